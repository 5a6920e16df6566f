"""What speculation is measured with: questions of our own, or the prompts of a DeepSpec trace.

How many drafts are accepted depends on the text, so these are questions that people ask, of
several kinds, and not random words. Pure but for reading files; what cannot be read raises
`SparklaneError`.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from daemon.bench.paired_prompts import PairedPrompts
from daemon.exit_codes import ExitCode, SparklaneError
from models.checkpoint import CheckpointError, inspect

# Of every kind among the first four, since few are used on a slow machine.
QUESTIONS = (
    "A baker fills 6 trays with 14 rolls each and sells 59 rolls. How many rolls are left?",
    "Write a Python function that returns the largest number of a list without using max.",
    "Why do leaves change their colour in autumn?",
    "A cyclist rides 18 km in 45 minutes. At the same speed, how far does she ride in 2 hours?",
    "Give me three tips for learning the names of many new colleagues.",
    "Write a Python function that counts how often each word appears in a text.",
    "A school buys 12 boxes of 24 pencils and shares them among 36 pupils. How many are there for "
    "each pupil?",
    "Explain in a few sentences how a bicycle stays upright.",
)


class Prompts(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts as tokens, and the tokens that end an answer."""

    tokens: list[list[int]]
    stop_tokens: list[int]


class _TracePrompt(msgspec.Struct):
    prompt_ids: list[int]


class _Trace(msgspec.Struct):
    prompts: list[_TracePrompt]
    stop_token_ids: list[int]


def our_questions(target: Path, count: int) -> Prompts:
    """The first `count` questions in the target's chat template.

    Raises:
        SparklaneError: there are not so many, or the target has no chat template.
    """
    paired = PairedPrompts(target)
    try:
        stops = list(inspect(target).stop_tokens)
    except CheckpointError as error:
        raise SparklaneError(str(error), ExitCode.CHECKPOINT) from error
    tokens = [paired.tokens_of(question) for question in QUESTIONS]
    return Prompts(tokens=_first(tokens, count, "the benchmark"), stop_tokens=stops)


def of_trace(path: Path, count: int) -> Prompts:
    """The first `count` prompts of a DeepSpec trace.

    Raises:
        SparklaneError: it cannot be read, or has not so many.
    """
    try:
        trace = msgspec.json.decode(path.read_bytes(), type=_Trace)
    except (OSError, msgspec.DecodeError) as error:
        raise SparklaneError(f"{path} is no DeepSpec trace: {error}", ExitCode.USAGE) from error
    tokens = [prompt.prompt_ids for prompt in trace.prompts]
    return Prompts(tokens=_first(tokens, count, str(path)), stop_tokens=trace.stop_token_ids)


def _first(tokens: list[list[int]], count: int, source: str) -> list[list[int]]:
    if count > len(tokens):
        raise SparklaneError(
            f"--prompts is {count}, but {source} has {len(tokens)} prompts: ask for fewer",
            ExitCode.USAGE,
        )
    return tokens[:count]
