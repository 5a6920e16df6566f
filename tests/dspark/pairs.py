"""The tiny reference pairs: a trained target and its drafter, for two families."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from models.dspark.configuration import TargetShape
from models.dspark.drafter import Drafter
from models.dspark.loader import load_drafter
from models.target import Target

FIXTURES = Path(__file__).parent.parent / "fixtures" / "dspark"
FAMILIES = ("gemma4", "qwen3")
THRESHOLDS = ("0", "0.5", "0.8")


@functools.cache
def target(family: str) -> nn.Module:
    """One float32 target for the whole run; tests must leave it untapped."""
    model: nn.Module = Target.load(FIXTURES / family / "target", "float32").model
    return model


def shape(family: str) -> TargetShape:
    return TargetShape.read(FIXTURES / family / "target")


def make_drafter(family: str, **options: Any) -> Drafter:
    return load_drafter(FIXTURES / family / "drafter", target(family), shape(family), **options)


@functools.cache
def trace(family: str, threshold: str = "0") -> dict[str, Any]:
    path = FIXTURES / family / f"trace_float32_thr{threshold}.json"
    parsed: dict[str, Any] = json.loads(path.read_text())
    return parsed


def goldens(family: str) -> dict[str, mx.array]:
    loaded = mx.load(str(FIXTURES / family / "goldens_fp32.safetensors"))
    assert isinstance(loaded, dict)
    return loaded
