"""One step of training: target, drafter, loss, gradient and optimizer as one compiled function.

Owns nothing between steps: parameters and optimizer state go in and come out by name. Master
weights are float32; the forward uses a copy in the dtype to compute in, except where sums are
long or values few (the confidence head, the table of token embeddings). With a recipe the
copy is rounded as the drafter will be when it is exported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_unflatten
from numpy.typing import NDArray

from models.dspark.drafter import Drafter
from models.workshop.anchors import Blocks, choose_anchors, make_blocks
from models.workshop.corpus import Packed
from models.workshop.frozen_target import FrozenTarget
from models.workshop.objective import Batch, Losses, loss
from models.workshop.optimizer import GroupedOptimizer, Parameters
from models.workshop.quantization import Recipe, as_quantized

_FLOAT32 = ("confidence_head", "markov_head.markov_w1")
Inputs = tuple[mx.array, ...]
"""Tokens [S, L], the arrays of `Blocks` and, when they are stored, taps and final states; those
that are not there are computed."""
_COMPUTED = 1 + len(Blocks._fields)


class TrainingStep:
    """Compiled for every shape of batch that comes along."""

    def __init__(
        self,
        frozen: FrozenTarget,
        drafter: Drafter,
        optimizer: GroupedOptimizer,
        dtype: mx.Dtype,
        rows: int,
        recipe: Recipe | None = None,
    ) -> None:
        self._recipe = recipe
        self._bits: dict[str, int] = {}
        if recipe is not None:
            modules: Any = drafter.network.named_modules()
            for path, module in modules:
                bits = recipe.bits_for(path, module)
                if bits is not None:
                    self._bits[f"{path}.weight"] = bits
        self._frozen, self._drafter, self._optimizer = frozen, drafter, optimizer
        self._dtype, self._rows = dtype, rows
        self._head = frozen.head.astype(dtype)
        mx.eval(self._head)
        self.train: Callable[..., tuple[Parameters, Parameters, Losses, mx.array]] = mx.compile(
            self._train
        )
        self.evaluate: Callable[..., Losses] = mx.compile(self._evaluate)

    def _train(
        self,
        parameters: Parameters,
        state: Parameters,
        share: mx.array,
        tap_scale: mx.array,
        *inputs: mx.array,
    ) -> tuple[Parameters, Parameters, Losses, mx.array]:
        batch = self._batch(tap_scale, inputs)

        def total(parameters: Parameters) -> tuple[mx.array, Losses]:
            losses = self._losses(parameters, tap_scale, batch)
            return losses.total, losses

        (_, losses), gradients = mx.value_and_grad(total)(parameters)
        moved, after, norm = self._optimizer.update(gradients, parameters, state, share)
        return moved, after, losses, norm

    def _evaluate(self, parameters: Parameters, tap_scale: mx.array, *inputs: mx.array) -> Losses:
        return self._losses(parameters, tap_scale, self._batch(tap_scale, inputs))

    def _losses(self, parameters: Parameters, tap_scale: mx.array, batch: Batch) -> Losses:
        network = self._drafter.network
        network.update(
            tree_unflatten(
                [
                    (path, value if path.startswith(_FLOAT32) else value.astype(self._dtype))
                    for path, value in self._rounded(parameters, tap_scale).items()
                ]
            )
        )
        return loss(self._drafter, network, batch, self._head, self._rows)

    def _rounded(self, parameters: Parameters, scale: mx.array) -> Parameters:
        """The parameters as they will be in an exported drafter."""
        if self._recipe is None:
            return parameters
        finished = finished_weights(parameters, scale)
        for path, bits in self._bits.items():
            finished[path] = as_quantized(finished[path], self._recipe.group_size, bits)
        return unfinished_weights(finished, scale)

    def _batch(self, tap_scale: mx.array, inputs: Inputs) -> Batch:
        tokens, *blocks = inputs[:_COMPUTED]
        taps, states = inputs[_COMPUTED:] or self._frozen.read(tokens)
        scaled = taps.astype(self._dtype) * tap_scale.astype(self._dtype)
        return Batch(scaled, states.astype(self._dtype), *blocks)


def make_inputs(
    packed: Packed,
    anchors: int,
    block_size: int,
    seed: list[int],
    stored: tuple[mx.array, ...] = (),
) -> Inputs:
    """What a step takes behind its state: `anchors` of them in all, drawn by `seed`, and the
    `stored` taps and states of `packed`, if any."""
    random = np.random.default_rng(seed)
    each = max(1, anchors // len(packed.tokens))
    chosen, kept = choose_anchors(packed.supervised, each, random)
    blocks: Blocks = make_blocks(packed.tokens, packed.supervised, chosen, kept, block_size)
    return (mx.array(packed.tokens), *(mx.array(part) for part in blocks), *stored)


def tap_scale(batches: Iterable[tuple[mx.array, NDArray[np.bool_]]]) -> mx.array:
    """One over the root mean square of every tap channel, [m * H] float32, over those of the
    taps [S, L, m * H] that are supervised [S, L].

    A few channels of a target are hundreds of times larger than the others; the projection
    would see little else. Its weights take the scale in when the drafter is exported.
    """
    total: mx.array = mx.array(0.0)
    count = 0
    for taps, supervised in batches:
        seen = mx.array(supervised)[..., None]
        squares = mx.where(seen, taps.astype(mx.float32) ** 2, 0.0)
        total = total + squares.sum(axis=(0, 1))
        count += int(supervised.sum())
        mx.eval(total)
    return mx.rsqrt(total / max(count, 1) + 1e-6)


def finished_weights(parameters: Parameters, scale: mx.array) -> Parameters:
    """The weights that a drafter loads: the taps' scale folded into the projection."""
    finished: dict[str, Any] = dict(parameters)
    finished["fc.weight"] = parameters["fc.weight"] * scale
    return finished


def unfinished_weights(finished: Parameters, scale: mx.array) -> Parameters:
    """The parameters to train of a drafter's weights: the inverse of `finished_weights`."""
    return {**finished, "fc.weight": finished["fc.weight"] / scale}
