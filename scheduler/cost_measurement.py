"""Measuring what rounds and drafts cost, one at a time.

Runs on the MLX thread, once for a machine and pair: `scheduler.round_costs` keeps the result.
A measurement is made of slices, each of one evaluation on the device, so that an engine takes them
between requests (`scheduler.measuring`): one that arrives waits for what is being evaluated and no
more. That cannot be made less, because a round is timed whole: the widest of many rows is the
longest wait, 0.45 s for 8 rows of 8 tokens with the default pair on two cores. Caches are filled
with noise instead of being computed, so that a deep context is measured without reading a long
prompt. Every figure is the least of samples taken in turn over all widths: whatever else runs on
the machine only ever adds to a sample, and a drift of its speed touches all widths alike. Few rows
come first, and are known before more are begun.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import mlx.core as mx

from models.dspark.drafter import Drafter
from models.dspark.rows import SpeculativeRows
from models.taps import Taps
from models.target import Target
from scheduler.round_costs import CostKey, CostRecord, MeasuredCost, RoundCosts

DEPTH = 256
REPEATS = 3
IDLE_REPEATS = 6
"""Samples that an idle engine takes: they delay nobody, and one table is kept for good."""

_LEAST = 0.01
"""Of a draft, what a verification counts at least, where noise would make it nothing."""

_DRAFT = 0
"""Stands for a draft where widths are listed."""


def row_counts(maximum_rows: int) -> list[int]:
    """Powers of two up to `maximum_rows`, and that itself."""
    counts = [1]
    while counts[-1] * 2 <= maximum_rows:
        counts.append(counts[-1] * 2)
    return sorted({*counts, maximum_rows})


class CostMeasurement:
    """Timed forwards of a pair, up to a whole table.

    What is found goes into `costs`; what is there already is not measured again. `rows` are the
    row counts wanted, ascending; `widths` are those of 1 .. block + 1 when None. `found` is
    called with the record whenever all is known about one depth and row count.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        taps: Taps,
        costs: RoundCosts,
        *,
        rows: Sequence[int],
        depths: Sequence[int] = (DEPTH,),
        widths: Sequence[int] | None = None,
        repeats: int = REPEATS,
        found: Callable[[CostRecord], None] = lambda record: None,
    ) -> None:
        self._target, self._drafter, self._taps = target, drafter, taps
        self._costs = costs
        self._found = found
        self._kinds = [*(widths or range(1, drafter.block_size + 2)), _DRAFT]
        # The first of each compiles and allocates: it does not count.
        self._turns = len(self._kinds) * (repeats + 1)
        known = {(cost.depth, cost.rows) for cost in costs.record.verify}
        wanted = [(depth, count) for depth in depths for count in rows]
        self._left = [point for point in wanted if point not in known]
        self.total = len(wanted) * self._turns
        self.timed = self.total - len(self._left) * self._turns
        self._state: SpeculativeRows | None = None
        # A row of noise that has been made and is not among the others yet.
        self._made: SpeculativeRows | None = None
        self._depth = 0
        self._settled = False
        self._samples: list[float] = []
        costs.complete = not self._left

    @property
    def complete(self) -> bool:
        """Whether nothing is left to measure."""
        return not self._left

    @property
    def rows(self) -> int:
        """Rows of noise that the next slice works with; 0 when there is none."""
        return self._left[0][1] if self._left else 0

    @property
    def holds_noise(self) -> bool:
        """Whether there is noise in memory."""
        return self._state is not None or self._made is not None

    def run_slice(self) -> bool:
        """Time one forward, or make or join one row for it: one evaluation on the device. True
        when with it all is known about one depth and row count."""
        depth, rows = self._left[0]
        if self._made is not None:
            self._join(self._made)
            return False
        if self._state is None or len(self._state) < rows or self._depth != depth:
            self._make_row(depth)
            return False
        if not self._settled:
            # The first forward behind new rows makes their caches grow.
            _seconds(_verify, self._state, max(self._kinds))
            self._settled = True
            return False
        kind = self._kinds[len(self._samples) % len(self._kinds)]
        seconds = (
            _seconds(_draft, self._state) if kind == _DRAFT else _seconds(_round, self._state, kind)
        )
        self._samples.append(seconds)
        self.timed += 1
        if len(self._samples) < self._turns:
            return False
        self._close(depth, rows)
        return True

    def release(self) -> None:
        """Free the noise. What has been timed is kept."""
        if self.holds_noise:
            self._state, self._made = None, None
            mx.clear_cache()

    def _make_row(self, depth: int) -> None:
        if self._depth != depth:
            self._state, self._depth = None, depth
        row = SpeculativeRows(self._target, self._drafter, self._taps)
        row.fill_with_noise(1, depth)
        if self._state is None:
            self._state, self._settled = row, False
        else:
            self._made = row

    def _join(self, row: SpeculativeRows) -> None:
        assert self._state is not None
        self._made = None
        self._state.join(row)
        mx.eval(self._state.batch.state(), self._state.context.state())
        self._settled = False

    def _close(self, depth: int, rows: int) -> None:
        """All is timed of one depth and row count."""
        by_kind = {
            kind: min(self._samples[place :: len(self._kinds)][1:])
            for place, kind in enumerate(self._kinds)
        }
        self._samples = []
        del self._left[0]
        draft = by_kind.pop(_DRAFT)
        # A draft behind a verification shares its wait for the device: together they take less
        # than one after the other, so what counts is what a draft adds up to with it.
        by_kind = {
            width: seconds if width == 1 else max(seconds - draft, draft * _LEAST)
            for width, seconds in by_kind.items()
        }
        self._costs.add(
            [
                MeasuredCost(depth=depth, rows=rows, width=width, seconds=seconds)
                for width, seconds in by_kind.items()
            ],
            rows=rows,
            draft_seconds=draft,
        )
        if not self._left:
            self._costs.complete = True
            self.release()
        self._found(self._costs.record)


