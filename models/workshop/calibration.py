"""Calibrate a drafter's confidences on conversations that it was not trained on.

Run as `python -m models.workshop.calibration --target DIR --drafter DIR --corpus DIR`, or with
`--prompts FILE` in place of a corpus, in a process of its own. Prompts are answered with coupled
acceptance and whole blocks verified, at every one of `--temperatures`. The paper's temperatures
and, unless `--method sts` asks for those alone, a Platt fit for each sampling temperature are
stored beside the drafter, with the errors they leave on conversations that were left out. Exits
with 2 when it cannot begin, or when the rounds are too few to fit on.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from models.calibration import Calibration, CalibrationError, fit
from models.checkpoint import CheckpointError
from models.dspark.configuration import DrafterError
from models.platt_scaling import PlattFit
from models.sampling_settings import Sampling
from models.workshop.carried_error import Sample, fit_and_judge
from models.workshop.held_out_prompts import prompts_of_corpus, prompts_of_file
from models.workshop.measurement import load_pair
from models.workshop.progress import refuse, say
from models.workshop.run_folder import RunError
from models.workshop.speculation import Answer, Decoder

# With fewer rounds the error of a bin is mostly chance, and so is the fit.
FEWEST_ROUNDS = 40


def calibrate(answers: Mapping[float, Sequence[Answer]], *, platt: bool = True) -> Calibration:
    """Fit on all rounds that show the fate of a whole block, by sampling temperature.

    The answers at each temperature are to the same prompts in the same order. Raises
    `CalibrationError` for too few rounds, and for a drafter without confidences.
    """
    samples = {heat: whole_rounds(answers[heat]) for heat in sorted(answers)}
    for heat, sample in samples.items():
        if len(sample.accepted) < FEWEST_ROUNDS:
            raise CalibrationError(
                f"{len(sample.accepted)} rounds at temperature {heat:g} are too few, at least "
                f"{FEWEST_ROUNDS} are needed: give more prompts, or allow longer answers"
            )
    together = [np.concatenate(parts) for parts in zip(*samples.values(), strict=True)]
    record = fit(together[0], together[1].tolist())
    if not platt:
        return record
    fits = [fit_and_judge(sample, heat) for heat, sample in samples.items()]
    return msgspec.structs.replace(record, fits=fits)


def whole_rounds(answers: Sequence[Answer]) -> Sample:
    """Rounds that no stop token cut short; an answer is a conversation."""
    rounds = [
        (one, number)
        for number, answer in enumerate(answers)
        for one in answer.rounds
        if not one.stopped
    ]
    if any(not one.confidences for one, _ in rounds):
        raise CalibrationError("the drafter has no confidence head, so nothing to calibrate")
    return Sample(
        np.array([one.confidences for one, _ in rounds], dtype=np.float64),
        np.array([one.accepted for one, _ in rounds], dtype=np.int64),
        np.array([number for _, number in rounds], dtype=np.int64),
    )


def answer(
    decoder: Decoder,
    prompts: Sequence[list[int]],
    temperatures: Sequence[float],
    *,
    tokens: int,
    rows: int,
    seconds: float,
) -> dict[float, list[Answer]]:
    """Answers to `prompts` at every temperature, `rows` side by side; no group begins after
    `seconds`, when over 0. Every prompt answered is answered at all temperatures."""
    answers: dict[float, list[Answer]] = {heat: [] for heat in temperatures}
    started = time.monotonic()
    for at in range(0, len(prompts), rows):
        if 0 < seconds < time.monotonic() - started:
            break
        group = prompts[at : at + rows]
        for heat, done in answers.items():
            settings = [Sampling(temperature=heat, seed=at + i) for i in range(len(group))]
            done += decoder.speculative(group, settings, tokens).answers
        say("progress", done=at + len(group), total=len(prompts))
    return answers


def main(arguments: Sequence[str] | None = None) -> int:
    """The step; returns its exit code."""
    options = _parse(arguments)
    try:
        if options.corpus:
            prompts = prompts_of_corpus(options.corpus, options.target, options.held_out)
        else:
            prompts = prompts_of_file(options.prompts, options.target)
        prompts = prompts[: options.limit]
        target, drafter = load_pair(
            options.target, options.drafter, options.precision, options.draft_bits
        )
        highest = max((token for prompt in prompts for token in prompt), default=0)
        if highest >= target.vocabulary_size:
            raise RunError(
                f"a prompt has token {highest}, the target's vocabulary is "
                f"{target.vocabulary_size}: use prompts of this target"
            )
        decoder = Decoder(target, drafter)
        try:
            say("start", command="calibrate", prompts=len(prompts))
            answers = answer(
                decoder,
                prompts,
                options.temperatures,
                tokens=options.max_tokens,
                rows=options.rows,
                seconds=options.seconds,
            )
        finally:
            decoder.close()
        record = calibrate(answers, platt=options.method == "platt")
        record.save(options.drafter)
    except (
        *(CalibrationError, CheckpointError, DrafterError),
        *(RunError, OSError, ValueError),
    ) as error:
        return refuse(f"cannot calibrate: {error}")
    for one in record.fits:
        say("note", message=_table(one))
    say("result", command="calibrate", **_rounded(record))
    return 0


def _table(one: PlattFit) -> str:
    """A fit's errors on conversations left out, by position, in per cent."""
    lines = [
        f"temperature {one.sampling_temperature:g}, {one.rounds} rounds of {one.conversations} "
        "conversations, error in % on those left out",
        "position  scale   bias    raw  temperatures  scale+bias  chance",
    ]
    for k, (scale, bias) in enumerate(zip(one.scales, one.biases, strict=True)):
        lines.append(
            f"{k + 1:8}  {scale:5.2f}  {bias:5.2f}  {100 * one.error_before[k]:5.2f}  "
            f"{100 * one.error_temperatures_only[k]:12.2f}  {100 * one.error_after[k]:10.2f}  "
            f"{100 * one.noise_floor[k]:6.2f}"
        )
    return "\n".join(lines)


