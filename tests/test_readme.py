"""What the README says about the program is what the program says.

python -m tests.test_readme     writes the configuration's keys into it
"""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path

import pytest
from click import Group

from daemon.application import HttpSettings, create_application
from daemon.cli import cli
from daemon.configuration import decode, describe
from daemon.dispatcher import ModelDispatcher
from daemon.exit_codes import ExitCode
from daemon.metrics import Metrics

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def marked(name: str) -> str:
    """What stands between the comments of that name."""
    _, opening, rest = README.partition(f"<!-- {name} -->\n")
    text, closing, _ = rest.partition(f"<!-- /{name} -->")
    assert opening and closing, f"the README has no part {name!r}"
    return text


def configuration_table() -> str:
    """Every key, as the README should show it."""
    lines = []
    for section, keys in groupby(describe(), key=lambda row: row.section):
        lines += ["", f"`{section}`", "", "| key | default | what |", "|---|---|---|"]
        lines += [f"| `{key.key}` | `{key.default}` | {key.description} |" for key in keys]
    return "\n".join([*lines, "", ""])


def fenced(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_every_key_of_the_configuration_is_there() -> None:
    assert marked("configuration") == configuration_table(), "run: python -m tests.test_readme"


def test_the_example_of_a_configuration_is_one() -> None:
    (text,) = fenced("toml")
    assert decode(text, "README.md").models[0].name == "smollm2-135m"


def test_every_exit_code_is_there() -> None:
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", marked("exit codes"), re.MULTILINE)
    assert rows == [(str(code.value), code.name) for code in ExitCode]


def test_examples_are_python() -> None:
    examples = fenced("python")
    assert examples
    for text in examples:
        compile(text, "README.md", "exec")


def test_commands_are_there_and_real() -> None:
    named = set(re.findall(r"`sparklane (\w+)(?: (\w+))?", README))
    context = cli.make_context("sparklane", ["version"])
    for command, subcommand in named:
        found = cli.get_command(context, command)
        assert found is not None, command
        if isinstance(found, Group) and subcommand:
            assert found.get_command(context, subcommand) is not None, (command, subcommand)
    assert set(cli.list_commands(context)) <= {command for command, _ in named}


def test_every_route_is_there() -> None:
    metrics = Metrics()
    application = create_application(ModelDispatcher([], metrics), HttpSettings(), metrics)
    routes = {
        f"{route.method} {route.resource.canonical}"
        for route in application.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    assert routes == set(re.findall(r"`((?:GET|POST) /[^`]+)`", README))


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#]+?)\)", README))
def test_links_to_files_lead_somewhere(link: str) -> None:
    assert link.startswith("https://") or (ROOT / link).exists()


if __name__ == "__main__":
    table = configuration_table()
    (ROOT / "README.md").write_text(README.replace(marked("configuration"), table, 1))
