"""Side by side with mlx_lm.server: the same float32 weights, BLAS, prompts and lengths.

Owns both servers, a daemon and a peer, and the copy of the checkpoint that they both load. The
copy names no end-of-text token, so that both give answers of the set length; prompts are never
sent twice, so that neither reads one from its cache. One server is busy at a time, and who
goes first alternates. Runs on the benchmark's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import aiohttp
import msgspec

from daemon.bench.daemon_process import (
    Served,
    blas_variables,
    child_server,
    daemon,
    free_port,
)
from daemon.bench.http_load import HttpTarget, connections, run_load, stream_chat
from daemon.bench.paired_prompts import PairedPrompts
from daemon.bench.prompts import plain_words
from daemon.bench.report import Machine, this_machine
from daemon.bench.timings import LoadSummary, Ratio, StreamTiming, ratio, summarise
from daemon.child_process import python_command, python_environment
from daemon.exit_codes import ExitCode, SparklaneError

ONE_STREAM_TARGET = 1.0
MANY_STREAMS = 8
MANY_STREAMS_TARGET = 1.1
FIRST_TOKEN_TARGET = 0.5
LONG_PROMPT, SHORT_PROMPT = 1500, 20
_READING_SECONDS = 0.25
"""How long the long prompt is being read when the short one is sent."""
_SHORT_ANSWER = 8


class PeerResult(msgspec.Struct, frozen=True, kw_only=True):
    """Ratios, and what either side did at each number of streams."""

    machine: Machine
    peer: str
    prompt_tokens: int
    max_tokens: int
    ratios: list[Ratio]
    ours: dict[str, LoadSummary]
    theirs: dict[str, LoadSummary]


async def measure(
    checkpoint: Path,
    *,
    rounds: int,
    max_tokens: int,
    prompt_tokens: int,
    progress: Callable[[str], None],
) -> PeerResult:
    """Compare in `rounds` rounds: one stream, eight streams, a short prompt behind a long one."""
    machine = this_machine()
    with tempfile.TemporaryDirectory(prefix="sparklane-bench-") as folder:
        progress("writing a float32 copy of the checkpoint")
        copy = Path(folder) / "float32"
        await write_float32_copy(checkpoint, copy, endless=True)
        prompts = PairedPrompts(copy)
        progress("starting both servers")
        async with daemon(copy, rows=MANY_STREAMS) as ours, mlx_lm_server(copy) as theirs:
            sides = (
                HttpTarget(url=ours.url, model="bench", extra={"ignore_eos": True}),
                HttpTarget(url=theirs.url, model="default_model"),
            )
            async with connections() as client:
                ratios: list[Ratio] = []
                summaries: dict[str, list[LoadSummary]] = {}
                for streams, target in (
                    (1, ONE_STREAM_TARGET),
                    (MANY_STREAMS, MANY_STREAMS_TARGET),
                ):
                    progress(f"{streams} streams")
                    found = await _streams(
                        client, sides, prompts, streams, rounds, max_tokens, prompt_tokens
                    )
                    mine, other = (
                        [summarise(turn).tokens_per_second for turn in side] for side in found
                    )
                    name = f"{streams} stream{'s' if streams > 1 else ''}"
                    ratios.append(ratio(name, "tokens/s", mine, other, target))
                    summaries[str(streams)] = [summarise(*side) for side in found]
                progress("a short prompt behind a long one")
                mine, other = await _short_behind_long(client, sides, prompts, rounds)
                name = f"first token of {SHORT_PROMPT} words while {LONG_PROMPT} tokens are read"
                ratios.append(ratio(name, "s", mine, other, FIRST_TOKEN_TARGET, at_most=True))
    return PeerResult(
        machine=machine,
        peer=f"mlx_lm.server {_peer_version()}",
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        ratios=ratios,
        ours={streams: ours for streams, (ours, _) in summaries.items()},
        theirs={streams: theirs for streams, (_, theirs) in summaries.items()},
    )


@contextlib.asynccontextmanager
async def mlx_lm_server(checkpoint: Path) -> AsyncIterator[Served]:
    """mlx-lm's own server with its own defaults, on the BLAS that our engine uses."""
    variables = blas_variables()
    if sys.platform == "linux" and (library := variables.get("SPARKLANE_BLAS")):
        already = os.environ.get("LD_PRELOAD")
        variables["LD_PRELOAD"] = f"{library} {already}" if already else library
    port = free_port()
    command = python_command("-m", "mlx_lm.server", "--model", str(checkpoint))
    async with child_server(
        [*command, "--host", "127.0.0.1", "--port", str(port)],
        # It would ask the hub about a folder on the disk.
        python_environment(HF_HUB_OFFLINE="1", **variables),
        f"http://127.0.0.1:{port}",
        live="/health",
        ready="/health",
    ) as served:
        yield served


