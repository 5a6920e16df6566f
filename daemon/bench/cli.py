"""`sparklane bench`: the commands, their options, and how their results are shown.

Owns no measurement: each command calls the module of its name. Modules are imported when a
command runs, so that `--help` is quick. Errors are `SparklaneError`, for the command line to
print in one line.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import click

Result = TypeVar("Result")
Command = Callable[..., None]

_count = click.IntRange(min=1)
_folder = click.Path(exists=True, file_okay=False, path_type=Path)
_file = click.Path(exists=True, dir_okay=False, path_type=Path)


def _json_option(command: Command) -> Command:
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")(command)


def _model_option(command: Command) -> Command:
    return click.option(
        "--model", help="Name in the cache, or path of a checkpoint folder.  [default: the default]"
    )(command)


def _rounds_option(default: int) -> Callable[[Command], Command]:
    return click.option(
        "--rounds",
        type=_count,
        default=default,
        show_default=True,
        help="Rounds that count, each side once in every round.",
    )


def _run(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a benchmark on the event loop that the daemon uses.

    Servers that a benchmark started must not outlive it: SIGTERM unwinds it as Ctrl-C does.
    """
    import uvloop

    async def until_told_to_stop() -> Result:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await work

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(until_told_to_stop())
        except asyncio.CancelledError:
            raise SystemExit(128 + signal.SIGTERM) from None


@click.group()
def bench() -> None:
    """Measure this machine and this version. Ratios are taken side by side in one run."""


@bench.command("http")
@click.option("--url", default="http://127.0.0.1:8090", show_default=True, help="A server's root.")
@click.option("--model", help="Model to ask for.  [default: the first that is listed]")
@click.option("--api-key", envvar="SPARKLANE_API_KEY", help="Sent as a bearer token.")
@click.option("--concurrency", type=_count, default=8, show_default=True)
@click.option("--requests", type=_count, default=32, show_default=True)
@click.option("--max-tokens", type=_count, default=64, show_default=True)
@click.option("--prompt-tokens", type=_count, default=64, show_default=True, help="Words, roughly.")
@click.option(
    "--ignore-eos/--stop-at-eos",
    default=True,
    help="Whether to ask for answers of full length, which servers besides this may not know.",
)
@_json_option
def http(
    url: str,
    model: str | None,
    api_key: str | None,
    concurrency: int,
    requests: int,
    max_tokens: int,
    prompt_tokens: int,
    ignore_eos: bool,
    as_json: bool,
) -> None:
    """Load a server with streaming chats, and time every token."""
    from daemon.bench import http_command, report

    result = _run(
        http_command.measure(
            url.rstrip("/"),
            model,
            api_key,
            concurrency=concurrency,
            requests=requests,
            max_tokens=max_tokens,
            prompt_tokens=prompt_tokens,
            ignore_eos=ignore_eos,
            progress=report.progress,
        )
    )
    title = f"{result.model} at {result.url}, {concurrency} at a time"
    report.show(result, as_json, [report.load_table(title, {"": result.load})])


@bench.command("engine")
@_model_option
@click.option("--concurrency", type=_count, default=8, show_default=True)
@click.option("--requests", type=_count, default=16, show_default=True)
@click.option("--max-tokens", type=_count, default=64, show_default=True)
@click.option("--prompt-tokens", type=_count, default=64, show_default=True)
@click.option("--scaling", is_flag=True, help="Also compare eight streams with one.")
@_rounds_option(3)
@_json_option
def engine(
    model: str | None,
    concurrency: int,
    requests: int,
    max_tokens: int,
    prompt_tokens: int,
    scaling: bool,
    rounds: int,
    as_json: bool,
) -> None:
    """Load an engine process without HTTP."""
    from daemon.bench import engine_scaling, report
    from daemon.bench.daemon_process import checkpoint_of
    from daemon.bench.paired_prompts import PairedPrompts

    checkpoint = checkpoint_of(model)
    result = _run(
        engine_scaling.measure(
            checkpoint,
            PairedPrompts(checkpoint),
            concurrency=concurrency,
            requests=requests,
            max_tokens=max_tokens,
            prompt_tokens=prompt_tokens,
            scaling_rounds=rounds if scaling else 0,
            progress=report.progress,
        )
    )
    title = f"{checkpoint.name}, {result.precision} on {result.device}, {result.blas}"
    tables = [report.load_table(title, {f"{concurrency} at a time": result.load})]
    if result.scaling is not None:
        tables.append(report.ratio_table("Scaling", "1 stream", [result.scaling], ours="8 streams"))
    report.show(result, as_json, tables)


