"""The daemon as a process: starting, readiness, signals, reloading, exit codes.

The engine is the fake one; the checkpoint, and so tokenizer and template, are the default's.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from daemon.exit_codes import ExitCode
from daemon.locations import CacheLock
from daemon.service_notify import ServiceNotifier
from tests.served_daemon import Served, ended_daemon, served_daemon, write_configuration


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


@pytest.fixture
def configuration(smollm2: Path) -> str:
    """One model named "m", on any free port."""
    return (
        f'[server]\nport = 0\n[[models]]\nname = "m"\ncheckpoint = "{smollm2}"\n'
        "maximum_context = 2048\n"
    )


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """The data of an event stream's events."""
    async for line in response.content:
        if line.startswith(b"data: "):
            yield line[6:].decode().strip()


def text_of(event: str) -> str:
    choice = json.loads(event)["choices"][0]
    return choice["delta"].get("content") or ""


def chat(served: Served, max_tokens: int = 40) -> Any:
    """A streaming request, to be used with `async with`."""
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "Hello"}],
        "stream": True,
        "max_tokens": max_tokens,
        "seed": 7,
    }
    return served.client.post(f"{served.url}/v1/chat/completions", json=body)


async def read_chat(served: Served, max_tokens: int = 40) -> tuple[str, str | None]:
    """Text and finish reason of a stream that ends as it should."""
    text, finish, last = "", None, ""
    async with chat(served, max_tokens) as response:
        assert response.status == 200, await response.text()
        async for event in events(response):
            last = event
            if event != "[DONE]":
                text += text_of(event)
                finish = json.loads(event)["choices"][0]["finish_reason"] or finish
    assert last == "[DONE]"
    return text, finish


def engine_pid(served: Served) -> int:
    """The process id of the daemon's only child."""
    (engine,) = psutil.Process(served.process.pid).children()
    return engine.pid


def test_live_at_once_and_ready_only_when_loaded(tmp_path: Path, configuration: str) -> None:
    async def scenario() -> None:
        async with served_daemon(tmp_path, configuration, "--load-seconds", "3600") as served:
            assert await served.status("/livez") == 200
            assert await served.status("/readyz") == 503
            await served.logged("load")
            served.signal(signal.SIGTERM)
            assert await served.exit_code() == ExitCode.OK

    run(scenario())


def test_requests_that_come_while_the_model_loads_are_served(
    tmp_path: Path, configuration: str
) -> None:
    async def scenario() -> None:
        async with served_daemon(tmp_path, configuration, "--load-seconds", "0.3") as served:
            await served.logged("engine")
            text, finish = await read_chat(served)
            assert text and finish == "length"
            assert await served.status("/readyz") == 200
            async with served.client.get(served.url + "/metrics") as response:
                body = await response.text()
            assert 'sparklane_requests_total{finish_reason="length",model="m"} 1.0' in body

    run(scenario())


def test_a_client_sees_a_pause_and_the_same_text_when_the_engine_is_killed(
    tmp_path: Path, configuration: str
) -> None:
    options = ["--wedge-after", "60", "--once", str(tmp_path / "ill")]

    async def scenario() -> None:
        async with served_daemon(tmp_path, configuration, *options) as served:
            await served.logged("is ready")
            whole = await read_chat(served, 40)
            text, killed = "", False
            async with chat(served, 40) as response:
                async for event in events(response):
                    if event == "[DONE]":
                        break
                    text += text_of(event)
                    if text and not killed:
                        # The engine stands still after 20 of this stream's 40 tokens.
                        os.kill(engine_pid(served), signal.SIGKILL)
                        killed = True
            assert text == whole[0]

    run(scenario())


def test_sigterm_lets_streams_finish_and_takes_nothing_new(
    tmp_path: Path, configuration: str
) -> None:
    async def scenario() -> None:
        async with served_daemon(tmp_path, configuration, "--tokens-per-second", "200") as served:
            await served.logged("is ready")
            async with chat(served, 100) as response:
                stream = events(response)
                await anext(stream)
                served.signal(signal.SIGTERM)
                await served.logged("draining")
                assert await served.status("/readyz") == 503
                assert await served.status("/livez") == 200
                async with chat(served) as refused:
                    assert refused.status == 503
                    assert "Retry-After" in refused.headers
                received = [event async for event in stream]
            assert received[-1] == "[DONE]"
            assert json.loads(received[-2])["choices"][0]["finish_reason"] == "length"
            assert await served.exit_code() == ExitCode.OK

    run(scenario())


@pytest.mark.parametrize("second_signal", [True, False])
def test_streams_that_are_cut_off_end_with_an_error_event(
    tmp_path: Path, configuration: str, second_signal: bool
) -> None:
    grace = 3600 if second_signal else 0.2
    configured = configuration.replace("port = 0", f"port = 0\ngrace_seconds = {grace}")

    async def scenario() -> None:
        async with served_daemon(tmp_path, configured, "--wedge-after", "3") as served:
            await served.logged("is ready")
            async with chat(served) as response:
                stream = events(response)
                await anext(stream)
                served.signal(signal.SIGTERM)
                await served.logged("draining")
                if second_signal:
                    served.signal(signal.SIGINT)
                received = [event async for event in stream]
            assert "error" in json.loads(received[-1])
            assert await served.exit_code() == ExitCode.OK

    run(scenario())


