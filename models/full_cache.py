"""The cache of a full-attention layer: every token of every row is kept.

Implements mlx-lm's cache protocol for rows of different lengths; used on the engine's MLX
thread. With one row it does what mlx-lm's `KVCache` does, bit for bit. `update_and_fetch`
writes behind each row's committed length and commits nothing: a forward may be repeated or
forgotten.
"""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.cache import create_attention_mask

from models.cache_capacity import slot_capacity
from models.ragged_attention import EVERYTHING, Reach
from models.row_buffer import RowBuffer
from models.row_positions import RowPositions


class FullCache:
    """Keys and values of one layer. `offset` is an int for one row and int32 [R] for more."""

    window: int | None = None
    """How many positions a query sees: all."""

    def __init__(self, positions: RowPositions) -> None:
        self._positions = positions
        self._keys = RowBuffer()
        self._values = RowBuffer()

    @property
    def offset(self) -> int | mx.array:
        """Positions of the next tokens."""
        return self._positions.offset

    def make_mask(
        self, width: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """What the next `width` queries of each row may see: None, "causal" or bool arrays
        of [R, 1, W, S]."""
        positions = self._positions
        if window_size is not None and positions.longest + width <= window_size:
            window_size = None
        if len(positions.lengths) == 1:
            mask: mx.array | str | None = create_attention_mask(
                width, positions.lengths[0], return_array, window_size
            )
            return mask

        def build() -> mx.array:
            keys = mx.arange(positions.longest + width, dtype=mx.int32)
            queries = positions.queries(width)[:, None, :, None]
            visible = keys <= queries
            return visible if window_size is None else visible & (keys > queries - window_size)

        return positions.once(("full mask", width, window_size), build)

    @property
    def starts(self) -> mx.array:
        """Committed tokens of each row, int32 [R]."""
        return self._positions.starts

    def reach_of(self, mask: mx.array | str | None, width: int) -> Reach | None:
        """What hides the same as `mask`, made for `width` queries; None when nothing does."""
        if len(self._positions.lengths) == 1:
            return EVERYTHING if mask == "causal" or (mask is None and width == 1) else None
        name = self._positions.name_of(mask)
        return EVERYTHING if name == ("full mask", width, None) else None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write [R, H, W, D] behind each row; returns all keys and values, [R, H, S, D] with
        S the longest row and W together."""
        positions = self._positions
        rows, _, width, _ = keys.shape
        positions.begin(rows, width)
        end = positions.longest + width
        slots = slot_capacity(end)
        return (
            self._update(self._keys, keys, end, slots),
            self._update(self._values, values, end, slots),
        )

    def _update(self, buffer: RowBuffer, new: mx.array, end: int, slots: int) -> mx.array:
        rows, _, width, _ = new.shape
        array = buffer.reserve(rows, slots, new)
        if rows == 1:
            array[:1, :, end - width : end] = new
            return array[:1, :, :end]
        return buffer.scatter(new, self._positions.slots(width, array.shape[0]))[:rows, :, :end]

    def commit(self, counts: list[int]) -> None:
        """Called before the lengths grow by `counts`: nothing is to be done here."""

    def append(self, other: FullCache, longest: int, room: int) -> None:
        """Take over the rows of `other`; `longest` is the longest row of the batch to be, which
        will have `room` rows."""
        rows, count = len(self._positions.lengths), len(other._positions.lengths)
        slots = slot_capacity(longest)
        self._keys.append(rows, other._keys, count, slots, room)
        self._values.append(rows, other._values, count, slots, room)

    def keep(self, rows: list[int], longest: int) -> None:
        """Keep `rows` in that order, the longest of them `longest` tokens."""
        for buffer in (self._keys, self._values):
            buffer.keep(rows, slot_capacity(longest))

    def noise(self, rows: int, width: int) -> tuple[mx.array, mx.array]:
        """Random keys and values [R, H, W, D] of the shapes that this cache has seen."""
        return self._keys.noise(rows, width), self._values.noise(rows, width)

    def state(self) -> list[mx.array]:
        """The arrays to evaluate."""
        return [b.array for b in (self._keys, self._values) if b.array is not None]

    @property
    def nbytes(self) -> int:
        """Bytes that are allotted now."""
        return self._keys.nbytes + self._values.nbytes

    def bytes_for(self, rows: int, length: int) -> int:
        """Bytes that `rows` rows take, the longest of them `length` tokens."""
        slots = slot_capacity(length)
        return self._keys.bytes_for(rows, slots) + self._values.bytes_for(rows, slots)

    def bytes_per_token(self) -> int:
        """Bytes that one more token costs a row, whatever came before."""
        return self._keys.bytes_for(1, 1) + self._values.bytes_for(1, 1)
