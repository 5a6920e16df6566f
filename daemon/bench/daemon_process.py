"""A daemon of the benchmark's own: started in a process, waited for, ended.

Owns the child, its configuration file and its cache folder, all in one temporary folder: the
user's own daemon may be running, and two daemons cannot share a cache. The prepared BLAS of
the real cache is used by its path. A daemon that does not come up raises `SparklaneError` with
the end of what it said.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import aiohttp
import msgspec

from daemon.catalog import DEFAULT_MODEL, resolve
from daemon.child_process import python_command, python_environment
from daemon.exit_codes import ExitCode, SparklaneError
from daemon.locations import default_cache_folder
from models import blas

START_SECONDS = 300.0
STOP_SECONDS = 20.0
_POLL_SECONDS = 0.01
_WORDS = 2000


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """A child server that answers. `live_seconds` is from its start to its first answer."""

    url: str
    pid: int
    live_seconds: float


def blas_variables(cache: Path | None = None) -> dict[str, str]:
    """What a child's environment needs to multiply as the engine does by default."""
    threads = {"OPENBLAS_NUM_THREADS": os.environ.get("OPENBLAS_NUM_THREADS", "1")}
    if os.environ.get("SPARKLANE_BLAS", "auto") != "auto":
        return threads
    with contextlib.suppress(blas.BlasError):
        if (library := blas.prepare(cache or default_cache_folder())) is not None:
            return {**threads, "SPARKLANE_BLAS": str(library)}
    return threads


def checkpoint_of(model: str | None) -> Path:
    """The folder of a model in the cache, or of the default one.

    Raises:
        SparklaneError: it is not there.
    """
    name = model or DEFAULT_MODEL
    folder = resolve(name, default_cache_folder())
    if folder is None:
        raise SparklaneError(
            f"{name} is not in the cache; fetch it with: sparklane pull {name}",
            ExitCode.CONFIGURATION,
        )
    return folder


def free_port() -> int:
    """A TCP port of this machine that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def configuration_text(
    checkpoint: Path, port: int, *, name: str = "bench", rows: int = 8, queue: int = 1024
) -> str:
    """A configuration file that serves one checkpoint on this machine alone."""
    return (
        f'[server]\nhost = "127.0.0.1"\nport = {port}\n'
        f"[queue]\nrequests = {queue}\nprompt_tokens = 10_000_000\n"
        f"[[models]]\nname = {json.dumps(name)}\ncheckpoint = {json.dumps(str(checkpoint))}\n"
        f"maximum_rows = {rows}\n"
    )


@contextlib.asynccontextmanager
async def daemon(
    checkpoint: Path,
    *,
    rows: int = 8,
    command: Sequence[str] | None = None,
    wait_for: str = "/readyz",
) -> AsyncIterator[Served]:
    """Serve a checkpoint as "bench" until the block ends. `command` gets `--config FILE`."""
    with tempfile.TemporaryDirectory(prefix="sparklane-bench-") as folder:
        port = free_port()
        configuration = Path(folder) / "sparklane.toml"
        configuration.write_text(configuration_text(checkpoint, port, rows=rows))
        start = list(command or python_command("-m", "daemon", "serve"))
        environment = python_environment(SPARKLANE_CACHE=folder, **blas_variables())
        async with child_server(
            [*start, "--config", str(configuration)],
            environment,
            f"http://127.0.0.1:{port}",
            live="/livez",
            ready=wait_for,
        ) as served:
            yield served


@contextlib.asynccontextmanager
async def child_server(
    command: Sequence[str], environment: Mapping[str, str], url: str, *, live: str, ready: str
) -> AsyncIterator[Served]:
    """Run a server in a child until the block ends; entered when both paths answer with 200."""
    with tempfile.TemporaryFile() as said:
        started = time.perf_counter()
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            env=dict(environment),
            start_new_session=True,
        )
        try:
            try:
                async with aiohttp.ClientSession() as client, asyncio.timeout(START_SECONDS):
                    live_seconds = await _answers(client, url + live, process, started)
                    await _answers(client, url + ready, process, started)
            except (TimeoutError, ChildProcessError) as error:
                said.seek(0)
                words = said.read()[-_WORDS:].decode(errors="replace").strip()
                raise SparklaneError(
                    f"{' '.join(command)}: it did not come up ({error}); it said:\n{words}",
                    ExitCode.ENGINE,
                ) from error
            yield Served(url=url, pid=process.pid, live_seconds=live_seconds)
        finally:
            await _end(process)


async def _answers(
    client: aiohttp.ClientSession, url: str, process: asyncio.subprocess.Process, started: float
) -> float:
    """Seconds from `started` until a GET of `url` gave 200."""
    while True:
        if process.returncode is not None:
            raise ChildProcessError(f"ended with code {process.returncode}")
        with contextlib.suppress(aiohttp.ClientError, OSError):
            async with client.get(url) as answer:
                if answer.status == 200:
                    return time.perf_counter() - started
        await asyncio.sleep(_POLL_SECONDS)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), STOP_SECONDS)
    # Its own session: whatever it started goes with it.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
