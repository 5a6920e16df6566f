"""Taps: the outputs of chosen target layers, recorded without copying model code.

Owns the recording wrappers on one model's layers; used on the engine's MLX thread. A tapped
layer object gets a subclass of its own class whose `__call__` keeps the output, so parameters,
names and arithmetic stay what they were and logits are bit-identical. The last decoder layer
can be tapped too, before the model's final norm. A model that is compiled as a whole must not
be tapped: the record would hold tracers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn


class Taps:
    """Records layer outputs of every forward until `take` fetches the latest."""

    def __init__(self, model: nn.Module, layers: Sequence[int]) -> None:
        """Tap `layers`, 0-based, of `model.layers`. Raises `ValueError` for a layer that does
        not exist or is tapped already."""
        stack: Sequence[Any] = model.layers
        if out_of_range := [index for index in layers if not 0 <= index < len(stack)]:
            raise ValueError(f"layers {out_of_range} do not exist: the model has {len(stack)}")
        if tapped := [index for index in layers if hasattr(type(stack[index]), "tapped_class")]:
            raise ValueError(f"layers {tapped} are tapped already")
        self._order = tuple(layers)
        self._layers = {index: stack[index] for index in layers}
        self._record: dict[int, mx.array] = {}
        for index, layer in self._layers.items():
            layer.__class__ = _recording_class(type(layer), self._record, index)

    def take(self) -> mx.array:
        """The latest forward's outputs, concatenated in the order asked for: [R, W, m * H].

        Lazy, and forgotten here, so that nobody keeps a graph alive. Raises `RuntimeError`
        when no forward ran since the last call.
        """
        if len(self._record) < len(self._layers):
            raise RuntimeError("no forward has passed the tapped layers since the last take")
        outputs = [self._record[index] for index in self._order]
        self._record.clear()
        return mx.concatenate(outputs, axis=-1) if len(outputs) > 1 else outputs[0]

    def discard(self) -> None:
        """Forget the latest forward's outputs."""
        self._record.clear()

    def remove(self) -> None:
        """Give the layers their own classes back."""
        for layer in self._layers.values():
            layer.__class__ = type(layer).tapped_class
        self._layers = {}
        self._record.clear()


def _recording_class(base: type, record: dict[int, mx.array], index: int) -> type:
    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        output = base.__call__(self, *arguments, **keywords)
        # Some layers hand on their keys and values beside the hidden state, which is first.
        record[index] = output[0] if isinstance(output, tuple) else output
        return output

    return type(f"Tapped{base.__name__}", (base,), {"__call__": call, "tapped_class": base})
