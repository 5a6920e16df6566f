"""Admission: which request runs now, which waits, which is refused, and for how long.

Pure, with an injected clock; used on the daemon's event loop for one engine. The engine gets
only what has been admitted, so this queue is the only one that is long. Everything that does
not run counts against the queue's limits. Requests are admitted in order of arrival; one that
does not fit now may be passed by at most `MAXIMUM_PASSES` that do, after which the room that
falls free is kept for it. So a long request waits for a bounded amount of work, and a short
one seldom waits for it.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from scheduler.ledger import KvCost, Ledger
from scheduler.service_rate import ServiceRate

MAXIMUM_PASSES = 8
UNKNOWN_WAIT_SECONDS = 5.0
"""The wait that is told before anything was served."""

MAXIMUM_WAIT_SECONDS = 60.0
"""The longest wait that is told: official clients ignore a Retry-After of more than this."""


class QueueLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How many requests may wait, and how many prompt tokens they may have together."""

    requests: int
    prompt_tokens: int


class DenialReason(enum.Enum):
    """What stands against a request."""

    CONTEXT_LENGTH = enum.auto()
    QUEUED_REQUESTS = enum.auto()
    QUEUED_PROMPT_TOKENS = enum.auto()


@dataclass(frozen=True)
class Denial:
    """A request is refused. `retry_after` in seconds; None where waiting does not help."""

    reason: DenialReason
    message: str
    retry_after: float | None = None


@dataclass(frozen=True)
class Acceptance:
    """A request is accepted, to run at once or to wait. `max_tokens` is the clamped limit."""

    max_tokens: int
    running: bool


@dataclass
class _Waiting:
    key: int
    prompt_tokens: int
    max_tokens: int
    passes: int = 0

    @property
    def need(self) -> int:
        return self.prompt_tokens + self.max_tokens


class Admission:
    """The queue and the ledger of one engine.

    While `open` is false nothing new is admitted: the engine loads, or is being restarted.
    """

    def __init__(
        self,
        *,
        limits: QueueLimits,
        maximum_rows: int,
        budget: int,
        cost: KvCost,
        context_length: int,
        clock: Callable[[], float],
    ) -> None:
        self.limits = limits
        self.open = False
        self.ledger = Ledger(maximum_rows, budget, cost)
        self.rate = ServiceRate(clock)
        self._model_context = context_length
        self._waiting: dict[int, _Waiting] = {}

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and answer: the model's, or what memory has room for."""
        return min(self._model_context, self.ledger.longest_possible())

    @property
    def running(self) -> int:
        """Requests that hold a reservation."""
        return len(self.ledger)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def waiting_prompt_tokens(self) -> int:
        """Prompt tokens in the queue."""
        return sum(request.prompt_tokens for request in self._waiting.values())

    def enter(self, key: int, prompt_tokens: int, max_tokens: int) -> Acceptance | Denial:
        """Take a request in. `key` must be new; `max_tokens` is clamped to the room there is."""
        if key in self._waiting or self.ledger.holds(key):
            raise ValueError(f"request {key} is here already")
        room = self.context_length - prompt_tokens
        if room < 1:
            return self._too_long(prompt_tokens)
        request = _Waiting(key, prompt_tokens, min(max_tokens, room))
        if self.open and not self._waiting and self.ledger.fits(request.need):
            self._start(request)
            return Acceptance(request.max_tokens, running=True)
        if (denial := self._queue_full(prompt_tokens)) is not None:
            return denial
        self._waiting[key] = request
        return Acceptance(request.max_tokens, running=False)

    def admit(self) -> list[int]:
        """Reserve for every waiting request that may run now; their keys, in order."""
        admitted: list[int] = []
        if not self.open or self.running >= self.ledger.maximum_rows:
            return admitted
        passed: list[_Waiting] = []
        for request in list(self._waiting.values()):
            if self.ledger.fits(request.need):
                del self._waiting[request.key]
                self._start(request)
                admitted.append(request.key)
                for other in passed:
                    other.passes += 1
            else:
                passed.append(request)
            if self.running >= self.ledger.maximum_rows:
                break
            if any(other.passes >= MAXIMUM_PASSES for other in passed):
                break
        return admitted

    def leave(self, key: int) -> bool:
        """Forget a request and give back what it held. False if it is not here any more."""
        if self._waiting.pop(key, None) is not None:
            return True
        released = self.ledger.release(key)
        self.rate.busy(self.running > 0)
        return released

    def expected_wait(self) -> float:
        """Seconds until a request that came now would run, between 1 and 60."""
        speed = self.rate.tokens_per_second
        if speed is None:
            return UNKNOWN_WAIT_SECONDS
        work = sum(
            request.prompt_tokens + self.rate.expected_answer(request.max_tokens)
            for request in self._waiting.values()
        )
        # All rows are taken by then: one of them has to come free first.
        work += self.rate.expected_answer(self.context_length) / 2
        return float(min(max(math.ceil(work / speed), 1.0), MAXIMUM_WAIT_SECONDS))

    def _start(self, request: _Waiting) -> None:
        self.ledger.reserve(request.key, request.need)
        self.rate.busy(True)

    def _too_long(self, prompt_tokens: int) -> Denial:
        limit = self.context_length
        message = f"prompt is too long: {prompt_tokens} tokens, and at least one to answer, "
        message += f"do not fit the maximum context length of {limit} tokens; "
        if limit < self._model_context:
            message += f"the model allows {self._model_context}, memory has room for {limit}; "
        return Denial(DenialReason.CONTEXT_LENGTH, message + "shorten the prompt")

    def _queue_full(self, prompt_tokens: int) -> Denial | None:
        wait = self.expected_wait()
        again = f"try again in {wait:.0f} s, or raise queue."
        if len(self._waiting) >= self.limits.requests:
            message = f"the queue is full: {len(self._waiting)} requests wait, the limit is "
            message += f"{self.limits.requests}; {again}requests"
            return Denial(DenialReason.QUEUED_REQUESTS, message, wait)
        queued = self.waiting_prompt_tokens
        # A prompt longer than the limit may wait alone, or it could never be served.
        if self._waiting and queued + prompt_tokens > self.limits.prompt_tokens:
            message = f"the queue is full: {queued} prompt tokens wait, {prompt_tokens} more "
            message += f"exceed the limit of {self.limits.prompt_tokens}; {again}prompt_tokens"
            return Denial(DenialReason.QUEUED_PROMPT_TOKENS, message, wait)
        return None
