"""The drafter over whole sequences: all sampled blocks of a batch in one pass.

Runs on the calling thread; lazy. Decoding gives a drafter one block behind a growing context.
Training gives it a sequence and many anchors in it: the context's keys and values are computed
once a sequence, block i sees those strictly before its anchor, and itself. The layers are the
drafter's own; only their attention is exchanged, by class, so that the names and arithmetic of
everything else stay what they are when it drafts.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import mlx.core as mx

from models.dspark.configuration import Family
from models.dspark.context import DraftContext, Placement
from models.dspark.drafter import Drafter, DraftNetwork
from models.dspark.layers import BlockAttention


class SequenceContext(NamedTuple):
    """What the blocks of a batch attend to.

    `features` [S, L, H] of the context, `hidden` bool [S, N, L], true where block n must not
    look; `offsets` [S * N] int32 are the blocks' first positions.
    """

    features: mx.array
    hidden: mx.array
    offsets: mx.array


class SequenceAttention(BlockAttention):
    """Attention of blocks [S * N, B, H] to their own sequence's context and to themselves."""

    def __call__(
        self, block: mx.array, context: DraftContext, layer: int, placement: Placement
    ) -> mx.array:
        source = cast(SequenceContext, context)
        sequences, count, length = source.hidden.shape
        size, dim = block.shape[1], self.head_dim
        heads = self.key_value_heads
        group = self.query_heads // heads
        queries = self.q_proj(block).reshape(-1, size, self.query_heads, dim)
        queries = self.rope(self.q_norm(queries).transpose(0, 2, 1, 3), offset=source.offsets)
        queries = queries.reshape(sequences, count, heads, group * size, dim) * self.scale
        own_keys, own_values = (
            part.reshape(sequences, count, heads, size, dim)
            for part in self.keys_and_values(block, source.offsets)
        )
        keys, values = self.keys_and_values(source.features, 0)
        # Key heads go outside the blocks, so that one product serves a sequence's blocks.
        wide = queries.transpose(0, 2, 1, 3, 4).reshape(sequences, heads, -1, dim)
        scores = (wide @ keys.swapaxes(-1, -2)).reshape(
            sequences, heads, count, group * size, length
        )
        scores = mx.where(source.hidden[:, None, :, None, :], -mx.inf, scores)
        own = (queries @ own_keys.swapaxes(-1, -2)).transpose(0, 2, 1, 3, 4)
        weights = mx.softmax(mx.concatenate([scores, own], axis=-1), axis=-1, precise=True)
        attended = weights[..., :length].reshape(sequences, heads, -1, length) @ values
        attended = attended.reshape(sequences, heads, count, group * size, dim)
        attended = attended + weights[..., length:] @ own_values.transpose(0, 2, 1, 3, 4)
        attended = attended.reshape(sequences, heads, count, group, size, dim)
        merged = attended.transpose(0, 2, 4, 1, 3, 5).reshape(sequences * count, size, -1)
        output: mx.array = self.o_proj(merged)
        return output


def train_on_sequences(network: DraftNetwork) -> None:
    """Exchange the attention of `network`'s layers. It can no longer draft afterwards."""
    for layer in network.layers:
        layer.self_attn.__class__ = SequenceAttention


def block_hidden(
    drafter: Drafter, network: DraftNetwork, taps: mx.array, anchors: mx.array, first: mx.array
) -> mx.array:
    """Final hidden rows [S, N, B, H] of the blocks behind `anchors` [S, N] int32.

    `taps` [S, L, m * H] are the target's, `first` [S, N] the anchors' own tokens. `network`
    holds the weights to use, in the dtype to compute in; `drafter` says what it is.
    """
    c = drafter.configuration
    sequences, count = anchors.shape
    dtype = network.fc.weight.dtype
    features = network.features(taps.astype(dtype))
    masks = mx.full((sequences * count, c.block_size - 1), c.mask_token, dtype=mx.int32)
    tokens = mx.concatenate([first.reshape(-1, 1), masks], axis=1)
    x = drafter.vocabulary.embed(tokens).astype(dtype)
    if c.family is Family.GEMMA4:
        x = x * mx.array(math.sqrt(c.hidden_size), dtype=dtype)
    positions = mx.arange(taps.shape[1], dtype=mx.int32)
    context: Any = SequenceContext(
        features=features,
        hidden=positions >= anchors[..., None],
        offsets=anchors.reshape(-1),
    )
    placement: Any = None
    final = network.block(x, context, placement)
    rows: mx.array = final.reshape(sequences, count, c.block_size, -1)
    return rows
