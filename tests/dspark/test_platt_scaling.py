"""Platt scaling by draft position, judged on drafters whose confidences are known to be off."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from models.calibration import fit
from models.calibration_error import errors_by_position, expected_calibration_error, noise_floor
from models.platt_scaling import fit_platt, platt_survival

_Floats = NDArray[np.float64]


def rounds(
    scales: list[float], biases: list[float], count: int, seed: int = 3
) -> tuple[_Floats, NDArray[np.int64]]:
    """Confidence logits that need just these scales and biases, and what was accepted."""
    random = np.random.default_rng(seed)
    logits = random.normal(1.0, 1.5, size=(count, len(scales)))
    chances = 1 / (1 + np.exp(-(logits * scales + biases)))
    passed = random.random(chances.shape) < chances
    return logits, np.cumprod(passed, axis=1).sum(axis=1)


def test_known_scales_and_biases_are_found() -> None:
    scales, biases = [0.6, 1.4, 1.0], [-0.7, 0.5, -0.2]
    logits, accepted = rounds(scales, biases, 40_000)
    found = fit_platt(logits, accepted)
    assert found[0] == pytest.approx(scales, abs=0.08)
    assert found[1] == pytest.approx(biases, abs=0.08)


def test_a_bias_mends_what_temperatures_cannot() -> None:
    logits, accepted = rounds([0.8, 0.8, 0.8], [-0.9, -0.6, -0.3], 20_000)
    fresh_logits, fresh = rounds([0.8, 0.8, 0.8], [-0.9, -0.6, -0.3], 20_000, seed=4)
    temperatures = fit(logits, accepted.tolist())
    by_temperature = errors_by_position(temperatures.survival(fresh_logits), fresh)
    survival = platt_survival(fresh_logits, *fit_platt(logits, accepted))
    by_platt = errors_by_position(survival, fresh)
    assert max(by_temperature) > 0.05
    assert max(by_platt) < 0.02
    # What is left is chance: a perfect prediction shows as much.
    assert by_platt == pytest.approx(noise_floor(survival), abs=0.006)


def test_the_product_stays_calibrated_where_luck_goes_by_round() -> None:
    """A hidden ease of the text makes later drafts depend on earlier ones."""
    random = np.random.default_rng(5)
    ease = random.normal(0, 1.0, size=(30_000, 1))
    logits = random.normal(0.5, 0.7, size=(30_000, 4))
    passed = random.random(logits.shape) < 1 / (1 + np.exp(-(logits + ease)))
    accepted = np.cumprod(passed, axis=1).sum(axis=1)
    survival = platt_survival(logits, *fit_platt(logits, accepted))
    assert max(errors_by_position(survival, accepted)) < 0.012


def test_a_position_that_no_round_reached_is_left_alone() -> None:
    scales, biases = fit_platt(np.ones((50, 3)), np.zeros(50, dtype=np.int64))
    assert (scales[1:], biases[1:]) == ([1, 1], [0, 0])
    assert platt_survival([1.0], scales, biases)[0] < 0.1


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.floats(-30, 30), min_size=3, max_size=3), st.integers(0, 3)),
        min_size=1,
        max_size=25,
    )
)
def test_any_rounds_give_a_falling_chance(data: list[tuple[list[float], int]]) -> None:
    """Also where an outcome never came, or the confidences are worth nothing or less."""
    logits = np.array([row for row, _ in data])
    scales, biases = fit_platt(logits, np.array([count for _, count in data]))
    assert all(np.isfinite([*scales, *biases])) and all(scale >= 0 for scale in scales)
    survival = platt_survival(logits, scales, biases)
    assert ((survival >= 0) & (survival <= 1)).all()
    assert (np.diff(survival, axis=1) <= 0).all()
    order = np.argsort(logits[:, 0], kind="stable")
    assert (np.diff(survival[order, 0]) >= 0).all()


def test_confidences_that_mislead_are_not_followed() -> None:
    logits, accepted = rounds([-0.8], [0.5], 4000)
    scales, biases = fit_platt(logits, accepted)
    assert scales == [0.0]
    share = float((accepted > 0).mean())
    assert 1 / (1 + np.exp(-biases[0])) == pytest.approx(share, abs=0.002)


def test_nothing_to_fit() -> None:
    for logits, accepted in ((np.zeros((0, 7)), []), (np.zeros((3, 7)), [1, 2])):
        with pytest.raises(ValueError, match="do not go with"):
            fit_platt(logits, np.array(accepted))


class TestError:
    def test_by_hand(self) -> None:
        predicted, outcome = np.array([0.11, 0.12, 0.9, 0.9]), np.array([0.0, 1.0, 1.0, 1.0])
        # The two bins are off by .77 and .2 in sum, over four rounds.
        assert expected_calibration_error(predicted, outcome) == pytest.approx(0.97 / 4)
        assert errors_by_position(predicted[:, None], [0, 1, 1, 1]) == pytest.approx([0.97 / 4])

    def test_what_is_chance_shrinks_with_rounds(self) -> None:
        few, many = (
            noise_floor(np.random.default_rng(1).random((count, 1))) for count in (500, 8000)
        )
        assert few[0] == pytest.approx(4 * many[0], rel=0.15)

    def test_certainty_leaves_nothing_to_chance(self) -> None:
        assert noise_floor(np.array([[1.0, 0.0], [1.0, 0.0]])) == pytest.approx([0, 0], abs=1e-6)
