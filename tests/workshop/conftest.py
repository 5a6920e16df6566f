"""MLX on the CPU and uncompiled, so that float32 means the same everywhere and starts at once."""

from collections.abc import Iterator

import mlx.core as mx
import pytest


@pytest.fixture(autouse=True, scope="package")
def _on_the_cpu() -> Iterator[None]:
    device = mx.default_device()
    mx.set_default_device(mx.cpu)
    mx.disable_compile()
    yield
    mx.enable_compile()
    mx.set_default_device(device)
