"""Beginnings of user turns, drawn by seed: bare headers, openings, whole questions.

Pure; any thread. The same seed and index give the same prompt.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Sequence
from typing import NamedTuple

from models.workshop.chat_text import ChatText
from models.workshop.prompt_material import ENDINGS, OPENINGS, QUESTIONS, WEIGHTS
from models.workshop.prompt_slots import SLOTS

# Slots that hold another entry of a list than the slot of its own name does.
_SECOND = (
    ("other", "name"),
    ("topic2", "topic"),
    ("sentence2", "sentence"),
    ("role2", "role"),
    ("function2", "function"),
    ("task2", "task"),
)


class Source(enum.IntEnum):
    """How much of a user turn was given."""

    BARE = 0
    OPENING = 1
    QUESTION = 2


class Prefix(NamedTuple):
    """Forced token ids from position 0 on. The user's turn is over when `answering`."""

    tokens: list[int]
    answering: bool
    source: Source


class PromptDraw:
    """Draws prefixes; `shares` are those of bare headers and of openings, the rest are whole
    questions: ours, or those of `given`, in turn."""

    def __init__(
        self,
        text: ChatText,
        seed: int,
        shares: tuple[float, float] = (0.25, 0.5),
        given: Sequence[str] = (),
    ) -> None:
        self._text, self._seed, self._given = text, seed, given
        self._shares = (0.0, 0.0) if given else shares

    def draw(self, index: int) -> Prefix:
        """The prefix number `index`."""
        chance = random.Random(f"{self._seed}/{index}")
        frame = self._text.frame
        value = chance.random()
        if value < self._shares[0]:
            return Prefix(frame.before, False, Source.BARE)
        if value < sum(self._shares):
            opening = fill(chance.choice(OPENINGS[_kind(chance)]), chance)
            return Prefix(frame.before + self._text.encode(opening), False, Source.OPENING)
        question = self._given[index % len(self._given)] if self._given else write(chance)
        return Prefix(self._text.prompt(question), True, Source.QUESTION)


def write(chance: random.Random) -> str:
    """A whole question."""
    kind = _kind(chance)
    question = fill(chance.choice(QUESTIONS[kind]), chance)
    return question + chance.choice(ENDINGS) if kind == "maths" else question


def fill(template: str, chance: random.Random) -> str:
    """A template with every slot filled."""
    values: dict[str, object] = {slot: chance.choice(words) for slot, words in SLOTS.items()}
    for slot, of in _SECOND:
        values[slot] = chance.choice([word for word in SLOTS[of] if word != values[of]])
    values["n"] = chance.choice((chance.randint(12, 99), chance.randint(100, 960)))
    values["m"], values["k"] = chance.randint(11, 60), chance.randint(3, 12)
    values["j"], values["pc"] = chance.randint(2, 8), chance.choice((5, 10, 15, 20, 25, 30, 40, 75))
    values["place_upper"] = str(values["place"]).capitalize()
    values["task_upper"] = str(values["task"]).capitalize()
    return template.format_map(values)


def _kind(chance: random.Random) -> str:
    return chance.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
