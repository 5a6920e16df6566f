"""What a measurement says: acceptance by position, loops, divergences, ratios.

Pure; any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from models.workshop.screening import distinct_share
from models.workshop.speculation import Answer


def acceptance(answers: Sequence[Answer], block: int, within: int | None = None) -> dict[str, Any]:
    """`tau` is the tokens of a round, bonus included, `tau_by_position` the share of drafts at
    each position accepted with all before them, and `conditional` the share of those whose
    predecessors were. Rounds that a stop token ended count only what they drafted up to it.
    With `within`, only rounds that begin in the first so many tokens of their answer count."""
    rounds = [
        one
        for answer in answers
        for one in answer.rounds
        if within is None or one.produced < within
    ]
    whole = [one for one in rounds if not one.stopped]
    proposed, accepted = [0] * block, [0] * block
    for one in whole:
        for position in range(one.drafted):
            proposed[position] += 1
            accepted[position] += one.accepted > position
    survival = [a / p if p else 0.0 for a, p in zip(accepted, proposed, strict=True)]
    before = [1.0, *survival[:-1]]
    return {
        "tau": sum(one.accepted + 1 for one in whole) / max(len(whole), 1),
        "tau_by_position": [round(value, 4) for value in survival],
        "conditional": [
            round(s / b, 4) if b else 0.0 for s, b in zip(survival, before, strict=True)
        ],
        "rounds": len(whole),
    }


def looping_share(answers: Sequence[Answer]) -> float:
    """How many answers repeat themselves, which flatters acceptance at temperature 0."""
    loops = [distinct_share(np.array(answer.tokens, dtype=np.int64)) < 0.6 for answer in answers]
    return sum(loops) / max(len(loops), 1)


def divergences(serial: Sequence[Answer], speculative: Sequence[Answer]) -> list[dict[str, Any]]:
    """Where the texts part, and how close the target's two best tokens were there: with a
    tiny margin it is rounding, with a large one a bug."""
    found = []
    for index, (one, other) in enumerate(zip(serial, speculative, strict=True)):
        for at, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=False)):
            if a != b:
                margin = one.margins[at] if at < len(one.margins) else None
                found.append({"prompt": index, "token": at, "margin": margin})
                break
    return found
