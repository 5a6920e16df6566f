"""The device that MLX computes on, and what its allocator says.

Owns nothing; any thread of the engine may ask, nothing here evaluates.
"""

from __future__ import annotations

import enum

import mlx.core as mx


class DeviceKind(enum.StrEnum):
    """What MLX computes on."""

    CPU = "cpu"
    CUDA = "cuda"
    METAL = "metal"


def device_kind() -> DeviceKind:
    """The kind of MLX's default device."""
    if mx.default_device().type == mx.DeviceType.cpu:
        return DeviceKind.CPU
    return DeviceKind.METAL if mx.metal.is_available() else DeviceKind.CUDA


def device_name() -> str:
    """The vendor's name of the default device, such as "Apple M4 Max"."""
    return str(mx.device_info().get("device_name", device_kind().value))


def memory_counters() -> tuple[int, int, int]:
    """Bytes in use, bytes cached for reuse, and the highest use so far."""
    return mx.get_active_memory(), mx.get_cache_memory(), mx.get_peak_memory()
