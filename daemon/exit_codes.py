"""Exit codes of the command line, and the one exception that carries them.

Owns the numbers; runs nowhere. They follow sysexits.h where it has a fitting code, so that
a service unit can name the ones a restart cannot cure (`CONFIGURATION`, `CHECKPOINT`).
"""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    """What the process ended with."""

    OK = 0
    USAGE = 2
    CHECKPOINT = 65
    PORT_IN_USE = 69
    ENGINE = 70
    DISK_FULL = 74
    CACHE_LOCKED = 75
    NETWORK = 76
    CONFIGURATION = 78


class SparklaneError(Exception):
    """An error told to the user in one line: what is wrong, the limit, the remedy."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
