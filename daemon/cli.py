"""The command line: `sparklane serve`, `pull`, `models`, `doctor`, `bench`, `drafter`, `version`.

Owns what people type and what they see; every command calls the module of its subject. Modules
are imported when a command runs, so that `version` and `--help` take hardly longer than Python's
own start. Runs in the foreground process; never imports mlx. A `SparklaneError` is told in one
line on standard error, and its code ends the process.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from daemon.draft_section import SpeculationMode
from daemon.exit_codes import ExitCode, SparklaneError

if TYPE_CHECKING:
    from daemon.configuration import Configuration, Flags

CONFIGURATION_FILE = "sparklane.toml"

UNFIT = 1
"""What `doctor` ends with when sparklane cannot serve here."""

INCURABLE = (ExitCode.CONFIGURATION, ExitCode.CHECKPOINT)
"""What another start would only meet again."""

_LATE_GROUPS = {"bench": "daemon.bench.cli", "drafter": "daemon.drafter_commands"}
"""Groups in modules of their own, each under its own name; one may be absent."""

_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


class _Commands(click.Group):
    """The commands of this file, and the groups that are imported when they are named."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        late = [name for name, module in _LATE_GROUPS.items() if importlib.util.find_spec(module)]
        return [*super().list_commands(ctx), *late]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        module = _LATE_GROUPS.get(cmd_name)
        if module is None:
            return super().get_command(ctx, cmd_name)
        if importlib.util.find_spec(module) is None:
            return None
        group = getattr(importlib.import_module(module), cmd_name)
        assert isinstance(group, click.Group)
        return group

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except SparklaneError as error:
            click.echo(f"sparklane: {error}", err=True)
            ctx.exit(error.exit_code)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Serve language models on MLX, over HTTP as OpenAI's clients speak it."""


def main() -> None:
    """What the program `sparklane` runs. Does not return."""
    cli.main(prog_name="sparklane")


@cli.command()
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    envvar="SPARKLANE_CONFIG",
    help=f"Configuration file.  [default: {CONFIGURATION_FILE} of this folder, if it is there]",
)
@click.option("--model", help="Serve this one only: a name, an org/repo of the hub, or a path.")
@click.option("--host", help="Address to listen on.")
@click.option("--port", type=int, help="TCP port; 0 takes any free one.")
@click.option("--draft-model", help="Drafter of the model: a name or a folder.")
@click.option("--draft-bits", type=click.Choice(["4", "8", "16"]), help="Bits of its weights.")
@click.option("--draft-own-head", is_flag=True, help="Keep its own embedding and head.")
@click.option(
    "--draft-shortlist/--no-draft-shortlist",
    default=None,
    help="Whether to draft from the shortlist beside it only.",
)
@click.option("--num-draft-tokens", type=click.IntRange(min=1), help="Most drafts of a round.")
@click.option(
    "--confidence-threshold",
    type=click.FloatRange(0.0, 1.0, max_open=True),
    help="Verify drafts up to the first less confident one, whatever it costs.",
)
@click.option(
    "--speculation",
    type=click.Choice([mode.value for mode in SpeculationMode]),
    help="Draft where it pays, whatever it costs, or not at all.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    help="Least serious level that is logged.",
)
@click.option(
    "--give-up-code",
    type=click.IntRange(0, 255),
    help="End with this where a restart cannot help (78, 65), for service managers that know "
    "success and failure only.",
)
def serve(
    config: Path | None,
    model: str | None,
    host: str | None,
    port: int | None,
    draft_model: str | None,
    draft_bits: str | None,
    draft_own_head: bool,
    draft_shortlist: bool | None,
    num_draft_tokens: int | None,
    confidence_threshold: float | None,
    speculation: str | None,
    log_level: str | None,
    give_up_code: int | None,
) -> None:
    """Serve until stopped. Flags go before the file; SIGHUP reads the file again."""
    from daemon.configuration import Flags
    from daemon.server import run

    if config is None and Path(CONFIGURATION_FILE).is_file():
        config = Path(CONFIGURATION_FILE)
    # The folder may be another one when SIGHUP comes.
    path = config.absolute() if config is not None else None
    flags = Flags(
        model=model,
        host=host,
        port=port,
        draft_model=draft_model,
        draft_bits=int(draft_bits) if draft_bits else None,
        draft_own_head=draft_own_head or None,
        draft_shortlist=draft_shortlist,
        num_draft_tokens=num_draft_tokens,
        confidence_threshold=confidence_threshold,
        speculation=SpeculationMode(speculation) if speculation else None,
    )
    read = functools.partial(_configuration, path, flags, log_level)
    _log_to_stderr()
    try:
        configuration = read()
        names = ", ".join(served.name for served in configuration.models)
        code = run(
            configuration,
            read,
            listening=lambda url: click.echo(f"sparklane serves {names} at {url}"),
        )
    except SparklaneError as error:
        if give_up_code is not None and error.exit_code in INCURABLE:
            raise SparklaneError(str(error), give_up_code) from error
        raise
    sys.exit(code)


