"""What a round costs on this machine by width, and how good the choice made of it is.

The measurement runs in a child, since the daemon's packages never import mlx: it loads the pair
as an engine does and measures the table twice, once to choose by and once to judge by. The
figures come from `width_figures`. A pair that cannot be used raises `SparklaneError`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from rich.table import Table

from daemon.bench.daemon_process import blas_variables
from daemon.bench.report import Machine, this_machine, verdict
from daemon.bench.width_figures import (
    BEST_FIXED_TARGET,
    PROFILES,
    ROWS,
    SERIAL_TARGET,
    WidthFigure,
    figure,
)
from daemon.child_process import python_command, python_environment
from daemon.exit_codes import ExitCode, SparklaneError
from scheduler.round_costs import CostRecord, RoundCosts
from scheduler.width_policy import CostTable


class DepthFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures behind one depth of context, in tokens."""

    depth: int
    figures: list[WidthFigure]


class WidthsResult(msgspec.Struct, frozen=True, kw_only=True):
    """`chosen_by` is the measurement that the policy saw, `judged_by` the other one."""

    machine: Machine
    chosen_by: CostRecord
    judged_by: CostRecord
    depths: list[DepthFigures]

    @property
    def reached(self) -> bool:
        """Whether every figure meets its targets."""
        return all(found.reached for depth in self.depths for found in depth.figures)


async def measure(
    target: Path,
    drafter: Path,
    *,
    precision: str,
    draft_bits: int,
    depths: Sequence[int],
    widths: Sequence[int],
    repeats: int,
    progress: Callable[[str], None],
) -> WidthsResult:
    """Measure a pair behind each depth; `widths` empty = all of the drafter's block."""
    machine = this_machine()
    options = [f"--depth={depth}" for depth in depths] + [f"--width={width}" for width in widths]
    command = python_command(
        "-m",
        "scheduler.measure_widths",
        f"--model={target}",
        f"--draft-model={drafter}",
        f"--precision={precision}",
        f"--draft-bits={draft_bits}",
        f"--maximum-rows={max(ROWS)}",
        f"--repeats={repeats}",
        "--measurements=2",
        *options,
    )
    chosen_by, judged_by = await _records(command, progress)
    known, actual = RoundCosts(chosen_by), RoundCosts(judged_by)
    measured = sorted({cost.depth for cost in chosen_by.verify})
    return WidthsResult(
        machine=machine,
        chosen_by=chosen_by,
        judged_by=judged_by,
        depths=[
            DepthFigures(
                depth=depth,
                figures=[
                    figure(profile, rows, known.table(depth), actual.table(depth))
                    for profile in PROFILES
                    for rows in ROWS
                ],
            )
            for depth in measured
        ],
    )


def tables(result: WidthsResult) -> list[Table]:
    """Costs and figures of every depth."""
    shown = []
    for depth in result.depths:
        shown.append(_cost_table(depth.depth, RoundCosts(result.judged_by).table(depth.depth)))
        shown.append(_figure_table(depth))
    return shown


def _cost_table(depth: int, costs: CostTable) -> Table:
    title = f"Milliseconds behind {depth} tokens; width 1 is a serial step"
    table = Table(title=title, title_justify="left")
    for name in ("rows", "draft", *(f"width {width}" for width in costs.widths())):
        table.add_column(name, justify="right")
    for rows in sorted(costs.draft):
        verify = [costs.verify_seconds(rows, width) for width in costs.widths()]
        cells = [f"{seconds * 1000:.2f}" for seconds in (costs.draft[rows], *verify)]
        table.add_row(str(rows), *cells)
    return table


def _figure_table(depth: DepthFigures) -> Table:
    title = f"Width chosen behind {depth.depth} tokens, judged by a second measurement"
    table = Table(title=title, title_justify="left")
    table.caption = (
        f"targets: ≥ {BEST_FIXED_TARGET} of the best fixed width, ≥ {SERIAL_TARGET} of the serial "
        "lane, the latter also while acceptance has still to be learned"
    )
    names = ("profile", "rows", "width", "tau", "tokens/s", "best width")
    for name in (*names, "of best", "of serial", "learned, of best", "of serial", ""):
        table.add_column(name, justify="left" if name == "profile" else "right")
    for found in depth.figures:
        table.add_row(
            found.profile,
            str(found.rows),
            str(found.chosen),
            f"{found.tau:.2f}",
            f"{found.speed:.1f}",
            str(found.best_width),
            f"{found.over_best:.3f}",
            f"{found.over_serial:.3f}",
            f"{found.learned_over_best:.3f}",
            f"{found.learned_over_serial:.3f}",
            verdict(found.reached),
        )
    return table


async def _records(
    command: Sequence[str], progress: Callable[[str], None]
) -> tuple[CostRecord, CostRecord]:
    """The two measurements that the child prints; what it says meanwhile is passed on."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=python_environment(**blas_variables()),
    )
    assert process.stdout is not None and process.stderr is not None
    reading = asyncio.create_task(process.stdout.read())
    last = ""
    try:
        async for line in process.stderr:
            last = line.decode(errors="replace").strip() or last
            progress(last)
        printed, code = await reading, await process.wait()
    except BaseException:
        reading.cancel()
        if process.returncode is None:
            process.kill()
        await process.wait()
        raise
    if code:
        unusable = code == os.EX_DATAERR
        raise SparklaneError(
            last or f"the measurement ended with code {code}",
            ExitCode.CHECKPOINT if unusable else ExitCode.ENGINE,
        )
    first, second = (msgspec.json.decode(line, type=CostRecord) for line in printed.splitlines())
    return first, second
