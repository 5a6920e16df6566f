"""A float32 copy of a checkpoint: `python -m models.float32_copy SOURCE OUT [--endless]`.

For comparing programs on equal terms: whoever loads the copy computes what we compute on the
CPU, where quantized weights are dequantized when they are loaded. With `--endless` the copy
names no end-of-text token, so that a program without a way to ask for answers of a set length
gives them all the same. Runs in a process of its own, because it needs mlx. Ends with 65 for a
checkpoint that cannot be loaded and 74 when the copy cannot be written.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from models.checkpoint import CheckpointError

_TEXTS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_OTHERS = ("chat_template.jinja", "chat_template.json", "generation_config.json")
_QUANTIZATION = ("quantization", "quantization_config")
_ENDS = ("eos_token", "eos_token_id")


def copy(source: Path, out: Path, *, endless: bool) -> None:
    """Write the copy into the folder `out`, which is created.

    Raises:
        CheckpointError: `source` cannot be loaded.
        OSError: `out` cannot be written.
    """
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from models.target import Target

    target = Target.load(source, "float32")
    out.mkdir(parents=True, exist_ok=True)
    weights = dict(tree_flatten(target.model.parameters()))
    try:
        mx.save_safetensors(str(out / "model.safetensors"), weights, metadata={"format": "mlx"})
    except RuntimeError as error:  # mlx says so when the disk is full
        raise OSError(None, str(error), str(out / "model.safetensors")) from error
    configuration = _without(json.loads((source / "config.json").read_text("utf-8")), endless)
    configuration["torch_dtype"] = "float32"
    for name in _QUANTIZATION:
        configuration.pop(name, None)
    _write(out / "config.json", configuration)
    for name in (*_TEXTS, *_OTHERS):
        path = source / name
        if not path.exists():
            continue
        if name.endswith(".json") and name != "tokenizer.json" and endless:
            _write(out / name, _without(json.loads(path.read_text("utf-8")), endless))
        else:
            shutil.copyfile(path, out / name)


def _without(settings: dict[str, Any], endless: bool) -> dict[str, Any]:
    """The settings, without their end-of-text tokens if the copy is to have none."""
    if not endless:
        return settings
    return {name: value for name, value in settings.items() if name not in _ENDS}


def _write(path: Path, settings: dict[str, Any]) -> None:
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", "utf-8")


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="models.float32_copy", description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--endless", action="store_true", help="name no end-of-text token")
    arguments = parser.parse_args()
    try:
        copy(arguments.source, arguments.out, endless=arguments.endless)
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return os.EX_DATAERR
    except OSError as error:
        print(f"{error.filename or arguments.out}: {error.strerror}", file=sys.stderr)
        return os.EX_IOERR
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(main())
