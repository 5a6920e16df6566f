"""A peer in a child process: started, asked, ended.

Owns the child and both ends of its pipes; runs on the benchmark's event loop. A peer that is not
installed, or that cannot use the model, raises `PeerUnusable`, with which a comparison can go on;
one that breaks while it works raises `SparklaneError`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Sequence
from typing import IO

import msgspec

from daemon.bench.daemon_process import blas_variables
from daemon.child_process import python_command, python_environment
from daemon.exit_codes import ExitCode, SparklaneError
from models.peers.messages import PeerAnswer, PeerAsk, PeerReady

_LONGEST_LINE = 1 << 24


class PeerUnusable(Exception):
    """Why a peer cannot take part, in one line."""


class PeerProcess:
    """A peer that has loaded. Made by `peer`."""

    def __init__(
        self, process: asyncio.subprocess.Process, ready: PeerReady, said: IO[bytes]
    ) -> None:
        self.ready = ready
        self._process = process
        self._said = said

    async def ask(self, ask: PeerAsk) -> PeerAnswer:
        """What it answers.

        Raises:
            SparklaneError: it went away instead.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(ask) + b"\n")
        line = await self._process.stdout.readline()
        if not line:
            await self._process.wait()
            raise SparklaneError(
                f"{self.ready.name} went away: {last_line(self._said)}", ExitCode.ENGINE
            )
        return msgspec.json.decode(line, type=PeerAnswer)


@contextlib.asynccontextmanager
async def peer(arguments: Sequence[str]) -> AsyncIterator[PeerProcess]:
    """Run `models.peers.answer` with `arguments` until the block ends.

    Raises:
        PeerUnusable: it cannot take part.
    """
    with tempfile.TemporaryFile() as said:
        process = await asyncio.create_subprocess_exec(
            *python_command("-m", "models.peers.answer", *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=said,
            # It would ask the hub about a folder on the disk.
            env=python_environment(HF_HUB_OFFLINE="1", **blas_variables()),
            limit=_LONGEST_LINE,
        )
        try:
            assert process.stdout is not None
            line = await process.stdout.readline()
            if not line:
                code = await process.wait()
                raise PeerUnusable(
                    last_line(said)
                    if code == os.EX_UNAVAILABLE
                    else f"{arguments[0]} ended with code {code}: {last_line(said)}"
                )
            yield PeerProcess(process, msgspec.json.decode(line, type=PeerReady), said)
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


def last_line(said: IO[bytes]) -> str:
    """The last thing that a process said."""
    said.seek(0)
    lines = said.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
