"""Write a drafter's card: what it is, what it was trained on, what was measured.

Run as `python -m models.workshop.card --drafter DIR --run DIR --corpus DIR --results FILE...`,
in a process of its own. The card, `README.md` beside the weights, says only what the run
folder, the corpus' manifest and the result files say. Exits with 2 when one cannot be read.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from models.calibration import Calibration
from models.dspark.configuration import DrafterError, read_configuration
from models.dspark.shortlist import Shortlist
from models.workshop.progress import refuse, say

Record = dict[str, Any]


def write_card(
    drafter: Path, run: Record, log: Sequence[Record], corpus: Record, results: Sequence[Record]
) -> str:
    """The card as Markdown."""
    c = read_configuration(drafter)
    size = (drafter / "model.safetensors").stat().st_size
    bits = "16-bit" if c.quantization is None else f"{c.quantization['bits']}-bit"
    last = log[-1] if log else {}
    lines = [
        f"# DSpark drafter, {bits}, {size / 1e6:.1f} MB",
        "",
        f"{c.layer_count} layers of width {c.hidden_size}, block {c.block_size}, taps at layers "
        f"{', '.join(map(str, c.tap_layers))} of {c.target_layer_count}, {c.head_kind} head of "
        f"rank {c.markov_rank}. Embedding and output head are the target's and are not stored.",
        *_shortlist_lines(drafter, c.vocabulary_size),
        "",
        f"Target: sha256 of configuration and weights' ends `{run['fingerprint']['target'][:16]}`, "
        f"tokenizer `{run['fingerprint']['tokenizer'][:16]}`.",
        "",
        "## Data",
        "",
        f"{corpus['conversations']:,} conversations, {corpus['answer_tokens']:,} answer tokens, all "
        f"written by the target itself (seed {corpus['seed']}, {corpus['rows']} rows a wave, "
        f"answers at temperatures {corpus['settings']['answer_temperatures']}). Thrown away: "
        + ", ".join(
            f"{n:,} {why}"
            for why, n in corpus.get("screened", {}).items()
            if why not in ("kept", "cut")
        )
        + f". Cut short where they began to loop: {corpus.get('screened', {}).get('cut', 0):,}. "
        f"Nothing that shares 13 words with {', '.join(corpus['excluded']) or 'nothing'}.",
        "",
        "## Training",
        "",
        f"{last.get('step', 0):,} steps of {run['anchors']:,} anchors, seed {run['seed']}, "
        f"optimizer {json.dumps(run['optimizer'])}; last loss {last.get('loss', 0):.4f}.",
        "",
        "Commands: `sparklane drafter regen`, `train`, `calibrate`, `export --quantize`; settings "
        "as above, everything else by default.",
        "",
        "## Measured",
        "",
        "| set | temperature | rows | tokens a round | first 64 | looping answers | speedup |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in results:
        speedup = f"{one['speedup']:.2f}" if "speedup" in one else ""
        lines.append(
            f"| {one['dataset']} | {one['temperature']:g} | {one['rows']} | {one['tau']:.2f} | "
            f"{one['tau_first_64']:.2f} | {100 * one['looping_share']:.0f} % | {speedup} |"
        )
    lines += _cost_lines(results)
    calibration = Calibration.load(drafter, c.block_size)
    if calibration is not None:
        lines += _calibration_lines(calibration)
    return "\n".join(lines) + "\n"


def _shortlist_lines(drafter: Path, vocabulary_size: int) -> list[str]:
    """What the drafter may propose, if that is not everything."""
    record = Shortlist.load(drafter, vocabulary_size)
    if record is None:
        return []
    return [
        "",
        f"Drafts are chosen from a shortlist of {len(record.tokens):,} of {vocabulary_size:,} "
        f"tokens, which hold {100 * record.coverage:.2f} % of {record.counted:,} answer tokens "
        f"(corpus `{record.corpus}`). `--no-draft-shortlist` drafts from all of them.",
    ]


def _cost_lines(results: Sequence[Record]) -> list[str]:
    """What steps and rounds cost where it was measured."""
    lines = [
        f"| {one['dataset']} | {one['cost_rows']} | {one['cost_depth']} | "
        + " | ".join(
            f"{1e3 * one[f'{name}_seconds']:.2f}"
            for name in ("serial_step", "draft", "verify", "round")
        )
        + f" | {one['break_even_tau']:.2f} |"
        for one in results
        if "round_seconds" in one
    ]
    if not lines:
        return []
    return [
        "",
        "Costs in milliseconds. Draft and verification are measured apart; a round waits for the "
        "device once. Speculation pays from as many tokens a round as the last column says.",
        "",
        "| set | rows | tokens of context | serial step | draft | verify | round | pays from |",
        "|---|---|---|---|---|---|---|---|",
        *lines,
    ]


def _calibration_lines(calibration: Calibration) -> list[str]:
    lines = ["", "## Calibration", ""]
    if not calibration.fits:
        lines += [f"{calibration.rounds:,} held-out rounds.", ""]
        lines += ["| position | temperature | error before | after |", "|---|---|---|---|"]
        columns = zip(
            calibration.temperatures,
            calibration.error_before,
            calibration.error_after,
            strict=True,
        )
        for position, (temperature, before, after) in enumerate(columns, start=1):
            lines.append(
                f"| {position} | {temperature:.3f} | {100 * before:.1f} % | {100 * after:.1f} % |"
            )
        return lines
    lines += [
        "Expected calibration error of the probability that the first k drafts are accepted, on "
        "conversations that the judged fit had not seen; chance is what a perfect prediction "
        "would show with as many rounds.",
    ]
    for fit in calibration.fits:
        lines += [
            "",
            f"Sampling temperature {fit.sampling_temperature:g}, {fit.rounds:,} rounds of "
            f"{fit.conversations:,} conversations:",
            "",
            "| k | scale | bias | raw | temperatures only | scale and bias | chance |",
            "|---|---|---|---|---|---|---|",
        ]
        rows = zip(
            fit.error_before,
            fit.error_temperatures_only,
            fit.error_after,
            fit.noise_floor,
            strict=True,
        )
        for position, errors in enumerate(rows):
            shares = " | ".join(f"{100 * error:.1f} %" for error in errors)
            lines.append(
                f"| {position + 1} | {fit.scales[position]:.3f} | {fit.biases[position]:.3f} | "
                f"{shares} |"
            )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """The step; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m models.workshop.card", description="Write a drafter's card."
    )
    add = parser.add_argument
    add("--drafter", type=Path, required=True, help="folder of the drafter")
    add("--run", type=Path, required=True, help="run folder of its training")
    add("--corpus", type=Path, required=True, help="folder of its corpus, or its manifest")
    add("--results", type=Path, nargs="*", default=[], help="what measure wrote with --out")
    options = parser.parse_args(arguments)
    manifest = options.corpus / "manifest.json" if options.corpus.is_dir() else options.corpus
    try:
        log = (options.run / "log.jsonl").read_text().splitlines()
        card = write_card(
            options.drafter,
            json.loads((options.run / "configuration.json").read_text()),
            [json.loads(line) for line in log],
            json.loads(manifest.read_text()),
            [json.loads(file.read_text()) for file in options.results],
        )
        (options.drafter / "README.md").write_text(card)
    except (DrafterError, OSError, ValueError, KeyError) as error:
        return refuse(f"cannot write the card: {error!r}")
    say("result", command="card", card=str(options.drafter / "README.md"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
