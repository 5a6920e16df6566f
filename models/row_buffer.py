"""Storage for the keys, or the values, of all rows in one layer.

Owns one array [row_capacity, heads, slot_capacity, dim]; rows 0..R-1 are live. Used on the
engine's MLX thread. Every operation only builds a graph and replaces the array by the result,
so that MLX can write in place: nothing here evaluates. What a row that left wrote never stays
within reach of the row that follows it, because a value that is not finite would spread
through a mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from models.cache_capacity import row_capacity


class RowBuffer:
    """One array of keys or values; `array` is None until the first write."""

    def __init__(self) -> None:
        self.array: mx.array | None = None
        self.heads = 0
        self.dim = 0
        self.dtype: mx.Dtype | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that are allotted now."""
        return 0 if self.array is None else self.array.nbytes

    def bytes_for(self, rows: int, slots: int) -> int:
        """Bytes of `rows` rows with room for exactly `slots` each."""
        if self.dtype is None:
            raise RuntimeError("the shape of a cache is unknown before the first forward")
        return row_capacity(rows) * self.heads * slots * self.dim * self.dtype.size

    def noise(self, rows: int, width: int) -> mx.array:
        """Random entries [R, H, W, D] like those that were written here."""
        if self.dtype is None:
            raise RuntimeError("the shape of a cache is unknown before the first forward")
        return mx.random.normal((rows, self.heads, width, self.dim), dtype=self.dtype)

    def reserve(self, rows: int, slots: int, like: mx.array) -> mx.array:
        """Make room for `rows` rows of exactly `slots` slots, shaped as `like` [*, H, *, D].

        Returns `array` itself, so that assigning to a part of it updates the buffer.
        """
        array = self.array
        if array is not None and rows <= array.shape[0] and slots <= array.shape[2]:
            return array
        if array is None:
            _, self.heads, _, self.dim = like.shape
            self.dtype = like.dtype
            shape = (row_capacity(rows), self.heads, slots, self.dim)
            self.array = mx.zeros(shape, self.dtype)
            return self.array
        held_rows, _, held_slots, _ = array.shape
        more_rows = row_capacity(rows) - held_rows if rows > held_rows else 0
        more_slots = max(slots - held_slots, 0)
        self.array = mx.pad(array, [(0, more_rows), (0, 0), (0, more_slots), (0, 0)])
        return self.array

    def scatter(self, values: mx.array, slots: mx.array) -> mx.array:
        """Write [R, H, W, D] at each row's own slots, int [row_capacity, 1, W, 1]; returns all.

        What `slots` says of rows without values does not matter as long as it is in range.
        """
        assert self.array is not None
        spare = self.array.shape[0] - values.shape[0]
        if spare:
            # Writing all rows keeps the update in place; a slice of the rows would be a copy.
            values = mx.pad(values, [(0, spare), (0, 0), (0, 0), (0, 0)])
        self.array = mx.put_along_axis(self.array, slots, values, axis=2)
        return self.array

    def append(self, rows: int, other: RowBuffer, count: int, slots: int, room: int) -> None:
        """Put `other`'s first `count` rows behind the first `rows`, `slots` slots of each.

        Where the buffer must grow it grows to `room` rows, so that others follow at no cost.
        """
        if other.array is None and self.array is None:
            return
        if rows == 0 and other.array is not None:
            self.array = other.array
            self.heads, self.dim, self.dtype = other.heads, other.dim, other.dtype
            return
        like = other.array if other.array is not None else self.array
        assert like is not None
        array = self.reserve(room, slots, like)
        held = array.shape[2]
        if other.array is None:
            piece = mx.zeros((count, self.heads, held, self.dim), array.dtype)
        else:
            piece = other.array[:count, :, :held]
            piece = mx.pad(piece, [(0, 0), (0, 0), (0, held - piece.shape[2]), (0, 0)])
        array[rows : rows + count] = piece

    def keep(self, rows: Sequence[int], slots: int) -> None:
        """Keep `rows` in that order, with room for `slots` each.

        Room is given back when less than half of it is needed. Anything but dropping rows
        from the end copies what is kept: a row cannot be moved in place by the same graph
        that reads it.
        """
        if self.array is None:
            return
        if not rows:
            self.array = None
            return
        held_rows, _, held_slots, _ = self.array.shape
        wanted_rows = row_capacity(len(rows))
        if wanted_rows * 2 > held_rows:
            wanted_rows = held_rows
        if slots * 2 > held_slots:
            slots = held_slots
        in_place = all(place == row for place, row in enumerate(rows))
        if in_place and (wanted_rows, slots) == (held_rows, held_slots):
            return
        index = mx.array([*rows, *[rows[0]] * (wanted_rows - len(rows))], dtype=mx.int32)
        self.array = mx.take(self.array[:, :, :slots], index, axis=0)
