"""Quantized layers of a network turned back into plain ones.

Runs on the calling thread. Used where only unquantized products are fast, and to tell what
quantization costs apart from what a slower kernel costs.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten


def dequantize_network(network: nn.Module) -> None:
    """Replace every quantized linear layer and embedding of `network`, in place."""
    replaced: list[tuple[str, Any]] = []
    modules: Any = network.named_modules()
    for path, module in modules:
        if not isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding):
            continue
        quantized: Any = module
        weight = mx.dequantize(
            quantized.weight,
            quantized.scales,
            quantized.get("biases"),
            quantized.group_size,
            quantized.bits,
        )
        plain: Any
        if isinstance(module, nn.QuantizedEmbedding):
            plain = nn.Embedding(1, 1)
        else:
            plain = nn.Linear(1, 1, bias="bias" in module)
            if "bias" in module:
                plain.bias = quantized.bias
        plain.weight = weight
        replaced.append((path, plain))
    if replaced:
        network.update_modules(tree_unflatten(replaced))
        mx.eval(network.parameters())
