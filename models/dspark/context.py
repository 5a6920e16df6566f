"""The drafter's context: keys and values of every committed token, for rows of any length.

Owns one pair of arrays per drafter layer, `[R, heads, capacity, head_dim]`, and the list of
committed lengths; used on the engine's MLX thread only. A position is written at its absolute
index, so a row needs no offset. What lies behind a row's length is scrap space: the context
rows of tokens that may yet be rejected, and the rows of the block being drafted, are written
there and never committed, so nothing has to be taken back.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import mlx.core as mx

from models.dspark.configuration import DrafterConfiguration

# Capacity grows by this many positions, so that most rounds write in place.
_STEP = 256


class Placement:
    """Where `count` positions of every row go. Built once per pass, shared by all layers.

    `offset` is what a rotary embedding takes: an int for one row, `[R]` for more. `end` is an
    upper bound, known to the host, of the columns in use.
    """

    def __init__(
        self, lengths: Sequence[int], count: int, starts: mx.array | None, reach: int
    ) -> None:
        self.count = count
        self.index: mx.array | None = None
        self.offset: int | mx.array
        if starts is None and len(lengths) == 1:
            self.offset, self.end = lengths[0], lengths[0] + count
            return
        self.offset = mx.array(lengths, dtype=mx.int32) if starts is None else starts
        self.end = max(lengths) + reach + count
        columns = self.offset[:, None] + mx.arange(count, dtype=mx.int32)
        self.index = columns[:, None, :, None]

    @cached_property
    def mask(self) -> mx.array | None:
        """`[R, 1, 1, end]`: hides the columns behind each row's last new position. None when
        there are none."""
        if self.index is None:
            return None
        visible = mx.arange(self.end, dtype=mx.int32) < (self.offset + self.count)[:, None]
        return visible[:, None, None, :]


class DraftContext:
    """Rows drafted together. `lengths[r]` counts the tokens committed for row r."""

    def __init__(self, configuration: DrafterConfiguration, dtype: mx.Dtype) -> None:
        self.lengths: list[int] = []
        self._heads = configuration.key_value_heads
        self._head_dim = configuration.head_dim
        self._dtype = dtype
        self._capacity = 0
        self._keys = [self._empty(0, 0) for _ in range(configuration.layer_count)]
        self._values = [self._empty(0, 0) for _ in range(configuration.layer_count)]

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes held, capacity included."""
        return sum(array.nbytes for array in self.state())

    def state(self) -> list[mx.array]:
        """Every array to evaluate after a write that nothing else reads."""
        return [*self._keys, *self._values]

    def open_row(self) -> None:
        """Append a row of length 0."""
        self._keys = [mx.concatenate([k, self._empty(1, self._capacity)]) for k in self._keys]
        self._values = [mx.concatenate([v, self._empty(1, self._capacity)]) for v in self._values]
        self.lengths.append(0)

    def place(self, count: int, starts: mx.array | None = None, reach: int = 0) -> Placement:
        """Make room for `count` positions of every row.

        They begin at the committed lengths, or at `starts` [R] int32, which may be a value that
        the host has not read yet; it is at most `reach` beyond the committed lengths.
        """
        placement = Placement(self.lengths, count, starts, reach)
        if placement.end > self._capacity:
            capacity = -(-placement.end // _STEP) * _STEP
            self._keys = [self._widened(k, capacity) for k in self._keys]
            self._values = [self._widened(v, capacity) for v in self._values]
            self._capacity = capacity
        return placement

    def write(
        self, layer: int, placement: Placement, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Store `[R, heads, count, head_dim]`; return the columns in use, `[R, heads, end, …]`."""
        if placement.index is None:
            start = placement.end - placement.count
            self._keys[layer][..., start : placement.end, :] = keys
            self._values[layer][..., start : placement.end, :] = values
        else:
            self._keys[layer] = mx.put_along_axis(self._keys[layer], placement.index, keys, 2)
            self._values[layer] = mx.put_along_axis(self._values[layer], placement.index, values, 2)
        return (
            self._keys[layer][..., : placement.end, :],
            self._values[layer][..., : placement.end, :],
        )

    def advance(self, counts: Sequence[int]) -> None:
        """Commit the first `counts[r]` positions written behind each row's length."""
        if len(counts) != len(self.lengths):
            raise ValueError(f"{len(counts)} counts for {len(self.lengths)} rows")
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def join(self, other: DraftContext) -> None:
        """Append the rows of `other`, which is left without any."""
        capacity = max(self._capacity, other._capacity)
        self._keys, self._values = (
            [
                mx.concatenate([self._widened(a, capacity), self._widened(b, capacity)])
                for a, b in zip(mine, theirs, strict=True)
            ]
            for mine, theirs in ((self._keys, other._keys), (self._values, other._values))
        )
        self._capacity = capacity
        self.lengths += other.lengths
        other.lengths = []
        other._keys = [self._empty(0, 0) for _ in other._keys]
        other._values = [self._empty(0, 0) for _ in other._values]
        other._capacity = 0

    def leave(self, row: int) -> int | None:
        """Drop `row`. The last row takes its place; returns that row's old index, or None."""
        last = len(self.lengths) - 1
        if not 0 <= row <= last:
            raise IndexError(f"row {row} of {last + 1}")
        kept = list(range(last))
        if row < last:
            kept[row] = last
        order = mx.array(kept, dtype=mx.int32)
        self._keys = [k[order] for k in self._keys]
        self._values = [v[order] for v in self._values]
        self.lengths = [self.lengths[index] for index in kept]
        return last if row < last else None

    def committed(self, layer: int, row: int) -> tuple[mx.array, mx.array]:
        """Keys and values of one row's committed tokens, `[heads, length, head_dim]`."""
        length = self.lengths[row]
        return self._keys[layer][row, :, :length], self._values[layer][row, :, :length]

    def _empty(self, rows: int, capacity: int) -> mx.array:
        return mx.zeros((rows, self._heads, capacity, self._head_dim), dtype=self._dtype)

    def _widened(self, array: mx.array, capacity: int) -> mx.array:
        missing = capacity - array.shape[2]
        if missing <= 0:
            return array
        # Zeros, never uninitialised memory: a hidden column still meets its weight of 0.
        return mx.concatenate(
            [array, mx.zeros((*array.shape[:2], missing, array.shape[3]), dtype=array.dtype)],
            axis=2,
        )
