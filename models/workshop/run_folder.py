"""The folder of one training run: configuration, log, checkpoint and plot.

Used by one process at a time. A checkpoint is a folder that is written beside the old one and
renamed, so that an interrupted write leaves the old one whole. `RunError` says what does not
agree with what the folder already holds.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import platform
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

CHECKPOINT = "checkpoint"


class RunError(Exception):
    """Steps disagree, or a run folder is not usable; the message names what and the remedy."""


class RunFolder:
    """Files of a run, by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)

    def remember(self, configuration: Mapping[str, Any], must_agree: tuple[str, ...]) -> None:
        """Store the run's configuration; a resumed run must agree in the fields named, but for
        those that were not stored yet when it began."""
        file = self.path / "configuration.json"
        if file.exists():
            stored = json.loads(file.read_text())
            for key in must_agree:
                if key in stored and stored[key] != configuration.get(key):
                    raise RunError(
                        f"{file}: this run has {key} {stored.get(key)!r}, now it is "
                        f"{configuration.get(key)!r}: use another run folder"
                    )
        write_json(file, configuration)

    def log(self, record: Mapping[str, Any]) -> None:
        """Append a line to `log.jsonl`."""
        with (self.path / "log.jsonl").open("a") as file:
            file.write(json.dumps({"time": round(time.time(), 3), **record}) + "\n")

    def records(self) -> list[dict[str, Any]]:
        """All whole lines of the log."""
        file = self.path / "log.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def save(self, arrays: Mapping[str, mx.array], facts: Mapping[str, Any]) -> None:
        """Replace the checkpoint."""
        fresh, old = self.path / f".{CHECKPOINT}.new", self.path / f".{CHECKPOINT}.old"
        for leftover in (fresh, old):
            shutil.rmtree(leftover, ignore_errors=True)
        fresh.mkdir()
        mx.save_safetensors(str(fresh / "state.safetensors"), dict(arrays))
        (fresh / "facts.json").write_text(json.dumps(facts))
        current = self.path / CHECKPOINT
        if current.exists():
            current.rename(old)
        fresh.rename(current)
        shutil.rmtree(old, ignore_errors=True)

    def load(self) -> tuple[dict[str, mx.array], dict[str, Any]] | None:
        """The checkpoint, or None where there is none."""
        folder = self.path / CHECKPOINT
        if not folder.exists():
            # A write was interrupted between its two renames.
            folder = self.path / f".{CHECKPOINT}.old"
        if not folder.exists():
            return None
        arrays = mx.load(str(folder / "state.safetensors"))
        assert isinstance(arrays, dict)
        return arrays, json.loads((folder / "facts.json").read_text())

    def plot(self) -> str | None:
        """Draw loss and acceptance as `training.png`; returns why not, if not."""
        try:
            import matplotlib  # type: ignore[import-not-found, unused-ignore]

            matplotlib.use("Agg")
            from matplotlib import pyplot  # type: ignore[import-not-found, unused-ignore]
        except ImportError:
            return (
                "matplotlib is not installed, so there is no plot; log.jsonl has the figures. "
                "Remedy: pip install 'sparklane[plots]'"
            )
        records = [record for record in self.records() if "loss" in record]
        if not records:
            return "the log has no losses yet"
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5))
        steps = [record["step"] for record in records]
        for key in ("loss", "distance", "cross_entropy", "confidence"):
            left.plot(steps, [record[key] for record in records], label=key)
        left.set(xlabel="step", title="loss", yscale="log")
        left.legend()
        for key in ("tokens_per_round", "held_out_tokens_per_round"):
            known = [record for record in records if key in record]
            right.plot([r["step"] for r in known], [r[key] for r in known], label=key)
        right.set(xlabel="step", title="expected tokens a round (temperature 1, rejection)")
        right.legend()
        figure.tight_layout()
        figure.savefig(self.path / "training.png", dpi=110)
        pyplot.close(figure)
        return None


def write_json(path: Path, content: Any) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    temporary.replace(path)


def fingerprint(folder: Path) -> dict[str, str]:
    """What a target is known by: hashes of its configuration and weights, and its tokenizer.

    Of large weight files only the size and both ends are read.
    """
    weights = hashlib.sha256((folder / "config.json").read_bytes())
    edge = 1 << 22
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        weights.update(str(size).encode())
        with file.open("rb") as stream:
            weights.update(stream.read(edge))
            stream.seek(max(0, size - edge))
            weights.update(stream.read(edge))
    tokenizer = folder / "tokenizer.json"
    text = tokenizer.read_bytes() if tokenizer.exists() else b""
    return {"target": weights.hexdigest(), "tokenizer": hashlib.sha256(text).hexdigest()}


def versions() -> dict[str, str]:
    """Of what the numbers depend on."""
    return {
        "python": platform.python_version(),
        "mlx": str(getattr(mx, "__version__", "unknown")),
        "mlx_lm": str(getattr(importlib.import_module("mlx_lm"), "__version__", "unknown")),
        "device": str(mx.default_device()),
    }
