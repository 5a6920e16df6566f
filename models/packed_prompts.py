"""Several prompts read in one forward: cut into pieces, so that no rectangle has to be filled.

Owns the layout of one such forward and, for each layer, a cache that looks to mlx-lm's models
like a batch with a row for each piece. Every piece attends to the keys of its whole prompt, which
are gathered from the pieces, so a prompt need not be of its neighbours' length: at most
`PIECE_TOKENS` - 1 tokens of each are padding, and nothing real sees them. The keys and values go
into the prompts' own caches, one row each, as if each had been read alone. Used on one MLX
thread; all of it is lazy.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from models.piece_size import PIECE_TOKENS
from models.row_batch import RowBatch, RowCache
from models.target import Target


class PackedPrompts:
    """P pieces of w tokens: those of the first prompt, then those of the second, ..."""

    def __init__(self, prompts: Sequence[Sequence[int]]) -> None:
        """Lay out `prompts`, none of them empty."""
        if not prompts or not all(prompts):
            raise ValueError(f"{len(prompts)} prompts cannot be packed: each needs a token")
        width = PIECE_TOKENS
        self.lengths = [len(prompt) for prompt in prompts]
        counts = [-(-length // width) for length in self.lengths]
        self._counts = counts
        self._firsts = [sum(counts[:place]) for place in range(len(counts))]
        flat: list[int] = []
        for prompt, count in zip(prompts, counts, strict=True):
            flat += [*prompt, *[0] * (count * width - len(prompt))]
        self.tokens = mx.array(flat, dtype=mx.int32).reshape(-1, width)
        starts = [piece * width for count in counts for piece in range(count)]
        self.offset = mx.array(starts, dtype=mx.int32)
        blocks = max(counts)
        self._slots = blocks * width
        # Behind a prompt's end comes its last piece once more: finite, and hidden by the mask.
        places = [
            [first + min(block, count - 1) for block in range(blocks)]
            for first, count in zip(self._firsts, counts, strict=True)
            for _ in range(count)
        ]
        self._places = mx.array(places, dtype=mx.int32)
        self._masks: dict[int | None, mx.array] = {}

    def mask(self, window: int | None) -> mx.array:
        """What each query may see, bool [P, 1, w, S], S the slots of the longest prompt."""
        if window is not None and window >= self._slots:
            window = None
        if window not in self._masks:
            keys = mx.arange(self._slots, dtype=mx.int32)
            queries = self.offset[:, None] + mx.arange(PIECE_TOKENS, dtype=mx.int32)
            queries = queries[:, None, :, None]
            visible = keys <= queries
            self._masks[window] = visible if window is None else visible & (keys > queries - window)
        return self._masks[window]

    def of_whole_prompts(self, pieces: mx.array) -> mx.array:
        """From keys or values [P, H, w, D] those of each piece's whole prompt, [P, H, S, D]."""
        count, heads, _, dim = pieces.shape
        gathered = pieces[self._places].transpose(0, 2, 1, 3, 4)
        return gathered.reshape(count, heads, self._slots, dim)

    def row(self, pieces: mx.array, prompt: int) -> mx.array:
        """The keys or values [1, H, n, D] of one prompt's n tokens, from [P, H, w, D]."""
        own = self._own(pieces, prompt).transpose(1, 0, 2, 3)
        return own.reshape(1, own.shape[0], -1, own.shape[3])[:, :, : self.lengths[prompt]]

    def outputs(self, pieces: mx.array, prompt: int) -> mx.array:
        """The layer outputs [1, n, C] of one prompt's n tokens, from [P, w, C]."""
        own = self._own(pieces, prompt)
        return own.reshape(1, -1, own.shape[2])[:, : self.lengths[prompt]]

    def _own(self, pieces: mx.array, prompt: int) -> mx.array:
        first = self._firsts[prompt]
        return pieces[first : first + self._counts[prompt]]


class PackedCache:
    """One layer's cache in such a forward. `rows` are the prompts' own, without any token."""

    def __init__(self, layout: PackedPrompts, rows: Sequence[RowCache]) -> None:
        self._layout = layout
        self._rows = rows

    @property
    def offset(self) -> mx.array:
        """Positions of the pieces' first tokens, int32 [P]."""
        return self._layout.offset

    def make_mask(
        self, width: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """What the queries may see, bool [P, 1, w, S]."""
        windows = [size for size in (self._rows[0].window, window_size) if size is not None]
        return self._layout.mask(min(windows, default=None))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write [P, H, w, D] into the prompts' rows; returns the keys and values that
        `make_mask` speaks of, [P, H, S, D]."""
        layout = self._layout
        for prompt, cache in enumerate(self._rows):
            cache.update_and_fetch(layout.row(keys, prompt), layout.row(values, prompt))
        return layout.of_whole_prompts(keys), layout.of_whole_prompts(values)


def read_packed(
    target: Target, prompts: Sequence[Sequence[int]], batches: Sequence[RowBatch]
) -> PackedPrompts:
    """Run `prompts` in one forward into `batches`, an opened row of length 0 each. Lazy.

    Nothing is committed: each batch advances by its prompt's length. Afterwards the target's
    taps hold pieces, [P, w, C], which the layout sorts by prompt.

    Raises:
        ValueError: not one empty row for each prompt.
    """
    if len(batches) != len(prompts) or any(batch.lengths != [0] for batch in batches):
        found = [batch.lengths for batch in batches]
        raise ValueError(
            f"{len(prompts)} prompts are read together into as many rows of length 0, not {found}"
        )
    layout = PackedPrompts(prompts)
    layers = zip(*(batch.caches for batch in batches), strict=True)
    target.model(layout.tokens, cache=[PackedCache(layout, rows) for rows in layers])
    return layout
