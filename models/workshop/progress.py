"""How a step tells what it is doing: one JSON object a line on standard output.

Every line has `event`. A step begins with event "start" and its `command`; lines of event
"progress" have `done` and, where it is known, `total`, in a unit of the step's own. It ends with
event "result" or, before it exits with 2, "refused" and a `message`.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def say(event: str, **fields: Any) -> None:
    """Print one line and flush it."""
    print(json.dumps({"event": event, **fields}), flush=True)


def refuse(message: str) -> int:
    """Say why a step does not run; returns its exit code."""
    say("refused", message=message)
    print(message, file=sys.stderr)
    return 2
