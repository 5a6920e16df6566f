"""Server-sent events to one client.

Owns one response and its keep-alive task; on the event loop. The first line is always data,
because strict clients stumble over a comment there; comments follow when nothing else was
written for a while. Once started, a stream ends in `[DONE]` or in an error event, and what its
body raises goes no further: the status line has been sent.
"""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType

import msgspec
from aiohttp import web

from daemon.errors import of_exception

_KEEP_ALIVE = b": keep-alive\n\n"
_DONE = b"data: [DONE]\n\n"


class EventStream:
    """Use as an asynchronous context, and `start` it once the request has been accepted.

    A client that has gone raises `ConnectionResetError` from `send`, so that whatever feeds the
    stream ends; leaving the context takes that exception out of the way.
    """

    def __init__(self, request: web.Request, keepalive_seconds: float) -> None:
        """`keepalive_seconds` is the longest silence; 0 means no keep-alive."""
        self._request = request
        self._period = keepalive_seconds
        self._started = False
        self._task: asyncio.Task[None] | None = None
        self._last_write = 0.0
        self.response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                # Proxies would otherwise collect the stream before they pass it on.
                "X-Accel-Buffering": "no",
            }
        )

    async def __aenter__(self) -> EventStream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if not self._started or not isinstance(error, Exception):
            return False
        if not isinstance(error, ConnectionResetError):
            with contextlib.suppress(ConnectionResetError):
                await self._event(of_exception(error).answer)
        return True

    async def start(self) -> None:
        """Send the headers."""
        self._started = True
        await self.response.prepare(self._request)

    async def send(self, event: msgspec.Struct) -> None:
        """One event."""
        await self._event(event)
        if self._task is None and self._period > 0:
            self._task = asyncio.create_task(self._keep_alive())

    async def done(self) -> None:
        """The end of the stream."""
        await self._write(_DONE)

    async def _event(self, event: msgspec.Struct) -> None:
        await self._write(b"data: " + msgspec.json.encode(event) + b"\n\n")

    async def _write(self, data: bytes) -> None:
        self._last_write = asyncio.get_running_loop().time()
        await self.response.write(data)

    async def _keep_alive(self) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionResetError):
            while True:
                await asyncio.sleep(self._last_write + self._period - loop.time())
                if loop.time() - self._last_write >= self._period:
                    await self._write(_KEEP_ALIVE)
