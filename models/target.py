"""A target: a checkpoint loaded into one of mlx-lm's models, ready to decode rows.

Owns the weights; loaded, used and freed on the engine's MLX thread. Loading raises
`CheckpointError` for what cannot be loaded; code that came with a checkpoint is never run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model, load_model

from models.attention_hook import use_ragged_attention
from models.backend import DeviceKind, device_kind
from models.checkpoint import CheckpointError, CheckpointFacts, inspect
from models.row_batch import RowBatch

_DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
_BITS = {"4-bit": 4, "8-bit": 8}
_GROUP_SIZE = 64
PRECISIONS = ("auto", *_DTYPES, *_BITS)


class Target:
    """The model that decides. Its vocabulary, weights and caches are of one precision."""

    def __init__(self, facts: CheckpointFacts, model: Any, precision: str) -> None:
        self.facts = facts
        self.model = model
        self.precision = precision
        self.vocabulary_size = facts.vocabulary_size
        weights = dict(tree_flatten(model.parameters()))
        self.weight_bytes = sum(weight.nbytes for weight in weights.values())
        use_ragged_attention(model)
        # Lazy, and never evaluated: it only tells the shapes of keys and values.
        self._probe = self.new_batch()
        self._probe.open_row()
        logits = self.forward(mx.zeros((1, 1), dtype=mx.int32), self._probe)
        if logits.shape[-1] != self.vocabulary_size:
            raise CheckpointError(
                facts.folder / "config.json",
                f"vocab_size {self.vocabulary_size}, but the model has {logits.shape[-1]} logits",
                "fetch the checkpoint again",
            )
        self.kv_bytes_per_token = self._probe.bytes_per_token()

    @classmethod
    def load(
        cls, folder: Path, precision: str = "auto", facts: CheckpointFacts | None = None
    ) -> Target:
        """Load a checkpoint folder.

        `precision` "auto" is float32 on the CPU, where only float32 is fast, and as stored on
        a GPU. "float32", "bfloat16" and "float16" dequantize and cast; "4-bit" and "8-bit"
        quantize weights that are not stored so, in groups of 64.

        Raises:
            CheckpointError: the folder cannot be loaded or its model cannot be batched.
            ValueError: an unknown precision.
        """
        if precision not in PRECISIONS:
            raise ValueError(f"precision is {precision!r}; it must be one of {PRECISIONS}")
        facts = facts or inspect(folder)
        on_cpu = device_kind() is DeviceKind.CPU
        if precision == "auto":
            precision = "float32" if on_cpu else facts.precision
        try:
            model: Any = load_model(
                folder, lazy=True, model_config=facts.config_overrides, trust_remote_code=False
            )[0]
            _set_precision(model, facts, precision, on_cpu=on_cpu)
            mx.eval(model.parameters())
            return cls(facts, model, precision)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            remedy = "fetch the checkpoint again, or choose a model that mlx-lm can load"
            raise CheckpointError(folder, f"cannot be loaded: {error}", remedy) from error

    def new_batch(self) -> RowBatch:
        """A batch without rows for this model."""
        return RowBatch(self.model)

    def noise_batch(self, rows: int, length: int) -> RowBatch:
        """`rows` rows of `length` random tokens, for measuring what a depth costs."""
        batch = self.new_batch()
        batch.fill_with_noise(rows, length, self._probe)
        return batch

    def forward(self, tokens: mx.array, batch: RowBatch) -> mx.array:
        """Logits [R, W, V] of the next `tokens`, int32 [R, W]. Lazy; does not advance."""
        logits: mx.array = self.model(tokens, cache=batch.caches)
        return logits

    def prefill(self, tokens: mx.array, batch: RowBatch) -> None:
        """Read `tokens`, int32 [1, W], into a batch of one row, commit them and wait.

        Only the caches are evaluated, so neither logits nor the last layer's output are
        computed.
        """
        self.forward(tokens, batch)
        batch.advance([tokens.shape[1]])
        mx.eval(batch.state())

    def cache_bytes(self, rows: int, length: int) -> int:
        """Bytes that the caches of `rows` rows take, the longest of `length` tokens."""
        return self._probe.bytes_for(rows, length)


def _set_precision(model: Any, facts: CheckpointFacts, precision: str, *, on_cpu: bool) -> None:
    """Bring lazily loaded weights into `precision`."""
    dtype = _DTYPES.get(precision)
    if dtype is not None:
        # Scales are cast first: a product of float16 scales would be rounded to float16.
        model.set_dtype(mx.float32)
        dequantize_model(model)
        model.set_dtype(dtype)
        return
    if on_cpu:
        # Scales of 16 bits make quantized products 5 to 37 times slower there.
        model.set_dtype(mx.float32)
    bits = _BITS.get(precision)
    if bits is None or (facts.quantization is not None and facts.quantization.bits == bits):
        return
    dequantize_model(model)
    wanted = getattr(model, "quant_predicate", None)

    def predicate(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized") or module.weight.shape[-1] % _GROUP_SIZE:
            return False
        choice: bool | dict[str, Any] = True if wanted is None else wanted(path, module)
        return choice

    nn.quantize(model, _GROUP_SIZE, bits, class_predicate=predicate)
