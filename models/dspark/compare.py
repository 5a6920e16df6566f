"""Replay a DeepSpec trace round for round and report the first difference.

Run as `python -m models.dspark.compare --trace FILE --target DIR --drafter DIR`, in a process
of its own. A wrong drafter still yields the right text, because the target decides; only the
trace's numbers tell. In float32 every integer of every round must be equal and confidence
logits within 1e-3; the exit code is 1 on a difference, 2 when something cannot be loaded.
`--acceptance-only` prints acceptance beside the trace's instead, for pairs whose arithmetic
differs, such as quantized ones. MLX's own matrix products are used, not a faster BLAS: they
give the same bits for one row and for several.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec

from models.checkpoint import CheckpointError
from models.dspark.configuration import DrafterError, TargetShape
from models.dspark.decode import ReferenceDecoder, Round, Transcript
from models.dspark.loader import load_drafter
from models.target import Target

CONFIDENCE_TOLERANCE = 1e-3

_EXACT = (
    "start",
    "anchor",
    "context_rows",
    "draft_cache_before",
    "draft_tokens",
    "base_argmax",
    "draft_cache_after",
    "draft_token_count",
    "verify_input_ids",
    "target_argmax",
    "accepted_draft_tokens",
    "effective_proposal_length",
    "terminated_by_stop_token",
    "committed",
)


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Where a replay parts from the trace. `round` is None for what concerns a whole answer."""

    prompt: str
    round: int | None
    field: str
    expected: Any
    actual: Any
    context: str

    def __str__(self) -> str:
        place = "" if self.round is None else f", round {self.round}"
        return (
            f"prompt {self.prompt!r}{place}: {self.field} differs\n"
            f"  trace:  {self.expected}\n  replay: {self.actual}\n  {self.context}"
        )


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a replay; `worst_confidence` is the largest difference of a logit."""

    rounds: int
    worst_confidence: float
    difference: Difference | None


class Acceptance(msgspec.Struct, frozen=True, kw_only=True):
    """`tokens_per_round` counts the bonus token; `by_position` is the share of verified drafts
    at each position that were accepted with all before them."""

    rounds: int
    tokens_per_round: float
    by_position: list[float]


def replay(trace: Mapping[str, Any], decode: Callable[[list[int], int], Transcript]) -> Report:
    """Decode every prompt of `trace` and compare; stops at the first difference."""
    count, worst = 0, 0.0
    for prompt in trace["prompts"]:
        transcript = decode(prompt["prompt_ids"], prompt["max_new_tokens"])
        for expected, actual in zip(prompt["rounds"], transcript.rounds, strict=False):
            deviation, difference = _compare_round(prompt["id"], expected, actual)
            count, worst = count + 1, max(worst, deviation)
            if difference is not None:
                return Report(rounds=count, worst_confidence=worst, difference=difference)
        for field, wanted, got in (
            ("first_token", prompt["first_token"], transcript.first_token),
            ("number of rounds", len(prompt["rounds"]), len(transcript.rounds)),
            ("output_ids", prompt["output_ids"], transcript.output),
        ):
            if wanted != got:
                difference = Difference(
                    prompt=prompt["id"],
                    round=None,
                    field=field,
                    expected=wanted,
                    actual=got,
                    context=f"{len(prompt['prompt_ids'])} prompt tokens",
                )
                return Report(rounds=count, worst_confidence=worst, difference=difference)
    return Report(rounds=count, worst_confidence=worst, difference=None)


def measure_acceptance(rounds: Sequence[Mapping[str, Any]], block_size: int) -> Acceptance:
    """Acceptance over rounds in the trace's own shape."""
    proposed, accepted = [0] * block_size, [0] * block_size
    for one in rounds:
        for position in range(one["effective_proposal_length"]):
            proposed[position] += 1
            accepted[position] += position < one["accepted_draft_tokens"]
    return Acceptance(
        rounds=len(rounds),
        tokens_per_round=sum(len(one["committed"]) for one in rounds) / max(len(rounds), 1),
        by_position=[a / p if p else 0.0 for a, p in zip(accepted, proposed, strict=True)],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    options = _parse(arguments)
    try:
        trace = json.loads(options.trace.read_text())
        precision = "auto" if options.acceptance_only else "float32"
        target = Target.load(options.target, precision).model
        drafter = load_drafter(
            options.drafter,
            target,
            TargetShape.read(options.target),
            bits=options.draft_bits,
            own_head=options.draft_own_head,
            dtype=None if options.acceptance_only else mx.float32,
            # A trace is of a drafter that proposes from the whole vocabulary.
            shortlist=False,
        )
    except (CheckpointError, DrafterError, OSError, ValueError) as error:
        print(f"cannot compare: {error}", file=sys.stderr)
        return 2
    decoder = ReferenceDecoder(
        target, drafter, trace["stop_token_ids"], trace["confidence_threshold"]
    )
    try:
        if options.acceptance_only:
            _print_acceptance(trace, decoder)
            return 0
        report = replay(trace, decoder.decode)
    finally:
        decoder.close()
    if report.difference is not None:
        print(report.difference)
        return 1
    print(
        f"{len(trace['prompts'])} prompts, {report.rounds} rounds equal; confidence logits "
        f"within {report.worst_confidence:.1e}"
    )
    return 0


def _compare_round(
    prompt: str, expected: Mapping[str, Any], actual: Round
) -> tuple[float, Difference | None]:
    def difference(field: str, wanted: Any, got: Any, context: str) -> Difference:
        return Difference(
            prompt=prompt,
            round=expected["round"],
            field=field,
            expected=wanted,
            actual=got,
            context=context,
        )

    where = f"anchor {expected['anchor']} at index {expected['start']}"
    deviations = [
        abs(a - b)
        for a, b in zip(expected["confidence_logits"], actual.confidence_logits, strict=False)
    ]
    worst = max(deviations, default=0.0)
    for field in _EXACT:
        wanted, got = expected[field], getattr(actual, field)
        if wanted != got:
            context = f"{where}; draft margins in the trace {expected['draft_margins']}"
            return worst, difference(field, wanted, got, context)
    wanted, got = expected["confidence_logits"], actual.confidence_logits
    if len(wanted) != len(got) or worst > CONFIDENCE_TOLERANCE:
        context = f"{where}; largest deviation {worst:.1e}, allowed {CONFIDENCE_TOLERANCE:.0e}"
        return worst, difference("confidence_logits", wanted, got, context)
    return worst, None


def _print_acceptance(trace: Mapping[str, Any], decoder: ReferenceDecoder) -> None:
    block, recorded, replayed, equal = trace["block_size"], [], [], 0
    for prompt in trace["prompts"]:
        transcript = decoder.decode(prompt["prompt_ids"], prompt["max_new_tokens"])
        recorded += prompt["rounds"]
        replayed += [msgspec.structs.asdict(one) for one in transcript.rounds]
        equal += transcript.output == prompt["output_ids"]
    for name, rounds in (("trace", recorded), ("replay", replayed)):
        result = measure_acceptance(rounds, block)
        positions = " ".join(f"{value:.2f}" for value in result.by_position)
        print(
            f"{name:6}  {result.rounds} rounds, {result.tokens_per_round:.2f} tokens a round, "
            f"accepted by position {positions}"
        )
    print(f"{equal} of {len(trace['prompts'])} answers equal to the trace's")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m models.dspark.compare", description="Replay a DeepSpec trace."
    )
    parser.add_argument("--trace", type=Path, required=True, help="a DeepSpec trace, JSON")
    parser.add_argument("--target", type=Path, required=True, help="folder of the target")
    parser.add_argument("--drafter", type=Path, required=True, help="folder of the drafter")
    parser.add_argument("--acceptance-only", action="store_true", help="compare acceptance only")
    parser.add_argument("--draft-bits", type=int, choices=(4, 8, 16), help="quantize the drafter")
    parser.add_argument("--draft-own-head", action="store_true", help="keep the drafter's head")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
