"""The drafter: taps in, a block of draft tokens out, for rows of any length.

Owns the network and, unless it has its own, borrows the target's embedding and output head.
Runs on the engine's MLX thread. Nothing here reads a value back: a draft is a lazy graph, and
a caller may chain it behind a verification whose outcome the host does not know yet. With a
shortlist the heads tell only its tokens apart, and nothing else is ever proposed.
Arithmetic follows the checkpoint's dtype; logits and confidences are float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from models.dspark.configuration import DrafterConfiguration, DrafterError, Family
from models.dspark.context import DraftContext, Placement
from models.dspark.heads import ConfidenceHead, make_markov_head
from models.dspark.layers import GemmaLayer, QwenLayer
from models.dspark.short_head import ShortHead, gather_rows

Choose = Callable[[mx.array, int], mx.array]
"""`choose(logits, column)`: logits [R, n, V] float32 of draft columns `column`.. (0 is the token
after the anchor) to tokens [R, n] int32. Sampling with the noise and the filters of the target
is what makes drafts agree with it. Under a shortlist V is still the whole vocabulary, with -inf
for what is not on it; where the choice is `greedy` itself, that detour is saved."""


def greedy(logits: mx.array, column: int) -> mx.array:
    """The `Choose` of temperature 0."""
    return mx.argmax(logits, axis=-1).astype(mx.int32)


class Draft(NamedTuple):
    """`tokens` [R, c] int32; `confidence_logits` [R, c] float32, None without the head;
    `logits` [R, c, V] float32 when asked for, as rejection sampling needs them; -inf for what
    is not on the drafter's shortlist."""

    tokens: mx.array
    confidence_logits: mx.array | None
    logits: mx.array | None


class Vocabulary(Protocol):
    """Where token embeddings and output logits come from."""

    def embed(self, tokens: mx.array) -> mx.array:
        """[R, n] token ids to [R, n, H], unscaled."""

    def project(self, hidden: mx.array) -> mx.array:
        """[R, n, H] to logits [R, n, V], before any softcap."""

    @property
    def head(self) -> nn.Module:
        """The layer whose outputs the logits are: linear, or an embedding used as one."""


class TargetVocabulary:
    """The target's own embedding and head, borrowed, quantized as they are.

    Raises `DrafterError` when the target has none of the expected shape.
    """

    def __init__(self, model: nn.Module, vocabulary_size: int, hidden_size: int) -> None:
        outer = getattr(model, "language_model", model)
        inner = getattr(outer, "model", outer)
        embedding = getattr(inner, "embed_tokens", None)
        head = getattr(outer, "lm_head", None)
        for name, module in (("embedding", embedding), ("output head", head)):
            if module is None and name == "output head" and embedding is not None:
                continue
            shape = _matrix_shape(module)
            if shape != (vocabulary_size, hidden_size):
                raise DrafterError(
                    f"the target's {name} has the shape {shape}, the drafter needs "
                    f"({vocabulary_size}, {hidden_size}): load it with its own head"
                )
        self._embedding: Any = embedding
        self._head: Any = head

    def embed(self, tokens: mx.array) -> mx.array:
        embedded: mx.array = self._embedding(tokens)
        return embedded

    def project(self, hidden: mx.array) -> mx.array:
        logits: mx.array = (
            self._embedding.as_linear(hidden) if self._head is None else self._head(hidden)
        )
        return logits

    @property
    def head(self) -> nn.Module:
        module: nn.Module = self._embedding if self._head is None else self._head
        return module