async def _streams(
    client: aiohttp.ClientSession,
    sides: Sequence[HttpTarget],
    prompts: PairedPrompts,
    streams: int,
    rounds: int,
    max_tokens: int,
    prompt_tokens: int,
) -> list[list[list[StreamTiming]]]:
    """All rounds of each side; the first, which warms, is left out."""
    found: list[list[list[StreamTiming]]] = [[] for _ in sides]
    for turn in range(rounds + 1):
        texts = [prompt.text for prompt in prompts.some(streams, prompt_tokens)]
        for side in _order(turn):
            timings = await run_load(
                client, sides[side], texts, concurrency=streams, max_tokens=max_tokens
            )
            _require_length(timings, sides[side], max_tokens)
            if turn:
                found[side].append(timings)
    return found


async def _short_behind_long(
    client: aiohttp.ClientSession,
    sides: Sequence[HttpTarget],
    prompts: PairedPrompts,
    rounds: int,
) -> list[list[float]]:
    """Seconds to the short prompt's first token, by side and round."""
    found: list[list[float]] = [[] for _ in sides]
    for turn in range(rounds + 1):
        long_text = prompts.next(LONG_PROMPT).text
        short_text = plain_words(SHORT_PROMPT, turn)
        for side in _order(turn):
            long = asyncio.create_task(stream_chat(client, sides[side], long_text, _SHORT_ANSWER))
            await asyncio.sleep(_READING_SECONDS)
            short = await stream_chat(client, sides[side], short_text, _SHORT_ANSWER)
            long_timing = await long
            _require_length([short, long_timing], sides[side], _SHORT_ANSWER)
            if long_timing.arrivals[0] <= short.sent:
                raise SparklaneError(
                    f"{LONG_PROMPT} tokens were read within {_READING_SECONDS} s: "
                    "this machine is too fast for the comparison of first tokens",
                    ExitCode.USAGE,
                )
            if turn:
                found[side].append(short.first_token_seconds)
    return found


def _order(turn: int) -> tuple[int, int]:
    return (0, 1) if turn % 2 else (1, 0)


def _require_length(timings: Sequence[StreamTiming], side: HttpTarget, tokens: int) -> None:
    """A comparison of different work would say nothing."""
    for timing in timings:
        if timing.error is not None:
            raise SparklaneError(f"{side.url} lost a stream: {timing.error}", ExitCode.ENGINE)
        if timing.tokens != tokens or not timing.arrivals:
            raise SparklaneError(
                f"{side.url} produced {timing.tokens} tokens of {tokens}; "
                "both sides must do the same work",
                ExitCode.ENGINE,
            )


async def write_float32_copy(checkpoint: Path, out: Path, *, endless: bool) -> None:
    """Write what both sides of a comparison load; `endless` leaves its end-of-text tokens out.

    Raises:
        SparklaneError: the checkpoint cannot be loaded.
    """
    options = ["--endless"] if endless else []
    process = await asyncio.create_subprocess_exec(
        *python_command("-m", "models.float32_copy", str(checkpoint), str(out), *options),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env=python_environment(),
    )
    _, complaints = await process.communicate()
    if process.returncode:
        lines = complaints.decode(errors="replace").strip().splitlines()
        raise SparklaneError(
            lines[-1] if lines else f"the copy ended with code {process.returncode}",
            ExitCode.CHECKPOINT if process.returncode == os.EX_DATAERR else ExitCode.ENGINE,
        )


def _peer_version() -> str:
    from importlib.metadata import version

    return version("mlx-lm")
