"""What all tests share: the cache folder, and the default model in it."""

from __future__ import annotations

import os

# Before anything can load a BLAS: with more threads than free cores a step takes seconds.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from pathlib import Path

import pytest

from daemon.catalog import DEFAULT_MODEL, pull
from models.cache_folder import default_cache_folder


@pytest.fixture(scope="session")
def cache() -> Path:
    """The real cache folder: $SPARKLANE_CACHE, or the platform's."""
    return default_cache_folder()


@pytest.fixture(scope="session")
def smollm2(cache: Path) -> Path:
    """The folder of the default model, fetched and converted if it is not there."""
    return pull(DEFAULT_MODEL, cache, lambda progress: None)