class DraftNetwork(nn.Module):
    """The weights, named as in the checkpoint."""

    def __init__(self, configuration: DrafterConfiguration, own_head: bool) -> None:
        super().__init__()
        hidden, epsilon = configuration.hidden_size, configuration.norm_epsilon
        layer = GemmaLayer if configuration.family is Family.GEMMA4 else QwenLayer
        self.fc = nn.Linear(configuration.tap_width, hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(hidden, eps=epsilon)
        self.layers = [layer(configuration) for _ in range(configuration.layer_count)]
        self.norm = nn.RMSNorm(hidden, eps=epsilon)
        if (head := make_markov_head(configuration)) is not None:
            self.markov_head = head
        if configuration.confidence_head:
            self.confidence_head = ConfidenceHead(
                hidden, configuration.markov_rank if configuration.confidence_sees_token else 0
            )
        if own_head:
            self.embed_tokens = nn.Embedding(configuration.vocabulary_size, hidden)
            self.lm_head = nn.Linear(hidden, configuration.vocabulary_size, bias=False)

    def embed(self, tokens: mx.array) -> mx.array:
        """The drafter's own embedding."""
        embedded: mx.array = self.embed_tokens(tokens)
        return embedded

    def project(self, hidden: mx.array) -> mx.array:
        """The drafter's own head."""
        logits: mx.array = self.lm_head(hidden)
        return logits

    @property
    def head(self) -> nn.Module:
        """The drafter's own head, the layer itself."""
        return self.lm_head

    def features(self, taps: mx.array) -> mx.array:
        """What every layer's context projections read: [R, n, m * H] to [R, n, H]."""
        projected: mx.array = self.hidden_norm(self.fc(taps))
        return projected

    def block(self, x: mx.array, context: DraftContext, placement: Placement) -> mx.array:
        """Embedded block rows [R, B, H] to their final, normed hidden rows."""
        for index, layer in enumerate(self.layers):
            x = layer(x, context, index, placement)
        final: mx.array = self.norm(x)
        return final


class Drafter:
    """Drafts for many rows at once."""

    def __init__(
        self,
        configuration: DrafterConfiguration,
        network: DraftNetwork,
        vocabulary: Vocabulary,
        dtype: mx.Dtype,
    ) -> None:
        self.configuration = configuration
        self.network = network
        self.vocabulary = vocabulary
        self.dtype = dtype
        self.short_head: ShortHead | None = None
        self.embedding_scale = (
            math.sqrt(configuration.hidden_size) if configuration.family is Family.GEMMA4 else None
        )

    @property
    def block_size(self) -> int:
        """Draft tokens of one block."""
        return self.configuration.block_size

    @property
    def weight_bytes(self) -> int:
        """Bytes of the drafter's weights; what is borrowed from the target is not counted, the
        rows that a shortlist copies from it are."""
        parameters: Any = tree_flatten(self.network.parameters())
        own: int = sum(value.nbytes for _, value in parameters)
        return own if self.short_head is None else own + self.short_head.weight_bytes

    @property
    def context_bytes_per_token(self) -> int:
        """Bytes that one committed token of one row takes in the context."""
        c = self.configuration
        return 2 * c.layer_count * c.key_value_heads * c.head_dim * self.dtype.size

    def shorten(self, tokens: Sequence[int]) -> None:
        """From now on propose `tokens` only, ascending ids. Cannot be taken back: of the Markov
        head's output matrix only their rows are kept.

        Raises `DrafterError` when a matrix is of a kind whose rows cannot be gathered.
        """
        self.short_head = ShortHead(
            tokens, self.vocabulary.head, self.configuration.vocabulary_size
        )
        if "markov_head" in self.network:
            head: Any = self.network.markov_head
            head.markov_w2 = gather_rows(head.markov_w2, self.short_head.tokens)
            mx.eval(head.parameters())

    def new_context(self) -> DraftContext:
        """An empty context without rows."""
        return DraftContext(self.configuration, self.dtype)

    def extend(self, context: DraftContext, taps: mx.array) -> None:
        """Write context rows for the taps [R, n, m * H] of tokens at each row's length onward.

        Lazy, and not committed: `context.advance` says how many of them count. A token's rows
        depend on its own taps and position only, so a prompt may come in chunks of any size.
        """
        features = self.network.features(taps.astype(self.dtype))
        placement = context.place(taps.shape[1])
        for index, layer in enumerate(self.network.layers):
            keys, values = layer.self_attn.keys_and_values(features, placement.offset)
            context.write(index, placement, keys, values)

    def hidden(
        self,
        context: DraftContext,
        anchors: mx.array,
        starts: mx.array | None = None,
        reach: int = 0,
    ) -> mx.array:
        """Final hidden rows [R, B, H] of a block behind `anchors` [R] int32.

        The block begins at the committed lengths: the anchor itself is not context yet. With
        `starts` [R] int32 it begins there instead, at most `reach` positions further on; the
        rows up to there must have been written by `extend`.
        """
        c = self.configuration
        masks = mx.full((anchors.shape[0], c.block_size - 1), c.mask_token, dtype=mx.int32)
        tokens = mx.concatenate([anchors.astype(mx.int32)[:, None], masks], axis=1)
        x = self.vocabulary.embed(tokens).astype(self.dtype)
        if self.embedding_scale is not None:
            x = x * mx.array(self.embedding_scale, dtype=self.dtype)
        return self.network.block(x, context, context.place(c.block_size, starts, reach))

    def base_logits(self, hidden: mx.array) -> mx.array:
        """Logits [R, n, V] float32 of hidden rows, softcapped, without the Markov bias, over the
        whole vocabulary whatever the shortlist."""
        return self._softcapped(self.vocabulary.project(hidden))

    def _softcapped(self, logits: mx.array) -> mx.array:
        logits = logits.astype(mx.float32)
        softcap = self.configuration.softcap
        return logits if softcap is None else mx.tanh(logits / softcap) * softcap

    def draft(
        self,
        context: DraftContext,
        anchors: mx.array,
        *,
        cap: int | None = None,
        choose: Choose = greedy,
        keep_logits: bool = False,
        starts: mx.array | None = None,
        reach: int = 0,
    ) -> Draft:
        """Draft the `cap` tokens after `anchors` [R] int32 (all of the block when None).

        The body always runs the whole block, because its rows see each other; the heads run
        for the first `cap` rows only. `starts` and `reach` are as in `hidden`. Each token is
        chosen with the one before it as input, without the host reading any.
        """
        count = self.block_size if cap is None else cap
        if not 1 <= count <= self.block_size:
            raise ValueError(f"cap {count} is outside 1 to {self.block_size}")
        hidden = self.hidden(context, anchors, starts, reach)[:, :count]
        head = self.vocabulary if self.short_head is None else self.short_head
        base = self._softcapped(head.project(hidden))
        if "markov_head" not in self.network:
            tokens = self._choose(base, 0, choose)
            return self._finish(hidden, tokens, None, base if keep_logits else None)
        markov = self.network.markov_head
        previous, state = anchors, None
        columns, embeddings, logits = [], [], []
        for column in range(count):
            step = markov.step(previous, hidden[:, column], state)
            corrected = base[:, column] + step.bias.astype(mx.float32)
            chosen = self._choose(corrected[:, None], column, choose)
            previous, state = chosen[:, 0], step.state
            columns.append(chosen)
            embeddings.append(step.embedding)
            if keep_logits:
                logits.append(corrected)
        return self._finish(
            hidden,
            mx.concatenate(columns, axis=1),
            mx.stack(embeddings, axis=1),
            mx.stack(logits, axis=1) if keep_logits else None,
        )

    def _choose(self, logits: mx.array, column: int, choose: Choose) -> mx.array:
        """Tokens [R, n] of the heads' own logits: those of the shortlist, where there is one."""
        if self.short_head is None:
            return choose(logits, column)
        if choose is greedy:
            return self.short_head.token_ids(greedy(logits, column))
        return choose(self.short_head.spread(logits), column)

    def _finish(
        self,
        hidden: mx.array,
        tokens: mx.array,
        embeddings: mx.array | None,
        logits: mx.array | None,
    ) -> Draft:
        confidence = None
        if "confidence_head" in self.network:
            seen = embeddings if self.configuration.confidence_sees_token else None
            confidence = self.network.confidence_head(hidden, seen)
        if logits is not None and self.short_head is not None:
            logits = self.short_head.spread(logits)
        return Draft(tokens, confidence, logits)


def _matrix_shape(module: Any) -> tuple[int, int] | None:
    """Rows and columns of an embedding or linear layer, quantized or not."""
    weight = getattr(module, "weight", None)
    if weight is None or weight.ndim != 2:
        return None
    columns = weight.shape[1]
    bits = getattr(module, "bits", None)
    return weight.shape[0], columns if bits is None else columns * 32 // bits
