"""The command line, run as a process: what it prints, what it ends with."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from rich.console import Console

from daemon.catalog import Progress, Stage
from daemon.exit_codes import ExitCode
from daemon.locations import CacheLock
from daemon.pull_display import PullDisplay


def sparklane(
    *arguments: str, folder: Path | None = None, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).parents[1])
    return subprocess.run(
        [sys.executable, "-m", "daemon", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=folder or root,
        env={**os.environ, "PYTHONPATH": root, "COLUMNS": "200", **(variables or {})},
    )


def refused(done: subprocess.CompletedProcess[str], code: ExitCode) -> str:
    """The one line in which a command said why it failed."""
    assert done.returncode == code, done.stderr
    lines = done.stderr.splitlines()
    assert lines[-1].startswith("sparklane: ")
    assert "Traceback" not in done.stderr
    assert len(lines) == 1, done.stderr
    return lines[0]


@pytest.mark.parametrize("mode", ["off", "auto", "always"])
def test_modes_of_speculation_are_words_of_the_command_line(mode: str, tmp_path: Path) -> None:
    done = sparklane("serve", "--speculation", mode, "--port", "70000", folder=tmp_path)
    assert "70000" in refused(done, ExitCode.CONFIGURATION)


def test_version_names_what_it_runs_on() -> None:
    done = sparklane("version")
    assert done.returncode == 0
    assert done.stdout.startswith("sparklane ") and "mlx 0.32.4" in done.stdout


@pytest.mark.parametrize("arguments", [["version"], ["--help"], ["serve", "--help"]])
def test_a_quick_command_imports_neither_server_nor_engine(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom daemon.cli import cli\n"
        f"cli.main({arguments!r}, standalone_mode=False)\n"
        "print(sorted({'mlx', 'aiohttp', 'rich', 'tokenizers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_help_lists_every_command() -> None:
    done = sparklane("--help")
    named = {line.split()[0] for line in done.stdout.partition("Commands:")[2].splitlines() if line}
    assert {"serve", "pull", "models", "doctor", "bench", "version"} <= named


def test_an_unknown_command_or_option_is_a_usage_error() -> None:
    for arguments in (["sing"], ["serve", "--loud"]):
        done = sparklane(*arguments)
        assert done.returncode == ExitCode.USAGE
        assert "Error: No such" in done.stderr


def test_models_lists_good_and_bad_checkpoints(smollm2: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    (folder / "broken").mkdir(parents=True)
    (folder / "smollm2-135m").symlink_to(smollm2)
    variables = {"SPARKLANE_CACHE": str(tmp_path)}
    table = sparklane("models", variables=variables)
    assert table.returncode == 0 and "8,192" in table.stdout and "config.json" in table.stdout
    listed = json.loads(sparklane("models", "--json", variables=variables).stdout)
    assert [one["name"] for one in listed] == ["broken", "smollm2-135m"]
    assert listed[0]["problem"] and listed[1]["problem"] is None


def test_models_of_an_empty_cache_say_how_to_get_one(tmp_path: Path) -> None:
    done = sparklane("models", variables={"SPARKLANE_CACHE": str(tmp_path)})
    assert done.returncode == 0 and "sparklane pull smollm2-135m" in done.stdout


def test_pull_of_what_is_there_is_a_quick_success(smollm2: Path) -> None:
    done = sparklane("pull", "smollm2-135m")
    assert done.returncode == 0 and str(smollm2) in done.stdout
    quiet = sparklane("pull", "--quiet", "smollm2-135m")
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", "")


def test_pull_of_an_unknown_name_leaves_nothing(tmp_path: Path) -> None:
    done = sparklane("pull", "nothing-of-that-name", variables={"SPARKLANE_CACHE": str(tmp_path)})
    assert "unknown model" in refused(done, ExitCode.CONFIGURATION)
    assert list(tmp_path.iterdir()) == []


def test_doctor_gives_a_table_or_json(smollm2: Path) -> None:
    table = sparklane("doctor")
    assert "default model" in table.stdout and "smollm2-135m" in table.stdout
    done = sparklane("doctor", "--json")
    states = {finding["state"] for finding in json.loads(done.stdout)}
    assert done.returncode == table.returncode == (1 if "fail" in states else 0)


def test_doctor_ends_with_1_where_nothing_can_be_served(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "smollm2-135m").mkdir(parents=True)
    variables = {"SPARKLANE_CACHE": str(tmp_path), "SPARKLANE_BLAS": "reference"}
    done = sparklane("doctor", variables=variables)
    assert done.returncode == 1 and "→" in done.stdout


def test_serve_names_line_and_key_of_a_wrong_configuration(tmp_path: Path) -> None:
    (tmp_path / "sparklane.toml").write_text("[server]\nport = 8090\nprot = 1\n")
    # Found without being named, because it lies in the folder.
    line = refused(sparklane("serve", folder=tmp_path), ExitCode.CONFIGURATION)
    assert "sparklane.toml:3: server.prot: unknown key" in line
    missing = sparklane("serve", "--config", str(tmp_path / "other.toml"))
    assert "other.toml: cannot be read" in refused(missing, ExitCode.CONFIGURATION)


def test_serve_can_give_up_with_a_code_of_choice(tmp_path: Path) -> None:
    (tmp_path / "sparklane.toml").write_text("[server]\nport = 70000\n")
    done = sparklane("serve", "--give-up-code", "0", folder=tmp_path)
    assert done.returncode == 0 and "server.port" in done.stderr


def test_serve_refuses_to_be_open_to_others_without_keys() -> None:
    line = refused(sparklane("serve", "--host", "0.0.0.0"), ExitCode.CONFIGURATION)
    assert "api_keys_file" in line


def test_serve_refuses_a_cache_in_use(tmp_path: Path) -> None:
    with CacheLock(tmp_path):
        done = sparklane("serve", "--port", "0", variables={"SPARKLANE_CACHE": str(tmp_path)})
    line = refused(done, ExitCode.CACHE_LOCKED)
    assert str(tmp_path) in line and str(os.getpid()) in line


def test_serve_refuses_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = sparklane("serve", "--port", port, variables={"SPARKLANE_CACHE": str(tmp_path)})
    assert port in refused(done, ExitCode.PORT_IN_USE)


def test_serve_refuses_an_unreadable_checkpoint(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{")
    arguments = ["--port", "0", "--model", str(checkpoint), "--log-level", "error"]
    done = sparklane("serve", *arguments, variables={"SPARKLANE_CACHE": str(tmp_path / "cache")})
    assert "config.json" in refused(done, ExitCode.CHECKPOINT)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_pull_shows_each_stage(terminal: bool) -> None:
    seen = io.StringIO()
    console = Console(file=seen, force_terminal=terminal, width=100)
    with PullDisplay("a-model", console) as display:
        display.show(Progress(Stage.DOWNLOAD))
        display.show(Progress(Stage.UNPACK, 1, 4))
        display.show(Progress(Stage.UNPACK, 4, 4))
        display.show(Progress(Stage.CONVERT, 3, 9))
    shown = seen.getvalue()
    for words in ("a-model: downloading", "a-model: unpacking", "a-model: converting"):
        assert words in shown
        assert terminal or shown.count(words) == 1
    assert ("100%" in shown) is terminal
