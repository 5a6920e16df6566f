"""Fewer bits for a drafter's weights: uniform, or by part.

Runs on the calling thread. A recipe such as "4:32,fc=8,markov_head=16" reads: 4 bits in groups
of 32, but the projection 8 bits and the Markov head as it is. The confidence head is one row
and stays as it is. `DrafterError` names a part of a recipe that cannot be.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
from mlx.utils import tree_flatten

from models.dspark.configuration import DrafterError
from models.dspark.drafter import DraftNetwork

_NEVER = "confidence_head"
_PARTS = ("layers", "fc", "markov_head")


class Recipe(msgspec.Struct, frozen=True):
    """`bits` 16 leaves weights as they are; `parts` are bits by the beginning of a path."""

    bits: int
    group_size: int
    parts: dict[str, int] = {}

    @classmethod
    def parse(cls, text: str) -> Recipe:
        """From "BITS:GROUP[,PART=BITS…]"."""
        first, *others = text.split(",")
        try:
            bits, _, group = first.partition(":")
            parts = dict(other.split("=") for other in others)
            recipe = cls(int(bits), int(group or 32), {k: int(v) for k, v in parts.items()})
        except ValueError as error:
            raise DrafterError(f"recipe {text!r} is not BITS:GROUP[,PART=BITS]") from error
        wrong = [
            b for b in (recipe.bits, *recipe.parts.values()) if b not in (2, 3, 4, 5, 6, 8, 16)
        ]
        if wrong:
            raise DrafterError(f"recipe {text!r}: {wrong[0]} bits are not possible")
        if unknown := [part for part in recipe.parts if part.split(".")[0] not in _PARTS]:
            raise DrafterError(f"recipe {text!r}: {unknown[0]} is none of {', '.join(_PARTS)}")
        return recipe

    def bits_of(self, path: str) -> int:
        """Bits of the module at `path`; the longest part that it begins with decides."""
        own = [part for part in self.parts if path == part or path.startswith(part + ".")]
        return self.parts[max(own, key=len)] if own else self.bits

    def bits_for(self, path: str, module: nn.Module) -> int | None:
        """Bits that `module` is to be quantized to, None when it stays as it is.

        Raises `DrafterError` where groups do not fit.
        """
        if path.startswith(_NEVER) or not hasattr(module, "to_quantized"):
            return None
        bits = self.bits_of(path)
        if bits == 16:
            return None
        inputs = module.weight.shape[-1]
        if inputs % self.group_size:
            raise DrafterError(
                f"{path} has {inputs} inputs, which groups of {self.group_size} do not divide"
            )
        return bits


def quantize_by_recipe(network: DraftNetwork, recipe: Recipe) -> dict[str, Any]:
    """Quantize `network` in place; returns the record for its `config.json`."""
    overrides: dict[str, Any] = {}

    def choose(path: str, module: nn.Module) -> bool | dict[str, Any]:
        bits = recipe.bits_for(path, module)
        if bits is None:
            return False
        setting = {"group_size": recipe.group_size, "bits": bits}
        if bits != recipe.bits:
            overrides[path] = setting
        return dict(setting)

    nn.quantize(network, recipe.group_size, min(recipe.bits, 8), class_predicate=choose)
    return {"group_size": recipe.group_size, "bits": min(recipe.bits, 8), **overrides}


def as_quantized(weight: mx.array, group_size: int, bits: int) -> mx.array:
    """`weight` [a, b] as it will be once exported, with the gradient of `weight` itself.

    Learning with it (the straight-through estimator, Bengio et al. 2013) finds weights that
    rounding does not hurt.
    """
    packed, scales, biases = mx.quantize(weight, group_size, bits)
    scales, biases = (part.astype(mx.bfloat16).astype(weight.dtype) for part in (scales, biases))
    rounded = mx.dequantize(packed, scales, biases, group_size, bits)
    return weight + mx.stop_gradient(rounded - weight)


def stored_weights(network: DraftNetwork) -> dict[str, mx.array]:
    """What is written: 16-bit floats, the confidence head float32."""
    parameters: Any = tree_flatten(network.parameters())
    return {
        name: value.astype(mx.float32 if name.startswith(_NEVER) else mx.bfloat16)
        if mx.issubdtype(value.dtype, mx.floating)
        else value
        for name, value in parameters
    }