@bench.command("overhead")
@_model_option
@click.option("--max-tokens", type=_count, default=96, show_default=True)
@click.option("--prompt-tokens", type=_count, default=64, show_default=True)
@_rounds_option(5)
@_json_option
def overhead(
    model: str | None, max_tokens: int, prompt_tokens: int, rounds: int, as_json: bool
) -> None:
    """Compare the daemon with the same engine without HTTP."""
    from daemon.bench import overhead as benchmark
    from daemon.bench import report
    from daemon.bench.daemon_process import checkpoint_of

    checkpoint = checkpoint_of(model)
    result = _run(
        benchmark.measure(
            checkpoint,
            rounds=rounds,
            max_tokens=max_tokens,
            prompt_tokens=prompt_tokens,
            progress=report.progress,
        )
    )
    loads = {}
    for streams in result.http:
        loads[f"HTTP, {streams}"] = result.http[streams]
        loads[f"engine, {streams}"] = result.engine[streams]
    title = f"{checkpoint.name}: through HTTP, and the engine alone"
    report.show(
        result,
        as_json,
        [
            report.ratio_table(title, "engine", result.ratios, ours="HTTP"),
            report.load_table("All rounds", loads),
        ],
    )


@bench.command("peer")
@_model_option
@click.option("--max-tokens", type=_count, default=96, show_default=True)
@click.option("--prompt-tokens", type=_count, default=64, show_default=True)
@_rounds_option(3)
@_json_option
def peer(
    model: str | None, max_tokens: int, prompt_tokens: int, rounds: int, as_json: bool
) -> None:
    """Compare with mlx_lm.server: same float32 weights, BLAS, prompts and lengths."""
    from daemon.bench import peer as benchmark
    from daemon.bench import report
    from daemon.bench.daemon_process import checkpoint_of

    checkpoint = checkpoint_of(model)
    result = _run(
        benchmark.measure(
            checkpoint,
            rounds=rounds,
            max_tokens=max_tokens,
            prompt_tokens=prompt_tokens,
            progress=report.progress,
        )
    )
    loads = {}
    for streams in result.ours:
        loads[f"sparklane, {streams}"] = result.ours[streams]
        loads[f"peer, {streams}"] = result.theirs[streams]
    title = f"{checkpoint.name} in float32: sparklane and {result.peer}"
    report.show(
        result,
        as_json,
        [
            report.ratio_table(title, "peer", result.ratios),
            report.load_table("All rounds", loads),
        ],
    )


@bench.command("fanout")
@_model_option
@click.option("--streams", type=_count, default=500, show_default=True)
@click.option("--max-tokens", type=click.IntRange(min=2), default=200, show_default=True)
@click.option(
    "--tokens-per-second",
    type=click.FloatRange(min=0, min_open=True),
    default=10.0,
    show_default=True,
    help="Of each stream.",
)
@_json_option
def fanout(
    model: str | None, streams: int, max_tokens: int, tokens_per_second: float, as_json: bool
) -> None:
    """Open many streams at once on a daemon with a fake engine."""
    from daemon.bench import fanout as benchmark
    from daemon.bench import report
    from daemon.bench.daemon_process import checkpoint_of

    result = _run(
        benchmark.measure(
            checkpoint_of(model),
            streams=streams,
            max_tokens=max_tokens,
            tokens_per_second=tokens_per_second,
            progress=report.progress,
        )
    )
    table = report.limit_table(
        f"{streams} streams at {tokens_per_second:g} tokens per second each",
        [
            ("streams lost", str(result.lost), "0", result.lost == 0),
            (
                "longest stall",
                f"{result.longest_stall_seconds:.2f} s",
                f"{result.stall_limit_seconds:.0f} s",
                result.longest_stall_seconds <= result.stall_limit_seconds,
            ),
            ("daemon, idle", f"{result.idle_bytes / 1e6:.0f} MB", "", None),
            ("daemon, peak", f"{result.peak_bytes / 1e6:.0f} MB", "", None),
            ("for each stream", f"{result.bytes_per_stream / 1e3:.0f} kB", "", None),
        ],
    )
    report.show(
        result, as_json, [table, report.load_table("As the clients saw it", {"": result.load})]
    )


