"""A real daemon in a process of its own, on a fake engine, for tests.

    python -m tests.served_daemon CACHE CONFIGURATION [fake engine's options]

It prints its URL once it listens, and ends as `sparklane serve` does: with the exit code, and
an error in one line of stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import uvloop

from daemon.child_process import python_command, python_environment
from daemon.configuration import load
from daemon.exit_codes import SparklaneError
from daemon.server import serve
from tests.serving import FAKE_ENGINE, PATIENCE


def main() -> int:
    """Serve until told to stop."""
    cache, path = Path(sys.argv[1]), Path(sys.argv[2])
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)

    def listening(url: str) -> None:
        print(url, flush=True)

    try:
        return uvloop.run(
            serve(
                load(path),
                lambda: load(path),
                cache=cache,
                engine_command=[*FAKE_ENGINE, *sys.argv[3:]],
                listening=listening,
            )
        )
    except SparklaneError as error:
        print(error, file=sys.stderr)
        return error.exit_code


@dataclass(frozen=True)
class Served:
    """A running daemon and a client of it."""

    process: asyncio.subprocess.Process
    url: str
    client: aiohttp.ClientSession
    log: list[str]
    folder: Path

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def logged(self, words: str) -> None:
        """Wait until the daemon has logged these words."""
        while not any(words in line for line in self.log):
            self.log.append(await self._line())

    async def status(self, path: str, **headers: str) -> int:
        async with self.client.get(self.url + path, headers=headers) as response:
            return response.status

    async def exit_code(self) -> int:
        """Wait for the daemon to end."""
        assert self.process.stderr is not None
        rest = (await self.process.stderr.read()).decode().splitlines()
        self.log.extend(rest)
        return await self.process.wait()

    async def _line(self) -> str:
        assert self.process.stderr is not None
        line = await self.process.stderr.readline()
        assert line, "the daemon has ended: " + "\n".join(self.log)
        return line.decode()


def write_configuration(folder: Path, text: str) -> Path:
    """The configuration file in a folder."""
    path = folder / "sparklane.toml"
    path.write_text(text)
    return path


@contextlib.asynccontextmanager
async def served_daemon(
    folder: Path,
    configuration: str,
    *options: str,
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[Served]:
    """A daemon with its cache and its configuration in `folder`; killed at the end."""
    path = write_configuration(folder, configuration)
    process = await asyncio.create_subprocess_exec(
        *python_command("-m", "tests.served_daemon", str(folder / "cache"), str(path), *options),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=python_environment(**(environment or {})),
    )
    try:
        async with asyncio.timeout(PATIENCE), aiohttp.ClientSession() as client:
            assert process.stdout is not None
            url = (await process.stdout.readline()).decode().strip()
            yield Served(process, url, client, [], folder)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def ended_daemon(folder: Path, configuration: str) -> tuple[int, list[str]]:
    """The exit code and the last words of a daemon that ends by itself."""
    async with served_daemon(folder, configuration) as served:
        code = await served.exit_code()
        return code, served.log


if __name__ == "__main__":
    sys.exit(main())
