"""The BLAS that MLX multiplies with, each case in a fresh process, as an engine does it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from models import blas

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux needs OpenBLAS")

# Prints what load() said, a float32 product and whether the prepared library is mapped.
MULTIPLY = """
import json, pathlib, sys
from models import blas
said = blas.load(pathlib.Path(sys.argv[1]))
import mlx.core as mx
mx.set_default_device(mx.cpu)
a = mx.random.normal((64, 512), key=mx.random.key(1))
b = mx.random.normal((512, 64), key=mx.random.key(2))
product = (a @ b).tolist()
mapped = "libopenblas-" in open("/proc/self/maps").read()
print(json.dumps({"said": said, "product": product, "mapped": mapped}))
"""


def run(code: str, cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k != "SPARKLANE_BLAS"}
    return subprocess.run(
        [sys.executable, "-c", code, str(cache)],
        env={**kept, **environment},
        cwd=Path(blas.__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder of this module's own, with the library built."""
    folder = tmp_path_factory.mktemp("cache")
    assert blas.prepare(folder) is not None
    return folder


def test_the_library_is_built_once_and_leaves_nothing_else(prepared: Path) -> None:
    path = blas.prepare(prepared)
    assert path is not None
    built = path.stat()
    assert blas.prepare(prepared) == path
    assert path.stat().st_mtime_ns == built.st_mtime_ns
    assert path.stat().st_ino == built.st_ino
    assert list((prepared / "blas").iterdir()) == [path]


def test_mlx_multiplies_with_openblas(prepared: Path) -> None:
    fast = json.loads(run(MULTIPLY, prepared).stdout)
    plain = json.loads(run(MULTIPLY, prepared, SPARKLANE_BLAS="reference").stdout)
    assert fast["said"].startswith("OpenBLAS 0.3.")
    assert fast["said"].endswith("1 thread")
    assert fast["mapped"] and not plain["mapped"]
    assert plain["said"].startswith("reference")
    # OpenBLAS sums in another order: the same numbers, but not the same bits.
    assert fast["product"] != plain["product"]
    for left, right in zip(fast["product"], plain["product"], strict=True):
        assert left == pytest.approx(right, abs=1e-3)


def test_a_number_of_threads_that_is_set_is_kept(prepared: Path) -> None:
    done = run(MULTIPLY, prepared, OPENBLAS_NUM_THREADS="2")
    # OpenBLAS starts no more threads than there are cores.
    expected = "2 threads" if len(os.sched_getaffinity(0)) > 1 else "1 thread"
    assert json.loads(done.stdout)["said"].endswith(expected)


def test_a_path_is_used_as_it_is(prepared: Path, tmp_path: Path) -> None:
    path = blas.prepare(prepared)
    done = json.loads(run(MULTIPLY, tmp_path, SPARKLANE_BLAS=str(path)).stdout)
    assert done["said"].startswith("OpenBLAS") and done["mapped"]
    assert list(tmp_path.iterdir()) == []


def test_loading_after_mlx_is_refused(prepared: Path) -> None:
    code = "import mlx.core; from models import blas; blas.load()"
    done = run(code, prepared)
    assert done.returncode == 1
    assert "RuntimeError: models.blas.load() must run before mlx.core" in done.stderr


@pytest.mark.parametrize(
    ("path", "reason"),
    [("/missing/libblas.so", "cannot open shared object file"), (__file__, "invalid ELF header")],
)
def test_a_library_that_cannot_be_loaded_leaves_the_reference(
    prepared: Path, path: str, reason: str
) -> None:
    done = json.loads(run(MULTIPLY, prepared, SPARKLANE_BLAS=path).stdout)
    assert done["said"].startswith("reference BLAS (") and reason in done["said"]


def test_a_cache_that_cannot_be_written_leaves_the_reference(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    done = json.loads(run(MULTIPLY, blocked).stdout)
    assert done["said"].startswith("reference BLAS (cannot write")
    assert "Not a directory" in done["said"]


def test_a_build_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "_patchelf", lambda: "/bin/false")
    with pytest.raises(blas.BlasError, match="patchelf failed: exit code 1"):
        blas.prepare(tmp_path)
    assert list((tmp_path / "blas").iterdir()) == []


def test_a_library_that_multiplies_wrongly_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "libbroken.so"
    broken.write_bytes(b"\x7fELF and then nothing")
    with pytest.raises(blas.BlasError, match="does not multiply"):
        blas._verify(broken)
