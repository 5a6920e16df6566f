"""When an engine counts as lost, and how often it is started again.

Pure, with an injected clock; used by the supervisor on the daemon's event loop. An engine is
wedged when work is pending and no step has ended for too long, though its heart may beat; it
is silent when no heartbeat comes. Restarts are limited, because an engine that dies at every
start would keep the machine busy and help nobody.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable

import msgspec

from scheduler.messages import Heartbeat, MeasuringProgress, Memory


class Loss(enum.StrEnum):
    """How an engine was lost."""

    EXITED = "exited"
    WEDGED = "wedged"
    SILENT = "silent"
    LOAD_TIMEOUT = "load_timeout"


class EngineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds; at most `maximum_restarts` restarts in any `restart_window`."""

    load: float = 600.0
    wedge: float = 60.0
    heartbeat: float = 30.0
    maximum_restarts: int = 3
    restart_window: float = 60.0


class EngineWatch:
    """Watches one ready engine by what it says. `work` tells how many requests it has got."""

    def __init__(
        self, limits: EngineLimits, clock: Callable[[], float], work: Callable[[], int]
    ) -> None:
        self._limits = limits
        self._clock = clock
        self._work = work
        self._heard = self._progress = clock()
        self._steps = -1
        self._pending = 0
        self.memory: Memory | None = None
        self.measuring: MeasuringProgress | None = None

    @property
    def heartbeat_age(self) -> float:
        """Seconds since the last heartbeat, or since the engine was ready."""
        return self._clock() - self._heard

    @property
    def stalled_seconds(self) -> float:
        """For how long there has been work and no step has ended; 0 without work."""
        # Its own count may lag: a stuck engine does not even take its messages in.
        if not max(self._pending, self._work()):
            self._progress = self._clock()
        return self._clock() - self._progress

    def beat(self, heartbeat: Heartbeat) -> None:
        """A heartbeat has come."""
        self._heard = self._clock()
        self.memory = heartbeat.memory
        self.measuring = heartbeat.measuring
        self._pending = heartbeat.pending
        if heartbeat.steps != self._steps:
            self._steps = heartbeat.steps
            self._progress = self._heard

    def progress(self) -> None:
        """A step has ended."""
        self._progress = self._clock()

    def verdict(self) -> Loss | None:
        """How the engine must be counted as lost now, if at all."""
        if self.heartbeat_age > self._limits.heartbeat:
            return Loss.SILENT
        if self.stalled_seconds > self._limits.wedge:
            return Loss.WEDGED
        return None


class RestartBudget:
    """Counts restarts. Loads that never came to an end count without a window."""

    def __init__(self, limits: EngineLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._restarts: deque[float] = deque()
        self._failed_loads = 0

    def was_ready(self) -> None:
        """The engine has been able to serve."""
        self._failed_loads = 0

    def allows(self) -> bool:
        """Whether one more restart may be made; it is counted if so."""
        now = self._clock()
        while self._restarts and now - self._restarts[0] >= self._limits.restart_window:
            self._restarts.popleft()
        used = max(len(self._restarts), self._failed_loads)
        if used >= self._limits.maximum_restarts:
            return False
        self._restarts.append(now)
        self._failed_loads += 1
        return True
