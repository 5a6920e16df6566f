"""One engine process and the socket to it: started, spoken to, killed.

Owns the child process, its connection and the relay of what it prints; runs on the daemon's
event loop. The socket lies in the cache's run folder for as long as the engine takes to
connect, readable by the user alone. An engine that cannot be started or does not connect
raises `EngineLost`; one that goes away ends `messages`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import re
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from daemon.child_process import python_command, python_environment
from scheduler.frames import AsyncFrameReader, encode
from scheduler.messages import (
    Fault,
    FromEngine,
    Heartbeat,
    Loading,
    Ready,
    Rejected,
    Shutdown,
    Step,
    ToEngine,
)

log = logging.getLogger("sparklane.engine")

Message = Loading | Ready | Step | Heartbeat | Rejected | Fault

# An address of a Unix socket may have 104 bytes on macOS and 108 on Linux, one of them a zero.
_LONGEST_ADDRESS = 103
# Where TMPDIR itself is too long for one.
_SHORT_FOLDER = "/tmp"
_LONGEST_LINE = 4096
_READ_BYTES = 65536
_numbers = itertools.count(1)

# What computing needs. Whatever else is set, secrets among it, is none of the engine's business.
_PASSED_ON = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|TMPDIR|TZ|LANG|LC_\w+|VIRTUAL_ENV|CC|CXX|CPATH|LD_LIBRARY_PATH"
    r"|(DYLD|PYTHON|XDG|OMP|OPENBLAS|MKL|MLX|MTL|METAL|CUDA|CUDNN|NVIDIA|NCCL|SPARKLANE)\w*"
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)


class EngineLost(Exception):
    """An engine could not be started, or is no longer there."""


def engine_command() -> list[str]:
    """How the real engine is started; the socket is appended."""
    return python_command("-m", "scheduler.engine")


def engine_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that an engine gets: those that computing needs, and no secrets."""
    return {
        name: value
        for name, value in environment.items()
        if _PASSED_ON.fullmatch(name) and not _SECRET.search(name)
    }


class EngineLink:
    """A connected engine process. Made by `started`; ended by `close`."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        stream: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        relay: asyncio.Task[None],
    ) -> None:
        self._process = process
        self._reader = AsyncFrameReader[Message](stream, FromEngine)
        self._writer = writer
        self._relay = relay

    @classmethod
    async def started(
        cls, name: str, command: Sequence[str], run_folder: Path, connect_seconds: float
    ) -> EngineLink:
        """Start `command --socket PATH` and wait until it has connected.

        Raises:
            EngineLost: it cannot be started, ends at once, or does not connect in time.
        """
        with _listening(run_folder) as (listener, address):
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    "--socket",
                    address,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.STDOUT,
                    env=engine_environment(python_environment()),
                    # The terminal's signals are for the daemon alone to answer.
                    start_new_session=True,
                )
            except OSError as error:
                raise EngineLost(f"{command[0]} cannot be started: {error}") from error
            assert process.stdout is not None
            relay = asyncio.create_task(_relay(name, process.stdout))
            try:
                connection = await _accepted(listener, process, connect_seconds)
                stream, writer = await asyncio.open_unix_connection(sock=connection)
            except BaseException:
                await _end(process, relay)
                raise
        return cls(process, stream, writer, relay)

    @property
    def pid(self) -> int:
        """The engine's process id."""
        return self._process.pid

    def send(self, message: ToEngine) -> None:
        """Hand a message over. An engine that has gone is noticed by `messages`, not here."""
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.write(encode(message))

    async def messages(self) -> AsyncIterator[Message]:
        """What the engine says, until it goes away.

        Raises:
            EngineLost: it said something that this daemon does not understand.
        """
        while True:
            try:
                message = await self._reader.read()
            except (OSError, EOFError):
                return
            except (ValueError, msgspec.MsgspecError) as error:
                raise EngineLost(f"it sent a message that makes no sense: {error}") from error
            if message is None:
                return
            yield message

    async def shut_down(self, seconds: float) -> None:
        """Ask it to stop, and wait so long for it to do so."""
        self.send(Shutdown())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), seconds)

    async def close(self) -> int:
        """End it, if it is still there, and return its exit code (negative: its signal)."""
        self._writer.close()
        return await _end(self._process, self._relay)


def _is_address(path: Path) -> bool:
    return len(os.fsencode(path)) <= _LONGEST_ADDRESS


@contextlib.contextmanager
def _listening(run_folder: Path) -> Iterator[tuple[socket.socket, str]]:
    """A Unix socket for one engine, and its address."""
    name = f"engine-{os.getpid()}-{next(_numbers)}.sock"
    with contextlib.ExitStack() as stack:
        folder = str(run_folder)
        if not _is_address(run_folder / name):
            made = Path(tempfile.gettempdir(), "sparklane-12345678", name)
            parent = None if _is_address(made) else _SHORT_FOLDER
            folder = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="sparklane-", dir=parent)
            )
        address = os.path.join(folder, name)
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.setblocking(False)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(address)
        listener.bind(address)
        stack.callback(os.unlink, address)
        # Nobody can connect before listen(), so there is no moment at which others could.
        os.chmod(address, 0o600)
        listener.listen(1)
        yield listener, address


async def _accepted(
    listener: socket.socket, process: asyncio.subprocess.Process, seconds: float
) -> socket.socket:
    accepting = asyncio.create_task(asyncio.get_running_loop().sock_accept(listener))
    ending = asyncio.create_task(process.wait())
    try:
        await asyncio.wait(
            (accepting, ending), timeout=seconds, return_when=asyncio.FIRST_COMPLETED
        )
        if accepting.done():
            return accepting.result()[0]
        if ending.done():
            raise EngineLost(f"it ended with code {ending.result()} before it connected")
        raise EngineLost(f"it did not connect within {seconds:.0f} s")
    finally:
        accepting.cancel()
        ending.cancel()


async def _end(process: asyncio.subprocess.Process, relay: asyncio.Task[None]) -> int:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    code = await process.wait()
    # A child of the engine could keep the pipe open; what the engine said is there already.
    await asyncio.wait((relay,), timeout=1.0)
    relay.cancel()
    return code


async def _relay(name: str, output: asyncio.StreamReader) -> None:
    """Log what an engine prints, line by line, at the level that a line begins with."""
    pending = b""
    while chunk := await output.read(_READ_BYTES):
        *lines, pending = (pending + chunk).split(b"\n")
        if len(pending) > _LONGEST_LINE:
            lines, pending = [*lines, pending], b""
        for line in lines:
            _log_line(name, line)
    if pending:
        _log_line(name, pending)


def _log_line(name: str, line: bytes) -> None:
    text = line[:_LONGEST_LINE].decode(errors="replace").rstrip()
    if not text:
        return
    word, _, rest = text.partition(" ")
    level = logging.getLevelNamesMapping().get(word)
    log.log(level or logging.INFO, "%s: %s", name, rest if level else text)
