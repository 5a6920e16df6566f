"""A load on a real engine process over its socket, without HTTP.

Owns the engine that it starts, as the daemon does, and speaks the same messages. Runs on an
event loop of the benchmark's own process. What an engine refuses is recorded as an error of
its request; an engine that cannot serve at all raises `SparklaneError`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from daemon.bench.timings import StreamTiming
from daemon.engine_link import EngineLink, EngineLost, engine_command
from daemon.exit_codes import ExitCode, SparklaneError
from models.sampling_settings import Sampling
from scheduler.messages import (
    Configure,
    Fault,
    Heartbeat,
    LaneChoice,
    MeasuringProgress,
    Output,
    Ready,
    Rejected,
    Step,
    Submit,
)

CONNECT_SECONDS = 120.0
STOP_SECONDS = 10.0


@dataclass
class _Live:
    timing: StreamTiming
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    outputs: list[Output] = field(default_factory=list)


class EngineLoad:
    """A running engine and the requests in it. Made by `engine`."""

    def __init__(
        self, link: EngineLink, ready: Ready, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.ready = ready
        self._link = link
        self._clock = clock
        self._numbers = itertools.count(1)
        self._live: dict[int, _Live] = {}
        self._lost = False
        self._beat = asyncio.Condition()
        self._measuring: MeasuringProgress | None = None
        self._beats = 0

    async def until_costs_are_known(self, progress: Callable[[str], None]) -> None:
        """Wait, without a request, until the engine has measured what rounds cost.

        Raises:
            SparklaneError: it goes away meanwhile.
        """
        async with self._beat:
            # What was said before could be from before the measurement began.
            begun = self._beats
            while not self._lost and (self._beats == begun or self._measuring is not None):
                await self._beat.wait()
                if self._measuring is not None:
                    timed, total = self._measuring.timed, self._measuring.total
                    progress(f"the engine measures what rounds cost: {timed} of {total}")
        if self._lost:
            raise SparklaneError("the engine went away while it was measuring", ExitCode.ENGINE)

    @property
    def pid(self) -> int:
        """The engine's process id."""
        return self._link.pid

    def processor_seconds(self) -> float:
        """What the engine's process has taken of all processors so far."""
        times = psutil.Process(self.pid).cpu_times()
        return float(times.user + times.system)

    async def stream(self, prompt: Sequence[int], max_tokens: int) -> StreamTiming:
        """One answer of `max_tokens` greedy tokens: no token stops it."""
        timing, _ = await self.answer(prompt, max_tokens)
        return timing

    async def answer(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        stop_tokens: Sequence[int] = (),
        lane: LaneChoice = LaneChoice.AUTO,
        logprobs: int | None = None,
    ) -> tuple[StreamTiming, list[Output]]:
        """One greedy answer: when its tokens came, and all that the engine said of it."""
        number = next(self._numbers)
        live = _Live(StreamTiming(sent=self._clock(), prompt_tokens=len(prompt)))
        if self._lost:
            live.timing.error, live.timing.ended = "the engine went away", self._clock()
            return live.timing, []
        self._live[number] = live
        self._link.send(
            Submit(
                request_id=number,
                prompt=list(prompt),
                produced=[],
                sampling=Sampling(temperature=0.0),
                max_tokens=max_tokens,
                stop_tokens=list(stop_tokens),
                logprobs=logprobs,
                lane=lane,
            )
        )
        await live.ended.wait()
        return live.timing, live.outputs

    async def run_load(
        self, prompts: Sequence[Sequence[int]], *, concurrency: int, max_tokens: int
    ) -> list[StreamTiming]:
        """Submit all prompts, `concurrency` at a time, the next as soon as one ends."""
        waiting = iter(prompts)
        timings: list[StreamTiming] = []

        async def one_after_the_other() -> None:
            for prompt in waiting:
                timings.append(await self.stream(prompt, max_tokens))

        await asyncio.gather(*(one_after_the_other() for _ in range(concurrency)))
        return timings

    async def read(self) -> None:
        """Take in what the engine says until it goes; then no request is left waiting."""
        problem = "the engine went away"
        try:
            async for message in self._link.messages():
                match message:
                    case Step():
                        now = self._clock()
                        for output in message.outputs:
                            self._take(output, now)
                    case Heartbeat():
                        await self._heard(message.measuring)
                    case Rejected(request_id, words):
                        self._end(request_id, self._clock(), words)
                    case Fault():
                        problem = message.message
        except EngineLost as error:
            problem = str(error)
        finally:
            self._lost = True
            await self._heard(None)
            for number in list(self._live):
                self._end(number, self._clock(), problem)

    async def _heard(self, measuring: MeasuringProgress | None) -> None:
        async with self._beat:
            self._beats += 1
            self._measuring = measuring
            self._beat.notify_all()

    def _take(self, output: Output, now: float) -> None:
        live = self._live.get(output.request_id)
        if live is None:
            return
        live.outputs.append(output)
        if output.tokens:
            live.timing.arrivals.append(now)
            live.timing.tokens += len(output.tokens)
        if output.finish is not None:
            self._end(output.request_id, now)

    def _end(self, number: int, now: float, error: str | None = None) -> None:
        if (live := self._live.pop(number, None)) is not None:
            live.timing.ended, live.timing.error = now, error
            live.ended.set()


@contextlib.asynccontextmanager
async def engine(
    configure: Configure, run_folder: Path, *, command: Sequence[str] | None = None
) -> AsyncIterator[EngineLoad]:
    """Start an engine, wait until it is ready, and end it afterwards.

    Raises:
        SparklaneError: it cannot load what it is told to.
    """
    try:
        link = await EngineLink.started(
            "bench", command or engine_command(), run_folder, CONNECT_SECONDS
        )
    except (EngineLost, OSError) as error:
        raise SparklaneError(f"the engine cannot be started: {error}", ExitCode.ENGINE) from error
    reading: asyncio.Task[None] | None = None
    try:
        link.send(configure)
        load = EngineLoad(link, await _until_ready(link))
        reading = asyncio.create_task(load.read())
        yield load
        await link.shut_down(STOP_SECONDS)
    finally:
        await link.close()
        if reading is not None:
            await reading


async def _until_ready(link: EngineLink) -> Ready:
    problem = "the engine went away while it was loading"
    try:
        async for message in link.messages():
            if isinstance(message, Ready):
                return message
            if isinstance(message, Fault):
                problem = message.message
    except EngineLost as error:
        problem = str(error)
    raise SparklaneError(problem, ExitCode.ENGINE)
