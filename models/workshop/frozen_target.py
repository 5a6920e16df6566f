"""The target as training sees it: taps and final states of whole sequences, never changed.

Owns the taps on one target; runs on the calling thread, lazy. Taps are computed when they are
needed, unless `tap_storage` has stored them, at thousands of bytes a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from models.backend import DeviceKind, device_kind
from models.taps import Taps
from models.target import Target


class FrozenTarget:
    """A target and its taps at `tap_layers`."""

    def __init__(self, target: Target, tap_layers: Sequence[int]) -> None:
        self.target = target
        outer = getattr(target.model, "language_model", target.model)
        self._body: Any = outer.model
        head: Any = getattr(outer, "lm_head", None)
        self.embedding: mx.array = self._body.embed_tokens.weight
        self.head: mx.array = (self._body.embed_tokens if head is None else head).weight
        self.final_norm: mx.array = self._body.norm.weight
        self._taps = Taps(target.model, tap_layers)

    @classmethod
    def load(cls, folder: Path, tap_layers: Sequence[int], precision: str | None) -> FrozenTarget:
        """Load unquantized, because the head's matrix is used as it is: float32 on the CPU,
        bfloat16 on a GPU, unless `precision` says otherwise. Raises `CheckpointError`."""
        return cls(Target.load(folder, precision or training_precision()), tap_layers)

    def read(self, tokens: mx.array) -> tuple[mx.array, mx.array]:
        """[S, L] int32 to taps [S, L, m * H] and final, normed states [S, L, H]."""
        states: mx.array = self._body(tokens)
        return self._taps.take(), states

    def forget_layers(self) -> None:
        """Free all but embedding, head and final norm: `read` cannot be called afterwards."""
        self._taps.remove()
        del self.target, self._body

    def close(self) -> None:
        """Give the target its own layers back."""
        self._taps.remove()


def training_precision() -> str:
    """What is fast and safe to compute in on this device."""
    return "float32" if device_kind() is DeviceKind.CPU else "bfloat16"
