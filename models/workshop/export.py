"""Write a drafter in another form: with or without the target's matrices, in fewer bits.

Run as `python -m models.workshop.export --target DIR --drafter DIR --out DIR`, in a process of
its own. `--with-embeddings` adds what DeepSpec's own reader wants: copies of the target's
embedding and head, bfloat16 throughout, the confidence head too, and every key that it asks of
a configuration. Without it the copies are left out, since ours binds the target's. A checkpoint
of DeepSpec's goes in as well as one of ours. A calibration beside the drafter goes along, and so
does a shortlist but for DeepSpec's form, whose readers take every safetensors file in the folder
for weights. Exits with 2 when the drafter does not fit.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from models import calibration
from models.checkpoint import CheckpointError
from models.dspark import shortlist
from models.dspark.configuration import DrafterError, Family, TargetShape
from models.dspark.loader import load_drafter
from models.target import Target
from models.workshop.checkpoint_files import WEIGHTS
from models.workshop.dequantized import dequantize_network
from models.workshop.frozen_target import FrozenTarget
from models.workshop.progress import refuse, say
from models.workshop.quantization import Recipe, quantize_by_recipe, stored_weights
from models.workshop.run_folder import write_json


def export(
    target: Path, drafter: Path, out: Path, recipe: Recipe | None, with_embeddings: bool
) -> int:
    """Write the drafter to `out`; returns the bytes of its weights' file."""
    if recipe is not None and with_embeddings:
        raise DrafterError("DeepSpec reads no quantized weights: leave one of the two out")
    model = Target.load(target, "bfloat16")
    loaded = load_drafter(
        drafter, model.model, TargetShape.read(target), dtype=mx.float32, shortlist=False
    )
    config: dict[str, Any] = dict(loaded.configuration.source)
    for key in ("quantization", "quantization_config"):
        config.pop(key, None)
    dequantize_network(loaded.network)
    if recipe is not None:
        config["quantization"] = quantize_by_recipe(loaded.network, recipe)
    weights = stored_weights(loaded.network)
    if with_embeddings:
        frozen = FrozenTarget(model, [])
        weights["embed_tokens.weight"] = frozen.embedding.astype(mx.bfloat16)
        weights["lm_head.weight"] = frozen.head.astype(mx.bfloat16)
        weights = {name: value.astype(mx.bfloat16) for name, value in weights.items()}
        # Its reader asks for it, though only its training uses it; its configurations have 512.
        config.setdefault("num_anchors", 512)
        if loaded.configuration.family is Family.GEMMA4:
            # Configurations saved by later releases of transformers have them by layer only.
            config.setdefault("global_head_dim", loaded.configuration.head_dim)
            config.setdefault("num_global_key_value_heads", loaded.configuration.key_value_heads)
    out.mkdir(parents=True, exist_ok=True)
    temporary = out / f".new-{WEIGHTS}"
    mx.save_safetensors(str(temporary), weights, {"format": "mlx" if recipe else "pt"})
    temporary.replace(out / WEIGHTS)
    write_json(out / "config.json", config)
    beside = [calibration.FILE_NAME]
    if not with_embeddings:
        beside.append(shortlist.FILE_NAME)
    for name in beside:
        if (drafter / name).exists() and out != drafter:
            shutil.copyfile(drafter / name, out / name)
    return (out / WEIGHTS).stat().st_size


def main(arguments: Sequence[str] | None = None) -> int:
    """The step; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m models.workshop.export", description="Write a drafter in another form."
    )
    add = parser.add_argument
    add("--target", type=Path, required=True, help="folder of the target")
    add("--drafter", type=Path, required=True, help="folder of the drafter")
    add("--out", type=Path, required=True, help="folder to write")
    add("--with-embeddings", action="store_true", help="as DeepSpec's reader wants it")
    add("--quantize", help='BITS:GROUP[,PART=BITS], such as "4:32,fc=8"')
    options = parser.parse_args(arguments)
    try:
        recipe = Recipe.parse(options.quantize) if options.quantize else None
        size = export(options.target, options.drafter, options.out, recipe, options.with_embeddings)
    except (CheckpointError, DrafterError, OSError, ValueError) as error:
        return refuse(f"cannot export: {error}")
    say("result", command="export", drafter=str(options.out), bytes=size)
    return 0


if __name__ == "__main__":
    sys.exit(main())
