"""How many drafts a verification accepts, and from what the next token is drawn.

Pure functions on device arrays, lazy, for the engine's MLX thread; nothing is read back.
Coupled acceptance compares drafts with the target's own samples, so what is committed is the
target's own output whatever the drafter proposed. Rejection sampling (Leviathan, Chen) keeps
the target's distribution instead. Stop tokens and budgets are the caller's affair: they cut
what has been accepted, on the host.

The noise of rejection is a function of (seed, position, stream) and of nothing else. A draft is
drawn with the noise of stream 0, the target's own; the accept test and the redraw after a
rejection need noise that is independent of it, which are streams of their own.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import mlx.core as mx

# Below this mass the difference of two distributions is rounding, not a distribution.
FLOOR = 1e-8


class Stream(enum.IntEnum):
    """Independent noises at one position of one row."""

    ACCEPT = 1
    REDRAW = 2


class Rejection(NamedTuple):
    """`accepted` [R] int32 leading drafts; `distribution` [R, V] of the token after them."""

    accepted: mx.array
    distribution: mx.array


def count_matches(drafts: mx.array, targets: mx.array, lengths: mx.array | None = None) -> mx.array:
    """Leading drafts that equal the target's own tokens: [R] int32.

    `drafts` [R, c]; `targets` [R, at least c], chosen from the logits of the anchor's row
    onward; `lengths` [R] says how many drafts each row really has (all, when None). Row r
    commits `targets[r, : accepted + 1]`.
    """
    same = drafts == targets[:, : drafts.shape[1]]
    return _leading(same, lengths)


def probabilities(logits: mx.array, temperature: float) -> mx.array:
    """[…, V] float32; under 1e-5 the temperature is 0 and all mass is on the best token."""
    logits = logits.astype(mx.float32)
    if temperature < 1e-5:
        best = mx.argmax(logits, axis=-1, keepdims=True)
        return (mx.arange(logits.shape[-1]) == best).astype(mx.float32)
    return mx.softmax(logits / temperature, axis=-1, precise=True)


def reject(
    drafts: mx.array,
    draft_probabilities: mx.array,
    target_probabilities: mx.array,
    uniforms: mx.array,
    lengths: mx.array | None = None,
) -> Rejection:
    """Accept draft k while `uniform < min(1, p_target / p_draft)`.

    `drafts` [R, c] int32, `draft_probabilities` [R, c, V], `target_probabilities`
    [R, c + 1, V], `uniforms` [R, c] in [0, 1), `lengths` [R] or None. Both distributions must
    have passed the same temperature and filters, and each draft must have been drawn from its
    own. The distribution returned is the target's row after all drafts of the row, or, after a
    rejection, what the draft distribution left uncovered.
    """
    count = drafts.shape[1]
    picked = drafts[..., None]
    wanted = mx.take_along_axis(target_probabilities[:, :count], picked, axis=-1)[..., 0]
    offered = mx.take_along_axis(draft_probabilities, picked, axis=-1)[..., 0]
    passes = uniforms < mx.minimum(1.0, wanted / mx.maximum(offered, FLOOR))
    accepted = _leading(passes, lengths)
    index = accepted[:, None, None]
    target_row = mx.take_along_axis(target_probabilities, index, axis=1)[:, 0]
    draft_row = mx.take_along_axis(draft_probabilities, mx.minimum(index, count - 1), axis=1)[:, 0]
    uncovered = mx.maximum(target_row - draft_row, 0.0)
    mass = uncovered.sum(axis=-1, keepdims=True)
    residual = mx.where(mass > FLOOR, uncovered / mx.maximum(mass, FLOOR), target_row)
    offered_all = accepted >= (count if lengths is None else lengths)
    return Rejection(accepted, mx.where(offered_all[:, None], target_row, residual))


def draw(distribution: mx.array, noise: mx.array) -> mx.array:
    """A token of each row [R] int32 by Gumbel-max; `noise` [R, V] is standard Gumbel."""
    scores = mx.where(distribution > 0, mx.log(distribution) + noise, -mx.inf)
    return mx.argmax(scores, axis=-1).astype(mx.int32)


def keyed_uniforms(seeds: mx.array, positions: mx.array, stream: Stream) -> mx.array:
    """Uniforms in [0, 1), one for each (seed, position) pair, shape of `positions` [R, c]."""
    keys = _keys(seeds, positions, stream)
    drawn = mx.vmap(lambda key: mx.random.uniform(shape=(), key=key))(keys.reshape(-1, 2))
    return drawn.reshape(positions.shape)


def keyed_gumbel(
    seeds: mx.array, positions: mx.array, vocabulary_size: int, stream: Stream
) -> mx.array:
    """Standard Gumbel noise [R, V] for one position [R] of each row."""
    keys = _keys(seeds, positions, stream)
    drawn: mx.array = mx.vmap(lambda key: mx.random.gumbel(shape=(vocabulary_size,), key=key))(keys)
    return drawn


def _keys(seeds: mx.array, positions: mx.array, stream: Stream) -> mx.array:
    """Threefry keys […, 2]: a seed mixed with its stream, and the position."""
    words = seeds.astype(mx.uint32).reshape(-1, *([1] * (positions.ndim - 1)))
    # Multiplying by an odd constant keeps seeds apart; the stream moves them all elsewhere.
    mixed = (words * 0x9E3779B1) ^ mx.array(0x85EBCA6B * int(stream) & 0xFFFFFFFF, mx.uint32)
    mixed = mx.broadcast_to(mixed, positions.shape)
    return mx.stack([mixed, positions.astype(mx.uint32)], axis=-1)


def _leading(passes: mx.array, lengths: mx.array | None) -> mx.array:
    """How many of [R, c] are true before the first that is not, or that lies beyond `lengths`."""
    if passes.shape[1] == 0:
        return mx.zeros((passes.shape[0],), dtype=mx.int32)
    if lengths is not None:
        passes = passes & (mx.arange(passes.shape[1]) < lengths[:, None])
    return mx.cumprod(passes.astype(mx.int32), axis=1).sum(axis=1).astype(mx.int32)
