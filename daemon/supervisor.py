"""Keeps one engine running: starts it, watches its heart, restarts it, gives it up.

Owns the engine process of one model; runs as a task on the daemon's event loop, woken by
messages and once a second. What the engine says is passed on to an `EngineListener`. Nothing
that an engine does raises here: it ends in a restart, or in a model that is down.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from daemon.engine_health import EngineLimits, EngineWatch, Loss, RestartBudget
from daemon.engine_link import EngineLink, EngineLost, engine_command
from scheduler.messages import (
    PROTOCOL_VERSION,
    Configure,
    Fault,
    Heartbeat,
    Loading,
    MeasuringProgress,
    Memory,
    Ready,
    Rejected,
    Step,
    ToEngine,
)

log = logging.getLogger("sparklane.supervisor")

TICK_SECONDS = 1.0
STOP_SECONDS = 5.0


class EngineListener(Protocol):
    """Who is told what happens to the engine. Calls come on the event loop and return fast."""

    def engine_ready(self, ready: Ready) -> None:
        """A new engine can take requests; what the one before had, it must be sent again."""

    def engine_stepped(self, step: Step) -> None:
        """A step has ended."""

    def engine_rejected(self, rejected: Rejected) -> None:
        """One request cannot be served."""

    def engine_lost(self, loss: Loss) -> None:
        """The engine is gone and another one is being started."""

    def engine_down(self, problem: str) -> None:
        """There will be no other engine."""

    def outstanding(self) -> int:
        """Requests that the engine has been sent and has not finished."""


class _Lost(Exception):
    """Ends the watch over one engine."""

    def __init__(self, loss: Loss, reason: str, *, restartable: bool = True) -> None:
        super().__init__(reason)
        self.loss = loss
        self.restartable = restartable


class Supervisor:
    """One model's engine, over as many processes as it takes."""

    def __init__(
        self,
        name: str,
        configure: Configure,
        listener: EngineListener,
        run_folder: Path,
        limits: EngineLimits,
        *,
        command: Sequence[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        tick: float = TICK_SECONDS,
    ) -> None:
        self.name = name
        self._configure = configure
        self._listener = listener
        self._run_folder = run_folder
        self._limits = limits
        self._command = list(command) if command is not None else engine_command()
        self._clock = clock
        self._tick = tick
        self._link: EngineLink | None = None
        self._watch: EngineWatch | None = None
        self._stopping = asyncio.Event()
        self._stop_seconds = STOP_SECONDS

    @property
    def pid(self) -> int | None:
        """The engine's process id; None while there is none."""
        return self._link.pid if self._link else None

    @property
    def ready(self) -> bool:
        """Whether the engine takes requests."""
        return self._watch is not None

    @property
    def heartbeat_age(self) -> float | None:
        """Seconds since the last heartbeat; None while no engine is ready."""
        return self._watch.heartbeat_age if self._watch else None

    @property
    def memory(self) -> Memory | None:
        """What the last heartbeat said; None before one came."""
        return self._watch.memory if self._watch else None

    @property
    def measuring(self) -> MeasuringProgress | None:
        """How far the engine is in measuring its costs; None while it measures nothing."""
        return self._watch.measuring if self._watch else None

    @property
    def wedged(self) -> bool:
        """Whether work is pending and no step has ended for longer than the limit."""
        return self._watch is not None and self._watch.verdict() is Loss.WEDGED

    def send(self, message: ToEngine) -> bool:
        """Send to a ready engine. False when there is none."""
        if self._watch is None or self._link is None:
            return False
        self._link.send(message)
        return True

    async def run(self) -> None:
        """Keep the engine running until `stop`, or until it is given up."""
        budget = RestartBudget(self._limits, self._clock)
        while not self._stopping.is_set():
            try:
                await self._one_engine(budget)
                return
            except _Lost as lost:
                reason, loss, restartable = str(lost), lost.loss, lost.restartable
            except Exception as error:
                log.exception("%s: the supervisor failed", self.name)
                reason, loss, restartable = repr(error), Loss.EXITED, True
            if not restartable:
                return self._give_up(reason)
            if not budget.allows():
                return self._give_up(
                    f"the engine was lost once more after {self._limits.maximum_restarts} "
                    f"restarts, the limit for {self._limits.restart_window:.0f} s; last: {reason}"
                )
            log.warning("%s: the engine is lost (%s): %s; restarting", self.name, loss, reason)
            self._listener.engine_lost(loss)

    def stop(self, seconds: float = STOP_SECONDS) -> None:
        """Make `run` return; the engine gets so long to end by itself before it is killed."""
        self._stop_seconds = seconds
        self._stopping.set()

    def _give_up(self, reason: str) -> None:
        log.error("%s is down: %s", self.name, reason)
        self._listener.engine_down(reason)

    async def _one_engine(self, budget: RestartBudget) -> None:
        """Start one engine and watch it. Returns when told to stop; raises `_Lost`."""
        deadline = self._clock() + self._limits.load
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            link = await self._started(stopping)
            if link is not None:
                await self._attend(link, stopping, deadline, budget)
        finally:
            stopping.cancel()

    async def _started(self, stopping: asyncio.Task[bool]) -> EngineLink | None:
        """A connected engine; None when told to stop before there was one."""
        starting = asyncio.create_task(
            EngineLink.started(self.name, self._command, self._run_folder, self._limits.load)
        )
        try:
            await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
            return starting.result() if starting.done() else None
        except (EngineLost, OSError) as error:
            raise _Lost(Loss.EXITED, str(error)) from error
        finally:
            if not starting.done():
                starting.cancel()
                await asyncio.wait((starting,))

    async def _attend(
        self,
        link: EngineLink,
        stopping: asyncio.Task[bool],
        deadline: float,
        budget: RestartBudget,
    ) -> None:
        """Watch a connected engine to its end."""
        self._link = link
        link.send(self._configure)
        reading = asyncio.create_task(self._read(link, budget))
        try:
            while not reading.done():
                await asyncio.wait(
                    (reading, stopping),
                    timeout=self._tick,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if stopping.done():
                    # One that loads has nothing to lose, and would not listen.
                    await link.shut_down(self._stop_seconds if self.ready else 0.0)
                    return
                if not reading.done():
                    self._examine(deadline)
            reading.result()
        finally:
            self._watch = self._link = None
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError, _Lost):
                await reading
            code = await link.close()
            log.info("%s: engine %d has ended%s", self.name, link.pid, _ending(code))

    def _examine(self, deadline: float) -> None:
        """Raise `_Lost` if the engine has to be given up now."""
        if self._watch is None:
            if self._clock() > deadline:
                words = f"it was not ready within {self._limits.load:.0f} s (engine.load_seconds)"
                raise _Lost(Loss.LOAD_TIMEOUT, words)
            return
        match self._watch.verdict():
            case Loss.SILENT:
                words = f"no heartbeat for {self._watch.heartbeat_age:.1f} s"
                raise _Lost(Loss.SILENT, words + ", more than engine.heartbeat_seconds")
            case Loss.WEDGED:
                words = f"work is pending and no step ended for {self._watch.stalled_seconds:.1f} s"
                raise _Lost(Loss.WEDGED, words + ", more than engine.wedge_seconds")

    async def _read(self, link: EngineLink, budget: RestartBudget) -> None:
        fault: Fault | None = None
        try:
            async for message in link.messages():
                match message:
                    case Step():
                        if self._watch is not None:
                            self._watch.progress()
                        self._listener.engine_stepped(message)
                    case Heartbeat():
                        if self._watch is not None:
                            self._watch.beat(message)
                    case Rejected():
                        self._listener.engine_rejected(message)
                    case Loading():
                        self._require_protocol(message.protocol)
                        log.info("%s: engine %d: %s", self.name, link.pid, message.stage)
                    case Ready():
                        self._require_protocol(message.protocol)
                        self._engine_ready(message, budget)
                    case Fault():
                        fault = message
                        if not fault.restartable:
                            break
        except EngineLost as error:
            raise _Lost(Loss.EXITED, str(error)) from error
        if fault is not None:
            raise _Lost(Loss.EXITED, fault.message, restartable=fault.restartable)
        raise _Lost(Loss.EXITED, "its connection ended")

    def _engine_ready(self, ready: Ready, budget: RestartBudget) -> None:
        budget.was_ready()
        self._watch = EngineWatch(self._limits, self._clock, self._listener.outstanding)
        log.info(
            "%s is ready after %.1f s: %s %s, %s, %s",
            self.name, ready.load_seconds, ready.backend, ready.device, ready.precision, ready.blas,
        )  # fmt: skip
        self._listener.engine_ready(ready)

    def _require_protocol(self, protocol: int) -> None:
        if protocol != PROTOCOL_VERSION:
            words = f"the engine speaks protocol {protocol}, this daemon {PROTOCOL_VERSION}"
            raise _Lost(Loss.EXITED, f"{words}; restart the daemon", restartable=False)


def _ending(code: int) -> str:
    if code >= 0:
        return f" with code {code}"
    return f" by {signal.Signals(-code).name}"
