"""systemd's own judgement of the unit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.system.conftest import DEPLOY

PROGRAM = "/opt/sparklane/bin/sparklane"


def verified(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """What systemd says of a unit whose program exists."""
    path = folder / "sparklane.service"
    path.write_text(text.replace(PROGRAM, sys.executable))
    return subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(path)],
        capture_output=True,
        text=True,
    )


def test_the_unit_is_accepted(tmp_path: Path) -> None:
    text = (DEPLOY / "sparklane.service").read_text()
    assert PROGRAM in text
    done = verified(text, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_unknown_setting_would_be_noticed(tmp_path: Path) -> None:
    text = (DEPLOY / "sparklane.service").read_text()
    done = verified(text.replace("WatchdogSec=", "WatchdogSeconds="), tmp_path)
    assert "WatchdogSeconds" in done.stderr
