"""The drafter's context: keys and values of every committed token, for rows of any length.

Owns the buffers of all drafter layers and the list of committed lengths; used on the engine's
MLX thread only. A position is written at its absolute index, so a row needs no offset. What
lies behind a row's length is scrap space: the context rows of tokens that may yet be rejected,
and the rows of the block being drafted, are written there and never committed, so nothing has
to be taken back. Rows join and leave as in the target's `RowBatch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import mlx.core as mx

from models.cache_capacity import row_capacity, slot_capacity
from models.dspark.configuration import DrafterConfiguration
from models.row_buffer import RowBuffer


class Placement:
    """Where `count` positions of every row go. Built once per pass, shared by all layers.

    `offset` is what a rotary embedding takes: an int for one row, `[R]` for more. `end` is an
    upper bound, known to the host, of the columns in use.
    """

    def __init__(
        self, lengths: Sequence[int], count: int, starts: mx.array | None, reach: int
    ) -> None:
        self.rows, self.count = len(lengths), count
        self.offset: int | mx.array
        self._lengths = lengths
        self._starts: mx.array | None = None
        if starts is None and len(lengths) == 1:
            self.offset, self.end = lengths[0], lengths[0] + count
            return
        self._starts = mx.array(list(lengths), dtype=mx.int32) if starts is None else starts
        self.offset, self.end = self._starts, max(lengths) + reach + count
        self._slots: dict[int, mx.array] = {}

    @cached_property
    def starts(self) -> mx.array:
        """Where each row's positions begin, int32 `[R]`."""
        if self._starts is None:
            return mx.array(list(self._lengths), dtype=mx.int32)
        return self._starts

    @cached_property
    def mask(self) -> mx.array | None:
        """`[R, 1, 1, end]`: hides the columns behind each row's last new position. None when
        there are none."""
        if self._starts is None:
            return None
        visible = mx.arange(self.end, dtype=mx.int32) < (self._starts + self.count)[:, None]
        return visible[:, None, None, :]

    def write(self, buffer: RowBuffer, values: mx.array) -> mx.array:
        """Store `[R, heads, count, dim]`; return the columns in use, `[R, heads, end, dim]`."""
        array = buffer.reserve(self.rows, slot_capacity(self.end), values)
        if self._starts is None:
            # One row at a known place: a slice, which is written in place.
            array[:1, :, self.end - self.count : self.end] = values
        else:
            buffer.scatter(values, self._slots_of(self._starts, array.shape[0]))
        assert buffer.array is not None
        return buffer.array[: self.rows, :, : self.end]

    def _slots_of(self, starts: mx.array, held_rows: int) -> mx.array:
        """Slots of the new positions, `[held_rows, 1, count, 1]`, 0 for rows that are spare."""
        if held_rows not in self._slots:
            columns = starts[:, None] + mx.arange(self.count, dtype=mx.int32)
            columns = mx.pad(columns, [(0, held_rows - self.rows), (0, 0)])
            self._slots[held_rows] = columns[:, None, :, None]
        return self._slots[held_rows]


class DraftContext:
    """Rows drafted together. `lengths[r]` counts the tokens committed for row r."""

    def __init__(self, configuration: DrafterConfiguration, dtype: mx.Dtype) -> None:
        self.lengths: list[int] = []
        layers = range(configuration.layer_count)
        self._keys = [RowBuffer() for _ in layers]
        self._values = [RowBuffer() for _ in layers]
        # Keys and values of one token, in bytes.
        self._token_bytes = (
            2 * len(layers) * configuration.key_value_heads * configuration.head_dim * dtype.size
        )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes held, spare room included."""
        return sum(buffer.nbytes for buffer in self._buffers())

    def bytes_for(self, rows: int, length: int) -> int:
        """Bytes that `rows` rows take, the longest of them, its block included, `length`."""
        return row_capacity(rows) * slot_capacity(length) * self._token_bytes

    def state(self) -> list[mx.array]:
        """Every array to evaluate after a write that nothing else reads."""
        return [buffer.array for buffer in self._buffers() if buffer.array is not None]

    def open_row(self) -> None:
        """Add a row of length 0 to a context that has none."""
        if self.lengths:
            raise ValueError(f"a row is opened in an empty context; this has {len(self)}")
        self.lengths.append(0)

    def place(self, count: int, starts: mx.array | None = None, reach: int = 0) -> Placement:
        """A place for `count` positions of every row.

        They begin at the committed lengths, or at `starts` [R] int32, which may be a value that
        the host has not read yet; it is at most `reach` beyond the committed lengths.
        """
        return Placement(self.lengths, count, starts, reach)

    def write(
        self, layer: int, placement: Placement, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Store `[R, heads, count, head_dim]`; return the columns in use, `[R, heads, end, …]`."""
        return (
            placement.write(self._keys[layer], keys),
            placement.write(self._values[layer], values),
        )

    def advance(self, counts: Sequence[int]) -> None:
        """Commit the first `counts[r]` positions written behind each row's length."""
        if len(counts) != len(self.lengths):
            raise ValueError(f"{len(counts)} counts for {len(self.lengths)} rows")
        self.lengths = [a + b for a, b in zip(self.lengths, counts, strict=True)]

    def join(self, *others: DraftContext) -> None:
        """Append the rows of `others`, which are left without any."""
        lengths = [*self.lengths, *(length for other in others for length in other.lengths)]
        slots, room = slot_capacity(max(lengths, default=0)), len(lengths)
        for other in others:
            for mine, theirs in zip(self._buffers(), other._buffers(), strict=True):
                mine.append(len(self), theirs, len(other), slots, room)
                theirs.keep([], 0)
            self.lengths += other.lengths
            other.lengths = []

    def leave(self, row: int) -> int | None:
        """Drop `row`. The last row takes its place; returns that row's old index, or None."""
        last = len(self.lengths) - 1
        if not 0 <= row <= last:
            raise ValueError(f"row {row} does not exist: the context has {last + 1} rows")
        kept = list(range(last))
        if row < last:
            kept[row] = last
        self.lengths = [self.lengths[index] for index in kept]
        slots = slot_capacity(max(self.lengths, default=0))
        for buffer in self._buffers():
            buffer.keep(kept, slots)
        return last if row < last else None

    def committed(self, layer: int, row: int) -> tuple[mx.array, mx.array]:
        """Keys and values of one row's committed tokens, `[heads, length, head_dim]`."""
        length = self.lengths[row]
        keys, values = self._keys[layer].array, self._values[layer].array
        if keys is None or values is None:
            raise ValueError("nothing has been written into this context yet")
        return keys[row, :, :length], values[row, :, :length]

    def _buffers(self) -> list[RowBuffer]:
        return [*self._keys, *self._values]
