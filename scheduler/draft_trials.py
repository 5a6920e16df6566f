"""Whether the rows of a lane draft now, and when parked rows try again.

Owns one lane's account of drafting, in serial steps; runs on the engine's step loop, without mlx
or models, with the clock passed in. Every round that had drafts to verify is entered: what it
brought, less what it cost with its draft, against plain decode by the measured costs. So noisy
blocks even out: a lane whose rounds pay on average goes on through poor ones, and one that has lost
the most it may parks: its rows decode plainly, at no cost. Texts change, so parked rows try again,
with an account of their own. What that lost is known then, and the time to the next probe is such
that all of them take a fixed share; every probe that fails doubles it.

What a round brought is what was accepted of it. A forecast that is believed tells it with half the
noise, by what it expected; but when far more was lost than chance explains, that decides. Whether a
round drafts never depends on the drafts at hand, only on earlier rounds: rejection acceptance keeps
its distribution.
"""

from __future__ import annotations

from collections.abc import Callable

from scheduler.width_policy import CostTable, WidthChoice

MOST_LOST_STEPS = 2.0
"""Serial steps that drafting may lose before the lane parks. A probe that has saved as many has
paid."""

PROBE_STEPS = 1.0
"""Serial steps that a probe may lose, or a text behind one that did not pay."""

CHANCE_STEPS = 8.0
"""Serial steps that a text that pays may lose by chance. So many can be saved up to lose again: no
more, for a text that stops paying is to be noticed. And so many may be lost, by what was accepted,
while a believed forecast expects better."""

PROBE_SHARE = 0.01
"""The most of its time that a parked lane may lose to probes."""

LONGEST_WAIT_SECONDS = 30.0
"""Doubling stops here, unless the share alone asks for longer."""


class DraftTrials:
    """The lane of all rows that can draft."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # Serial steps that drafting has saved, since the lane parked or was empty: by what was
        # accepted and by what was expected.
        self._saved, self._expected = 0.0, 0.0
        # When parked rows try again, and when the share alone would let them; None while drafting
        # is not known to lose.
        self._probe_at: float | None = None
        self._fair_at = 0.0
        self._failures = 0
        # Whether the probe that the last round ended, if it did, showed that drafting pays again.
        self.probe_paid: bool | None = None

    @property
    def parked(self) -> bool:
        """Whether drafting was found to lose: the rows decode plainly or are trying again."""
        return self._probe_at is not None

    @property
    def waiting(self) -> bool:
        """Whether the rows are parked and not due to try."""
        return self._probe_at is not None and self._clock() < self._probe_at

    def another_text(self, *, alone: bool) -> None:
        """A row joins. In an empty lane it is tried for itself, because what the texts before it
        were says little of it; beside others it ends the doubling."""
        self._failures = 0
        if self._probe_at is not None:
            self._probe_at = self._clock() if alone else min(self._probe_at, self._fair_at)
        if alone:
            self._restart()

    def verified(
        self, choice: WidthChoice, tokens: int, costs: CostTable, *, believed: bool
    ) -> None:
        """A round that had drafts verified as many as were chosen and committed `tokens` over all
        rows. Parks, stays, or comes back; `believed` says whether the forecast is."""
        rows = len(choice.lengths)
        serial = costs.serial_seconds(rows)
        spent = costs.round_seconds(rows, choice.width) / serial
        self._saved = min(self._saved + tokens / rows - spent, CHANCE_STEPS)
        expected = choice.expected_tokens / rows
        self._expected = min(self._expected + expected - spent, CHANCE_STEPS)
        balance = self._saved
        if believed and self._saved > -CHANCE_STEPS:
            balance = self._expected
        if balance <= -MOST_LOST_STEPS:
            # Nobody will verify the draft behind this round.
            self._park(balance, serial, costs.draft_seconds(rows))
        elif self.parked and self._saved >= MOST_LOST_STEPS:
            self._probe_at, self._failures, self.probe_paid = None, 0, True

    def _park(self, balance: float, serial_seconds: float, draft_seconds: float) -> None:
        lost = PROBE_STEPS
        if self.parked:
            lost = -balance - MOST_LOST_STEPS + PROBE_STEPS
            self._failures += 1
            self.probe_paid = False
        now, fair = self._clock(), (lost * serial_seconds + draft_seconds) / PROBE_SHARE
        self._fair_at = now + fair
        self._probe_at = now + max(fair, min(fair * 2.0**self._failures, LONGEST_WAIT_SECONDS))
        self._restart()

    def _restart(self) -> None:
        """Begin the account again; where drafting was found to lose, with less to lose."""
        balance = PROBE_STEPS - MOST_LOST_STEPS if self.parked else 0.0
        self._saved, self._expected = balance, balance
