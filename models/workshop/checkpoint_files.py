"""Drafter checkpoints as files: what training writes and warm starts read.

Runs on the calling thread. Weights are written in bfloat16, the confidence head in float32;
embedding and head are the target's and are not written.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx

from models.dspark.configuration import DrafterConfiguration, DrafterError
from models.workshop.run_folder import write_json

WEIGHTS = "model.safetensors"


def write_drafter(
    folder: Path, configuration: DrafterConfiguration, weights: Mapping[str, mx.array]
) -> None:
    """Write `config.json` and the weights, each whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {
        name: value.astype(mx.float32 if name.startswith("confidence_head") else mx.bfloat16)
        for name, value in weights.items()
    }
    temporary = folder / f".new-{WEIGHTS}"
    mx.save_safetensors(str(temporary), stored, {"format": "pt"})
    temporary.replace(folder / WEIGHTS)
    write_json(folder / "config.json", {**configuration.source, "dtype": "bfloat16"})


def read_weights(folder: Path) -> dict[str, mx.array]:
    """The tensors of an unquantized, unsplit checkpoint. Raises `DrafterError`."""
    try:
        loaded = mx.load(str(folder / WEIGHTS))
    except (OSError, RuntimeError, ValueError) as error:
        raise DrafterError(f"{folder / WEIGHTS} cannot be read: {error}") from error
    assert isinstance(loaded, dict)
    if any(name.endswith(".scales") for name in loaded):
        raise DrafterError(f"{folder} is quantized: give the drafter that it was made from")
    return loaded
