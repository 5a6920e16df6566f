"""The engine's end of the socket to the daemon.

Owns the connection, a reader thread and a heartbeat thread; the MLX thread sends its own
messages, because handing them to another thread would cost up to a switch interval a token.
When the daemon goes away, the inbox gets a `Shutdown`; should the MLX thread be stuck then,
the process ends itself after `ORPHAN_GRACE_SECONDS`, so that no engine outlives its daemon.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Callable
from typing import TypeVar

import msgspec

from scheduler.frames import SocketFrameReader, encode
from scheduler.messages import Cancel, Configure, FromEngine, Heartbeat, Shutdown, Submit, ToEngine

HEARTBEAT_SECONDS = 1.0
ORPHAN_GRACE_SECONDS = 10.0

Message = TypeVar("Message")


class EngineLink:
    """Connects at construction; `OSError` when the daemon does not listen."""

    def __init__(self, path: str) -> None:
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.connect(path)
        self._sending = threading.Lock()
        self._closed = threading.Event()
        self._inbox: queue.SimpleQueue[Configure | Submit | Cancel | Shutdown] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="reader", daemon=True).start()

    def send(self, message: FromEngine) -> None:
        """Write one message. A daemon that has gone is told by the inbox, not by an error."""
        frame = encode(message)
        with self._sending, contextlib.suppress(OSError):
            self._connection.sendall(frame)

    def receive(
        self, *, wait: bool, seconds: float | None = None
    ) -> Configure | Submit | Cancel | Shutdown | None:
        """The next message; None when there is none and `wait` is false, or after `seconds`."""
        try:
            return self._inbox.get(block=wait, timeout=seconds)
        except queue.Empty:
            return None

    def start_heartbeat(self, beat: Callable[[], Heartbeat]) -> None:
        """Send what `beat` returns once a second, from a thread of its own."""

        def run() -> None:
            while not self._closed.wait(HEARTBEAT_SECONDS):
                self.send(beat())

        threading.Thread(target=run, name="heartbeat", daemon=True).start()

    def close(self) -> None:
        """Stop the heartbeat and close the socket."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _read(self) -> None:
        reader = SocketFrameReader[Configure | Submit | Cancel | Shutdown](
            self._connection, ToEngine
        )
        try:
            while (message := reader.read()) is not None:
                self._inbox.put(message)
        except (OSError, EOFError, ValueError, msgspec.MsgspecError):
            pass
        self._inbox.put(Shutdown())
        if not self._closed.wait(ORPHAN_GRACE_SECONDS):
            os._exit(os.EX_UNAVAILABLE)