@bench.command("footprint")
@_model_option
@click.option(
    "--seconds", type=click.FloatRange(min=0, min_open=True), default=30.0, show_default=True
)
@_json_option
def footprint(model: str | None, seconds: float, as_json: bool) -> None:
    """Start a daemon and see what it takes while idle."""
    from daemon.bench import footprint as benchmark
    from daemon.bench import report
    from daemon.bench.daemon_process import checkpoint_of

    result = _run(
        benchmark.measure(checkpoint_of(model), idle_seconds=seconds, progress=report.progress)
    )
    report.show(result, as_json, [report.limit_table("The daemon's process", result.rows)])


@bench.command("widths")
@_model_option
@click.option("--draft-model", required=True, help="Name in the cache, or path of a drafter.")
@click.option("--precision", default="auto", show_default=True, help="Of the target.")
@click.option("--draft-bits", type=click.Choice(["4", "8", "16"]), default="4", show_default=True)
@click.option("--depth", type=_count, multiple=True, help="Context in tokens; can be repeated.")
@click.option("--width", type=_count, multiple=True, help="Anchor included; can be repeated.")
@click.option("--repeats", type=_count, default=5, show_default=True, help="Samples of a cost.")
@_json_option
def widths(
    model: str | None,
    draft_model: str,
    precision: str,
    draft_bits: str,
    depth: tuple[int, ...],
    width: tuple[int, ...],
    repeats: int,
    as_json: bool,
) -> None:
    """Measure what rounds cost by width, and judge the choice of width."""
    from daemon.bench import report
    from daemon.bench import widths as benchmark
    from daemon.bench.daemon_process import checkpoint_of

    result = _run(
        benchmark.measure(
            checkpoint_of(model),
            checkpoint_of(draft_model),
            precision=precision,
            draft_bits=int(draft_bits),
            depths=depth,
            widths=width,
            repeats=repeats,
            progress=report.progress,
        )
    )
    report.show(result, as_json, benchmark.tables(result))


@bench.command("speculation")
@_model_option
@click.option("--draft-model", required=True, help="Name in the cache, or path of a drafter.")
@click.option("--peer-draft-model", type=_folder, help="Causal model that mlx-lm drafts with.")
@click.option("--trace", type=_file, help="Take the prompts of a DeepSpec trace.")
@click.option("--prompts", type=click.IntRange(min=4), default=4, show_default=True)
@click.option("--max-tokens", type=_count, default=64, show_default=True)
@_rounds_option(3)
@_json_option
def speculation(
    model: str | None,
    draft_model: str,
    peer_draft_model: Path | None,
    trace: Path | None,
    prompts: int,
    max_tokens: int,
    rounds: int,
    as_json: bool,
) -> None:
    """Compare the speculative lane with mlx-lm's speculation and, if installed, mlx-dspark."""
    from daemon.bench import drafted_prompts, report
    from daemon.bench import speculation as benchmark
    from daemon.bench.daemon_process import checkpoint_of

    if prompts % 4:
        raise click.UsageError(
            f"--prompts is {prompts}; groups of 4 run together, so take a multiple"
        )
    target = checkpoint_of(model)
    found = (
        drafted_prompts.of_trace(trace, prompts)
        if trace
        else drafted_prompts.our_questions(target, prompts)
    )
    result = _run(
        benchmark.measure(
            target,
            checkpoint_of(draft_model),
            found,
            peer_draft_model=peer_draft_model,
            rounds=rounds,
            max_tokens=max_tokens,
            progress=report.progress,
        )
    )
    report.show(result, as_json, benchmark.tables(result))
