"""The files of deploy/, as far as they can be checked without the programs that read them."""

from __future__ import annotations

import json
import plistlib
import re
from pathlib import Path

import click
import pytest

from daemon.cli import INCURABLE, serve
from daemon.configuration import ServerSection
from daemon.metrics import Metrics

DEPLOY = Path(__file__).parents[1] / "deploy"
GRACE = ServerSection().grace_seconds


def unit() -> dict[str, list[str]]:
    """The settings of the systemd unit; one may stand there more than once."""
    settings: dict[str, list[str]] = {}
    for line in (DEPLOY / "sparklane.service").read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            settings.setdefault(key, []).append(value)
    return settings


def agent() -> dict[str, object]:
    """The launchd agent."""
    found = plistlib.loads((DEPLOY / "dev.sparklane.daemon.plist").read_bytes())
    assert isinstance(found, dict)
    return found


def parsed(command: list[str]) -> click.Context:
    """The options of a command line, as our program understands it."""
    program, name, *arguments = command
    assert (Path(program).name, name) == ("sparklane", "serve")
    return serve.make_context("serve", arguments)


def test_the_unit_notifies_drains_and_gives_up() -> None:
    settings = unit()
    assert settings["Type"] == ["notify"]
    assert int(settings["WatchdogSec"][0]) > 0
    assert int(settings["TimeoutStopSec"][0]) > GRACE
    assert settings["Restart"] == ["on-failure"]
    (codes,) = settings["RestartPreventExitStatus"]
    assert {int(code) for code in codes.split()} == set(INCURABLE)
    assert parsed(settings["ExecStart"][0].split()).params["config"].is_absolute()


def test_the_unit_leaves_the_gpu_usable() -> None:
    """These would hide its device nodes, or forbid kernels that are compiled while running."""
    settings = unit()
    for setting in ("PrivateDevices", "DevicePolicy", "MemoryDenyWriteExecute", "ProcSubset"):
        assert setting not in settings


def test_the_agent_is_interactive_drains_and_gives_up() -> None:
    settings = agent()
    assert settings["Label"] == "dev.sparklane.daemon"
    assert settings["ProcessType"] == "Interactive"
    assert settings["ThrottleInterval"] == 10
    assert settings["KeepAlive"] == {"SuccessfulExit": False}
    exit_time = settings["ExitTimeOut"]
    assert isinstance(exit_time, int) and exit_time > GRACE
    variables, command = settings["EnvironmentVariables"], settings["ProgramArguments"]
    assert isinstance(variables, dict) and variables["HOME"]
    assert isinstance(command, list)
    options = parsed(command)
    # launchd starts again whatever fails, so giving up must look like success.
    assert options.params["give_up_code"] == 0
    assert options.params["config"].is_absolute()


@pytest.mark.parametrize("name", ["grafana-dashboard.json", "alerts.yml"])
def test_only_metrics_that_exist_are_asked_for(name: str) -> None:
    metrics = Metrics()
    metrics.model("a-model")
    exposed, _ = metrics.exposition()
    known = set(re.findall(r"^# TYPE (sparklane_\w+)", exposed.decode(), re.MULTILINE))
    known |= {f"{metric}{suffix}" for metric in known for suffix in ("_bucket", "_sum", "_count")}
    asked = set(re.findall(r"sparklane_\w+", (DEPLOY / name).read_text()))
    assert asked and not asked - known


def test_no_panel_lies_over_another() -> None:
    panels = json.loads((DEPLOY / "grafana-dashboard.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert {x for x, _ in cells} == set(range(24))
