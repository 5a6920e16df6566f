"""Slices of a measurement: how much of the device one takes, and that what they time is whole."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest

from models.checkpoint import inspect
from models.taps import Taps
from models.target import Target
from scheduler.cost_measurement import CostMeasurement
from scheduler.round_costs import CostKey, CostRecord, RoundCosts
from tests.dspark.pairs import FIXTURES, make_drafter, target

KEY = CostKey(machine="", backend="", blas="", mlx="", target="", drafter="", maximum_rows=4)


class Measured:
    """A measurement of the qwen3 pair with 1, 2 and 4 rows, and what it found."""

    def __init__(self, taps: Taps, pair: Target) -> None:
        self.costs = RoundCosts(CostRecord(key=KEY, verify=[], draft={}), complete=False)
        self.slices = CostMeasurement(
            pair,
            make_drafter("qwen3", dtype=mx.float32),
            taps,
            self.costs,
            rows=[1, 2, 4],
            depths=[16],
            widths=[1, 2, 5],
            repeats=1,
        )


@pytest.fixture
def measured() -> Iterator[Measured]:
    pair = Target(inspect(FIXTURES / "qwen3" / "target"), target("qwen3"), "float32")
    taps = Taps(pair.model, make_drafter("qwen3", dtype=mx.float32).configuration.tap_layers)
    try:
        yield Measured(taps, pair)
    finally:
        taps.remove()


def test_a_slice_is_one_evaluation(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    """What arrives meanwhile waits for it."""
    evaluate, evaluations = mx.eval, 0

    def counted(*arrays: object) -> None:
        nonlocal evaluations
        evaluations += 1
        evaluate(*arrays)

    monkeypatch.setattr(mx, "eval", counted)
    by_slice = []
    while not measured.slices.complete:
        before = evaluations
        measured.slices.run_slice()
        by_slice.append(evaluations - before)
    assert set(by_slice) == {1}
    # A row is made at first, then one and then two more; each of the latter is joined, too.
    assert len(by_slice) == measured.slices.timed + 4 + 3 + 3
    assert {(cost.rows, cost.width) for cost in measured.costs.record.verify} == {
        (rows, width) for rows in (1, 2, 4) for width in (1, 2, 5)
    }


@pytest.mark.parametrize("taken", [1, 2, 9, 10, 11, 14, 20])
def test_noise_given_up_after_any_slice_changes_nothing_that_is_measured(
    measured: Measured, taken: int
) -> None:
    for _ in range(taken):
        measured.slices.run_slice()
    timed = measured.slices.timed
    assert measured.slices.holds_noise
    measured.slices.release()
    assert not measured.slices.holds_noise and measured.slices.timed == timed
    while not measured.slices.complete:
        measured.slices.run_slice()
    assert measured.slices.timed == measured.slices.total == 4 * 2 * 3
    assert measured.costs.record.draft.keys() == {1, 2, 4}
