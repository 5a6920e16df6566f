"""The cache of a sliding-window layer: a ring of window + block entries for each row.

Implements mlx-lm's cache protocol for rows of different lengths; used on the engine's MLX
thread. Position p lies in slot p mod (window + block). A forward of up to block + 1 tokens
overwrites nothing that the window before it can see, so taking back any of its tokens is
exact, past the window too. A longer chunk that does not fit is held aside: attention sees it
behind the window's entries in the order of time, and only the commit puts into the ring what
turned out to be real.
"""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from models.cache_capacity import slot_capacity
from models.ragged_attention import EVERYTHING, Reach
from models.row_buffer import RowBuffer
from models.row_positions import RowPositions


class SlidingCache:
    """Keys and values of one layer that sees `window` positions, its own included."""

    def __init__(self, positions: RowPositions, window: int, block: int) -> None:
        self._positions = positions
        self.window = window
        self._block = block
        self._ring = window + block
        self._keys = RowBuffer()
        self._values = RowBuffer()
        self._aside: list[mx.array] = []

    @property
    def offset(self) -> int | mx.array:
        """Positions of the next tokens."""
        return self._positions.offset

    def make_mask(
        self, width: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """What the next `width` queries of each row may see: None, "causal", or a bool array
        of [R, 1, W, S] (one row and a long chunk: [W, S])."""
        positions = self._positions
        window = min(window_size or self.window, self.window)
        one = len(positions.lengths) == 1
        if one and positions.longest + width <= window and not return_array:
            return None if width == 1 else "causal"
        key = ("sliding mask", width, window, self._ring)
        if not self._goes_aside(width):
            return positions.once(key, lambda: self._ring_mask(width, window))
        past = self._past()
        if one:
            return positions.once(key, lambda: create_causal_mask(width, past, window))
        return positions.once(key, lambda: self._aside_mask(width, window, past))

    @property
    def starts(self) -> mx.array:
        """Committed tokens of each row, int32 [R]."""
        return self._positions.starts

    def reach_of(self, mask: mx.array | str | None, width: int) -> Reach | None:
        """What hides the same as `mask`, made for `width` queries; None when nothing does, as
        beside a chunk held aside."""
        if self._aside:
            return None
        if mask is None or isinstance(mask, str):
            one = len(self._positions.lengths) == 1
            return EVERYTHING if one and (mask == "causal" or width == 1) else None
        match self._positions.name_of(mask):
            case ("sliding mask", int(made_for), int(window), self._ring) if made_for == width:
                return Reach(window, self._ring)
        return None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write [R, H, W, D] behind each row; returns the keys and values that `make_mask`
        speaks of, [R, H, S, D]."""
        rows, _, width, _ = keys.shape
        self._positions.begin(rows, width)
        if self._goes_aside(width):
            held = [self._recent(self._keys, keys), self._recent(self._values, values)]
            self._aside = held
            return held[0], held[1]
        self._aside = []
        return self._update(self._keys, keys), self._update(self._values, values)

    def commit(self, counts: list[int]) -> None:
        """Called before the lengths grow by `counts`: a chunk held aside enters the ring."""
        if not self._aside:
            return
        positions = self._positions
        rows = len(counts)
        grown = [length + count for length, count in zip(positions.lengths, counts, strict=True)]
        slots = self._slots_for(max(grown))
        index = positions.once(
            ("sliding commit", slots, self._ring, self.window),
            lambda: self._time_order(mx.array(grown, dtype=mx.int32), slots),
        )
        for buffer, held in zip((self._keys, self._values), self._aside, strict=True):
            array = buffer.reserve(rows, slots, held)
            array[:rows, :, :slots] = mx.take_along_axis(held, index, axis=2)
        self._aside = []

    def append(self, other: SlidingCache, longest: int, room: int) -> None:
        """Take over the rows of `other`; `longest` is the longest row of the batch to be, which
        will have `room` rows."""
        self._aside = []
        rows, count = len(self._positions.lengths), len(other._positions.lengths)
        slots = self._slots_for(longest)
        self._keys.append(rows, other._keys, count, slots, room)
        self._values.append(rows, other._values, count, slots, room)

    def keep(self, rows: list[int], longest: int) -> None:
        """Keep `rows` in that order, the longest of them `longest` tokens."""
        self._aside = []
        for buffer in (self._keys, self._values):
            buffer.keep(rows, self._slots_for(longest))

    def noise(self, rows: int, width: int) -> tuple[mx.array, mx.array]:
        """Random keys and values [R, H, W, D] of the shapes that this cache has seen."""
        return self._keys.noise(rows, width), self._values.noise(rows, width)

    def state(self) -> list[mx.array]:
        """The arrays to evaluate."""
        arrays = [b.array for b in (self._keys, self._values) if b.array is not None]
        return arrays + self._aside

    @property
    def nbytes(self) -> int:
        """Bytes that are allotted now, a chunk held aside included."""
        aside = sum(array.nbytes for array in self._aside)
        return self._keys.nbytes + self._values.nbytes + aside

    def bytes_for(self, rows: int, length: int) -> int:
        """Bytes that `rows` rows take, the longest of them `length` tokens."""
        slots = self._slots_for(length)
        return self._keys.bytes_for(rows, slots) + self._values.bytes_for(rows, slots)

    def bytes_per_token(self) -> int:
        """Bytes that one more token costs a row once its window is full: none."""
        return 0

    def _slots_for(self, length: int) -> int:
        return min(slot_capacity(length), self._ring)

    def _goes_aside(self, width: int) -> bool:
        return width > self._block + 1 and self._positions.longest + width > self._ring

    def _past(self) -> int:
        """Entries before a chunk held aside that its first query can see, in the longest row."""
        return min(self._positions.longest, self.window - 1)

    def _update(self, buffer: RowBuffer, new: mx.array) -> mx.array:
        positions = self._positions
        rows, _, width, _ = new.shape
        end = positions.longest + width
        array = buffer.reserve(rows, self._slots_for(end), new)
        if rows == 1:
            start = positions.longest % self._ring
            before_wrap = min(width, self._ring - start)
            array[:1, :, start : start + before_wrap] = new[:, :, :before_wrap]
            if before_wrap < width:
                array[:1, :, : width - before_wrap] = new[:, :, before_wrap:]
        else:
            array = buffer.scatter(new, positions.slots(width, array.shape[0], self._ring))
        return array[:rows, :, : min(end, self._ring)]

    def _ring_mask(self, width: int, window: int) -> mx.array:
        positions = self._positions
        slots = mx.arange(min(positions.longest + width, self._ring), dtype=mx.int32)
        last = positions.starts[:, None] + (width - 1)
        # The position that a slot holds is the newest one with its remainder.
        keys = (last - mx.remainder(last - slots, self._ring))[:, None, None, :]
        queries = positions.queries(width)[:, None, :, None]
        return (keys >= 0) & (keys <= queries) & (keys > queries - window)

    def _aside_mask(self, width: int, window: int, past: int) -> mx.array:
        starts = self._positions.starts[:, None]
        keys = starts + mx.arange(-past, width, dtype=mx.int32)
        keys = keys[:, None, None, :]
        queries = self._positions.queries(width)[:, None, :, None]
        return (keys >= 0) & (keys <= queries) & (keys > queries - window)

    def _recent(self, buffer: RowBuffer, new: mx.array) -> mx.array:
        """The window's entries in the order of time, and `new` behind them."""
        past = self._past()
        if past == 0 or buffer.array is None:
            return new
        rows = new.shape[0]
        array = buffer.array[:rows]
        if rows == 1:
            start = (self._positions.longest - past) % self._ring
            before_wrap = min(past, self._ring - start)
            pieces = [array[:, :, start : start + before_wrap]]
            if before_wrap < past:
                pieces.append(array[:, :, : past - before_wrap])
            return mx.concatenate([*pieces, new], axis=2)
        index = self._positions.once(
            ("sliding recent", past, self._ring, array.shape[2]),
            lambda: self._recent_slots(past, array.shape[2]),
        )
        return mx.concatenate([mx.take_along_axis(array, index, axis=2), new], axis=2)

    def _recent_slots(self, past: int, held: int) -> mx.array:
        """Slots of the `past` positions before each row's end, int32 [R, 1, past, 1].

        What a short row has before its beginning is any slot: the mask hides it.
        """
        keys = self._positions.starts[:, None] + mx.arange(-past, 0, dtype=mx.int32)
        slots = mx.minimum(mx.remainder(keys, self._ring), held - 1)
        return slots[:, None, :, None]

    def _time_order(self, grown: mx.array, slots: int) -> mx.array:
        """For each slot the place, in a chunk held aside, of the position that belongs there
        when the rows are `grown` [R] tokens long: int32 [R, 1, slots, 1]."""
        last = grown[:, None] - 1
        keys = last - mx.remainder(last - mx.arange(slots, dtype=mx.int32), self._ring)
        first = self._positions.starts[:, None] - self._past()
        width = self._positions.width
        places = mx.clip(keys - first, 0, self._past() + width - 1)
        return places[:, None, :, None]
