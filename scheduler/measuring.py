"""When an engine measures what rounds cost: between requests, a slice at a time.

Owns the measurement while it lasts; runs on the engine's MLX thread, free of mlx, with the clock
passed in. An idle engine takes slice after slice, so a request waits for one at most. One that
is never idle would never know its costs: after `PATIENCE_SECONDS` of serving, slices are taken
between steps, for a fixed share of the time. Noise is only held where requests leave room for
it, and an idle engine's goes before a prompt is read. A measurement that fails is given up, and
the engine serves without.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from scheduler.ledger import CacheRoom
from scheduler.messages import MeasuringProgress

log = logging.getLogger("sparklane.engine")

QUIET_SECONDS = 0.25
"""Without a request for so long, an engine counts as idle: a client that sends one after the
other does not wait for a slice each time."""

PATIENCE_SECONDS = 20.0
BUSY_SHARE = 0.05

NOISE_SLACK = 64
"""Tokens behind the depth that a row may come to hold while it is measured."""


class Slices(Protocol):
    """A measurement in slices: `scheduler.cost_measurement.CostMeasurement`."""

    timed: int
    total: int

    @property
    def complete(self) -> bool: ...
    @property
    def rows(self) -> int: ...
    @property
    def holds_noise(self) -> bool: ...
    def run_slice(self) -> bool: ...
    def release(self) -> None: ...


class Measuring:
    """Fits the slices of `slices` between requests. `noise_tokens` is what a row of it takes.

    `room` is what the caches may take; None sets no bound.
    """

    def __init__(
        self,
        slices: Slices,
        room: CacheRoom | None,
        noise_tokens: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._slices = slices
        self._room = room
        self._noise_tokens = noise_tokens
        self._clock = clock
        self._given_up = False
        self._served = 0.0
        self._credit = 0.0

    @property
    def progress(self) -> MeasuringProgress:
        """How far it is."""
        return MeasuringProgress(self._slices.timed, self._slices.total)

    @property
    def wanted(self) -> bool:
        """Whether there is something left to measure."""
        return not self._given_up and not self._slices.complete

    def served(self, seconds: float) -> None:
        """A step for requests took `seconds`."""
        self._served += seconds
        if self._overdue:
            self._credit = min(self._credit + seconds * BUSY_SHARE, PATIENCE_SECONDS * BUSY_SHARE)

    def due(self, needs: Sequence[int]) -> bool:
        """Whether a slice is to be taken now, though requests that may become `needs` tokens
        long are being served."""
        return self.wanted and self._credit > 0.0 and self._fits(needs)

    def make_way(self, needs: Sequence[int]) -> None:
        """A request comes, so that `needs` is what all may become: give up noise for it.

        Noise stays for slices between steps, where there is room for both: to make it anew each
        time would cost more than the slices.
        """
        if self._slices.holds_noise and not (self._overdue and self._fits(needs)):
            self._slices.release()

    def run_slice(self) -> None:
        """Measure a little."""
        started = self._clock()
        try:
            self._slices.run_slice()
        except Exception:
            # Serving needs no costs: the lane stays plain where they are unknown.
            log.exception("what rounds cost cannot be measured; drafting stays off without it")
            self._given_up = True
            self._slices.release()
        self._credit -= self._clock() - started
        if not self.wanted:
            log.info(
                "measured what rounds cost: %d of %d forwards",
                self._slices.timed,
                self._slices.total,
            )

    @property
    def _overdue(self) -> bool:
        return self._served >= PATIENCE_SECONDS

    def _fits(self, needs: Sequence[int]) -> bool:
        return self._room is None or self._room.has_room(
            needs, self._slices.rows, self._noise_tokens
        )
