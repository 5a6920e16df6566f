"""Choose the tokens that a drafter may propose: the most frequent of a corpus' answers.

Run as `python -m models.workshop.shortlist --corpus DIR --drafter DIR --size N`, in a process
of its own. The heads of a drafter cost by the token, and answers use few of them. The record is
stored beside the drafter and used from then on wherever it drafts; its weights stay what they
are. What it covers of conversations that were not counted is told, too. Exits with 2 when it
cannot begin.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from models.dspark.configuration import DrafterError, read_configuration
from models.dspark.shortlist import Shortlist
from models.workshop.corpus import MANIFEST, Corpus
from models.workshop.progress import refuse, say
from models.workshop.run_folder import RunError


def most_frequent(counts: NDArray[np.int64], size: int) -> tuple[int, ...]:
    """The `size` ids of the highest `counts` [V], ascending.

    Of equals, the lower id: tokenizers give low ids to what is frequent in text at large.
    """
    order = np.argsort(-counts, kind="stable")
    return tuple(np.sort(order[:size]).tolist())


def coverage(counts: NDArray[np.int64], tokens: Sequence[int]) -> float:
    """The share of what was counted that is among `tokens`; 0 when nothing was."""
    return float(counts[list(tokens)].sum() / max(int(counts.sum()), 1))


def main(arguments: Sequence[str] | None = None) -> int:
    """The step; returns its exit code."""
    options = _parse(arguments)
    try:
        vocabulary = read_configuration(options.drafter).vocabulary_size
        if not 1 <= options.size <= vocabulary:
            raise RunError(
                f"--size is {options.size}; the drafter's vocabulary allows 1 to {vocabulary}"
            )
        corpus = Corpus(options.corpus)
        say("start", command="shortlist", conversations=len(corpus))
        counted, others = corpus.split(options.held_out)
        counts = corpus.answer_counts(counted, vocabulary)
        if not counts.any():
            raise RunError(f"{options.corpus} holds no answers: run regen again")
        tokens = most_frequent(counts, options.size)
        record = Shortlist(
            tokens=tokens,
            coverage=coverage(counts, tokens),
            counted=int(counts.sum()),
            corpus=hashlib.sha256((options.corpus / MANIFEST).read_bytes()).hexdigest()[:16],
        )
        record.check(vocabulary)
        record.save(options.drafter)
    except (DrafterError, RunError, OSError, ValueError) as error:
        return refuse(f"cannot choose a shortlist: {error}")
    say(
        "result",
        command="shortlist",
        tokens=len(tokens),
        vocabulary=vocabulary,
        counted=record.counted,
        distinct=int((counts > 0).sum()),
        coverage=round(record.coverage, 6),
        held_out_coverage=round(coverage(corpus.answer_counts(others, vocabulary), tokens), 6),
    )
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m models.workshop.shortlist", description="Choose what may be proposed."
    )
    add = parser.add_argument
    add("--corpus", type=Path, required=True, help="folder that regen wrote")
    add("--drafter", type=Path, required=True, help="folder of the drafter")
    add("--size", type=int, required=True, help="tokens")
    add("--held-out", type=int, default=128, help="conversations not counted, as in training")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
