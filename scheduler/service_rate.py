"""How fast an engine serves, as a moving average: what expected waits are computed from.

Pure, with an injected clock; used on the daemon's event loop. Only time in which there was
work counts, so that a quiet night does not make the engine look slow in the morning.
"""

from __future__ import annotations

from collections.abc import Callable

HALF_LIFE_SECONDS = 30.0
ANSWER_MEMORY = 0.9
"""Weight of the past in the running mean of answer lengths, once enough have been seen."""


class ServiceRate:
    """Served tokens per second, prompt and generated, and the mean length of an answer."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._busy_since: float | None = None
        self._tokens = 0.0
        self._seconds = 0.0
        self._answers = 0
        self._answer_tokens = 0.0

    def busy(self, working: bool) -> None:
        """Tell whether there is work. Telling the same again changes nothing."""
        if working and self._busy_since is None:
            self._busy_since = self._clock()
        elif not working and self._busy_since is not None:
            self._settle()
            self._busy_since = None

    def served(self, tokens: int) -> None:
        """So many tokens have just been served."""
        self._settle()
        self._tokens += tokens

    def answered(self, tokens: int) -> None:
        """A request has ended after so many generated tokens."""
        self._answers += 1
        weight = max(1.0 - ANSWER_MEMORY, 1.0 / self._answers)
        self._answer_tokens += weight * (tokens - self._answer_tokens)

    @property
    def tokens_per_second(self) -> float | None:
        """None before anything was served."""
        self._settle()
        if self._seconds <= 0.0 or self._tokens <= 0.0:
            return None
        return self._tokens / self._seconds

    def expected_answer(self, limit: int) -> float:
        """Tokens to expect of a request that may generate `limit`."""
        return min(limit, self._answer_tokens) if self._answers else limit

    def _settle(self) -> None:
        if self._busy_since is None:
            return
        now = self._clock()
        elapsed = now - self._busy_since
        self._busy_since = now
        fade: float = 0.5 ** (elapsed / HALF_LIFE_SECONDS)
        self._tokens *= fade
        self._seconds = self._seconds * fade + elapsed