def measure(
    target: Target,
    drafter: Drafter,
    taps: Taps,
    key: CostKey,
    *,
    depths: Sequence[int] = (DEPTH,),
    widths: Sequence[int] | None = None,
    repeats: int = REPEATS,
    progress: Callable[[float], None] = lambda share: None,
) -> CostRecord:
    """The costs of all (depth, rows, width), and of drafts by rows, at once.

    `widths` are those of 1 .. block + 1 when None. `progress` gets the share that is done.
    """
    costs = RoundCosts(CostRecord(key=key, verify=[], draft={}))
    measurement = CostMeasurement(
        target,
        drafter,
        taps,
        costs,
        rows=row_counts(key.maximum_rows),
        depths=depths,
        widths=widths,
        repeats=repeats,
    )
    while not measurement.complete:
        if measurement.run_slice():
            progress(measurement.timed / measurement.total)
    return costs.record


def _verify(state: SpeculativeRows, width: int) -> list[mx.array]:
    rows = len(state)
    anchors = mx.zeros((rows,), dtype=mx.int32)
    if width == 1:
        return [mx.argmax(state.decode(anchors[:, None]), axis=-1)]
    found = state.verify(anchors, mx.zeros((rows, width - 1), dtype=mx.int32))
    return [found.tokens, found.accepted]


def _round(state: SpeculativeRows, width: int) -> list[mx.array]:
    """What a lane waits for at once: a verification and, behind it, the next draft."""
    verified = _verify(state, width)
    if width == 1:
        return verified
    tokens, accepted = verified
    anchors = mx.take_along_axis(tokens, accepted[:, None], axis=1)[:, 0]
    starts = mx.array(state.lengths, dtype=mx.int32) + accepted + 1
    draft = state.draft(anchors, starts=starts, reach=width)
    return [*verified, *(array for array in draft if array is not None)]


def _draft(state: SpeculativeRows) -> list[mx.array]:
    draft = state.draft(mx.zeros((len(state),), dtype=mx.int32))
    return [array for array in draft if array is not None]


def _seconds(build: Callable[..., list[mx.array]], *arguments: object) -> float:
    started = time.perf_counter()
    mx.eval(build(*arguments))
    return time.perf_counter() - started
