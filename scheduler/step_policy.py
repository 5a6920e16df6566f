"""Which step the engine takes next, and which prompt tokens a prefill chunk reads.

Pure: given what waits and what was measured, it returns a decision. It runs on the engine's
MLX thread and cannot fail. Two promises are kept here. Decode is never starved: reading prompts
earns its time from decode steps, twice theirs, and more, up to eightfold, when more prompts
wait than rows decode, because a step of few rows costs what one of many does. A short prompt
never waits behind a long one: the prompt with the fewest tokens left goes first, yet every
`OLDEST_EVERY`-th chunk goes to the oldest, so the long one gets on. A chunk that reads a short
prompt to its end takes others along, whole, as far as the time allows.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler.read_groups import WaitingPrompt, group_of

CHUNK_QUANTUM = 16
"""Chunks are multiples of this many tokens, so that few shapes occur."""

MINIMUM_CHUNK = 64
"""No prompt is cut into smaller pieces: every chunk reads all weights, so small ones waste."""

MAXIMUM_CHUNK = 2048
OLDEST_EVERY = 4
PREFILL_PER_DECODE = 2.0
"""Seconds of reading that a second of decode earns while as many rows decode as prompts wait."""

MOST_WAITING_PER_ROW = 4.0
"""From how many prompts for each decoding row on that ratio no longer grows; and by what
factor a chunk may take longer while no row decodes, where it delays arrivals only."""

COMPANY = 2.5
"""By what factor a chunk may take longer still when prompts are read together and no row decodes.
It bounds how long a prompt's first token waits for the company: at the default
`prefill_milliseconds` such a chunk takes a second at most."""

PACE_MEMORY = 0.7
"""Weight of the past in the running estimate of prefill speed."""


class Turn(enum.Enum):
    """What a step does."""

    IDLE = enum.auto()
    PREFILL = enum.auto()
    DECODE = enum.auto()


@dataclass(frozen=True)
class Decision:
    """The next step. The others are set for a prefill only.

    One of `request_ids` reads its next `tokens`; several are read whole, `tokens` together.
    """

    turn: Turn
    request_ids: tuple[int, ...] = ()
    tokens: int = 0


@dataclass
class PrefillPace:
    """Running estimate of prefill speed, in tokens per second. Starts cautious."""

    tokens_per_second: float = 250.0

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn from one finished chunk. Tiny chunks say little about speed: skipped."""
        if tokens < CHUNK_QUANTUM or seconds <= 0.0:
            return
        measured = tokens / seconds
        self.tokens_per_second += (1.0 - PACE_MEMORY) * (measured - self.tokens_per_second)

    def chunk(self, seconds: float) -> int:
        """Tokens that fit in `seconds`, between `MINIMUM_CHUNK` and `MAXIMUM_CHUNK`."""
        tokens = int(self.tokens_per_second * seconds) // CHUNK_QUANTUM * CHUNK_QUANTUM
        return max(MINIMUM_CHUNK, min(MAXIMUM_CHUNK, tokens))


@dataclass
class StepPolicy:
    """Shares time between reading prompts and decoding.

    `prefill_seconds` is the most that reading may save up, so the size of a chunk, while as
    many rows decode as prompts wait, or more.
    """

    prefill_seconds: float
    pace: PrefillPace = field(default_factory=PrefillPace)
    _credit: float = 0.0
    _waiting_per_row: float = 1.0
    _beside_rows: bool = False
    _chunks: int = 0

    def decide(self, prompts: Sequence[WaitingPrompt], decoding_rows: int) -> Decision:
        """The next step for the prompts that wait (by arrival) and the rows that decode."""
        if not prompts:
            return Decision(Turn.DECODE if decoding_rows else Turn.IDLE)
        budget = self.prefill_seconds * MOST_WAITING_PER_ROW
        self._beside_rows = decoding_rows > 0
        if decoding_rows:
            per_row = len(prompts) / decoding_rows
            self._waiting_per_row = min(max(per_row, 1.0), MOST_WAITING_PER_ROW)
            budget = min(self._credit, self.prefill_seconds * self._waiting_per_row)
            if budget <= 0.0:
                return Decision(Turn.DECODE)
        self._chunks += 1
        if self._chunks % OLDEST_EVERY == 0:
            prompt = prompts[0]
        else:
            prompt = min(prompts, key=lambda waiting: waiting.tokens_left)
        chunk = self.pace.chunk(budget)
        together = chunk if decoding_rows else self.pace.chunk(budget * COMPANY)
        members = group_of(prompt, prompts, together)
        if len(members) == 1:
            tokens = min(prompt.tokens_left, chunk)
        else:
            tokens = sum(one.tokens_left for one in prompts if one.request_id in members)
        return Decision(Turn.PREFILL, tuple(members), tokens)

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """A chunk of `tokens` took `seconds`."""
        if self._beside_rows:
            self._credit -= seconds
        self.pace.observe(tokens, seconds)

    def observe_decode(self, seconds: float) -> None:
        """A decode step took `seconds`."""
        most = self.prefill_seconds * self._waiting_per_row
        earned = seconds * PREFILL_PER_DECODE * self._waiting_per_row
        self._credit = min(self._credit + earned, most)


@dataclass
class LaneShare:
    """Which of two lanes decodes next when both have rows.

    A lane's share of time is proportional to its rows: what a step took is divided by the
    rows it served, and the lane that has had less goes first. A lane that was empty does not
    catch up on the time it did not ask for.
    """

    _served: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def choose(self, rows: Sequence[int]) -> int:
        """The index of the lane to step; `rows` holds the rows of each, not all zero."""
        busy = [lane for lane, count in enumerate(rows) if count]
        if len(busy) == 1:
            # The other starts level whenever it gets rows.
            self._served = [0.0, 0.0]
            return busy[0]
        return min(busy, key=lambda lane: self._served[lane])

    def observe(self, lane: int, seconds: float, rows: int) -> None:
        """A step of `lane` took `seconds` for its `rows`."""
        self._served[lane] += seconds / max(rows, 1)
