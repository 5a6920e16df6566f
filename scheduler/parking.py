"""When a row stops drafting, and when it tries again.

Owns the parking state of one row; runs on the engine's step loop, without mlx or models, with
the clock passed in. A row whose best width is 1 for several rounds on end parks: it decodes in
the serial lane, which costs nothing extra. Texts change, so a parked row probes. What a probe
costs is known, so the time to the next one is chosen such that probes together take at most a
fixed share of the row's time; every probe that fails doubles it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

# Rounds on end without a width that pays, before a row parks. One is too nervous: the
# confidences of a single block are noisy.
PATIENCE_ROUNDS = 3
# The most of its time that a parked row may lose to probes.
PROBE_SHARE = 0.01
# Doubling stops here, unless the share alone asks for longer.
LONGEST_WAIT_SECONDS = 30.0


class Lane(enum.StrEnum):
    """Where a row decodes next."""

    SPECULATIVE = "speculative"
    SERIAL = "serial"


class Parking:
    """One row's lane. `choose` before each step, `observe` after each speculative round."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        patience: int = PATIENCE_ROUNDS,
        probe_share: float = PROBE_SHARE,
        longest_wait: float = LONGEST_WAIT_SECONDS,
    ) -> None:
        self._clock = clock
        self._patience = patience
        self._share = probe_share
        self._longest = longest_wait
        self._unpaid = 0
        self._failures = 0
        self._parked_since: float | None = None
        self._probe_at = 0.0
        self._parked_before = 0.0

    @property
    def parked_seconds(self) -> float:
        """All the time parked so far."""
        since = self._parked_since
        return self._parked_before + (0.0 if since is None else self._clock() - since)

    @property
    def parked(self) -> bool:
        return self._parked_since is not None

    @property
    def probing(self) -> bool:
        """Whether a parked row is due to draft once."""
        return self.parked and self._clock() >= self._probe_at

    def choose(self) -> Lane:
        """The lane of the next step."""
        return Lane.SERIAL if self.parked and not self.probing else Lane.SPECULATIVE

    def probe_now(self) -> None:
        """Another text begins: if parked, try at once, as if nothing had failed before."""
        if self.parked:
            self._failures, self._probe_at = 0, self._clock()

    def observe(self, pays: bool, loss_seconds: float, *, at_once: bool = False) -> None:
        """After a speculative round, or instead of one that would have had width 1.

        `pays` says whether the best width for the row is more than 1; `loss_seconds` is how
        much longer a probe takes than a serial step. `at_once` parks without patience.
        """
        now = self._clock()
        if pays:
            if self._parked_since is not None:
                self._parked_before += now - self._parked_since
            self._parked_since, self._unpaid, self._failures = None, 0, 0
            return
        if self._parked_since is None:
            self._unpaid += 1
            if self._unpaid < self._patience and not at_once:
                return
            self._parked_since = now
        else:
            self._failures += 1
        fair = max(loss_seconds, 0.0) / self._share
        self._probe_at = now + max(fair, min(fair * 2.0**self._failures, self._longest))
