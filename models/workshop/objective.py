"""The drafter's training objective, and its gradient without whole tables of logits.

Runs on the calling thread; lazy. Per position k of a block, with the weight
w_k = counted * exp(-k / 4):

    L = 0.1 * CE + 0.9 * |softmax(draft) - softmax(target)|_1 + 1.0 * BCE(confidence)

each a mean under the weights. The confidence's label is 1 - half the L1 distance, which is the
chance that rejection sampling accepts the position, and gets no gradient.

A step has 28,672 positions of 49,152 logits. Their gradient is known as soon as they are:
dL/dz = w (0.1 (p - onehot) + 0.9 p (s - <s, p>)), s = sign(p - q). So logits are made for a
few thousand positions at a time, turned into the gradients of the head's inputs and of the
Markov matrix, and dropped; automatic differentiation sees those gradients as constants.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from models.dspark.configuration import HeadKind
from models.dspark.drafter import Drafter, DraftNetwork
from models.workshop import loss_kernel
from models.workshop.sequences import block_hidden

CROSS_ENTROPY = 0.1
DISTANCE = 0.9
CONFIDENCE = 1.0
DECAY = 4.0
_FLOOR = 1e-6


class Batch(NamedTuple):
    """What one step sees: see `anchors.Blocks`; `taps` [S, L, m * H] and the target's final,
    normed `states` [S, L, H] are its own, `counted` is bool."""

    taps: mx.array
    states: mx.array
    anchors: mx.array
    labels: mx.array
    previous: mx.array
    places: mx.array
    counted: mx.array


class Losses(NamedTuple):
    """Scalars float32, and per position [B]: `accepted`, the mean of 1 - half the distance.

    `tokens_per_round` is what the accepted chances of a whole block promise, bonus included.
    """

    total: mx.array
    cross_entropy: mx.array
    distance: mx.array
    confidence: mx.array
    accepted: mx.array
    tokens_per_round: mx.array


class HeadWeights(NamedTuple):
    """Output matrices: the frozen `vocabulary` [V, H], `markov` [V, r] or None, and `joint`
    [V, H + r], both side by side, where no softcap is between them."""

    vocabulary: mx.array
    markov: mx.array | None
    softcap: float | None
    joint: mx.array | None = None


class PositionGradients(NamedTuple):
    """Of every position [n]: the two losses, and the gradients of what went into them."""

    cross_entropy: mx.array
    distance: mx.array
    hidden: mx.array
    features: mx.array | None
    markov: mx.array | None


def loss(drafter: Drafter, network: DraftNetwork, batch: Batch, head: Any, rows: int) -> Losses:
    """The objective of `network` on a batch; `total` can be differentiated.

    `head` is the frozen output matrix [V, H] in the dtype to compute in; logits are held for
    `rows` positions at a time.
    """
    c = drafter.configuration
    first = batch.previous[..., 0]
    hidden = block_hidden(drafter, network, batch.taps, batch.anchors, first)
    shape = batch.counted.shape
    weights = batch.counted.astype(mx.float32) * mx.exp(-mx.arange(c.block_size) / DECAY)
    scale = 1.0 / (weights.sum() + _FLOOR)
    embeddings, features = head_features(network, c.head_kind, batch.previous, hidden)
    states = _at_places(batch.states, batch.places)
    markov: Any = network.markov_head.markov_w2.weight if features is not None else None
    gradients = position_gradients(
        mx.stop_gradient(hidden).reshape(-1, c.hidden_size),
        None if features is None else mx.stop_gradient(features).reshape(-1, c.markov_rank),
        mx.stop_gradient(states).reshape(-1, c.hidden_size),
        batch.labels.reshape(-1),
        mx.stop_gradient(weights * scale).reshape(-1),
        _head_weights(head, None if markov is None else mx.stop_gradient(markov), c.softcap),
        rows,
    )
    flow = _flow(hidden.reshape(-1, c.hidden_size), gradients.hidden)
    if features is not None:
        flow = flow + _flow(features.reshape(-1, c.markov_rank), gradients.features)
        flow = flow + _flow(markov, gradients.markov)
    distance = gradients.distance.reshape(shape)
    accepted = mx.clip(1.0 - 0.5 * distance, 0.0, 1.0)
    cross_entropy = (weights * gradients.cross_entropy.reshape(shape)).sum() * scale
    mean_distance = (weights * distance).sum() * scale
    total = CROSS_ENTROPY * cross_entropy + DISTANCE * mean_distance + flow
    confidence = mx.array(0.0)
    if c.confidence_head:
        seen = embeddings if c.confidence_sees_token else None
        logits = network.confidence_head(hidden, seen)
        each = nn.losses.binary_cross_entropy(
            logits, mx.stop_gradient(accepted), with_logits=True, reduction="none"
        )
        confidence = (weights * each).sum() * scale
        total = total + CONFIDENCE * confidence
    return Losses(total, cross_entropy, mean_distance, confidence, *_summary(accepted, batch))


def _head_weights(head: mx.array, markov: mx.array | None, softcap: float | None) -> HeadWeights:
    if markov is None or softcap is not None:
        return HeadWeights(head, markov, softcap)
    return HeadWeights(head, markov, softcap, mx.concatenate([head, markov], axis=-1))


def head_features(
    network: DraftNetwork, kind: HeadKind, previous: mx.array, hidden: mx.array
) -> tuple[mx.array | None, mx.array | None]:
    """Embeddings W1[previous] and what W2 multiplies, [S, N, B, r] each, teacher-forced."""
    if kind is HeadKind.NONE:
        return None, None
    head = network.markov_head
    # Kept in float32 until here: the gradient of a frequent token is a sum of thousands.
    embeddings = head.markov_w1(previous).astype(hidden.dtype)
    if kind is HeadKind.VANILLA:
        return embeddings, embeddings
    columns, state = [], None
    for column in range(hidden.shape[2]):
        feature, state = head.features(embeddings[:, :, column], hidden[:, :, column], state)
        columns.append(feature)
    return embeddings, mx.stack(columns, axis=2)


def position_gradients(
    hidden: mx.array,
    features: mx.array | None,
    states: mx.array,
    labels: mx.array,
    weights: mx.array,
    head: HeadWeights,
    rows: int,
) -> PositionGradients:
    """Losses and gradients of positions [n], `rows` of them at a time.

    `hidden`, `states` [n, H], `features` [n, r]; `labels` [n]; `weights` [n] float32 scale the
    gradients, not the losses that are returned.
    """
    parts: list[PositionGradients] = []
    markov: mx.array | None = None
    for start in range(0, len(labels), rows):
        piece = slice(start, start + rows)
        source = hidden[piece]
        if parts:
            # One piece after the other: side by side, their logits would all be there at once.
            source = mx.depends(source, parts[-1].hidden)
        part = _piece(
            source,
            None if features is None else features[piece],
            states[piece],
            labels[piece],
            weights[piece],
            head,
        )
        if part.markov is not None:
            markov = part.markov if markov is None else markov + part.markov
        parts.append(part)
    return PositionGradients(
        mx.concatenate([part.cross_entropy for part in parts]),
        mx.concatenate([part.distance for part in parts]),
        mx.concatenate([part.hidden for part in parts]),
        None if features is None else _joined([part.features for part in parts]),
        markov,
    )


def _joined(parts: list[Any]) -> mx.array:
    return mx.concatenate(parts)


def _piece(
    hidden: mx.array,
    features: mx.array | None,
    states: mx.array,
    labels: mx.array,
    weights: mx.array,
    head: HeadWeights,
) -> PositionGradients:
    wanted, _ = _capped(states @ head.vocabulary.T, head.softcap)
    if features is not None and head.joint is not None:
        # One product makes the logits of both parts, and one the gradients of both.
        logits, slope = mx.concatenate([hidden, features], axis=-1) @ head.joint.T, None
    else:
        logits, slope = _capped(hidden @ head.vocabulary.T, head.softcap)
        if features is not None and head.markov is not None:
            logits = logits + features @ head.markov.T
    if loss_kernel.serves(logits):
        gradient, cross_entropy, distance = loss_kernel.loss_gradients(
            logits, wanted, labels, weights, CROSS_ENTROPY, DISTANCE
        )
    else:
        gradient, cross_entropy, distance = _loss_gradients(logits, wanted, labels, weights)
    of_features = of_markov = None
    if features is not None and head.markov is not None:
        of_markov = (gradient.T @ features).astype(mx.float32)
        if head.joint is None:
            of_features = gradient @ head.markov
    if slope is not None:
        gradient = gradient * slope
    if features is not None and head.joint is not None:
        both = gradient @ head.joint
        of_hidden, of_features = mx.split(both, [hidden.shape[-1]], axis=-1)
    else:
        of_hidden = gradient @ head.vocabulary
    return PositionGradients(cross_entropy, distance, of_hidden, of_features, of_markov)


def _loss_gradients(
    logits: mx.array, wanted: mx.array, labels: mx.array, weights: mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    """What `loss_kernel.loss_gradients` returns, on any device and in any dtype."""
    # `precise` sums in float32; storing the result in the logits' dtype keeps traffic low.
    drafted = mx.softmax(logits, axis=-1, precise=True)
    wanted = mx.softmax(wanted, axis=-1, precise=True)
    difference = drafted.astype(mx.float32) - wanted.astype(mx.float32)
    distance = mx.abs(difference).sum(axis=-1)
    # Exact in any dtype, and kept until the gradient is made: in the small one.
    signs = mx.sign(drafted - wanted)
    lean = (signs.astype(mx.float32) * drafted.astype(mx.float32)).sum(axis=-1, keepdims=True)
    chosen = mx.take_along_axis(drafted, labels[:, None], axis=-1)[:, 0]
    cross_entropy = -mx.log(mx.maximum(chosen.astype(mx.float32), 1e-37))
    one_hot = mx.arange(drafted.shape[-1]) == labels[:, None]
    p = drafted.astype(mx.float32)
    slopes = CROSS_ENTROPY * (p - one_hot) + DISTANCE * p * (signs - lean)
    return (weights[:, None] * slopes).astype(logits.dtype), cross_entropy, distance


def _capped(logits: mx.array, softcap: float | None) -> tuple[mx.array, mx.array | None]:
    """Softcapped logits and the cap's derivative."""
    if softcap is None:
        return logits, None
    squashed = mx.tanh(logits / softcap)
    return squashed * softcap, 1.0 - squashed * squashed


def _flow(value: mx.array, gradient: Any) -> mx.array:
    """A zero whose gradient with respect to `value` is `gradient`."""
    product = (value.astype(mx.float32) * mx.stop_gradient(gradient).astype(mx.float32)).sum()
    return product - mx.stop_gradient(product)


def _at_places(states: mx.array, places: mx.array) -> mx.array:
    """[S, L, H] at [S, N, B]: [S, N, B, H]."""
    count, length, width = states.shape
    rows = (mx.arange(count) * length)[:, None, None] + places
    gathered: mx.array = states.reshape(-1, width)[rows]
    return gathered


def _summary(accepted: mx.array, batch: Batch) -> tuple[mx.array, mx.array]:
    counted = batch.counted.astype(mx.float32)
    by_position = (accepted * counted).sum(axis=(0, 1)) / mx.maximum(counted.sum(axis=(0, 1)), 1.0)
    blocks = counted[..., 0]
    survival = mx.cumprod(accepted * counted, axis=-1).sum(axis=-1)
    rounds = mx.maximum(blocks.sum(), 1.0)
    return by_position, ((1.0 + survival) * blocks).sum() / rounds
