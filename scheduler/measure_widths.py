"""What rounds cost here, measured on demand: `python -m scheduler.measure_widths ...`.

Loads a target and a drafter as an engine does, measures the cost table as an engine does, and
prints each measurement as a `CostRecord` in JSON, a line each; how far it is goes to stderr.
More than one measurement lets a choice made by one be judged by another. Owns MLX on its main
thread. Ends with 65 when the pair cannot be used.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import msgspec

from models import blas, cuda_settings
from models.checkpoint import CheckpointError
from models.dspark.configuration import DrafterError
from scheduler.messages import DraftConfigure


def main() -> int:
    """Measure and print. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="scheduler.measure_widths", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of the target")
    parser.add_argument("--draft-model", type=Path, required=True, help="folder of the drafter")
    parser.add_argument("--precision", default="auto", help="of the target")
    parser.add_argument("--draft-bits", type=int, default=4, choices=(4, 8, 16))
    parser.add_argument("--draft-group-size", type=int, default=64)
    parser.add_argument("--no-draft-shortlist", action="store_true", help="ignore a stored one")
    parser.add_argument("--maximum-rows", type=int, default=8)
    parser.add_argument("--depth", type=int, action="append", help="context tokens; repeatable")
    parser.add_argument("--width", type=int, action="append", help="anchor included; repeatable")
    parser.add_argument("--repeats", type=int, default=5, help="samples of a cost")
    parser.add_argument("--measurements", type=int, default=1, help="whole tables")
    arguments = parser.parse_args()
    try:
        _measure(arguments)
    except (CheckpointError, DrafterError) as error:
        print(error, file=sys.stderr)
        return os.EX_DATAERR
    return os.EX_OK


def _measure(arguments: argparse.Namespace) -> None:
    cuda_settings.prepare(growing_keys=True)
    blas_name = blas.load()

    # MLX takes its BLAS from what the process has loaded when it is first imported.
    from models.dspark.configuration import TargetShape
    from models.dspark.loader import load_drafter
    from models.taps import Taps
    from models.target import Target
    from scheduler.cost_measurement import DEPTH, measure
    from scheduler.speculation import cost_key

    configure = DraftConfigure(
        drafter=str(arguments.draft_model),
        bits=arguments.draft_bits,
        group_size=arguments.draft_group_size,
        shortlist=not arguments.no_draft_shortlist,
    )
    target = Target.load(arguments.model, arguments.precision)
    drafter = load_drafter(
        arguments.draft_model,
        target.model,
        TargetShape.read(arguments.model),
        bits=configure.bits,
        group_size=configure.group_size,
        own_head=configure.own_head,
        shortlist=configure.shortlist,
    )
    taps = Taps(target.model, drafter.configuration.tap_layers)
    key = cost_key(target, drafter, configure, maximum_rows=arguments.maximum_rows, blas=blas_name)
    # A width of 1 is a serial step: nothing can be compared without it.
    widths = sorted({1, *arguments.width}) if arguments.width else None

    for number in range(1, arguments.measurements + 1):

        def report(share: float, number: int = number) -> None:
            words = f"measurement {number} of {arguments.measurements}: {share:.0%}"
            print(words, file=sys.stderr, flush=True)

        record = measure(
            target,
            drafter,
            taps,
            key,
            depths=arguments.depth or (DEPTH,),
            widths=widths,
            repeats=arguments.repeats,
            progress=report,
        )
        sys.stdout.buffer.write(msgspec.json.encode(record) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
