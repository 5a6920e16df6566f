"""The choice of width: recorded runs of Algorithm 1, tables by hand, and brute force."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.acceptance_record import AcceptanceRecord, survival_of
from scheduler.width_policy import CostTable, cheapest_width, early_stop_lengths

from .pairs import FIXTURES

SCHEDULES = json.loads((FIXTURES / "sts_alg1_goldens.json").read_text())["schedule"]


class TestEarlyStop:
    @pytest.mark.parametrize("case", SCHEDULES, ids=[case["name"] for case in SCHEDULES])
    def test_recorded_runs(self, case: dict[str, Any]) -> None:
        survival = [survival_of(row) for row in case["confidences"]]
        lengths, speed = early_stop_lengths(survival, lambda n: case["sps"][str(n)])
        assert lengths == case["early_stop"]
        assert speed == pytest.approx(case["early_stop_theta"], abs=1e-5)

    def test_a_later_draft_cannot_change_whether_an_earlier_one_is_verified(self) -> None:
        speeds = {1: 1.0, 2: 0.5, 3: 0.45}
        likely, unlikely = (
            early_stop_lengths([survival_of([0.8, second])], speeds.__getitem__)[0]
            for second in (0.9, 0.0)
        )
        assert likely == unlikely == [0]

    def test_equal_survivals_stay_prefixes(self) -> None:
        survival = [[0.5, 0.5, 0.5], [0.5, 0.5, 0.5]]
        lengths, _ = early_stop_lengths(survival, lambda n: 1.0 if n <= 5 else 0.1)
        assert lengths == [3, 0]


# One GPU's curve for a 12-billion-parameter target at 4 bits, in milliseconds: 8 tokens
# cost less than 3.
JAGGED = {1: 14.6, 2: 22.7, 3: 29.7, 4: 36.1, 5: 43.5, 8: 31.2}


def table(curve: dict[int, float], rows: int = 1, draft: float = 6.0) -> CostTable:
    return CostTable(
        verify={(rows, width): ms / 1000 for width, ms in curve.items()},
        draft={rows: draft / 1000},
    )


class TestCheapestWidth:
    @pytest.mark.parametrize(
        ("acceptance", "width"), [(0.0, 1), (0.3, 1), (0.5, 1), (0.6, 8), (0.9, 8), (1.0, 8)]
    )
    def test_jagged_costs_jump_over_the_middle(self, acceptance: float, width: int) -> None:
        survival = [survival_of([acceptance] * 7)]
        assert cheapest_width(survival, table(JAGGED)).width == width

    def test_flat_costs_take_the_whole_block(self) -> None:
        flat = table(dict.fromkeys(range(1, 9), 50.0), draft=5.0)
        choice = cheapest_width([survival_of([0.5] * 7)], flat)
        assert (choice.width, choice.lengths) == (8, [7])

    def test_steep_costs_draft_nothing(self) -> None:
        steep = table({width: 50.0 * width for width in range(1, 9)}, draft=5.0)
        choice = cheapest_width([survival_of([0.9] * 7)], steep)
        assert (choice.width, choice.lengths, choice.expected_tokens) == (1, [0], 1.0)

    def test_a_round_of_width_1_drafts_too(self) -> None:
        """A second token takes 8 ms more in a lane, 0.8 of a step; with its draft it takes 18."""
        costs = table({1: 10.0, 2: 18.0}, draft=10.0)
        assert cheapest_width([[0.6]], costs).width == 1
        assert cheapest_width([[0.85]], costs).width == 2

    def test_where_nothing_pays_the_least_is_lost(self) -> None:
        """By speed 8 is the best of the lane, 7.7 tokens in 8.5 steps instead of 1 in 1.5; but it
        loses 0.8 steps instead of 0.5."""
        steep = table({width: 10.0 * width for width in range(1, 9)}, draft=5.0)
        sure = [survival_of([0.99] * 7)]
        assert cheapest_width(sure, steep).width == 1
        assert cheapest_width(sure, steep, must_draft=True).width == 2

    def test_a_row_near_its_end_counts_for_what_it_can_still_use(self) -> None:
        sure = [survival_of([1.0] * 7)]
        assert cheapest_width(sure, table(JAGGED), limits=[7]).width == 8
        assert cheapest_width(sure, table(JAGGED), limits=[1]).width == 2
        # 8 is cheaper than 4, so a row that can use 3 drafts gets the wide rectangle.
        choice = cheapest_width(sure, table(JAGGED, draft=1.0), limits=[3])
        assert (choice.width, choice.lengths) == (8, [3])

    def test_no_wider_than_what_was_drafted(self) -> None:
        choice = cheapest_width([survival_of([1.0] * 3)], table(JAGGED, draft=0.0))
        assert choice.width <= 4

    def test_only_the_widths_allowed(self) -> None:
        survival = [survival_of([1.0] * 7)]
        assert cheapest_width(survival, table(JAGGED, draft=0.0), widths=[2, 3]).width in (2, 3)
        with pytest.raises(ValueError, match="width 6 was not measured"):
            cheapest_width(survival, table(JAGGED), widths=[6])

    def test_rows_between_measurements(self) -> None:
        costs = CostTable(
            verify={(1, 1): 1.0, (4, 1): 2.5, (1, 8): 2.0, (4, 8): 8.0}, draft={1: 0.5, 4: 0.5}
        )
        assert costs.verify_seconds(2, 1) == pytest.approx(1.5)
        assert costs.verify_seconds(3, 8) == pytest.approx(6.0)
        assert costs.verify_seconds(8, 8) == pytest.approx(16.0)
        assert costs.round_seconds(4, 8) == pytest.approx(8.5)
        assert costs.round_seconds(4, 1) == pytest.approx(3.0)

    @given(
        st.lists(
            st.lists(st.floats(0, 1), min_size=3, max_size=3).map(survival_of),
            min_size=1,
            max_size=3,
        ),
        st.lists(st.floats(0.01, 1), min_size=4, max_size=4),
        st.floats(0, 1),
        st.lists(st.integers(0, 3), min_size=3, max_size=3),
    )
    def test_nothing_beats_it(
        self,
        survival: list[list[float]],
        seconds: list[float],
        draft: float,
        limits: list[int],
    ) -> None:
        rows = len(survival)
        costs = CostTable(
            verify={(rows, width + 1): cost for width, cost in enumerate(seconds)},
            draft={rows: draft},
        )
        bounds = limits[:rows]
        choice = cheapest_width(survival, costs, limits=bounds)
        serial = rows / seconds[0]
        cost = draft + seconds[choice.width - 1]
        pays = choice.expected_tokens >= serial * cost
        for lengths in itertools.product(*[range(bound + 1) for bound in bounds]):
            tokens = sum(1 + sum(row[:n]) for row, n in zip(survival, lengths, strict=True))
            for width in range(max(lengths) + 1, 5):
                other = draft + seconds[width - 1]
                if pays:
                    assert tokens / other <= choice.expected_tokens / cost * (1 + 1e-9)
                else:
                    assert tokens / other <= serial * (1 + 1e-9)
                    lost = serial * cost - choice.expected_tokens
                    assert serial * other - tokens >= lost - 1e-9 * serial


class TestAcceptanceRecord:
    def test_it_learns_each_position(self) -> None:
        record = AcceptanceRecord(3)
        for _ in range(200):
            record.observe(3, 2)
        first, second, third = record.conditional()
        assert first > 0.95 and second > 0.95 and third < 0.1
        assert record.survival() == pytest.approx([first, first * second, first * second * third])

    def test_positions_behind_a_refusal_are_left_alone(self) -> None:
        record = AcceptanceRecord(3)
        before = record.conditional()
        record.observe(3, 0)
        after = record.conditional()
        assert after[0] < before[0] and after[1:] == before[1:]

    def test_a_narrow_round_says_nothing_of_wider_ones(self) -> None:
        record = AcceptanceRecord(3)
        before = record.conditional()
        record.observe(1, 1)
        assert record.conditional()[1:] == before[1:]
        record.observe(0, 0)

    def test_old_rounds_fade(self) -> None:
        record = AcceptanceRecord(1, half_life_rounds=4)
        for _ in range(100):
            record.observe(1, 1)
        for _ in range(8):
            record.observe(1, 0)
        assert record.conditional()[0] < 0.5

    def test_a_row_starts_from_all_rows(self) -> None:
        everyone = AcceptanceRecord(2)
        for _ in range(100):
            everyone.observe(2, 0)
        assert AcceptanceRecord(2, prior=everyone).conditional() == everyone.conditional()

    @pytest.mark.parametrize(("drafted", "accepted"), [(2, 3), (4, 1), (2, -1)])
    def test_impossible_rounds(self, drafted: int, accepted: int) -> None:
        with pytest.raises(ValueError, match="drafts accepted"):
            AcceptanceRecord(3).observe(drafted, accepted)