@cli.command()
@click.argument("model")
@click.option("--quiet", is_flag=True, help="Show nothing, and say nothing unless it fails.")
def pull(model: str, quiet: bool) -> None:
    """Fetch MODEL into the cache: smollm2-135m, or an org/repo of the Hugging Face hub."""
    from daemon.catalog import pull as fetch
    from daemon.locations import default_cache_folder

    cache = default_cache_folder()
    if quiet:
        fetch(model, cache, lambda progress: None)
        return
    from daemon.pull_display import PullDisplay

    with PullDisplay(model) as display:
        folder = fetch(model, cache, display.show)
    click.echo(f"{model} is at {folder}")


@cli.command()
@_json_option
def models(as_json: bool) -> None:
    """List the checkpoints in the cache."""
    from daemon.catalog import DEFAULT_MODEL, listing
    from daemon.locations import default_cache_folder

    cache = default_cache_folder()
    listed = listing(cache)
    if as_json:
        _print_json(listed)
        return
    if not listed:
        click.echo(f"No checkpoint in {cache}. Fetch one with: sparklane pull {DEFAULT_MODEL}")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("name", "architecture", "weights", "precision", "context", "state")
    for one in listed:
        state = Text("ready", "green") if one.problem is None else Text(one.problem, "red")
        size = f"{one.weight_bytes / 1e6:,.0f} MB" if one.weight_bytes else ""
        context = f"{one.context_length:,}" if one.context_length else ""
        table.add_row(one.name, one.architecture, size, one.precision, context, state)
    Console().print(table)


@cli.command()
@_json_option
def doctor(as_json: bool) -> None:
    """Say what this machine is, and whether sparklane can serve on it."""
    from daemon.doctor import State, examine, worst
    from daemon.locations import default_cache_folder

    findings = examine(default_cache_folder())
    if as_json:
        _print_json(findings)
    else:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        colours = {State.OK: "green", State.WARN: "yellow", State.FAIL: "red"}
        table = Table("check", "state", "finding")
        for finding in findings:
            detail = Text(finding.detail)
            if finding.remedy:
                detail.append(f"\n→ {finding.remedy}", "bold")
            state = Text(finding.state.value, colours[finding.state])
            table.add_row(finding.check, state, detail)
        Console().print(table)
    sys.exit(UNFIT if worst(findings) is State.FAIL else ExitCode.OK)


@cli.command()
def version() -> None:
    """Say which version this is, and which MLX it runs on."""
    import platform
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    from daemon.version import VERSION

    parts = []
    for package in ("mlx", "mlx-lm"):
        try:
            parts.append(f"{package} {installed(package)}")
        except PackageNotFoundError:
            parts.append(f"no {package}")
    parts.append(f"Python {platform.python_version()}")
    click.echo(f"sparklane {VERSION} ({', '.join(parts)})")


def _configuration(path: Path | None, flags: Flags, log_level: str | None) -> Configuration:
    """The configuration of the file, or the defaults, under what the command line says."""
    import msgspec

    from daemon.configuration import LogLevel, LogSection, load

    configuration = load(path, flags)
    if log_level is None:
        return configuration
    return msgspec.structs.replace(configuration, log=LogSection(level=LogLevel(log_level)))


def _log_to_stderr() -> None:
    """Send the log to standard error; the journal of systemd adds the time itself."""
    import logging

    layout = "%(levelname)s %(name)s: %(message)s"
    if "JOURNAL_STREAM" not in os.environ:
        layout = f"%(asctime)s {layout}"
    logging.basicConfig(stream=sys.stderr, format=layout)


def _print_json(value: Any) -> None:
    import msgspec

    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
