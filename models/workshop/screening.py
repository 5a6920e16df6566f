"""What is thrown away of what a target wrote: loops, repeats, and anything to be measured with.

Pure NumPy; any thread, but one at a time: it remembers what it has let through.
"""

from __future__ import annotations

import enum
import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

_GRAM = 4
# An answer that says nothing new for so many tokens loops: enough of it to learn that what was
# repeated goes on.
_PATIENCE = 48
_NEWS = 0.25
_WORDS = re.compile(r"[a-z0-9]+")


class Verdict(enum.StrEnum):
    """Why a conversation is kept or not."""

    KEPT = "kept"
    SHORT = "short"
    LOOP = "loop"
    REPEATED = "repeated"
    EXCLUDED = "excluded"


class Screen:
    """Judges conversations one after the other.

    An answer of fewer than `shortest` tokens teaches nothing, as in the paper (14). A loop is
    an answer in which less than `distinct` of the 4-grams are different ones. `excluded` are
    texts none of which may be in a conversation: any 13 words in a row of theirs count, but not
    what is common to many of them, such as an instruction that is in every prompt of a set.
    """

    def __init__(
        self,
        excluded: Iterable[str] = (),
        *,
        shortest: int = 14,
        distinct: float = 0.5,
        words: int = 13,
    ) -> None:
        self._shortest, self._distinct, self._words = shortest, distinct, words
        self._seen: set[bytes] = set()
        counts: Counter[str] = Counter()
        for text in excluded:
            counts.update(set(self._grams(text)))
        self._banned = {gram for gram, count in counts.items() if count <= 3}

    @property
    def excludes(self) -> bool:
        """Whether texts are looked at."""
        return bool(self._banned)

    def judge(self, tokens: Sequence[int], answer: int, text: str) -> Verdict:
        """`text` is the whole conversation's, needed only where `excludes`."""
        body = np.asarray(tokens[answer:], dtype=np.int64)
        if len(body) < self._shortest:
            return Verdict.SHORT
        if distinct_share(body) < self._distinct:
            return Verdict.LOOP
        mark = _mark(body)
        if mark in self._seen:
            return Verdict.REPEATED
        if self._banned and not self._banned.isdisjoint(self._grams(text)):
            return Verdict.EXCLUDED
        self._seen.add(mark)
        return Verdict.KEPT

    def remember(self, tokens: Sequence[int], answer: int) -> None:
        """Take a conversation for one that has been let through, as when it was judged."""
        self._seen.add(_mark(np.asarray(tokens[answer:], dtype=np.int64)))

    def _grams(self, text: str) -> list[str]:
        words = _WORDS.findall(text.lower())
        size = self._words
        return [" ".join(words[at : at + size]) for at in range(len(words) - size + 1)]


def without_loop(tokens: Sequence[int], answer: int) -> Sequence[int]:
    """`tokens` up to where the answer, which begins at index `answer`, has long been repeating
    itself: a quarter of its last 48 4-grams, or less, were new."""
    body = np.asarray(tokens[answer:], dtype=np.int64)
    grams = _grams_of(body)
    if len(grams) < _PATIENCE:
        return tokens
    new = np.zeros(len(grams), dtype=np.int64)
    new[np.unique(grams, return_index=True)[1]] = 1
    behind = np.concatenate([[0], np.cumsum(new)])
    news = behind[_PATIENCE:] - behind[:-_PATIENCE]
    stale = np.flatnonzero(news <= _NEWS * _PATIENCE)
    if len(stale) == 0:
        return tokens
    return tokens[: answer + int(stale[0]) + _PATIENCE + _GRAM - 1]


def distinct_share(tokens: NDArray[np.int64]) -> float:
    """How many of the 4-grams of `tokens` are different ones; 1 for a text too short to loop."""
    grams = _grams_of(tokens)
    if len(grams) < 16:
        return 1.0
    return len(np.unique(grams)) / len(grams)


def _mark(body: NDArray[np.int64]) -> bytes:
    """What an answer is known by: its beginning."""
    return hashlib.blake2b(body[:48].tobytes(), digest_size=8).digest()


def _grams_of(tokens: NDArray[np.int64]) -> NDArray[np.uint64]:
    """A hash of every 4 tokens in a row."""
    count = max(0, len(tokens) - _GRAM + 1)
    grams = np.zeros(count, dtype=np.uint64)
    for shift in range(_GRAM):
        grams = grams * np.uint64(0x9E3779B97F4A7C15) + tokens[shift : shift + count].astype(
            np.uint64
        )
    return grams
