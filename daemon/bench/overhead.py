"""What HTTP costs: the daemon against the same engine without it, in turn.

Two engines are loaded, one under a daemon and one alone; one of them is busy at a time. Both
get the same tokens to read and produce as many, so the ratio is the daemon's own cost. Runs on
the benchmark's event loop.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from daemon.bench.daemon_process import daemon
from daemon.bench.engine_load import EngineLoad, engine
from daemon.bench.http_load import HttpTarget, connections, run_load
from daemon.bench.paired_prompts import PairedPrompts
from daemon.bench.report import Machine, this_machine
from daemon.bench.timings import LoadSummary, Ratio, StreamTiming, ratio, summarise
from daemon.exit_codes import ExitCode, SparklaneError
from scheduler.messages import Configure

TARGET = 0.97
STREAMS = (1, 8)


class OverheadResult(msgspec.Struct, frozen=True, kw_only=True):
    """Ratios at each number of streams, and the loads of all rounds together."""

    machine: Machine
    backend: str
    precision: str
    blas: str
    prompt_tokens: int
    max_tokens: int
    ratios: list[Ratio]
    http: dict[str, LoadSummary]
    engine: dict[str, LoadSummary]


async def measure(
    checkpoint: Path,
    *,
    rounds: int,
    max_tokens: int,
    prompt_tokens: int,
    progress: Callable[[str], None],
) -> OverheadResult:
    """Run `rounds` rounds of HTTP, engine, HTTP, engine at 1 and at 8 streams."""
    prompts = PairedPrompts(checkpoint)
    configure = Configure(checkpoint=str(checkpoint), maximum_rows=max(STREAMS))
    ratios: list[Ratio] = []
    http: dict[str, LoadSummary] = {}
    alone: dict[str, LoadSummary] = {}
    machine = this_machine()
    with tempfile.TemporaryDirectory(prefix="sparklane-bench-") as folder:
        progress("starting a daemon, and an engine beside it")
        async with (
            daemon(checkpoint, rows=max(STREAMS)) as served,
            engine(configure, Path(folder)) as bare,
            connections() as client,
        ):
            target = HttpTarget(url=served.url, model="bench", extra={"ignore_eos": True})

            async def with_http(texts: list[str]) -> list[StreamTiming]:
                return await run_load(
                    client, target, texts, concurrency=len(texts), max_tokens=max_tokens
                )

            for streams in STREAMS:
                through: list[list[StreamTiming]] = []
                without: list[list[StreamTiming]] = []
                # The first round of each warms connections and kernels, and is not counted.
                for turn in range(rounds + 1):
                    progress(f"{streams} streams, round {turn} of {rounds}")
                    batch = prompts.some(streams, prompt_tokens)
                    texts = [prompt.text for prompt in batch]
                    tokens = [prompt.tokens for prompt in batch]
                    # Who goes first alternates, so that a drift favours neither.
                    if turn % 2:
                        http_round = await with_http(texts)
                        bare_round = await _without_http(bare, tokens, max_tokens)
                    else:
                        bare_round = await _without_http(bare, tokens, max_tokens)
                        http_round = await with_http(texts)
                    _require_equal(http_round, bare_round)
                    if turn:
                        through.append(http_round)
                        without.append(bare_round)
                key = str(streams)
                http[key] = summarise(*through)
                alone[key] = summarise(*without)
                ratios.append(
                    ratio(
                        f"{streams} stream{'s' if streams > 1 else ''}",
                        "tokens/s",
                        [summarise(turn_).tokens_per_second for turn_ in through],
                        [summarise(turn_).tokens_per_second for turn_ in without],
                        TARGET,
                    )
                )
            ready = bare.ready
    return OverheadResult(
        machine=machine,
        backend=ready.backend,
        precision=ready.precision,
        blas=ready.blas,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        ratios=ratios,
        http=http,
        engine=alone,
    )


async def _without_http(
    bare: EngineLoad, prompts: list[list[int]], max_tokens: int
) -> list[StreamTiming]:
    return await bare.run_load(prompts, concurrency=len(prompts), max_tokens=max_tokens)


def _require_equal(http: list[StreamTiming], bare: list[StreamTiming]) -> None:
    """A comparison of different work would say nothing."""
    for timing in (*http, *bare):
        if timing.error is not None:
            raise SparklaneError(f"a stream was lost: {timing.error}", ExitCode.ENGINE)

    def work(timings: list[StreamTiming]) -> list[tuple[int, int]]:
        return sorted((timing.prompt_tokens, timing.tokens) for timing in timings)

    if work(http) != work(bare):
        raise SparklaneError(
            "the two sides did different work (prompt tokens, tokens): "
            f"{work(http)} through HTTP, {work(bare)} without",
            ExitCode.ENGINE,
        )
