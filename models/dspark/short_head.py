"""The output head of a drafter that proposes tokens of a shortlist only.

Owns copies of the rows that the shortlist names: of the output head, borrowed or the drafter's
own. Runs on the engine's MLX thread; lazy. A quantized matrix is quantized along its rows, so
its rows can be gathered packed, and give the bits that the whole matrix gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from models.dspark.configuration import DrafterError


class ShortHead:
    """Logits over n tokens instead of V."""

    def __init__(self, tokens: Sequence[int], head: nn.Module, vocabulary_size: int) -> None:
        """`tokens` are ids of rows of `head`, a linear layer or an embedding used as one."""
        self.tokens = mx.array(list(tokens), dtype=mx.int32)
        self._vocabulary_size = vocabulary_size
        self._head: Any = gather_rows(head, self.tokens)
        mx.eval(self.tokens, self._head.parameters())

    def __len__(self) -> int:
        return self.tokens.size

    @property
    def weight_bytes(self) -> int:
        """Bytes of the copied rows."""
        parameters: Any = tree_flatten(self._head.parameters())
        return sum(value.nbytes for _, value in parameters)

    def project(self, hidden: mx.array) -> mx.array:
        """[R, n, H] to the logits of the shortlist's tokens [R, n, len], before any softcap."""
        logits: mx.array = self._head(hidden)
        return logits

    def token_ids(self, places: mx.array) -> mx.array:
        """Places in the shortlist, any shape, to token ids int32."""
        return self.tokens[places]

    def spread(self, logits: mx.array) -> mx.array:
        """Logits [..., len] to those of the whole vocabulary [..., V], -inf elsewhere."""
        shape = logits.shape[:-1]
        nowhere = mx.full((*shape, self._vocabulary_size), -mx.inf, dtype=logits.dtype)
        places = mx.broadcast_to(self.tokens, logits.shape)
        # On the CPU a fifteenth of what a gather by an inverse index takes.
        return mx.put_along_axis(nowhere, places, logits, axis=-1)


def gather_rows(module: nn.Module, rows: mx.array) -> nn.Module:
    """A linear layer of the outputs `rows` int32 [n] of `module`: a linear layer, or an
    embedding whose entries are outputs; packed like it where it is quantized.

    Raises `DrafterError` for a layer of another kind.
    """
    source: Any = module
    gathered: Any
    if isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding):
        # The constructor quantizes a matrix of its own, the smallest that it takes.
        gathered = nn.QuantizedLinear(
            source.group_size, 1, False, source.group_size, source.bits, source.mode
        )
        gathered.scales = source.scales[rows]
        biases = source.get("biases")
        gathered.biases = None if biases is None else biases[rows]
    elif isinstance(module, nn.Linear | nn.Embedding):
        gathered = nn.Linear(1, 1, bias=False)
    else:
        raise DrafterError(
            f"a shortlist needs rows of a linear layer or an embedding, not of a "
            f"{type(module).__name__}: serve without the shortlist"
        )
    gathered.weight = source.weight[rows]
    if "bias" in source:
        gathered.bias = source.bias[rows]
    return gathered  # type: ignore[no-any-return]
