"""How results are shown: tables for people, one JSON document for programs.

Owns the form of both; writes to standard output only, and progress to standard error, so that
`--json` can be piped. Runs in the benchmark's process.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence

import click
import msgspec
from rich.console import Console
from rich.table import Table

from daemon.bench.timings import LoadSummary, Ratio
from daemon.version import VERSION

_progress = Console(stderr=True)


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where a figure was measured; without it, it says nothing."""

    version: str
    system: str
    machine: str
    cores: int
    load_before: float


def this_machine() -> Machine:
    """This one. `load_before` is the load average of the last minute: far over 0 means that
    others were working too, and figures are not to be trusted."""
    return Machine(
        version=VERSION,
        system=f"{platform.system()} {platform.release()}",
        machine=platform.machine(),
        cores=os.cpu_count() or 1,
        load_before=round(os.getloadavg()[0], 2),
    )


def progress(words: str) -> None:
    """Say what is being done."""
    _progress.print(f"[dim]{words}[/dim]", highlight=False)


def show(result: msgspec.Struct, as_json: bool, tables: Sequence[Table]) -> None:
    """Print the result as one document, or as tables."""
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(result), indent=2).decode())
        return
    console = Console()
    for table in tables:
        console.print(table)


def load_table(title: str, loads: dict[str, LoadSummary]) -> Table:
    """Loads side by side."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name in loads:
        table.add_column(name, justify="right")
    summaries = list(loads.values())

    def row(name: str, cells: Sequence[str]) -> None:
        table.add_row(name, *cells)

    row("requests", [str(load.requests) for load in summaries])
    row("errors", [str(load.errors) for load in summaries])
    row("prompt tokens", [str(load.prompt_tokens) for load in summaries])
    row("tokens", [str(load.tokens) for load in summaries])
    row("seconds", [f"{load.seconds:.2f}" for load in summaries])
    row("tokens per second", [f"{load.tokens_per_second:.1f}" for load in summaries])
    for name, samples in (
        ("first token", [load.first_token_seconds for load in summaries]),
        ("inter-token", [load.inter_token_seconds for load in summaries]),
        ("end to end", [load.end_to_end_seconds for load in summaries]),
    ):
        row(f"{name}, ms  p50", [_milliseconds(sample.p50) for sample in samples])
        row("  p90", [_milliseconds(sample.p90) for sample in samples])
        row("  p99", [_milliseconds(sample.p99) for sample in samples])
    if error := next((load.first_error for load in summaries if load.first_error), None):
        table.caption = f"first error: {error}"
    return table


def ratio_table(
    title: str, theirs: str, ratios: Sequence[Ratio], *, ours: str = "sparklane"
) -> Table:
    """Ratios and whether they reach their targets."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name in (ours, theirs, "ratio", "rounds from..to", "target", ""):
        table.add_column(name, justify="right")
    for found in ratios:
        sign = "≤" if found.at_most else "≥"
        table.add_row(
            f"{found.name}, {found.unit}",
            _figure(found.ours),
            _figure(found.theirs),
            f"{found.value:.3f}",
            f"{min(found.rounds):.3f}..{max(found.rounds):.3f}",
            f"{sign} {found.target:g}",
            verdict(found.reached),
        )
    return table


def limit_table(title: str, rows: Sequence[tuple[str, str, str, bool | None]]) -> Table:
    """Single figures: name, value, limit, whether it is kept (None = no limit)."""
    table = Table(title=title, title_justify="left")
    for name in ("", "measured", "limit", ""):
        table.add_column(name, justify="left" if not name else "right")
    for name, value, limit, kept in rows:
        table.add_row(name, value, limit, "" if kept is None else verdict(kept))
    return table


def verdict(reached: bool) -> str:
    """A word in colour."""
    return "[green]reached[/green]" if reached else "[red]missed[/red]"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f}"


def _figure(value: float) -> str:
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3f}"
