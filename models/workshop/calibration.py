"""Calibrate a drafter's confidences on conversations that it was not trained on.

Run as `python -m models.workshop.calibration --target DIR --drafter DIR --corpus DIR`, in a
process of its own. The corpus' held-out questions are answered with whole blocks verified; the
temperatures fitted on all rounds are stored beside the drafter. How far they carry is told by a
fit on one half of the conversations, judged on the other. Exits with 2 when it cannot begin.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from models.calibration import Calibration, CalibrationError, expected_calibration_error, fit
from models.checkpoint import CheckpointError
from models.dspark.calibrate import FEWEST_ROUNDS
from models.dspark.configuration import DrafterError
from models.sampling_settings import Sampling
from models.workshop.corpus import Corpus
from models.workshop.measurement import load_pair
from models.workshop.progress import refuse, say
from models.workshop.run_folder import RunError, fingerprint
from models.workshop.speculation import Answer, Decoder, Round


def fit_answers(answers: Sequence[Answer]) -> Calibration:
    """Fit on all rounds that show the fate of a whole block. Raises `CalibrationError`."""
    rounds = whole_rounds(answers)
    if len(rounds) < FEWEST_ROUNDS:
        raise CalibrationError(
            f"{len(rounds)} rounds are too few, at least {FEWEST_ROUNDS} are needed: give more "
            "conversations, or allow longer answers"
        )
    if any(not one.confidences for one in rounds):
        raise CalibrationError("the drafter has no confidence head, so nothing to calibrate")
    return fit([one.confidences for one in rounds], [one.accepted for one in rounds])


def carried_error(record: Calibration, answers: Sequence[Answer]) -> list[float]:
    """Calibration error of `record` by position on rounds that it was not fitted on."""
    rounds = whole_rounds(answers)
    survival = record.survival([one.confidences for one in rounds])
    accepted = np.array([one.accepted for one in rounds])
    return [
        expected_calibration_error(survival[:, k], (accepted > k).astype(np.float64))
        for k in range(survival.shape[1])
    ]


def whole_rounds(answers: Sequence[Answer]) -> list[Round]:
    """Rounds that no stop token ended."""
    return [one for answer in answers for one in answer.rounds if not one.stopped]


def main(arguments: Sequence[str] | None = None) -> int:
    """The step; returns its exit code."""
    options = _parse(arguments)
    try:
        corpus = Corpus(options.corpus)
        corpus.check(fingerprint(options.target))
        _, held_out = corpus.split(options.held_out)
        prompts = []
        for index in held_out[: options.limit]:
            conversation = corpus[int(index)]
            prompts.append(list(conversation.tokens[: conversation.answer]))
        target, drafter = load_pair(options.target, options.drafter)
        decoder = Decoder(target, drafter)
        say("start", command="calibrate", prompts=len(prompts))
        answers: list[Answer] = []
        started = time.monotonic()
        for at in range(0, len(prompts), options.rows):
            if 0 < options.seconds < time.monotonic() - started:
                break
            group = prompts[at : at + options.rows]
            settings = [
                Sampling(temperature=options.temperature, seed=at + i) for i in range(len(group))
            ]
            answers += decoder.speculative(group, settings, options.max_tokens).answers
            say("progress", done=len(answers), total=len(prompts))
        decoder.close()
        record = fit_answers(answers)
        halves = answers[::2], answers[1::2]
        carried = None
        if min(len(whole_rounds(half)) for half in halves) >= FEWEST_ROUNDS:
            carried = carried_error(fit_answers(halves[0]), halves[1])
        record.save(options.drafter)
    except (
        *(CalibrationError, CheckpointError, DrafterError),
        *(RunError, OSError, ValueError),
    ) as error:
        return refuse(f"cannot calibrate: {error}")
    say(
        "result",
        command="calibrate",
        rounds=record.rounds,
        temperatures=record.temperatures,
        error_before=record.error_before,
        error_after=record.error_after,
        error_on_other_half=carried,
    )
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m models.workshop.calibration", description="Calibrate confidences."
    )
    add = parser.add_argument
    add("--target", type=Path, required=True, help="folder of the target")
    add("--drafter", type=Path, required=True, help="folder of the drafter")
    add("--corpus", type=Path, required=True, help="folder that regen wrote")
    add("--held-out", type=int, default=128, help="as in training")
    add("--limit", type=int, default=1 << 30, help="conversations")
    add("--max-tokens", type=int, default=128, help="tokens of an answer")
    add("--temperature", type=float, default=0.0)
    add("--rows", type=int, default=16, help="conversations side by side")
    add("--seconds", type=float, default=0.0, help="begin no group after so long")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
