"""Where this machine keeps what sparklane can make again: checkpoints, wheels, libraries.

Pure: reads the environment, creates nothing. Every process asks here, so that an engine
started by hand finds what the daemon prepared.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def default_cache_folder() -> Path:
    """`$SPARKLANE_CACHE`, or the platform's own cache folder. It may not exist yet."""
    if chosen := os.environ.get("SPARKLANE_CACHE"):
        return Path(chosen).expanduser().absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "sparklane"
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "sparklane"
