"""Attention of one token a row over plain keys, for thousands of rows at once.

Runs on the calling thread. Query heads that share a key head are taken as queries of one
product, so that keys and values are read once and not once for each of them: with thousands of
rows, reading them is most of a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from models.attention_hook import attention_of, original_attention, set_attention


def grouped_attention(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float
) -> mx.array:
    """Queries [R, heads, 1, d] over keys and values [R, key heads, T, d], all of them seen, to
    [R, heads, 1, d]."""
    rows, heads, _, width = queries.shape
    shared = (queries * scale).reshape(rows, keys.shape[1], -1, width)
    weights = mx.softmax(shared @ keys.swapaxes(2, 3), axis=-1, precise=True)
    return (weights @ values).reshape(rows, heads, 1, values.shape[-1])


@contextmanager
def lockstep_attention(model: nn.Module) -> Iterator[None]:
    """Let `model` attend by `grouped_attention` where that is the same, until the end."""
    before = attention_of(model)

    def attend(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any,
        scale: float,
        mask: mx.array | str | None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        if queries.shape[2] == 1 and mask is None and sinks is None:
            return grouped_attention(queries, keys, values, scale)
        attended: mx.array = original_attention(
            queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks
        )
        return attended

    try:
        set_attention(dict.fromkeys(before, attend))
        yield
    finally:
        set_attention(before)
