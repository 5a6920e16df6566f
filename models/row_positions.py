"""How long each row of a batch is, and the arrays that a forward derives from it.

Owns the committed lengths, on the host, shared by the caches of all layers; used on the
engine's MLX thread. Arrays are built by the first layer that asks and kept until a length
changes, so a forward builds each of them once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import mlx.core as mx


class RowPositions:
    """Committed tokens of each row in `lengths`; `width` tokens a row await their commit."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.width = 0
        self._built: dict[Hashable, mx.array] = {}

    @property
    def longest(self) -> int:
        """The largest length."""
        return max(self.lengths, default=0)

    @property
    def offset(self) -> int | mx.array:
        """Positions of the next tokens as rope takes them: an int for one row, else [R]."""
        return self.lengths[0] if len(self.lengths) == 1 else self.starts

    @property
    def starts(self) -> mx.array:
        """The lengths, int32 [R]."""
        return self.once("starts", lambda: mx.array(self.lengths, dtype=mx.int32))

    def queries(self, width: int) -> mx.array:
        """Positions of the next `width` tokens of each row, int32 [R, W]."""
        return self.once(
            ("queries", width),
            lambda: self.starts[:, None] + mx.arange(width, dtype=mx.int32)[None],
        )

    def slots(self, width: int, rows: int, ring: int | None = None) -> mx.array:
        """Where the next tokens are stored, int32 [rows, 1, W, 1]; 0 for rows past the live.

        A position's slot is the position itself, in a `ring` its remainder.
        """

        def build() -> mx.array:
            slots = self.queries(width)
            if ring is not None:
                slots = mx.remainder(slots, ring)
            slots = mx.pad(slots, [(0, rows - len(self.lengths)), (0, 0)])
            return slots[:, None, :, None]

        return self.once(("slots", width, rows, ring), build)

    def once(self, key: Hashable, build: Callable[[], mx.array]) -> mx.array:
        """The array of that name, built at the first call since a length changed."""
        array = self._built.get(key)
        if array is None:
            array = self._built[key] = build()
        return array

    def name_of(self, array: mx.array | str | None) -> Hashable | None:
        """The name that `array` itself was built under; None for any other."""
        return next((name for name, built in self._built.items() if built is array), None)

    def begin(self, rows: int, width: int) -> None:
        """Note that a forward writes `width` tokens into each of `rows` rows."""
        if rows != len(self.lengths):
            raise ValueError(f"tokens for {rows} rows were given to {len(self.lengths)} rows")
        self.width = width

    def change(self, lengths: list[int]) -> None:
        """Set the lengths. What was written and not committed is forgotten."""
        # In place: the list is handed out and shared.
        self.lengths[:] = lengths
        self.width = 0
        self._built.clear()
