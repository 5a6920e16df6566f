"""How the daemon starts Python processes of its own: same interpreter, same packages.

Pure. The working folder is kept off the import path: `models` is a common folder name, and
a user's own must not be imported in place of ours.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_PACKAGES = Path(__file__).resolve().parent.parent


def python_command(*arguments: str) -> list[str]:
    """The command line of a child, such as `python_command("-m", "models.smollm2", ...)`."""
    return [sys.executable, "-P", *arguments]


def python_environment(**extra: str) -> dict[str, str]:
    """The environment of a child: ours, `extra`, and our packages ahead of all others."""
    path = os.pathsep.join(filter(None, [str(_PACKAGES), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, **extra, "PYTHONPATH": path}
