"""The engine alone: one load, and how well rows share a step.

Runs on the benchmark's event loop, with one engine process. Scaling compares eight streams
with one, in turn, by the speed while all of them decode: what a batch is worth once prompts
are read.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from daemon.bench.engine_load import EngineLoad, engine
from daemon.bench.paired_prompts import PairedPrompts
from daemon.bench.report import Machine, this_machine
from daemon.bench.timings import LoadSummary, Ratio, decode_speed, ratio, summarise
from daemon.exit_codes import ExitCode, SparklaneError
from scheduler.messages import Configure

TARGET = 5.0
STREAMS = 8


class EngineResult(msgspec.Struct, frozen=True, kw_only=True):
    """A load on the engine. `scaling` is there when it was asked for."""

    machine: Machine
    backend: str
    device: str
    precision: str
    blas: str
    load_seconds: float
    concurrency: int
    load: LoadSummary
    scaling: Ratio | None = None


async def measure(
    checkpoint: Path,
    prompts: PairedPrompts,
    *,
    concurrency: int,
    requests: int,
    max_tokens: int,
    prompt_tokens: int,
    scaling_rounds: int,
    progress: Callable[[str], None],
) -> EngineResult:
    """Load an engine with `requests` prompts; then compare, in `scaling_rounds` rounds."""
    machine = this_machine()
    rows = max(concurrency, STREAMS if scaling_rounds else 1)
    configure = Configure(checkpoint=str(checkpoint), maximum_rows=rows)
    with tempfile.TemporaryDirectory(prefix="sparklane-bench-") as folder:
        progress("starting an engine")
        async with engine(configure, Path(folder)) as running:
            progress(f"{requests} requests, {concurrency} at a time")
            tokens = [prompt.tokens for prompt in prompts.some(requests, prompt_tokens)]
            timings = await running.run_load(tokens, concurrency=concurrency, max_tokens=max_tokens)
            scaling = None
            if scaling_rounds:
                scaling = await _scaling(
                    running, prompts, scaling_rounds, max_tokens, prompt_tokens, progress
                )
            ready = running.ready
    return EngineResult(
        machine=machine,
        backend=ready.backend,
        device=ready.device,
        precision=ready.precision,
        blas=ready.blas,
        load_seconds=ready.load_seconds,
        concurrency=concurrency,
        load=summarise(timings),
        scaling=scaling,
    )


async def _scaling(
    running: EngineLoad,
    prompts: PairedPrompts,
    rounds: int,
    max_tokens: int,
    prompt_tokens: int,
    progress: Callable[[str], None],
) -> Ratio:
    speeds: dict[int, list[float]] = {1: [], STREAMS: []}
    for turn in range(rounds + 1):
        for streams, found in speeds.items():
            progress(f"{streams} streams, round {turn} of {rounds}")
            tokens = [prompt.tokens for prompt in prompts.some(streams, prompt_tokens)]
            timings = await running.run_load(tokens, concurrency=streams, max_tokens=max_tokens)
            speed = decode_speed(timings)
            if not speed > 0:
                raise SparklaneError(
                    f"{streams} streams of {max_tokens} tokens never decoded together; "
                    "use more --max-tokens",
                    ExitCode.USAGE,
                )
            # The first round warms kernels of each batch size, and is not counted.
            if turn:
                found.append(speed)
    return ratio(f"{STREAMS} streams / 1 stream", "tokens/s", speeds[STREAMS], speeds[1], TARGET)
