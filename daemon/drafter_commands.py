"""`sparklane drafter …`: the workshop's steps as commands with progress bars.

Runs in the command's process, which never imports mlx: every step is a child process that
prints JSON lines. `register` adds the group to the command line. Options that are not the
command's own are passed on to the step, which refuses what it does not know; exit codes are the
step's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import click

from daemon.child_process import python_command, python_environment

STEPS = {
    "regen": ("workshop.regeneration", "Let a target write training data."),
    "taps": ("workshop.tap_storage", "Store what training reads of the target."),
    "train": ("workshop.training", "Train a drafter on a corpus."),
    "calibrate": ("workshop.calibration", "Calibrate a drafter's confidences on held-out text."),
    "shortlist": ("workshop.shortlist", "Choose the tokens that a drafter may propose."),
    "quantize": ("workshop.quantize_report", "Compare bits by acceptance, and write one choice."),
    "measure": ("workshop.measurement", "Measure acceptance and speed against plain decoding."),
    "export": ("workshop.export", "Write a drafter in another form."),
    "card": ("workshop.card", "Write a drafter's card from what its making left behind."),
    "compare": ("dspark.compare", "Replay a DeepSpec trace, round for round."),
}
_SHOWN = ("step", "loss", "tokens_per_round", "held_out_tokens_per_round", "seconds")


@click.group("drafter")
def drafter() -> None:
    """Make a drafter for a model, from nothing but the model."""


def register(group: click.Group) -> None:
    """Add the commands to the program's."""
    group.add_command(drafter)


def _add_step(name: str, module: str, summary: str) -> None:
    @drafter.command(
        name,
        help=f"{summary} `sparklane drafter {name} -- --help` lists the options.",
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )
    @click.pass_context
    def command(context: click.Context) -> None:
        context.exit(run_step(module, list(context.args)))


def run_step(module: str, arguments: list[str]) -> int:
    """Run a step and show its progress; returns its exit code. With `--json` among the
    arguments only the result is printed, as one JSON object."""
    from rich.console import Console  # late: the program's help must not wait for it

    plain = "--json" in arguments
    process = subprocess.Popen(
        python_command("-m", f"models.{module}", *arguments),
        stdout=subprocess.PIPE,
        env=python_environment(),
        text=True,
    )
    assert process.stdout is not None
    try:
        result = _follow(process.stdout, quiet=plain)
        code = process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    if result is not None:
        result.pop("event", None)
        if plain:
            click.echo(json.dumps(result))
        else:
            Console().print_json(json.dumps(result))
    return code


def _follow(lines: Iterator[str], *, quiet: bool) -> dict[str, Any] | None:
    """Show lines as they come; returns the result's, if there is one."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    result = None
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=quiet) as bars:
        task = bars.add_task("starting", total=None)
        for line in lines:
            try:
                record = json.loads(line)
                event = record["event"]
            except (ValueError, KeyError, TypeError):
                # Such as the help of a step.
                sys.stdout.write(line)
                continue
            if event == "result":
                result = record
            elif event == "progress":
                bars.update(
                    task,
                    description=_description(record),
                    completed=record["done"],
                    total=record.get("total"),
                )
            elif event == "note":
                bars.console.print(record["message"])
            elif event == "recipe":
                bars.console.print(
                    f"{record['recipe']:24} {record['bytes'] / 1e6:7.2f} MB  "
                    f"tau {record['tau']:.3f}  {100 * record['kept']:.1f} %"
                )
    return result


def _description(record: dict[str, Any]) -> str:
    shown = [f"{name.replace('_', ' ')} {record[name]:.4g}" for name in _SHOWN if name in record]
    return ", ".join(shown) or f"{record['done']:g} done"


for _name, (_module, _summary) in STEPS.items():
    _add_step(_name, _module, _summary)