def test_sighup_reloads_keys_and_keeps_what_is_wrong_out(
    tmp_path: Path, configuration: str
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    with_keys = configuration.replace("port = 0", f'port = 0\napi_keys_file = "{keys}"')

    async def scenario() -> None:
        async with served_daemon(tmp_path, configuration) as served:
            await served.logged("is ready")
            assert await served.status("/v1/models") == 200
            write_configuration(tmp_path, with_keys + "[engine]\nwedge_seconds = 5\n")
            served.signal(signal.SIGHUP)
            await served.logged("engine.wedge_seconds")
            assert await served.status("/v1/models") == 401
            assert await served.status("/v1/models", Authorization="Bearer secret") == 200
            write_configuration(tmp_path, "nonsense = 1\n")
            served.signal(signal.SIGHUP)
            await served.logged("stays as it was")
            assert await served.status("/v1/models", Authorization="Bearer secret") == 200
            served.signal(signal.SIGTERM)
            await served.exit_code()
            assert "secret" not in "".join(served.log)

    run(scenario())


def test_sighup_tries_a_model_again_that_is_down(tmp_path: Path, configuration: str) -> None:
    options = ["--fault-lasting", "no such weights", "--once", str(tmp_path / "ill")]

    async def scenario() -> None:
        async with served_daemon(tmp_path, configuration, *options) as served:
            await served.logged("is down: no such weights")
            async with chat(served) as response:
                assert response.status == 503
                assert "no such weights" in await response.text()
            served.signal(signal.SIGHUP)
            await served.logged("is ready")
            assert (await read_chat(served))[1] == "length"

    run(scenario())


def test_a_port_in_use_has_its_exit_code(tmp_path: Path, configuration: str) -> None:
    async def scenario() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            text = configuration.replace("port = 0", f"port = {port}")
            code, words = await ended_daemon(tmp_path, text)
        assert code == ExitCode.PORT_IN_USE
        assert len(words) == 1 and str(port) in words[0]

    run(scenario())


def test_a_cache_in_use_has_its_exit_code(tmp_path: Path, configuration: str) -> None:
    async def scenario() -> None:
        with CacheLock(tmp_path / "cache"):
            code, words = await ended_daemon(tmp_path, configuration)
        assert code == ExitCode.CACHE_LOCKED
        assert len(words) == 1 and str(os.getpid()) in words[0]

    run(scenario())


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (('checkpoint = "', 'checkpoint = "/nowhere'), ExitCode.CHECKPOINT, "config.json"),
        (("port = 0", 'port = 0\nhost = "203.0.113.1"\napi_keys_file = "KEYS"'),
         ExitCode.CONFIGURATION, "cannot listen"),
        (("[server]", "[memory]\nlimit_bytes = 1000000\n[server]"),
         ExitCode.CONFIGURATION, "memory.limit_bytes"),
        (("[server]", "[server]\napi_keys_file = '/nowhere/keys'"),
         ExitCode.CONFIGURATION, "/nowhere/keys"),
    ],
)  # fmt: skip
def test_what_keeps_a_daemon_from_serving_has_its_exit_code(
    tmp_path: Path, configuration: str, change: tuple[str, str], code: int, words: str
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("k\n")
    text = configuration.replace(*change, 1).replace("KEYS", str(keys))

    async def scenario() -> None:
        ended, log = await ended_daemon(tmp_path, text)
        assert ended == code, log
        assert words in log[-1]
        with CacheLock(tmp_path / "cache"):
            pass

    run(scenario())


def test_the_service_manager_is_told(tmp_path: Path, configuration: str) -> None:
    address = str(tmp_path / "notify")
    environment = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "3000000"}

    async def scenario() -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.bind(address)
            manager.setblocking(False)
            loop = asyncio.get_running_loop()
            async with served_daemon(tmp_path, configuration, environment=environment) as served:
                told = ""
                while "STATUS=serving" not in told or "WATCHDOG=1" not in told:
                    told += (await loop.sock_recv(manager, 4096)).decode() + "\n"
                assert told.startswith("READY=1\n")
                served.signal(signal.SIGTERM)
                while "STOPPING=1" not in told:
                    told += (await loop.sock_recv(manager, 4096)).decode() + "\n"
                assert await served.exit_code() == ExitCode.OK

    run(scenario())


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({}, None),
        ({"NOTIFY_SOCKET": "/n"}, None),
        ({"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "30000000"}, 30.0),
        ({"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1"}, None),
        ({"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "often"}, None),
        ({"WATCHDOG_USEC": "30000000"}, None),
    ],
)
def test_the_watchdog_is_served_only_when_asked_for(
    environment: dict[str, str], seconds: float | None
) -> None:
    assert ServiceNotifier(environment).watchdog_seconds == seconds


def test_a_service_manager_that_does_not_listen_is_no_problem() -> None:
    notifier = ServiceNotifier({"NOTIFY_SOCKET": "/nowhere/notify"})
    notifier.ready("x")
    ServiceNotifier({"NOTIFY_SOCKET": "@nobody"}).stopping()
    ServiceNotifier({}).status("x")
