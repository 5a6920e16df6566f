"""Calibrate a drafter's confidences on prompts of one's own, and store the result beside it.

Run as `python -m models.dspark.calibrate --target DIR --drafter DIR --prompts FILE`, in a
process of its own, with the target as it will be served. FILE is JSON with
`{"prompts": [{"prompt_ids": [...], "max_new_tokens": N}, ...]}`; a DeepSpec trace will do. The
prompts are decoded at temperature 0 with whole blocks verified. Exits with 2 when something
cannot be loaded, or when the rounds are too few to fit on.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from models.calibration import Calibration, CalibrationError, fit
from models.checkpoint import CheckpointError
from models.dspark.configuration import DrafterError, TargetShape
from models.dspark.decode import ReferenceDecoder, Transcript
from models.dspark.loader import load_drafter
from models.target import Target

# With fewer rounds the error of a bin is mostly chance, and so is the fit.
FEWEST_ROUNDS = 40


def calibrate(transcripts: Iterable[Transcript]) -> Calibration:
    """Fit on all rounds that show the fate of a whole block. Raises `CalibrationError`."""
    rounds = [
        one
        for transcript in transcripts
        for one in transcript.rounds
        if not one.terminated_by_stop_token and one.draft_token_count == len(one.draft_tokens)
    ]
    if len(rounds) < FEWEST_ROUNDS:
        raise CalibrationError(
            f"{len(rounds)} rounds are too few, at least {FEWEST_ROUNDS} are needed: give more "
            "prompts, or allow longer answers"
        )
    if any(not one.confidence_logits for one in rounds):
        raise CalibrationError("the drafter has no confidence head, so nothing to calibrate")
    return fit(
        [one.confidence_logits for one in rounds], [one.accepted_draft_tokens for one in rounds]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    options = _parse(arguments)
    try:
        prompts = json.loads(options.prompts.read_text())["prompts"]
        target = Target.load(options.target)
        drafter = load_drafter(
            options.drafter,
            target.model,
            TargetShape.read(options.target),
            bits=options.draft_bits,
        )
        decoder = ReferenceDecoder(target.model, drafter, target.facts.stop_tokens)
        try:
            record = calibrate(
                decoder.decode(prompt["prompt_ids"], prompt["max_new_tokens"]) for prompt in prompts
            )
        finally:
            decoder.close()
        record.save(options.drafter)
    except (
        *(CalibrationError, CheckpointError, DrafterError),
        *(OSError, ValueError, KeyError, TypeError),
    ) as error:
        print(f"cannot calibrate: {error}", file=sys.stderr)
        return 2
    print(f"{record.rounds} rounds\nposition  temperature  error before  after")
    for position, row in enumerate(
        zip(record.temperatures, record.error_before, record.error_after, strict=True), start=1
    ):
        print(f"{position:8}  {row[0]:11.3f}  {row[1]:12.3f}  {row[2]:5.3f}")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m models.dspark.calibrate", description="Calibrate a drafter's confidences."
    )
    parser.add_argument("--target", type=Path, required=True, help="folder of the target")
    parser.add_argument("--drafter", type=Path, required=True, help="folder of the drafter")
    parser.add_argument("--prompts", type=Path, required=True, help="prompts as token ids, JSON")
    parser.add_argument("--draft-bits", type=int, choices=(4, 8, 16), help="quantize the drafter")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
