"""Rows of a target that decode together: what a lane is given to work on.

Owns one `RowBatch`; used on the engine's MLX thread. `models.dspark.rows.SpeculativeRows`
offers the same calls with a drafter's context beside the caches, so a lane that only decodes
can run on either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

import mlx.core as mx

from models.packed_prompts import read_packed
from models.row_batch import RowBatch
from models.target import Target


class DecodeRows(Protocol):
    """Rows, each at its own length. Calls are lazy unless they say otherwise."""

    @property
    def lengths(self) -> list[int]:
        """Committed tokens of each row."""

    def __len__(self) -> int: ...

    def open_row(self) -> None:
        """Begin a row to read a prompt into, among none."""

    def prefill(self, tokens: mx.array) -> None:
        """Read a chunk of a prompt, int32 [1, W], commit it and wait for the device."""

    def prefill_with(self, others: Sequence[Self], prompts: Sequence[Sequence[int]]) -> None:
        """Read whole prompts in one forward, the first into this row and one into each of
        `others`, all of length 0; commit them and wait for the device."""

    def decode(self, tokens: mx.array) -> mx.array:
        """Run one token of each row, int32 [R, 1], and commit it: logits [R, 1, V]."""

    def leave(self, row: int) -> int | None:
        """Remove a row; the last one takes its place. Returns that one's old index, or None."""


class TargetRows:
    """Rows that never draft."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.batch: RowBatch = target.new_batch()

    @property
    def lengths(self) -> list[int]:
        """Committed tokens of each row."""
        return self.batch.lengths

    def __len__(self) -> int:
        return len(self.batch)

    def open_row(self) -> None:
        """Begin a row to read a prompt into, among none."""
        self.batch.open_row()

    def prefill(self, tokens: mx.array) -> None:
        """Read a chunk of a prompt, int32 [1, W], commit it and wait for the device."""
        self._target.prefill(tokens, self.batch)

    def prefill_with(self, others: Sequence[Self], prompts: Sequence[Sequence[int]]) -> None:
        """Read whole prompts in one forward, the first into this row and one into each of
        `others`, all of length 0; commit them and wait for the device."""
        batches = [rows.batch for rows in (self, *others)]
        layout = read_packed(self._target, prompts, batches)
        for batch, length in zip(batches, layout.lengths, strict=True):
            batch.advance([length])
        mx.eval([batch.state() for batch in batches])

    def decode(self, tokens: mx.array) -> mx.array:
        """Run one token of each row, int32 [R, 1], and commit it: logits [R, 1, V]."""
        logits = self._target.forward(tokens, self.batch)
        self.batch.advance([1] * len(self.batch))
        return logits

    def join(self, *others: TargetRows) -> None:
        """Append the rows of `others`, which are empty afterwards."""
        self.batch.join(*(other.batch for other in others))

    def leave(self, row: int) -> int | None:
        """Remove a row; the last one takes its place. Returns that one's old index, or None."""
        return self.batch.leave(row)
