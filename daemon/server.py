"""The daemon's life: lock, listen, bring the models up, serve, drain, stop.

Owns the order of things and the process's signals; runs on the event loop of the daemon's main
thread. /livez answers before any model is fetched or loaded. SIGTERM and SIGINT drain and end
with code 0, a second one ends at once; SIGHUP reloads what can be reloaded. What keeps the
daemon from serving raises `SparklaneError`, after everything has been taken down again.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import uvloop
from aiohttp import web

from daemon.application import create_application
from daemon.configuration import Configuration
from daemon.exit_codes import ExitCode, SparklaneError
from daemon.http_settings import http_settings, update_settings
from daemon.locations import CacheLock, default_cache_folder
from daemon.served_models import ServedModels
from daemon.service_notify import ServiceNotifier
from daemon.version import VERSION

log = logging.getLogger("sparklane.server")

HANDLER_SECONDS = 5.0
"""How long handlers get to write what is left, once all generations have ended."""

Reload = Callable[[], Configuration]


def run(
    configuration: Configuration,
    reload: Reload | None = None,
    *,
    listening: Callable[[str], None] | None = None,
) -> int:
    """`serve` on a uvloop of its own; returns the exit code."""
    return uvloop.run(serve(configuration, reload, listening=listening))


async def serve(
    configuration: Configuration,
    reload: Reload | None = None,
    *,
    cache: Path | None = None,
    engine_command: Sequence[str] | None = None,
    listening: Callable[[str], None] | None = None,
) -> int:
    """Serve until a signal says to stop, and return the exit code.

    `reload` reads the configuration again on SIGHUP. `listening` is called with the URL once
    connections are accepted. `engine_command` replaces the real engine.

    Raises:
        SparklaneError: the cache is in use, the address is, or a model cannot be served.
    """
    folder = cache or default_cache_folder()
    settings = http_settings(configuration)
    _set_log_level(configuration)
    with CacheLock(folder):
        served = ServedModels(configuration, folder, VERSION, engine_command)
        application = create_application(served.dispatcher, settings, served.metrics)
        runner = web.AppRunner(
            application,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=HANDLER_SECONDS,
        )
        await runner.setup()
        stops = _Stops()
        notifier = ServiceNotifier()

        def reloaded() -> None:
            if reload is None:
                log.warning("there is no configuration file to reload")
                return
            try:
                new = reload()
                update_settings(settings, served.applicable(new))
            except SparklaneError as error:
                log.error("the configuration stays as it was: %s", error)
                return
            served.take_over(new)
            _set_log_level(served.configuration)

        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, reloaded)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stops.signalled, number)
        keeping_alive: asyncio.Task[None] | None = None
        try:
            url = await _listen(runner, configuration)
            log.info("listening on %s", url)
            if listening is not None:
                listening(url)
            notifier.ready("loading")
            keeping_alive = asyncio.create_task(notifier.keep_alive())
            await _until_stopped(served, stops, notifier)
            notifier.stopping()
            await _drain(served, stops)
        finally:
            await served.stop(at_once=stops.now.is_set())
            await runner.cleanup()
            if keeping_alive is not None:
                keeping_alive.cancel()
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                loop.remove_signal_handler(number)
    return ExitCode.OK


class _Stops:
    """The signals that ask to stop: the first means drain, the second at once."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.now = asyncio.Event()

    def signalled(self, number: int) -> None:
        """A signal has come."""
        name = signal.Signals(number).name
        if self.drain.is_set():
            log.warning("%s again: stopping at once", name)
            self.now.set()
        else:
            log.info("%s: draining; a second signal stops at once", name)
            self.drain.set()


async def _listen(runner: web.AppRunner, configuration: Configuration) -> str:
    """Accept connections; the URL at which they come."""
    host, port = configuration.server.host, configuration.server.port
    try:
        await web.TCPSite(runner, host.strip("[]"), port).start()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            words = f"port {port} on {host} is in use; stop what listens there, or set server.port"
            raise SparklaneError(words, ExitCode.PORT_IN_USE) from error
        words = f"cannot listen on {host}, port {port}: {error.strerror or error}; "
        words += "choose another server.host or server.port"
        raise SparklaneError(words, ExitCode.CONFIGURATION) from error
    bound = runner.addresses[0][1]
    return f"http://{f'[{host}]' if ':' in host else host}:{bound}"


async def _until_stopped(served: ServedModels, stops: _Stops, notifier: ServiceNotifier) -> None:
    """Bring the models up and serve. What keeps a model from being served is raised."""
    bringing_up = asyncio.create_task(served.bring_up())
    stopping = asyncio.create_task(stops.drain.wait())
    try:
        await asyncio.wait((bringing_up, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not stopping.done():
            bringing_up.result()
            notifier.status("serving")
            await stopping
    finally:
        stopping.cancel()
        bringing_up.cancel()
        with contextlib.suppress(asyncio.CancelledError, SparklaneError):
            await bringing_up


async def _drain(served: ServedModels, stops: _Stops) -> None:
    """Finish what was accepted, within the grace period and unless told to stop now."""
    grace = served.configuration.server.grace_seconds
    draining = asyncio.create_task(served.dispatcher.drain(grace))
    hurry = asyncio.create_task(stops.now.wait())
    await asyncio.wait((draining, hurry), return_when=asyncio.FIRST_COMPLETED)
    hurry.cancel()
    if not draining.done():
        draining.cancel()
        await asyncio.wait((draining,))
        await served.dispatcher.drain(0.0)
    elif not draining.result():
        log.warning("requests were cut off at the end of the grace period of %g s", grace)


def _set_log_level(configuration: Configuration) -> None:
    logging.getLogger("sparklane").setLevel(configuration.log.level.value.upper())
