"""A fake dispatcher for the HTTP side: it says scripted tokens and notes what was cancelled.

Only the engine and its queue are fake; the application, the socket and the text side are real.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from daemon.application import HttpSettings, create_application
from daemon.generation import (
    Delta,
    FinishReason,
    Generation,
    MeasuringProgress,
    ModelState,
    Refusal,
    RefusalKind,
    TokenLogprobs,
)
from daemon.metrics import Metrics
from scheduler.messages import Speculation


@dataclass
class FakeModel:
    """A served model that is always there."""

    name: str
    folder: Path | None
    state: ModelState = ModelState.READY
    problem: str | None = None
    measuring: MeasuringProgress | None = None
    context_length: int = 512
    created: int = 1_700_000_000


@dataclass
class FakeDispatcher:
    """Says `script` to everybody, up to `max_tokens`.

    `hold` waits for `release` after that many tokens; `refusal` is raised on entering, by the
    queue's limit after `refuse_after` have entered; `failure` comes instead of the end.
    With `speculation` it says that it was in the speculative lane.
    """

    folder: Path
    script: list[int] = field(default_factory=list)
    hold: int | None = None
    refusal: Refusal | None = None
    refuse_after: int | None = None
    failure: Exception | None = None
    speculation: Speculation | None = None
    draining: bool = False
    wedged: bool = False
    entered: list[Generation] = field(default_factory=list)
    cancelled: int = 0
    """Left before the end, by an exception or because enough was heard."""
    abandoned: int = 0
    """Those of them that an exception ended: the client has gone, or another choice failed."""
    finished: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)
    release: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.models = {"fake": FakeModel("fake", self.folder)}

    @contextlib.asynccontextmanager
    async def generate(self, generation: Generation) -> AsyncIterator[AsyncIterator[Delta]]:
        if self.refusal is not None:
            raise self.refusal
        if len(self.entered) == self.refuse_after:
            raise Refusal(RefusalKind.TENANT_QUEUE_FULL, "2 of 2 wait already", 6.2)
        with self.changed:
            self.entered.append(generation)
            self.changed.notify_all()
        ended = False

        async def deltas() -> AsyncIterator[Delta]:
            nonlocal ended
            limit = min(generation.max_tokens, len(self.script))
            for place, token in enumerate(self.script[:limit]):
                if place == self.hold:
                    await self.release.wait()
                if self.failure is not None and place == limit - 1:
                    raise self.failure
                finish = None
                if token in generation.stop_tokens:
                    finish = FinishReason.STOP
                elif place == limit - 1:
                    finish = FinishReason.LENGTH
                details = None
                if generation.logprobs is not None:
                    best = [token] * min(generation.logprobs, 1)
                    details = [TokenLogprobs(-0.25, best, [-0.25] * len(best))]
                ended = finish is not None
                lane = "serial" if self.speculation is None else "speculative"
                yield Delta([token], details, finish, lane, self.speculation if ended else None)
                if ended:
                    return
                await asyncio.sleep(0)

        abandoned = True
        try:
            yield deltas()
            abandoned = False
        finally:
            with self.changed:
                self.finished += ended
                self.cancelled += not ended
                self.abandoned += abandoned and not ended
                self.changed.notify_all()

    def wait_for(self, condition: object, seconds: float = 20.0) -> None:
        """Block until `condition()` holds after some change."""
        with self.changed:
            assert self.changed.wait_for(condition, seconds)  # type: ignore[arg-type]


class Server:
    """The real application on a real socket, its loop in a thread of its own."""

    def __init__(self, dispatcher: FakeDispatcher, settings: HttpSettings) -> None:
        self.dispatcher = dispatcher
        self.settings = settings
        self.port = 0
        self.loop = asyncio.new_event_loop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def call(self, function: object) -> None:
        """Run a function on the loop's thread and wait for it."""
        done = threading.Event()
        self.loop.call_soon_threadsafe(lambda: (function(), done.set()))  # type: ignore[operator]
        assert done.wait(10)


@contextlib.contextmanager
def serving(dispatcher: FakeDispatcher, settings: HttpSettings | None = None) -> Iterator[Server]:
    """Serve until the context is left."""
    server = Server(dispatcher, settings or HttpSettings())
    started = threading.Event()
    stopping = asyncio.Event()

    async def run() -> None:
        application = create_application(dispatcher, server.settings, Metrics("test"))
        runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.port = runner.addresses[0][1]
        started.set()
        await stopping.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: server.loop.run_until_complete(run()))
    thread.start()
    assert started.wait(20)
    try:
        yield server
    finally:
        server.loop.call_soon_threadsafe(stopping.set)
        thread.join(20)
        server.loop.close()
