"""The heads on top of the block: token to token, and confidence.

Pure modules, run on the engine's MLX thread. A Markov head adds to the logits of position k a
bias that depends on the token chosen at k - 1; position 1 depends on the anchor. Three kinds
exist; they differ in what they multiply into the low-rank output matrix. State passes through
`step` as a value, so a head serves any number of rows at once.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from models.dspark.configuration import DrafterConfiguration, HeadKind


class HeadStep(NamedTuple):
    """`bias` [R, V] for the logits, or of a shortlist's tokens where the output matrix has only
    their rows; `embedding` [R, r] of the token before; the new `state`."""

    bias: mx.array
    embedding: mx.array
    state: mx.array | None


class VanillaHead(nn.Module):
    """bias = W2 W1[previous]"""

    def __init__(self, vocabulary_size: int, rank: int, hidden_size: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocabulary_size, rank)
        self.markov_w2 = nn.Linear(rank, vocabulary_size, bias=False)

    def step(self, previous: mx.array, hidden: mx.array, state: mx.array | None = None) -> HeadStep:
        """One position: `previous` [R] token ids, `hidden` [R, H] of the position's row.

        `state` is None at position 1 and what the last step returned afterwards.
        """
        embedding = self.markov_w1(previous)
        features, state = self.features(embedding, hidden, state)
        return HeadStep(self.markov_w2(features), embedding, state)

    def features(
        self, embedding: mx.array, hidden: mx.array, state: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        """What W2 multiplies, [R, r], and the next state."""
        return embedding, None


class GatedHead(VanillaHead):
    """The embedding is gated by itself and the hidden row."""

    def __init__(self, vocabulary_size: int, rank: int, hidden_size: int) -> None:
        super().__init__(vocabulary_size, rank, hidden_size)
        self.gate_proj = nn.Linear(hidden_size + rank, rank)

    def features(
        self, embedding: mx.array, hidden: mx.array, state: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        gate = mx.sigmoid(self.gate_proj(mx.concatenate([hidden, embedding], axis=-1)))
        return gate * embedding, None


class RecurrentHead(VanillaHead):
    """A gated state runs along the block; the output gate sees the state before this step."""

    def __init__(self, vocabulary_size: int, rank: int, hidden_size: int) -> None:
        super().__init__(vocabulary_size, rank, hidden_size)
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def features(
        self, embedding: mx.array, hidden: mx.array, state: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        before = mx.zeros_like(embedding) if state is None else state
        joint = self.joint_proj(mx.concatenate([before, embedding, hidden], axis=-1))
        gate, candidate, output = mx.split(joint, 3, axis=-1)
        gate = mx.sigmoid(gate)
        return mx.tanh(output), gate * before + (1 - gate) * mx.tanh(candidate)


class ConfidenceHead(nn.Module):
    """The logit of the chance that position k is accepted, given that all before it were.

    Kept in float32 and never quantized: it is a single row, and widths are chosen by it.
    """

    def __init__(self, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.proj = nn.Linear(hidden_size + rank, 1)

    def __call__(self, hidden: mx.array, embeddings: mx.array | None) -> mx.array:
        """`hidden` [R, c, H] and, where the head looks at tokens, `embeddings` [R, c, r] of the
        token before each position; returns logits [R, c] float32."""
        parts = [hidden] if embeddings is None else [hidden, embeddings]
        joined = mx.concatenate([part.astype(mx.float32) for part in parts], axis=-1)
        logits: mx.array = self.proj(joined).squeeze(-1)
        return logits


def make_markov_head(configuration: DrafterConfiguration) -> VanillaHead | None:
    """The head that the configuration names; None for DFlash."""
    kinds = {
        HeadKind.VANILLA: VanillaHead,
        HeadKind.GATED: GatedHead,
        HeadKind.RNN: RecurrentHead,
    }
    if configuration.head_kind is HeadKind.NONE:
        return None
    return kinds[configuration.head_kind](
        configuration.vocabulary_size, configuration.markov_rank, configuration.hidden_size
    )


def prefix_above(confidences: list[float], threshold: float) -> int:
    """How many leading drafts DeepSpec's threshold rule would verify.

    It cuts before the first position whose own probability, not the product, is under
    `threshold`; 0 or less cuts nothing.
    """
    if threshold <= 0:
        return len(confidences)
    return next(
        (index for index, value in enumerate(confidences) if value < threshold), len(confidences)
    )
