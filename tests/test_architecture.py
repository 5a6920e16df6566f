"""The house's rules: imports go daemon → scheduler → models, the daemon lives without mlx."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon.child_process import python_command, python_environment

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("daemon", "scheduler", "models")
MAY_IMPORT = {
    "daemon": {"daemon", "scheduler", "models"},
    "scheduler": {"scheduler", "models"},
    "models": {"models"},
}
HEAVY = {"mlx", "mlx_lm", "transformers", "torch", "numpy"}
HTTP = {"aiohttp", "http", "urllib", "requests", "uvloop"}
MOST_LINES = 400


def modules(root: Path) -> dict[str, Path]:
    """Every module of the packages under `root`, by name."""
    found = {}
    for package in PACKAGES:
        for path in (root / package).rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path) -> Iterator[str]:
    """The names that a file imports, wherever in it, but for those of type checking."""
    tree = ast.parse(path.read_text(), str(path))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in (
            "TYPE_CHECKING",
            "typing.TYPE_CHECKING",
        ):
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def outermost(names: Iterator[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def reached(start: str, known: dict[str, Path]) -> dict[str, list[str]]:
    """Everything outside our packages that `start` leads to, with the way there."""
    outside: dict[str, list[str]] = {}
    ways = {start: [start]}
    waiting = [start]
    while waiting:
        module = waiting.pop()
        for name in imports(known[module]):
            way = [*ways[module], name]
            if name in known:
                if name not in ways:
                    ways[name] = way
                    waiting.append(name)
            elif name.partition(".")[0] not in PACKAGES:
                outside.setdefault(name.partition(".")[0], way)
    return outside


def violations(root: Path) -> list[str]:
    """What breaks the rules in the packages under `root`."""
    found = []
    known = modules(root)
    for name, path in known.items():
        package = name.partition(".")[0]
        upward = outermost(imports(path)) & set(PACKAGES) - MAY_IMPORT[package]
        found += [f"{name} imports {other}" for other in sorted(upward)]
        if package != "daemon":
            used = outermost(imports(path)) & HTTP
            found += [f"{name} imports {other}, which is HTTP's" for other in sorted(used)]
        if package == "daemon":
            outside = reached(name, known)
            found += [" → ".join(outside[heavy]) for heavy in sorted(HEAVY & outside.keys())]
    return found


def test_imports_go_one_way_and_the_daemon_has_no_mlx() -> None:
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("module", "text", "expected"),
    [
        ("models/low.py", "def f():\n    import scheduler.row", "models.low imports scheduler"),
        ("scheduler/middle.py", "from daemon import x", "scheduler.middle imports daemon"),
        ("scheduler/middle.py", "import aiohttp", "scheduler.middle imports aiohttp"),
        ("daemon/top.py", "import mlx.core as mx", "daemon.top → mlx.core"),
        ("daemon/top.py", "from models import low", "daemon.top → models.low → mlx_lm.utils"),
    ],
)
def test_a_broken_rule_is_found(tmp_path: Path, module: str, text: str, expected: str) -> None:
    for package in PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "models/low.py").write_text("import mlx_lm.utils")
    (tmp_path / module).write_text(text)
    assert [words for words in violations(tmp_path) if words.startswith(expected)]


def test_typing_imports_are_not_run(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import mlx\nelse:\n    import os\n"
    )
    assert set(imports(path)) == {"typing", "typing.TYPE_CHECKING", "os"}


def test_a_running_daemon_has_no_mlx() -> None:
    """What the imports of a real process bring, libraries of others included."""
    names = sorted(
        name
        for name in modules(ROOT)
        if name.startswith("daemon") and not name.endswith("__main__")
    )
    assert "daemon.server" in names
    code = (
        "import importlib, sys\n"
        f"for name in {names}: importlib.import_module(name)\n"
        f"print(sorted(sys.modules.keys() & {HEAVY}))"
    )
    done = subprocess.run(
        python_command("-c", code),
        env=python_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_files_hold_one_idea() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for path in modules(ROOT).values()
    }
    assert {path: lines for path, lines in lengths.items() if lines > MOST_LINES} == {}


def test_modules_say_what_they_are() -> None:
    silent = [
        name
        for name, path in modules(ROOT).items()
        if path.stat().st_size and ast.get_docstring(ast.parse(path.read_text())) is None
    ]
    assert silent == []
