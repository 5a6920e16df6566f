"""Whether the rows of a lane draft now, and what finding out may cost them.

Owns the parking of one lane, its trials and their balance; runs on the engine's step loop, without
mlx or models, with the clock passed in. A calibrated forecast is believed until it has proved much
too good, so a probe is one draft. What a drafter that is uncalibrated or doubted is granted follows
from what was accepted, so only trying tells: a probe is a few rounds. Trying loses time where
drafting does not pay. So the lane keeps account of what drafting has won and lost against plain
decode, by the measured costs, and parks as soon as it has lost `MOST_LOST_STEPS`, whatever the
record still hopes for. A request that comes alone brings another text: it is tried for itself, and
that bound is what it may lose.
"""

from __future__ import annotations

from collections.abc import Callable

from scheduler.draft_forecast import DraftForecast
from scheduler.parking import Parking
from scheduler.round_costs import RoundCosts

TRIAL_ROUNDS = 3
"""Rounds that a probe verifies when only trying tells what is accepted."""

MOST_LOST_STEPS = 2.0
"""Serial steps that drafting may lose before the lane parks."""

MOST_SAVED_STEPS = 4.0
"""Serial steps that drafting may save up to lose again: bounded, so that a text which stops
paying is noticed, and no smaller, because single blocks of a text that pays fail, too."""


class DraftTrials:
    """The lane of all rows that can draft."""

    def __init__(
        self, forecast: DraftForecast, costs: RoundCosts, clock: Callable[[], float]
    ) -> None:
        self._forecast = forecast
        self._costs = costs
        self._parking = Parking(clock)
        # Rounds that a probe must still verify; None when no probe has begun.
        self._rounds_left: int | None = None
        # Serial steps that drafting has saved.
        self._balance = 0.0
        # Whether the probe of the last step, if it was one, showed that drafting pays again.
        self.probe_paid: bool | None = None

    @property
    def parked(self) -> bool:
        """Whether the rows decode plainly for now."""
        return self._parking.parked

    @property
    def waiting(self) -> bool:
        """Whether the rows are parked and not due to try."""
        return self._parking.parked and not self._parking.probing

    @property
    def trying(self) -> bool:
        """Whether parked rows are verifying drafts to find out."""
        return bool(self._rounds_left)

    def another_text(self) -> None:
        """The lane was empty and gets a row: what the texts before it were says little of it."""
        self._parking.probe_now()
        self._forecast.another_text()
        self._rounds_left, self._balance = None, 0.0

    def must_draft(self) -> bool:
        """Whether parked rows must verify their drafts in this round.

        A forecast that learns is what was accepted: a draft that is not verified could not
        change it, and a lane that once parked would stay so.
        """
        if not self._parking.parked or not self._forecast.learns:
            return False
        if self._rounds_left is None:
            self._rounds_left = TRIAL_ROUNDS
        else:
            self._rounds_left -= 1
        if self._exhausted:
            self._rounds_left = 0
        return self._rounds_left > 0

    def judge(self, *, pays: bool, rows: int, depth: int) -> None:
        """Park, stay, or come back. `pays` says whether the best width is more than 1, by the
        forecast, for `rows` rows behind `depth` tokens."""
        loss = self._costs.draft_seconds(rows)
        if self._rounds_left is not None:
            table = self._costs.table(depth)
            longer = table.round_seconds(rows, table.widths()[-1]) - table.serial_seconds(rows)
            loss += TRIAL_ROUNDS * max(longer, 0.0)
        pays = pays and not self._exhausted
        if self._parking.probing:
            self.probe_paid = pays
        # Single confidences are noisy, a record of what was accepted is not.
        self._parking.observe(pays, loss, at_once=self._forecast.learns)
        self._rounds_left = None
        if self._parking.parked:
            self._balance = 0.0

    def drafted(self, *, rows: int, depth: int) -> None:
        """A draft of its own was made, behind plain steps."""
        self._add(-self._costs.draft_seconds(rows) / self._serial_seconds(rows, depth))

    def committed(self, tokens: int, *, width: int, rows: int, depth: int) -> None:
        """A round of `width` committed `tokens` over all rows, and drafted once."""
        table = self._costs.table(depth)
        seconds = table.draft_seconds(rows) + table.verify_seconds(rows, width)
        self._add(tokens / rows - seconds / table.serial_seconds(rows))

    @property
    def _exhausted(self) -> bool:
        return self._forecast.learns and self._balance <= -MOST_LOST_STEPS

    def _add(self, steps: float) -> None:
        self._balance = min(self._balance + steps, MOST_SAVED_STEPS)

    def _serial_seconds(self, rows: int, depth: int) -> float:
        return self._costs.table(depth).serial_seconds(rows)
