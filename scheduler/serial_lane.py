"""The serial lane: plain batched decode, one token a row and step.

Owns the lane's rows; runs on the engine's MLX thread. Steps are built one ahead: `launch`
builds and starts step k+1 from the tokens of step k while those are still on the device, and
only then does `collect` read step k. So the device never waits for Python. A row that turns
out to have stopped at step k is already part of step k+1: what that step says of it is
dropped. Rows join and leave between steps only.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from models.decode_rows import DecodeRows
from models.sampling import choose, observe
from scheduler.messages import Output
from scheduler.row import Row, StepLogprobs


@dataclass(frozen=True, eq=False)
class Flight:
    """A step whose tokens, int32 [R, 1], have not been read."""

    rows: tuple[Row, ...]
    tokens: mx.array
    logprobs: StepLogprobs


class SerialLane:
    """Rows that decode together, over caches that the lane was given."""

    def __init__(self, state: DecodeRows) -> None:
        self._state = state
        self.rows: list[Row] = []
        self._anchors: mx.array | None = None
        self._flights: deque[Flight] = deque()

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def busy(self) -> bool:
        """Whether there is a step to launch or to collect."""
        return bool(self.rows or self._flights)

    def add(self, rows: list[Row], anchors: mx.array) -> None:
        """Take on `rows`, whose caches are the last of the lane's; `anchors` [r, 1] int32 are
        their next inputs."""
        own = self._anchors
        self._anchors = anchors if own is None else mx.concatenate([own, anchors], axis=0)
        self.rows += rows

    def release(self) -> tuple[list[Row], mx.array]:
        """Give up all rows, in the order of their caches, with their next inputs [R, 1].

        Everything in flight must have been collected, and there must be rows.
        """
        assert self._anchors is not None and not self._flights
        rows, anchors = self.rows, self._anchors
        self.rows, self._anchors = [], None
        return rows, anchors

    def cancel(self, request_id: int) -> bool:
        """Drop a row at once. False when the lane does not hold it."""
        for row in self.rows:
            if row.request_id == request_id:
                self._leave(row)
                return True
        return False

    def launch(self) -> int:
        """Build and start the next step for all rows; returns how many rows it has."""
        if not self.rows:
            return 0
        assert self._anchors is not None
        rows = tuple(self.rows)
        samplings = [row.sampling for row in rows]
        logits = self._state.decode(self._anchors)
        tokens = choose(logits, samplings, [row.position for row in rows])
        observe(samplings, tokens)
        logprobs = StepLogprobs(rows, logits, tokens)
        mx.async_eval(tokens, *logprobs.arrays)
        self._anchors = tokens
        self._flights.append(Flight(rows, tokens, logprobs))
        for row in rows:
            row.position += 1
            row.launched += 1
            if row.launched >= row.maximum:
                # Its last token is on the way; another step would be wasted on it.
                self._leave(row, live=True)
        return len(rows)

    def collect(self, keep: int = 0) -> list[Output]:
        """Read finished steps, oldest first, until `keep` are left in flight."""
        outputs: list[Output] = []
        while len(self._flights) > keep:
            outputs += self._read(self._flights.popleft())
        return outputs

    def _read(self, flight: Flight) -> list[Output]:
        outputs = []
        tokens: Any = flight.tokens.reshape(-1).tolist()
        for row, token, details in zip(flight.rows, tokens, flight.logprobs.read(), strict=True):
            if not row.live:
                continue
            output = row.take([token], details)
            if output.finish is not None:
                self._leave(row)
            outputs.append(output)
        return outputs

    def _leave(self, row: Row, *, live: bool = False) -> None:
        """Take a row out of the batch, if it is still in, and out of life unless `live`."""
        row.live = live
        if row not in self.rows:
            return
        index = self.rows.index(row)
        last = len(self.rows) - 1
        self._state.leave(index)
        order = list(range(last))
        if index != last:
            order[index] = last
        self.rows = [self.rows[place] for place in order]
        if not self.rows:
            self._anchors = None
        else:
            assert self._anchors is not None
            self._anchors = self._anchors[mx.array(order)]
