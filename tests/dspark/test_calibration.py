"""Sequential temperature scaling against recorded numbers, and the record of all fits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.calibration import GRID, Calibration, CalibrationError, fit
from models.platt_scaling import PlattFit

from .pairs import FAMILIES, FIXTURES, trace

GOLDENS = json.loads((FIXTURES / "sts_alg1_goldens.json").read_text())


def rounds(family: str) -> tuple[list[list[float]], list[int]]:
    whole = [
        one
        for prompt in trace(family)["prompts"]
        for one in prompt["rounds"]
        if not one["terminated_by_stop_token"]
    ]
    logits = [one["confidence_logits"] for one in whole]
    return logits, [one["accepted_draft_tokens"] for one in whole]


def test_the_grid() -> None:
    assert list(GRID) == GOLDENS["grid"]


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_fits(family: str) -> None:
    golden = GOLDENS["sts"][family]
    record = fit(*rounds(family))
    assert record.rounds == golden["rounds"]
    assert record.temperatures == golden["temperatures"]
    assert record.error_before == pytest.approx(golden["ece_before"], abs=2e-6)
    assert record.error_after == pytest.approx(golden["ece_after"], abs=2e-6)


def test_a_drafter_that_is_too_sure_is_cooled_down() -> None:
    rng = np.random.default_rng(7)
    true = rng.normal(size=(4000, 3))
    chances = 1 / (1 + np.exp(-true))
    accepted = np.cumprod(rng.random(true.shape) < chances, axis=1).sum(axis=1)
    record = fit(3 * true, accepted.tolist())
    assert record.temperatures == pytest.approx([3, 3, 3], rel=0.25)
    assert all(a < b for a, b in zip(record.error_after, record.error_before, strict=True))
    assert record.rounds == 4000


@pytest.mark.parametrize("family", FAMILIES)
def test_order_is_preserved_and_error_does_not_grow(family: str) -> None:
    logits, accepted = rounds(family)
    record = fit(logits, accepted)
    assert all(a <= b for a, b in zip(record.error_after, record.error_before, strict=True))
    first = record.survival(logits)[:, 0]
    assert (np.argsort(first) == np.argsort(np.array(logits)[:, 0])).all()


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.floats(-8, 8), min_size=2, max_size=2), st.integers(0, 2)),
        min_size=1,
        max_size=30,
    )
)
def test_survival_is_a_falling_chance(data: list[tuple[list[float], int]]) -> None:
    logits, accepted = [row for row, _ in data], [count for _, count in data]
    record = fit(logits, accepted)
    assert set(record.temperatures) <= set(GRID)
    survival = record.survival(logits)
    assert ((survival >= 0) & (survival <= 1)).all()
    assert (np.diff(survival, axis=1) <= 0).all()


def platt(heat: float, scales: list[float], biases: list[float]) -> PlattFit:
    nothing: list[float] = []
    return PlattFit(
        sampling_temperature=heat,
        scales=scales,
        biases=biases,
        rounds=0,
        conversations=0,
        error_before=nothing,
        error_temperatures_only=nothing,
        error_after=nothing,
        noise_floor=nothing,
    )


def with_fits(*fits: PlattFit) -> Calibration:
    return Calibration(
        temperatures=[1.5, 2.0],
        rounds=9,
        error_before=[0.2, 0.3],
        error_after=[0.1, 0.1],
        fits=list(fits),
    )


@pytest.mark.parametrize(
    ("heat", "scales", "biases"),
    [
        (0.0, (1, 2), (0, 1)),
        (0.2, (0.8, 1.4), (-0.4, 0.4)),
        (0.5, (0.5, 0.5), (-1, -0.5)),
        (0.75, (0.75, 0.25), (-1.5, -0.75)),
        (1.0, (1, 0), (-2, -1)),
        (1.7, (1, 0), (-2, -1)),
    ],
)
def test_between_sampling_temperatures(
    heat: float, scales: tuple[float, float], biases: tuple[float, float]
) -> None:
    record = with_fits(
        platt(0.0, [1, 2], [0, 1]), platt(0.5, [0.5, 0.5], [-1, -0.5]), platt(1.0, [1, 0], [-2, -1])
    )
    logits = np.array([[0.3, -2.0], [4.0, 1.0]])
    expected = np.cumprod(1 / (1 + np.exp(-(logits * scales + biases))), axis=1)
    assert record.survival(logits, heat) == pytest.approx(expected)
    assert record.survival(logits[:, :1], heat) == pytest.approx(expected[:, :1])


def test_a_single_fit_serves_all() -> None:
    record = with_fits(platt(1.0, [1, 2], [0, 1]))
    assert record.survival([0.5, 0.5], 0.0) == pytest.approx(record.survival([0.5, 0.5], 3.0))


class TestRecord:
    RECORD = Calibration(
        temperatures=[1.5, 2.0], rounds=9, error_before=[0.2, 0.3], error_after=[0.1, 0.1]
    )

    def test_stored_beside_the_drafter(self, tmp_path: Path) -> None:
        assert Calibration.load(tmp_path, 2) is None
        self.RECORD.save(tmp_path)
        assert Calibration.load(tmp_path, 2) == self.RECORD
        assert [path.name for path in tmp_path.iterdir()] == ["calibration.json"]

    def test_of_another_block_size(self, tmp_path: Path) -> None:
        self.RECORD.save(tmp_path)
        with pytest.raises(CalibrationError, match="not 7 positive numbers"):
            Calibration.load(tmp_path, 7)

    def test_unreadable(self, tmp_path: Path) -> None:
        (tmp_path / "calibration.json").write_text("{")
        with pytest.raises(CalibrationError, match="Calibrate the drafter again"):
            Calibration.load(tmp_path, 2)

    def test_of_before_platt_fits(self, tmp_path: Path) -> None:
        """The form in which temperatures alone were stored."""
        (tmp_path / "calibration.json").write_text(
            '{"temperatures": [1.5, 2.0], "rounds": 9, "error_before": [0.2, 0.3], '
            '"error_after": [0.1, 0.1]}'
        )
        stored = Calibration.load(tmp_path, 2)
        assert stored == self.RECORD
        # It knows nothing of sampling temperatures: they change nothing.
        for heat in (0.0, 0.7):
            first, both = stored.survival([1.5, 0.0], heat)
            assert first == pytest.approx(1 / (1 + np.exp(-1)))
            assert both == pytest.approx(first / 2)

    def test_platt_fits_are_stored_too(self, tmp_path: Path) -> None:
        record = with_fits(platt(0.0, [1, 2], [0, 1]), platt(1.0, [0.5, 0], [-1, -0.25]))
        record.save(tmp_path)
        assert Calibration.load(tmp_path, 2) == record

    @pytest.mark.parametrize(
        ("fits", "says"),
        [
            ([platt(0.0, [1, 1, 1], [0, 0])], "not 2 numbers each"),
            ([platt(0.0, [1, 1], [0])], "not 2 numbers each"),
            ([platt(0.0, [1, -0.5], [0, 0])], "scales 0 or more"),
            ([platt(1.0, [1, 1], [0, 0]), platt(0.0, [1, 1], [0, 0])], r"\[1.0, 0.0\] do not rise"),
            ([platt(1.0, [1, 1], [0, 0])] * 2, "do not rise"),
        ],
    )
    def test_of_fits_that_do_not_fit(self, tmp_path: Path, fits: list[PlattFit], says: str) -> None:
        with_fits(*fits).save(tmp_path)
        with pytest.raises(CalibrationError, match=says):
            Calibration.load(tmp_path, 2)

    def test_nothing_to_fit(self) -> None:
        with pytest.raises(ValueError, match="do not go with"):
            fit(np.zeros((0, 7)), [])
