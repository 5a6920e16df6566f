"""What a training run can be told on the command line.

Pure; any thread.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from models.dspark.configuration import HeadKind
from models.workshop.stored_taps import DTYPES


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of a run; leaves with 2 where they do not make one."""
    parser = argparse.ArgumentParser(
        prog="python -m models.workshop.training", description="Train a drafter."
    )
    add = parser.add_argument
    add("--target", type=Path, required=True, help="folder of the target")
    add("--corpus", type=Path, nargs="+", required=True, help="folders that regen wrote")
    add("--run", type=Path, required=True, help="run folder, made if need be")
    add("--resume", action="store_true", help="go on from the run's checkpoint")
    add(
        "--stored-taps",
        nargs="?",
        const="",
        metavar="DIR",
        help="read taps that `taps` wrote, from `taps` in the corpus' folder when DIR is left out",
    )
    add("--steps", type=int, default=0, help="end after so many steps")
    add("--seconds", type=float, default=0.0, help="end after so much wall clock")
    add("--head", default="vanilla", choices=[str(kind) for kind in HeadKind])
    add("--tap-layers", type=int, nargs="+", help="target layers from 0; a spread by default")
    add("--layers", type=int, default=3, help="layers of the drafter")
    add("--block", type=int, default=7, help="tokens drafted at once")
    add("--rank", type=int, default=64, help="rank of the Markov head")
    add("--mask-token", type=int, help="id of a token that text never holds")
    add("--start-from", type=Path, help="drafter whose weights to begin with")
    add("--optimizer", default="muon", choices=("muon", "adamw"))
    add("--rate", type=float, default=6e-4, help="AdamW's peak learning rate")
    add("--matrix-rate", type=float, default=2e-3, help="Muon's")
    add("--markov-rate", type=float, default=1e-3, help="AdamW's for the Markov head")
    add("--anchors", type=int, default=4096, help="anchors a step")
    add("--batch-tokens", type=int, default=12288, help="tokens a step, padding included")
    add("--longest", type=int, default=384, help="conversations are cut to so many tokens")
    add(
        "--quantize-aware",
        metavar="RECIPE",
        help='learn with weights rounded as `export --quantize RECIPE` will, such as "4:32"',
    )
    add("--rows", type=int, default=4096, help="positions whose logits are held at once")
    add("--held-out", type=int, default=128, help="conversations kept from training")
    add("--precision", choices=tuple(DTYPES), help="float32 on the CPU, bfloat16 on a GPU")
    add("--seed", type=int, default=0)
    add("--log-every", type=int, default=20, help="steps")
    add("--evaluate-every", type=int, default=500, help="steps; a multiple of --log-every")
    add("--save-every", type=float, default=120.0, help="seconds between checkpoints")
    options = parser.parse_args(arguments)
    if not options.steps and not options.seconds:
        parser.error("give --steps or --seconds")
    return options
