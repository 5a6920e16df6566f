"""The figures about widths, on tables whose best width is known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.bench.width_figures import (
    PROFILES,
    ROWS,
    conditional_acceptance,
    expected_speed,
    figure,
    learned_speed,
)
from scheduler.acceptance_record import survival_of
from scheduler.width_policy import CostTable

BLOCK = 7


def table(milliseconds: list[float], draft: float = 1.0) -> CostTable:
    """The same cost at every number of rows, by width from 1."""
    return CostTable(
        verify={
            (rows, width): cost / 1000
            for rows in ROWS
            for width, cost in enumerate(milliseconds, start=1)
        },
        draft=dict.fromkeys(ROWS, draft / 1000),
    )


FLAT = table([20.0] * (BLOCK + 1))
STEEP = table([20.0 * width for width in range(1, BLOCK + 2)])
JAGGED = table([14.6, 22.7, 29.7, 36.1, 43.5, 44.0, 44.0, 31.2], draft=6.0)


def test_profiles_run_from_the_first_draft_to_the_last() -> None:
    assert conditional_acceptance((0.8, 0.6), 3) == pytest.approx([0.8, 0.7, 0.6])
    assert conditional_acceptance((0.8, 0.6), 1) == [0.8]


def test_speed_by_hand() -> None:
    assert expected_speed([0.5, 0.25], 2, 3, table([10.0, 12.0, 19.0])) == pytest.approx(
        2 * 1.75 / 0.020
    )


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("costs", [FLAT, STEEP, JAGGED], ids=["flat", "steep", "jagged"])
def test_one_measurement_leaves_nothing_to_gain(profile: str, rows: int, costs: CostTable) -> None:
    found = figure(profile, rows, costs, costs, tokens=8)
    assert (found.chosen, found.over_best) == (found.best_width, 1.0)
    assert found.over_serial >= 1.0


def test_a_choice_by_wrong_costs_is_found_out() -> None:
    found = figure("zero", 1, table([20.0, 15.0], draft=0.0), table([20.0, 40.0], draft=0.0))
    assert (found.chosen, found.best_width) == (2, 1)
    assert found.over_serial == pytest.approx(0.5)
    assert not found.reached


def test_learning_comes_close_to_knowing() -> None:
    conditional = conditional_acceptance(PROFILES["math"], BLOCK)
    knowing = expected_speed(survival_of(conditional), 4, BLOCK + 1, FLAT)
    assert learned_speed(conditional, 4, FLAT, FLAT, 2000) == pytest.approx(knowing, rel=0.05)


def test_a_drafter_that_never_fits_costs_little_in_the_end() -> None:
    serial = 1 / FLAT.serial_seconds(1)
    assert learned_speed([0.0] * BLOCK, 1, FLAT, FLAT, 5000) > 0.95 * serial


@given(st.lists(st.floats(0, 1), min_size=BLOCK, max_size=BLOCK))
def test_a_learning_run_ends_and_stays_within_what_is_possible(conditional: list[float]) -> None:
    fastest = max(expected_speed([1.0] * BLOCK, 1, width, JAGGED) for width in JAGGED.widths())
    assert 0 < learned_speed(conditional, 1, JAGGED, JAGGED, 30) <= fastest
