"""Prompts to measure with: of a set length, each different from its first words on.

Pure and deterministic. They differ at the start because servers keep what they have read of
earlier prompts, and a benchmark of reading must not measure that. The words are common ones,
a token each in most vocabularies.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

_TEXT = (
    "time year people way day man thing woman life child world school state family student "
    "group country problem hand part place case week company system program question work "
    "government number night point home water room mother area money story fact month lot "
    "right study book eye job word business issue side kind head house service friend father "
    "power hour game line end member law car city community name president team minute idea "
    "body information back parent face others level office door health person art war history "
    "party result change morning reason research girl guy moment air teacher force education"
)
_WORDS = _TEXT.split()
_TASK = "Tell a long story with these words, and go on for as long as you can:"


def prompt(words: int, number: int) -> str:
    """A task with `words` words, the `number`-th of its kind."""
    source = random.Random(f"{number} of {words}")
    chosen = [source.choice(_WORDS) for _ in range(max(1, words))]
    return f"{chosen[0].capitalize()} {number}. {_TASK} {' '.join(chosen)}."


def plain_words(words: int, number: int) -> str:
    """`words` words and nothing else, for prompts that are to be short."""
    source = random.Random(f"plain {number} of {words}")
    return " ".join(source.choice(_WORDS) for _ in range(max(1, words)))


def fitted(tokens: int, number: int, length_of: Callable[[str], int]) -> str:
    """A text whose `length_of` is nearest to `tokens` without being over it.

    `length_of` counts tokens, those of a chat template included. The shortest text there is
    comes back when even that is over.
    """
    low, high = 1, max(2, tokens)
    best = plain_words(1, number)
    while low <= high:
        middle = (low + high) // 2
        text = plain_words(middle, number)
        if length_of(text) <= tokens:
            best, low = text, middle + 1
        else:
            high = middle - 1
    return best


def messages(text: str) -> Sequence[dict[str, str]]:
    """The conversation that asks `text`."""
    return [{"role": "user", "content": text}]
