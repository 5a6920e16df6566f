"""How weights move: Muon for matrices, AdamW for the rest, warmup and cosine.

Pure functions over flat dictionaries of parameters, so that a whole step can be compiled and
its state saved by name.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.optimizers as optimizers
import msgspec

Parameters = dict[str, mx.array]


class OptimizerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Peak learning rates by group; `warmup` is a share of the whole. With `muon` off, AdamW
    moves everything, as in the paper."""

    muon: bool = True
    matrix_rate: float = 2e-3
    markov_rate: float = 1e-3
    other_rate: float = 6e-4
    warmup: float = 0.04
    clip: float = 1.0


def rate_share(progress: float, warmup: float) -> float:
    """What share of the peak rates holds at `progress` in [0, 1]: linear up, cosine down."""
    if progress < warmup:
        return progress / warmup
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, (progress - warmup) / (1.0 - warmup))))


class StackedMuon(optimizers.Muon):
    """Muon for matrices by path, [a, b] each: those of one shape are made orthogonal together.

    A matrix of a small drafter is a few microseconds of work behind 15 products that wait for
    each other, so many matrices one by one leave the device idle.
    """

    def apply_gradients(self, gradients: Parameters, parameters: Parameters) -> Parameters:
        """The parameters moved; the momentum in `state` follows."""
        self.state["step"] = self.step + 1
        shapes: defaultdict[tuple[int, ...], list[str]] = defaultdict(list)
        updates: Parameters = {}
        for path, gradient in gradients.items():
            own = self.state[path]
            own["v"] = self.momentum * own["v"] + (1 - self.momentum) * gradient
            updates[path] = gradient * (1 - self.momentum) + own["v"] * self.momentum
            shapes[tuple(sorted(gradient.shape))].append(path)
        for paths in shapes.values():
            wide = [_lying(updates[path]) for path in paths]
            orthogonal = mx.vmap(self._orthogonal)(mx.stack(wide))
            for path, update in zip(paths, orthogonal, strict=True):
                rows, columns = updates[path].shape
                updates[path] = (update.T if rows > columns else update) * (
                    max(1.0, rows / columns) ** 0.5
                )
        return {
            path: parameters[path] - self.learning_rate * update for path, update in updates.items()
        }

    def _orthogonal(self, matrix: mx.array) -> mx.array:
        orthogonal: mx.array = self._zeropower_via_newtonschulz5(matrix, steps=self.ns_steps)
        return orthogonal


def _lying(matrix: mx.array) -> mx.array:
    return matrix.T if matrix.shape[0] > matrix.shape[1] else matrix


class GroupedOptimizer:
    """Three optimizers over disjoint sets of parameters."""

    def __init__(self, settings: OptimizerSettings, parameters: Mapping[str, mx.array]) -> None:
        self.settings = settings
        adam: dict[str, Any] = {"weight_decay": 0.0, "bias_correction": True}
        self._optimizers: dict[str, Any] = {
            "matrix": StackedMuon(learning_rate=0.0, weight_decay=0.0)
            if settings.muon
            else optimizers.AdamW(learning_rate=0.0, **adam),
            "markov": optimizers.AdamW(learning_rate=0.0, **adam),
            "other": optimizers.AdamW(learning_rate=0.0, **adam),
        }
        self._peaks = {
            "matrix": settings.matrix_rate if settings.muon else settings.other_rate,
            "markov": settings.markov_rate,
            "other": settings.other_rate,
        }
        self._groups: dict[str, list[str]] = {name: [] for name in self._optimizers}
        for path, value in parameters.items():
            self._groups[group_of(path, value)].append(path)
        for group, optimizer in self._optimizers.items():
            optimizer.init({path: parameters[path] for path in self._groups[group]})

    def initial_state(self) -> Parameters:
        """The state by name, to be passed through `update`."""
        return {
            f"{group}/{name}": value
            for group, optimizer in self._optimizers.items()
            for name, value in _flat(optimizer).items()
        }

    def update(
        self, gradients: Parameters, parameters: Parameters, state: Parameters, share: mx.array
    ) -> tuple[Parameters, Parameters, mx.array]:
        """New parameters, new state and the norm of the gradients before clipping."""
        clipped, norm = optimizers.clip_grad_norm(gradients, self.settings.clip)
        moved, after = {}, {}
        for group, optimizer in self._optimizers.items():
            paths = self._groups[group]
            if not paths:
                continue
            optimizer.state = {
                "step": state[f"{group}/step"],
                **{path: _under(state, f"{group}/{path}/") for path in paths},
            }
            optimizer.learning_rate = share * self._peaks[group]
            moved.update(
                optimizer.apply_gradients(
                    {path: clipped[path] for path in paths},
                    {path: parameters[path] for path in paths},
                )
            )
            after.update({f"{group}/{name}": value for name, value in _flat(optimizer).items()})
        return moved, after, norm


def group_of(path: str, value: mx.array) -> str:
    """The group of a parameter: Muon is for hidden matrices only."""
    if path.startswith("markov_head."):
        return "markov"
    matrix = value.ndim == 2 and path.split(".", 1)[0] in ("layers", "fc")
    return "matrix" if matrix else "other"


def _flat(optimizer: Any) -> Parameters:
    """An optimizer's state by name: "step", and "path/moment" of every parameter."""
    flat = {"step": optimizer.state["step"]}
    for path, moments in optimizer.state.items():
        if isinstance(moments, dict):
            flat.update({f"{path}/{moment}": value for moment, value in moments.items()})
    return flat


def _under(state: Mapping[str, mx.array], prefix: str) -> Parameters:
    return {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    }
