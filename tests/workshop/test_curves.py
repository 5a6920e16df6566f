"""The plot of a run: drawn where matplotlib is installed, and asked for where it is not."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from models.workshop.run_folder import RunFolder

ROOT = Path(__file__).parent.parent.parent


def _logged(path: Path) -> RunFolder:
    folder = RunFolder(path)
    losses = ("loss", "distance", "cross_entropy", "confidence", "tokens_per_round")
    for step in range(1, 6):
        record = {"step": step, **{name: 2.0 / step for name in losses}}
        folder.log({**record, "held_out_tokens_per_round": 1.5} if step == 4 else record)
    return folder


def test_curves_are_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert _logged(tmp_path).plot() is None
    picture = (tmp_path / "training.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = (int.from_bytes(picture[at : at + 4], "big") for at in (16, 20))
    assert width > 1000 and height > 400 and len(picture) > 10_000


def test_a_run_without_a_log_says_so(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert RunFolder(tmp_path).plot() == "the log has no losses yet"


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    missing = _logged(tmp_path).plot()
    assert missing is not None and "pip install 'sparklane[plots]'" in missing
    assert not (tmp_path / "training.png").exists()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (requirement,) = project["optional-dependencies"]["plots"]
    assert requirement.startswith("matplotlib")
