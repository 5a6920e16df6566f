"""The real daemon in front of a fake engine: `python -m daemon.bench.fake_daemon --config FILE`.

For measuring what the daemon can fan out, without a model that would set the pace. Everything
but the engine process is what `sparklane serve` runs. `--tokens-per-second` is each stream's.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import uvloop

from daemon.child_process import python_command
from daemon.configuration import load
from daemon.exit_codes import SparklaneError
from daemon.server import serve


def main() -> int:
    """Serve until told to stop; returns the exit code."""
    parser = argparse.ArgumentParser(prog="daemon.bench.fake_daemon", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--tokens-per-second", type=float, default=20.0)
    arguments = parser.parse_args()
    engine = python_command(
        "-m",
        "daemon.bench.fake_engine",
        "--tokens-per-second",
        str(arguments.tokens_per_second),
    )
    try:
        return uvloop.run(serve(load(arguments.config), engine_command=engine))
    except SparklaneError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
