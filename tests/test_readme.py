"""The README says what is so. `python -m tests.test_readme` writes its configuration table anew."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from daemon.cli import cli
from daemon.configuration import decode, describe
from daemon.exit_codes import ExitCode

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- configuration -->\n", "<!-- /configuration -->"


def configuration_table() -> str:
    """Every key of the configuration as Markdown."""
    lines = ["| section | key | default | what |", "|---|---|---|---|"]
    for row in describe():
        default = row.default if row.default in ("none", "required") else f"`{row.default}`"
        lines.append(f"| `{row.section}` | `{row.key}` | {default} | {row.description} |")
    return "\n".join(lines) + "\n"


def with_table(text: str) -> str:
    """The README's text with the table as it should be."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{configuration_table()}{END}{after}"


def blocks(language: str) -> list[str]:
    """The README's code in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)


def test_the_configuration_table_is_current() -> None:
    text = README.read_text()
    assert text.count(BEGIN) == text.count(END) == 1
    assert text == with_table(text), "run: python -m tests.test_readme"


def test_the_example_configuration_is_valid() -> None:
    (example,) = blocks("toml")
    assert decode(example, "README.md").models[0].maximum_rows == 16


def test_the_python_example_compiles() -> None:
    (example,) = blocks("python")
    compile(example, "README.md", "exec")


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_every_command_is_named(name: str) -> None:
    assert f"`sparklane {name}" in README.read_text()


def test_every_exit_code_is_named() -> None:
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", README.read_text(), re.MULTILINE)}
    assert listed == {int(code) for code in ExitCode} - {ExitCode.OK}


if __name__ == "__main__":
    README.write_text(with_table(README.read_text()))
