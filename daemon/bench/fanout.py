"""Many streams at once through the real daemon, fed by a fake engine.

Owns the daemon, its fake engine and all the clients, which run on the benchmark's event loop.
The fake engine sends every stream a token at a steady pace, so a stream that waits much longer
than that was kept waiting by the daemon, or by the clients that share this machine with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil

from daemon.bench.daemon_process import daemon
from daemon.bench.http_load import HttpTarget, connections, run_load
from daemon.bench.prompts import plain_words
from daemon.bench.report import Machine, this_machine
from daemon.bench.timings import LoadSummary, StreamTiming, summarise
from daemon.child_process import python_command

LONGEST_STALL_SECONDS = 1.0
_MEMORY_POLL_SECONDS = 0.1
_PROMPT_WORDS = 20


class FanoutResult(msgspec.Struct, frozen=True, kw_only=True):
    """`longest_stall_seconds` is the longest pause inside any stream, `first_token_seconds` of
    the load tells the wait before. Memory in bytes of the daemon's process; what a stream takes
    is the growth from idle to its peak, over the streams."""

    machine: Machine
    streams: int
    stream_tokens_per_second: float
    lost: int
    longest_stall_seconds: float
    stall_limit_seconds: float
    idle_bytes: int
    peak_bytes: int
    bytes_per_stream: int
    load: LoadSummary

    @property
    def reached(self) -> bool:
        """None lost, and none kept waiting for too long."""
        return self.lost == 0 and self.longest_stall_seconds <= self.stall_limit_seconds


async def measure(
    checkpoint: Path,
    *,
    streams: int,
    max_tokens: int,
    tokens_per_second: float,
    progress: Callable[[str], None],
) -> FanoutResult:
    """Open `streams` streams together, each of `max_tokens` tokens at `tokens_per_second`.

    Of the checkpoint only the tokenizer and the chat template are used.
    """
    machine = this_machine()
    command = python_command(
        "-m", "daemon.bench.fake_daemon", "--tokens-per-second", str(tokens_per_second)
    )
    progress("starting a daemon with a fake engine")
    async with (
        daemon(checkpoint, rows=streams, command=command) as served,
        connections() as client,
    ):
        target = HttpTarget(url=served.url, model="bench", extra={"ignore_eos": True})
        # What the first request makes the daemon load is not the streams' memory.
        await run_load(client, target, ["Hello"], concurrency=1, max_tokens=1)
        process = psutil.Process(served.pid)
        idle_bytes = process.memory_info().rss
        progress(f"{streams} streams of {max_tokens} tokens")
        peak = asyncio.create_task(_peak_bytes(process))
        prompts = [plain_words(_PROMPT_WORDS, number) for number in range(streams)]
        timings = await run_load(
            client, target, prompts, concurrency=streams, max_tokens=max_tokens
        )
        peak.cancel()
        peak_bytes = max(idle_bytes, await peak)
    return FanoutResult(
        machine=machine,
        streams=streams,
        stream_tokens_per_second=tokens_per_second,
        lost=sum(_is_lost(timing, max_tokens) for timing in timings),
        longest_stall_seconds=max(max(t.gaps, default=math.inf) for t in timings),
        stall_limit_seconds=LONGEST_STALL_SECONDS,
        idle_bytes=idle_bytes,
        peak_bytes=peak_bytes,
        bytes_per_stream=(peak_bytes - idle_bytes) // streams,
        load=summarise(timings),
    )


def _is_lost(timing: StreamTiming, max_tokens: int) -> bool:
    return timing.error is not None or timing.tokens != max_tokens


async def _peak_bytes(process: psutil.Process) -> int:
    """The most that the process was seen to hold, until this is cancelled."""
    peak = 0
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            peak = max(peak, process.memory_info().rss)
            await asyncio.sleep(_MEMORY_POLL_SECONDS)
    return peak
