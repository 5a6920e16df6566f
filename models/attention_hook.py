"""The place where mlx-lm's models attend, and how another function is put there.

mlx-lm's models call a function of their own module for attention, by one name. What is put there
serves every model of that module in the process, so it must answer any call: where it has nothing
better it calls `original_attention`. Used on the engine's MLX thread.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base

from models.full_cache import FullCache
from models.ragged_attention import available, fits, ragged_attention
from models.sliding_cache import SlidingCache

_NAME = "scaled_dot_product_attention"

original_attention: Any = base.scaled_dot_product_attention


class Attend(Protocol):
    """mlx-lm's attention: queries [R, H, W, D] over what the cache has returned."""

    def __call__(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any,
        scale: float,
        mask: mx.array | str | None,
        sinks: mx.array | None = None,
    ) -> mx.array: ...


def attention_of(model: nn.Module) -> dict[ModuleType, Attend]:
    """The attention that each module of the model's classes calls now."""
    layers: Any = model.modules()
    modules = {sys.modules[type(layer).__module__] for layer in layers}
    return {module: getattr(module, _NAME) for module in modules if hasattr(module, _NAME)}


def set_attention(functions: dict[ModuleType, Attend]) -> None:
    """From now on let each of these modules call its function."""
    for module, attend in functions.items():
        setattr(module, _NAME, attend)


def attend_ragged(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None = None,
) -> mx.array:
    """`ragged_attention` over our own caches where it does the same, mlx-lm's otherwise."""
    if isinstance(cache, FullCache | SlidingCache) and sinks is None:
        reach = cache.reach_of(mask, queries.shape[2])
        if reach is not None and fits(queries, keys, values):
            return ragged_attention(queries, keys, values, cache.starts, scale=scale, reach=reach)
    attended: mx.array = original_attention(
        queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks
    )
    return attended


def use_ragged_attention(model: nn.Module) -> None:
    """Let `model` attend by `attend_ragged` where that kernel runs."""
    if available():
        set_attention(dict.fromkeys(attention_of(model), attend_ragged))
