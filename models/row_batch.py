"""Rows that decode together, each at its own length, under mlx-lm's unchanged models.

Owns the caches of all layers and the rows' committed lengths; used on one MLX thread. A
forward writes behind every row's length and commits nothing; `advance` then commits as many
of its tokens as turned out to be real, for each row on its own. Joining, leaving and
advancing only build graphs, so the next step can be built while the last one runs.

The batch is a rectangle: it takes `bytes_for(len(batch), max(batch.lengths))`, more for a
while after rows have left. Growing, and a row that leaves before the last, copy the batch in
the next forward, layer after layer: one layer's old and new buffers are there at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from models.full_cache import FullCache
from models.row_positions import RowPositions
from models.sliding_cache import SlidingCache

RowCache = FullCache | SlidingCache


class RowBatch:
    """One cache for each layer that keeps keys and values; empty of rows at first."""

    def __init__(self, model: nn.Module, *, block: int = 8) -> None:
        """Make caches for `model`, an mlx-lm model.

        `block` is the number of drafts in a verify step: a forward of up to block + 1 tokens
        a row is the fast kind under sliding windows; wider ones are exact, too.

        Raises:
            ValueError: the model keeps something other than keys and values of all positions
                or of a sliding window.
        """
        if block < 0:
            raise ValueError(f"block is {block}; it must not be negative")
        self.block = block
        self._positions = RowPositions()
        self.caches: list[RowCache] = [
            _row_cache(layer, self._positions, block) for layer in make_prompt_cache(model)
        ]

    @property
    def lengths(self) -> list[int]:
        """Committed tokens of each row."""
        return self._positions.lengths

    def __len__(self) -> int:
        """Live rows."""
        return len(self._positions.lengths)

    def open_row(self) -> None:
        """Add a row of length 0 to a batch that has none, to read a prompt into."""
        if len(self):
            raise ValueError(f"a row is opened in an empty batch; this one has {len(self)}")
        self._positions.change([0])

    def fill_with_noise(self, rows: int, length: int, like: RowBatch) -> None:
        """Make `rows` rows of `length` random tokens in a batch that has none.

        For measuring what a depth costs without reading a prompt of that length. `like` is a
        batch of the same model that has seen a forward: it knows the shapes.
        """
        if len(self):
            raise ValueError(f"noise goes into an empty batch; this one has {len(self)} rows")
        self._positions.change([0] * rows)
        for cache, known in zip(self.caches, like.caches, strict=True):
            cache.update_and_fetch(*known.noise(rows, length))
        self.advance([length] * rows)

    def advance(self, counts: Sequence[int]) -> None:
        """Commit the first `counts[r]` tokens of the last forward for each row r.

        Raises:
            ValueError: not one count a row, or a count outside 0..width of that forward.
        """
        width = self._positions.width
        if len(counts) != len(self) or not all(0 <= count <= width for count in counts):
            raise ValueError(
                f"counts {list(counts)} do not fit: the last forward had {width} tokens for "
                f"each of {len(self)} rows, and is committed once"
            )
        counts = list(counts)
        for cache in self.caches:
            cache.commit(counts)
        self._positions.change([a + b for a, b in zip(self.lengths, counts, strict=True)])

    def join(self, *others: RowBatch) -> None:
        """Append the rows of `others`, which are empty afterwards.

        A forward that is not committed is forgotten, here and in `others`. Several at once are
        cheaper than one by one: the batch grows once.
        """
        for other in others:
            if other is self or len(other.caches) != len(self.caches) or other.block != self.block:
                raise ValueError("only another batch of the same model and block can join")
        lengths = [*self.lengths, *(length for other in others for length in other.lengths)]
        longest, room = max(lengths, default=0), len(lengths)
        for other in others:
            for own, theirs in zip(self.caches, other.caches, strict=True):
                own.append(theirs, longest, room)  # type: ignore[arg-type]
                theirs.keep([], 0)
            self._positions.change(self.lengths + other.lengths)
            other._positions.change([])

    def leave(self, row: int) -> int | None:
        """Remove a row; the last row moves into its place.

        A forward that is not committed is forgotten. Returns the index that the moved row had,
        None when no row had to move.
        """
        last = len(self) - 1
        if not 0 <= row <= last:
            raise ValueError(f"row {row} does not exist: the batch has {last + 1} rows")
        order = list(range(last))
        if row != last:
            order[row] = last
        lengths = [self.lengths[index] for index in order]
        for cache in self.caches:
            cache.keep(order, max(lengths, default=0))
        self._positions.change(lengths)
        return last if row != last else None

    def state(self) -> list[mx.array]:
        """Every array of the caches, to be evaluated together."""
        return [array for cache in self.caches for array in cache.state()]

    @property
    def nbytes(self) -> int:
        """Bytes that the caches are allotted now."""
        return sum(cache.nbytes for cache in self.caches)

    def bytes_for(self, rows: int, length: int) -> int:
        """Bytes that `rows` rows take when the longest has `length` tokens.

        Raises:
            RuntimeError: no forward has shown the shapes of keys and values yet.
        """
        return sum(cache.bytes_for(rows, length) for cache in self.caches)

    def bytes_per_token(self) -> int:
        """Bytes that one more token costs a row for ever: layers without a window.

        Raises:
            RuntimeError: no forward has shown the shapes of keys and values yet.
        """
        return sum(cache.bytes_per_token() for cache in self.caches)


def _row_cache(layer: object, positions: RowPositions, block: int) -> RowCache:
    if type(layer) is KVCache:
        return FullCache(positions)
    if type(layer) is RotatingKVCache and layer.keep == 0:
        return SlidingCache(positions, layer.max_size, block)
    raise ValueError(
        f"the model keeps a {type(layer).__name__}; only layers with keys and values of all "
        "positions or of a sliding window can be batched"
    )
