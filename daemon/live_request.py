"""A request from its acceptance to its end: a replayable prefix, and who waits for it.

Owned by its `ModelService`, on the daemon's event loop. All that an engine needs to go on with
a request is here, so an engine can be lost at any moment. Tokens are appended by the service
and read by one consumer; nothing is kept twice, and no queue grows between them.
"""

from __future__ import annotations

import asyncio
import enum

from daemon.generation import (
    Delta,
    FinishReason,
    Generation,
    Refusal,
    Speculation,
    TokenLogprobs,
)
from daemon.metrics import RequestTimes
from scheduler.messages import Output, Submit


class Phase(enum.StrEnum):
    """What a request is doing."""

    QUEUED = "queued"
    PREFILL = "prefill"
    DECODE = "decode"
    ENDED = "ended"


class LiveRequest:
    """One generation. Iterate it for its deltas; times are of the service's clock."""

    def __init__(
        self, request_id: int, generation: Generation, max_tokens: int, arrived: float
    ) -> None:
        self.request_id = request_id
        self.generation = generation
        self.max_tokens = max_tokens
        self.produced: list[int] = []
        self.phase = Phase.QUEUED
        self.arrived = arrived
        self.lane = "serial"
        self._speculation: Speculation | None = None
        self._started: float | None = None
        self._first: float | None = None
        self._last = arrived
        self._finish: FinishReason | None = None
        self._refusal: Refusal | None = None
        self._logprobs: list[TokenLogprobs] = []
        self._read = 0
        self._finish_read = False
        self._changed = asyncio.Event()

    def submit(self) -> Submit:
        """The message that makes an engine go on from here."""
        generation = self.generation
        return Submit(
            request_id=self.request_id,
            prompt=generation.prompt,
            produced=list(self.produced),
            sampling=generation.sampling,
            max_tokens=self.max_tokens,
            stop_tokens=generation.stop_tokens,
            logprobs=generation.logprobs,
            lane=generation.lane,
        )

    @property
    def times(self) -> RequestTimes:
        """When things happened, once there is a token."""
        first = self._last if self._first is None else self._first
        started = first if self._started is None else self._started
        return RequestTimes(self.arrived, started, first, self._last)

    def begin(self, now: float) -> None:
        """The engine reads the prompt. What counts is the first time; replays do not."""
        if self._started is None:
            self._started = now

    def take(self, output: Output, now: float) -> float | None:
        """Add an engine's output; seconds since the one before, None if it is the first."""
        self.begin(now)
        gap = None if self._first is None else now - self._last
        if self._first is None:
            self._first = now
        self._last = now
        self.phase = Phase.DECODE
        self.produced += output.tokens
        if output.logprobs is not None:
            self._logprobs += output.logprobs
        self._finish = output.finish
        self._speculation = output.speculation
        self._changed.set()
        return gap

    def refuse(self, refusal: Refusal) -> None:
        """Let the consumer's iteration end with an exception, after the tokens there are."""
        self._refusal = refusal
        self._changed.set()

    def __aiter__(self) -> LiveRequest:
        return self

    async def __anext__(self) -> Delta:
        """The tokens that have come since the last delta; waits for at least one.

        Raises:
            Refusal: the generation cannot be finished.
        """
        while True:
            if len(self.produced) > self._read or (self._finish and not self._finish_read):
                return self._delta()
            if self._finish is not None:
                raise StopAsyncIteration
            if self._refusal is not None:
                raise self._refusal
            self._changed.clear()
            await self._changed.wait()

    def _delta(self) -> Delta:
        tokens = self.produced[self._read :]
        self._read = len(self.produced)
        logprobs = None
        if self.generation.logprobs is not None:
            logprobs, self._logprobs = self._logprobs, []
        self._finish_read = self._finish is not None
        return Delta(tokens, logprobs, self._finish, self.lane, self._speculation)
