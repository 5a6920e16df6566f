"""The lane under rejection: what it verifies where costs are not to decide."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest

from models.checkpoint import inspect
from models.dspark.rows import SpeculativeRows
from models.sampling import RowSampling
from models.sampling_settings import Sampling
from models.taps import Taps
from models.target import Target
from scheduler.draft_forecast import DraftForecast
from scheduler.messages import RoundRecord
from scheduler.round_costs import CostKey, CostRecord, MeasuredCost, RoundCosts
from scheduler.row import Row
from scheduler.speculation_settings import SpeculationSettings
from scheduler.speculative_lane import SpeculativeLane
from tests.dspark.pairs import FIXTURES, make_drafter, target

BLOCK = 7
KEY = CostKey(machine="", backend="", blas="", mlx="", target="", drafter="", maximum_rows=2)
# A draft costs a step, and so does every token of a block: no draft ever pays.
DEAR = CostRecord(
    key=KEY,
    verify=[
        MeasuredCost(depth=1, rows=rows, width=width, seconds=float(width))
        for rows in (1, 2)
        for width in range(1, BLOCK + 2)
    ],
    draft={1: 1.0, 2: 1.0},
)


class Pair:
    """The qwen3 pair, and lanes of it; the clock stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 0.0
        self.target = Target(inspect(FIXTURES / "qwen3" / "target"), target("qwen3"), "float32")
        self.drafter = make_drafter("qwen3", dtype=mx.float32)
        self.taps = Taps(self.target.model, self.drafter.configuration.tap_layers)

    def lane(self, *maxima: int, **settings: object) -> SpeculativeLane:
        """A lane under rejection with a row for each of `maxima`, the tokens it may produce."""
        lane = SpeculativeLane(
            self._rows(),
            DraftForecast(BLOCK, None),
            RoundCosts(DEAR),
            SpeculationSettings(rejection=True, **settings),  # type: ignore[arg-type]
            clock=lambda: self.now,
        )
        for number, maximum in enumerate(maxima):
            self.join(lane, number, maximum)
        return lane

    def join(self, lane: SpeculativeLane, number: int, maximum: int) -> None:
        """Another row, which may produce `maximum` tokens."""
        rows = self._rows()
        rows.open_row()
        rows.prefill(mx.array([[5, 6, 7]], dtype=mx.int32))
        sampling = Sampling(temperature=1.0, seed=number)
        row = Row(
            request_id=number,
            sampling=RowSampling(sampling, self.target.vocabulary_size, []),
            position=4,
            produced=0,
            maximum=maximum,
            stop_tokens=frozenset(),
            logprobs=None,
        )
        lane.join([row], [rows], [8])

    def _rows(self) -> SpeculativeRows:
        return SpeculativeRows(self.target, self.drafter, self.taps)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    try:
        yield made
    finally:
        made.taps.remove()


def rounds_of(lane: SpeculativeLane) -> list[tuple[list[int], RoundRecord]]:
    """Every round to the lane's end: the rows' tokens left before it, and its record."""
    found = []
    while len(lane):
        left = [row.maximum - row.produced for row in lane.rows]
        _, record = lane.step()
        assert record is not None and not lane.parked
        found.append((left, record))
    return found


@pytest.mark.parametrize("cap", [None, 1, 3])
@pytest.mark.parametrize("maxima", [(40,), (40, 25)])
def test_always_verifies_all_drafts_that_a_row_can_use(
    pair: Pair, maxima: tuple[int, ...], cap: int | None
) -> None:
    first, *rest = rounds_of(pair.lane(*maxima, always=True, cap=cap))
    assert first[1].drafted == 0  # behind a prompt nothing has been drafted yet
    assert len(rest) >= 2
    for left, record in rest:
        assert record.drafted == sum(min(cap or BLOCK, tokens - 1) for tokens in left)


def test_a_trial_verifies_drafts_or_it_would_find_nothing_out(pair: Pair) -> None:
    lane = pair.lane(400)
    while not lane.parked:
        lane.step()
    # What it is chosen from is plain decode, so long as the probe is not due.
    assert all(lane.step()[1] is None for _ in range(3))
    pair.now += 1e9
    _, record = lane.step()
    assert record is not None and record.drafted == BLOCK
    # A whole block that is refused costs more than a trial may lose.
    assert lane.probe_paid is False and lane.step()[1] is None


def test_whether_a_draft_is_verified_is_decided_before_it_is_made(pair: Pair) -> None:
    """A lane that parks behind a round does so whatever the draft behind it is worth, and one that
    stays verifies by the early stop alone."""
    lane = pair.lane(400)
    while not lane.parked:
        lane.step()
    lane._survival = [[1.0] * BLOCK for _ in lane.rows]
    assert lane.step()[1] is None


def test_a_row_that_joins_parked_rows_decodes_plainly_with_them(pair: Pair) -> None:
    lane = pair.lane(60)
    while not lane.parked:
        lane.step()
    first = lane.rows[0].produced
    pair.join(lane, 1, 30)
    produced = {0: 0, 1: 0}
    while lane.busy:
        outputs, record = lane.step()
        assert record is None
        for output in outputs:
            produced[output.request_id] += len(output.tokens)
    assert produced == {0: 60 - first, 1: 30}