def _rounded(record: Calibration) -> dict[str, object]:
    """The record with as many digits as mean something."""

    def shorten(value: object) -> object:
        if isinstance(value, float):
            return round(value, 4)
        if isinstance(value, list):
            return [shorten(one) for one in value]
        if isinstance(value, dict):
            return {name: shorten(one) for name, one in value.items()}
        return value

    return {name: shorten(value) for name, value in msgspec.to_builtins(record).items()}


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m models.workshop.calibration", description="Calibrate confidences."
    )
    add = parser.add_argument
    add("--target", type=Path, required=True, help="folder of the target")
    add("--drafter", type=Path, required=True, help="folder of the drafter")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--corpus", type=Path, help="folder that regen wrote")
    source.add_argument(
        "--prompts", type=Path, help="JSON lines with `prompt`, a text, or `prompt_ids`"
    )
    add("--held-out", type=int, help="conversations of the corpus, as in training; 128 by default")
    add("--limit", type=int, default=1 << 30, help="prompts")
    add("--max-tokens", type=int, default=128, help="tokens of an answer")
    add("--temperatures", type=float, nargs="+", default=[0.0, 1.0], help="of the requests")
    add("--method", choices=("platt", "sts"), default="platt", help="sts: temperatures alone")
    add("--rows", type=int, default=16, help="prompts side by side")
    add("--draft-bits", type=int, choices=(4, 8, 16), help="quantize the drafter")
    add("--precision", default="auto", help="of the target")
    add("--seconds", type=float, default=0.0, help="begin no group after so long")
    options = parser.parse_args(arguments)
    if options.prompts and options.held_out is not None:
        parser.error("--held-out is of a corpus: with --prompts use --limit")
    options.held_out = 128 if options.held_out is None else options.held_out
    return options


if __name__ == "__main__":
    sys.exit(main())
