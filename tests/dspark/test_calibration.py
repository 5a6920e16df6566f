"""Sequential temperature scaling against recorded numbers, and its record on disk."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.calibration import GRID, Calibration, CalibrationError, fit
from models.dspark import calibrate

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


class TestCommand:
    def arguments(self, drafter: Path, prompts: Path) -> list[str]:
        return [
            *("--target", str(FIXTURES / "qwen3" / "target")),
            *("--drafter", str(drafter)),
            *("--prompts", str(prompts)),
        ]

    def test_it_fits_what_the_trace_fits(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        drafter = tmp_path / "drafter"
        shutil.copytree(FIXTURES / "qwen3" / "drafter", drafter, copy_function=shutil.copyfile)
        prompts = FIXTURES / "qwen3" / "trace_float32_thr0.json"
        assert calibrate.main(self.arguments(drafter, prompts)) == 0
        stored = Calibration.load(drafter, 7)
        assert stored is not None
        assert stored.temperatures == GOLDENS["sts"]["qwen3"]["temperatures"]
        assert "48 rounds" in capsys.readouterr().out

    def test_too_few_rounds(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        prompts = tmp_path / "prompts.json"
        prompts.write_text('{"prompts": [{"prompt_ids": [1, 2, 3], "max_new_tokens": 4}]}')
        assert calibrate.main(self.arguments(FIXTURES / "qwen3" / "drafter", prompts)) == 2
        assert "too few, at least 40" in capsys.readouterr().err


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

    def test_nothing_to_fit(self) -> None:
        with pytest.raises(ValueError, match="do not go with"):
            fit(np.zeros((0, 7)), [])
