"""MLX on the CPU, so that float32 means the same everywhere."""

import mlx.core as mx
import pytest


@pytest.fixture(autouse=True, scope="session")
def _on_the_cpu() -> None:
    mx.set_default_device(mx.cpu)
