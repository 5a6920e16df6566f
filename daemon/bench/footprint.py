"""What the daemon takes while it has nothing to do: time to start, memory, processor time.

Owns the daemon that it starts, with a real engine. Figures are of the daemon's process alone:
the engine's memory is the model's. Runs on the benchmark's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil

from daemon.bench.daemon_process import daemon
from daemon.bench.http_load import HttpTarget, connections, run_load
from daemon.bench.report import Machine, this_machine

LIVE_LIMIT_SECONDS = 1.0
RESIDENT_LIMIT_BYTES = 150_000_000
PROCESSOR_LIMIT_PERCENT = 0.5
_SETTLE_SECONDS = 2.0


class FootprintResult(msgspec.Struct, frozen=True, kw_only=True):
    """`live_seconds` from the process's start to the first answer of /livez; `resident_bytes`
    after one request and a pause; `processor_percent` of one core over the idle time."""

    machine: Machine
    live_seconds: float
    resident_bytes: int
    processor_percent: float
    idle_seconds: float
    engine_resident_bytes: int

    @property
    def rows(self) -> list[tuple[str, str, str, bool | None]]:
        """Name, value, limit, whether it is kept."""
        return [
            (
                "start to /livez",
                f"{self.live_seconds:.2f} s",
                f"{LIVE_LIMIT_SECONDS:.0f} s",
                self.live_seconds <= LIVE_LIMIT_SECONDS,
            ),
            (
                "resident, idle, model served",
                f"{self.resident_bytes / 1e6:.0f} MB",
                f"{RESIDENT_LIMIT_BYTES / 1e6:.0f} MB",
                self.resident_bytes < RESIDENT_LIMIT_BYTES,
            ),
            (
                f"processor over {self.idle_seconds:.0f} idle s",
                f"{self.processor_percent:.2f} %",
                f"{PROCESSOR_LIMIT_PERCENT} %",
                self.processor_percent < PROCESSOR_LIMIT_PERCENT,
            ),
            ("its engine, resident", f"{self.engine_resident_bytes / 1e6:.0f} MB", "", None),
        ]


async def measure(
    checkpoint: Path,
    *,
    idle_seconds: float,
    command: list[str] | None = None,
    progress: Callable[[str], None],
) -> FootprintResult:
    """Start a daemon, let it answer once, and watch it doing nothing for `idle_seconds`."""
    machine = this_machine()
    progress("starting a daemon")
    async with daemon(checkpoint, command=command) as served, connections() as client:
        target = HttpTarget(url=served.url, model="bench", extra={"ignore_eos": True})
        await run_load(client, target, ["Hello"], concurrency=1, max_tokens=4)
        await asyncio.sleep(min(_SETTLE_SECONDS, idle_seconds))
        process = psutil.Process(served.pid)
        progress(f"watching it for {idle_seconds:g} s")
        before, started = _processor_seconds(process), asyncio.get_running_loop().time()
        await asyncio.sleep(idle_seconds)
        used = _processor_seconds(process) - before
        elapsed = asyncio.get_running_loop().time() - started
        return FootprintResult(
            machine=machine,
            live_seconds=served.live_seconds,
            resident_bytes=process.memory_info().rss,
            processor_percent=100.0 * used / elapsed,
            idle_seconds=elapsed,
            engine_resident_bytes=sum(child.memory_info().rss for child in process.children()),
        )


def _processor_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
