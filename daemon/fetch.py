"""Fetches a checkpoint in a process of its own: `python -m daemon.fetch NAME CACHE`.

The daemon must be able to stop while a download runs, and a thread cannot be stopped. The
child prints `Progress` records as JSON lines; it ends with the exit code of what went wrong,
which it tells in the last line of stderr. `fetched` is the daemon's side, on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from pathlib import Path

import msgspec

from daemon.catalog import Progress, pull, resolve
from daemon.child_process import python_command, python_environment
from daemon.exit_codes import ExitCode, SparklaneError

log = logging.getLogger("sparklane.fetch")


async def fetched(name: str, cache: Path) -> Path:
    """The folder of a checkpoint, fetched if it is not there.

    Raises:
        SparklaneError: it is not there and cannot be fetched.
    """
    if (folder := resolve(name, cache)) is not None:
        return folder
    log.info("fetching %s", name)
    child = await asyncio.create_subprocess_exec(
        *python_command("-m", "daemon.fetch", name, str(cache)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=python_environment(),
        start_new_session=True,
    )
    assert child.stdout is not None and child.stderr is not None
    complaints = asyncio.create_task(child.stderr.read())
    try:
        stage = None
        async for line in child.stdout:
            progress = msgspec.json.decode(line, type=Progress)
            if progress.stage is not stage:
                stage = progress.stage
                log.info("fetching %s: %s", name, stage)
        code = await child.wait()
        lines = (await complaints).decode(errors="replace").strip().splitlines()
    except BaseException:
        # With the children that it has, such as pip.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        await child.wait()
        complaints.cancel()
        raise
    if code != ExitCode.OK:
        known = code in set(ExitCode)
        reason = lines[-1] if lines else f"fetching {name} ended with code {code}"
        raise SparklaneError(reason, code if known else ExitCode.CHECKPOINT)
    folder = resolve(name, cache)
    if folder is None:
        raise SparklaneError(f"{name} was fetched, but is not there", ExitCode.CHECKPOINT)
    return folder


def main() -> int:
    """Fetch what the command line names."""
    _, name, cache = sys.argv

    def report(progress: Progress) -> None:
        sys.stdout.write(msgspec.json.encode(progress).decode() + "\n")
        sys.stdout.flush()

    try:
        pull(name, Path(cache), report)
    except SparklaneError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
