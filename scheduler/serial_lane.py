"""The serial lane: plain batched decode, one token a row and step.

Owns the lane's `RowBatch` and its rows; runs on the engine's MLX thread. Steps are built one
ahead: `launch` builds and starts step k+1 from the tokens of step k while those are still on
the device, and only then does `collect` read step k. So the device never waits for Python.
A row that turns out to have stopped at step k is already part of step k+1: what that step
says of it is dropped. Rows join and leave between steps only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from models.row_batch import RowBatch
from models.sampling import RowSampling, choose, observe, token_logprobs
from models.target import Target
from scheduler.messages import FinishReason, Output, TokenLogprobs


@dataclass(eq=False)
class Row:
    """One request while it decodes.

    `position` is the index, in prompt + generated, of the next token to be chosen;
    `launched` counts generated tokens including those still on the device.
    """

    request_id: int
    sampling: RowSampling
    position: int
    produced: int
    maximum: int
    stop_tokens: frozenset[int]
    logprobs: int | None
    launched: int = 0
    live: bool = True


@dataclass(frozen=True, eq=False)
class Flight:
    """A step whose tokens have not been read. Arrays are [R, 1], [R], [R, k] and [R, k]."""

    rows: tuple[Row, ...]
    tokens: mx.array
    logprobs: tuple[mx.array, mx.array, mx.array] | None


class SerialLane:
    """Rows that decode together."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._batch: RowBatch = target.new_batch()
        self._rows: list[Row] = []
        self._anchors: mx.array | None = None
        self._flights: deque[Flight] = deque()

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def busy(self) -> bool:
        """Whether there is a step to launch or to collect."""
        return bool(self._rows or self._flights)

    def join(self, row: Row, batch: RowBatch, anchor: int) -> None:
        """Take over a prefilled one-row `batch` whose next input is the token `anchor`."""
        self._batch.join(batch)
        token = mx.array([[anchor]], dtype=mx.int32)
        self._anchors = (
            token if self._anchors is None else mx.concatenate([self._anchors, token], axis=0)
        )
        self._rows.append(row)

    def cancel(self, request_id: int) -> bool:
        """Drop a row at once. False when the lane does not hold it."""
        for row in self._rows:
            if row.request_id == request_id:
                self._leave(row)
                return True
        return False

    def launch(self) -> int:
        """Build and start the next step for all rows; returns how many rows it has."""
        if not self._rows:
            return 0
        assert self._anchors is not None
        rows = tuple(self._rows)
        logits = self._target.forward(self._anchors, self._batch)
        samplings = [row.sampling for row in rows]
        tokens = choose(logits, samplings, [row.position for row in rows])
        observe(samplings, tokens)
        logprobs = _logprobs(rows, logits, tokens)
        mx.async_eval(tokens, *(logprobs or ()))
        self._batch.advance([1] * len(rows))
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
        tokens = flight.tokens.reshape(-1).tolist()
        details = _read_logprobs(flight)
        for index, (row, token) in enumerate(zip(flight.rows, tokens, strict=True)):
            if not row.live:
                continue
            row.produced += 1
            finish = None
            if token in row.stop_tokens:
                finish = FinishReason.STOP
            elif row.produced >= row.maximum:
                finish = FinishReason.LENGTH
            if finish is not None:
                self._leave(row)
            wanted = [details[index]] if row.logprobs is not None else None
            outputs.append(Output(row.request_id, [token], finish, wanted))
        return outputs

    def _leave(self, row: Row, *, live: bool = False) -> None:
        """Take a row out of the batch, if it is still in, and out of life unless `live`."""
        row.live = live
        if row not in self._rows:
            return
        index = self._rows.index(row)
        self._batch.leave(index)
        last = len(self._rows) - 1
        order = list(range(last))
        if index != last:
            order[index] = last
        self._rows = [self._rows[place] for place in order]
        if not self._rows:
            self._anchors = None
        else:
            assert self._anchors is not None
            self._anchors = self._anchors[mx.array(order)]


def _logprobs(
    rows: Sequence[Row], logits: mx.array, tokens: mx.array
) -> tuple[mx.array, mx.array, mx.array] | None:
    wanted = [row.logprobs for row in rows if row.logprobs is not None]
    if not wanted:
        return None
    return token_logprobs(logits[:, -1], tokens.reshape(-1), max(wanted))


def _read_logprobs(flight: Flight) -> list[TokenLogprobs]:
    if flight.logprobs is None:
        return []
    chosen, alternatives, values = (array.tolist() for array in flight.logprobs)
    return [
        TokenLogprobs(chosen[i], alternatives[i][: row.logprobs], values[i][: row.logprobs])
        for i, row in enumerate(flight.rows)
    ]
