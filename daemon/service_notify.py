"""Tells systemd how the daemon is: started, stopping, alive.

Speaks the sd_notify protocol: datagrams to the socket named by NOTIFY_SOCKET. Without that
variable, as under launchd or in a terminal, it does nothing. Used on the event loop; never
blocks and never raises, because a daemon that serves must not stop for want of a listener.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Mapping

SHORTEST_INTERVAL_SECONDS = 1.0


class ServiceNotifier:
    """One daemon's line to its service manager."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        self.watchdog_seconds = _watchdog_seconds(environment) if self._address else None
        """How often the service manager must hear that we live; None = it does not ask."""

    def ready(self, status: str) -> None:
        """Started: connections are accepted."""
        self._send(f"READY=1\nSTATUS={status}")

    def status(self, status: str) -> None:
        """What `systemctl status` shows."""
        self._send(f"STATUS={status}")

    def stopping(self) -> None:
        """The end has begun."""
        self._send("STOPPING=1\nSTATUS=draining")

    async def keep_alive(self) -> None:
        """Say that the event loop turns, twice as often as asked for; returns if nobody asks."""
        if self.watchdog_seconds is None:
            return
        while True:
            self._send("WATCHDOG=1")
            await asyncio.sleep(max(self.watchdog_seconds / 2, SHORTEST_INTERVAL_SECONDS))

    def _send(self, message: str) -> None:
        if not self._address:
            return
        # "@" stands for the zero byte of Linux's abstract addresses.
        address = "\0" + self._address[1:] if self._address[0] == "@" else self._address
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection,
        ):
            connection.setblocking(False)
            connection.sendto(message.encode(), address)


def _watchdog_seconds(environment: Mapping[str, str]) -> float | None:
    """WATCHDOG_USEC, if it is meant for this process."""
    if environment.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    try:
        microseconds = int(environment["WATCHDOG_USEC"])
    except (KeyError, ValueError):
        return None
    return microseconds / 1e6 if microseconds > 0 else None
