"""Measuring what verifications and drafts cost, before an engine serves with a drafter.

Runs on the MLX thread, once for a machine and pair: `scheduler.round_costs` keeps the result.
Caches are filled with noise instead of being computed, so that a deep context is measured
without reading a long prompt. Every figure is a median of rounds taken in turn over all
widths, so that a drift of the machine's speed touches all of them alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import mlx.core as mx

from models.dspark.drafter import Drafter
from models.dspark.rows import SpeculativeRows
from models.taps import Taps
from models.target import Target
from scheduler.round_costs import CostKey, CostRecord, MeasuredCost

DEPTH = 256
REPEATS = 3


def row_counts(maximum_rows: int) -> list[int]:
    """Powers of two up to `maximum_rows`, and that itself."""
    counts = [1]
    while counts[-1] * 2 <= maximum_rows:
        counts.append(counts[-1] * 2)
    return sorted({*counts, maximum_rows})


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
    """The costs of all (depth, rows, width), and of drafts by rows.

    `widths` are those of 1 .. block + 1 when None. `progress` gets the share that is done.
    """
    chosen = list(widths or range(1, drafter.block_size + 2))
    verify: list[MeasuredCost] = []
    draft: dict[int, float] = {}
    plan = [(depth, rows) for depth in depths for rows in row_counts(key.maximum_rows)]
    for done, (depth, rows) in enumerate(plan):
        state = SpeculativeRows(target, drafter, taps)
        state.fill_with_noise(rows, depth)
        samples: dict[int, list[float]] = {width: [] for width in chosen}
        drafts: list[float] = []
        for _ in range(repeats + 1):
            for width in chosen:
                samples[width].append(_seconds(_verify, state, width))
            drafts.append(_seconds(_draft, state))
        # The first of each compiles and allocates.
        verify += [
            MeasuredCost(depth=depth, rows=rows, width=width, seconds=statistics.median(times[1:]))
            for width, times in samples.items()
        ]
        draft[rows] = statistics.median(drafts[1:])
        progress((done + 1) / len(plan))
    mx.clear_cache()
    return CostRecord(key=key, verify=verify, draft=draft)


def _verify(state: SpeculativeRows, width: int) -> list[mx.array]:
    rows = len(state)
    anchors = mx.zeros((rows,), dtype=mx.int32)
    if width == 1:
        return [mx.argmax(state.decode(anchors[:, None]), axis=-1)]
    found = state.verify(anchors, mx.zeros((rows, width - 1), dtype=mx.int32))
    return [found.tokens, found.accepted]


def _draft(state: SpeculativeRows) -> list[mx.array]:
    draft = state.draft(mx.zeros((len(state),), dtype=mx.int32))
    return [array for array in draft if array is not None]


def _seconds(build: Callable[..., list[mx.array]], *arguments: object) -> float:
    started = time.perf_counter()
    mx.eval(build(*arguments))
    return time.perf_counter() - started
