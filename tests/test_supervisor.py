"""The supervisor on real processes: the fake engine, which speaks the real messages."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import stat
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from daemon.child_process import python_command
from daemon.engine_health import EngineLimits, EngineWatch, Loss, RestartBudget
from daemon.engine_link import EngineLink, EngineLost, engine_environment
from daemon.supervisor import Supervisor
from scheduler.messages import (
    Configure,
    Heartbeat,
    Memory,
    Ready,
    Rejected,
    Sampling,
    Step,
    Submit,
)

FAKE = python_command("-m", "daemon.bench.fake_engine")
LIMITS = EngineLimits(load=20.0, wedge=20.0, heartbeat=20.0)
CONFIGURE = Configure(checkpoint="/nowhere")
WAIT = 30.0


class Listener:
    """Keeps what it is told, and lets a test wait for it."""

    def __init__(self) -> None:
        self.events: list[object] = []
        self.work = 0
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    def engine_ready(self, ready: Ready) -> None:
        self._add("ready")

    def engine_stepped(self, step: Step) -> None:
        for output in step.outputs:
            self._add(output)

    def engine_rejected(self, rejected: Rejected) -> None:
        self._add(rejected)

    def engine_lost(self, loss: Loss) -> None:
        self._add(loss)

    def engine_down(self, problem: str) -> None:
        self._add(f"down: {problem}")

    def outstanding(self) -> int:
        return self.work

    async def until(self, wanted: Callable[[list[object]], bool]) -> None:
        async with asyncio.timeout(WAIT), self._changed:
            await self._changed.wait_for(lambda: wanted(self.events))

    async def until_ready(self, times: int = 1) -> None:
        await self.until(lambda events: events.count("ready") >= times)

    async def until_down(self) -> str:
        await self.until(lambda events: bool(events) and str(events[-1]).startswith("down"))
        return str(self.events[-1])

    def _add(self, event: object) -> None:
        async def add() -> None:
            async with self._changed:
                self.events.append(event)
                self._changed.notify_all()

        task = asyncio.ensure_future(add())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@contextlib.asynccontextmanager
async def supervised(
    folder: Path, *options: str, limits: EngineLimits = LIMITS, command: list[str] | None = None
) -> AsyncIterator[tuple[Supervisor, Listener]]:
    listener = Listener()
    supervisor = Supervisor(
        "fake", CONFIGURE, listener, folder, limits,
        command=command or [*FAKE, *options], tick=0.05,
    )  # fmt: skip
    task = asyncio.create_task(supervisor.run())
    try:
        yield supervisor, listener
    finally:
        supervisor.stop()
        async with asyncio.timeout(WAIT):
            await task


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def submit(request_id: int, max_tokens: int = 4) -> Submit:
    return Submit(
        request_id=request_id, prompt=[1, 2], produced=[], sampling=Sampling(),
        max_tokens=max_tokens, stop_tokens=[],
    )  # fmt: skip


def test_an_engine_is_started_used_and_stopped(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with supervised(tmp_path) as (supervisor, listener):
            assert not supervisor.send(submit(1))
            await listener.until_ready()
            assert supervisor.send(submit(1))
            await listener.until(lambda events: len(events) == 5)
            pid = supervisor.pid
            assert pid is not None and alive(pid)
            assert supervisor.heartbeat_age is not None
            # The address is gone once the engine has connected.
            assert os.listdir(tmp_path) == []
        assert not alive(pid)
        assert supervisor.pid is None
        assert "down" not in str(listener.events)

    run(scenario())


def test_the_socket_is_the_users_alone(tmp_path: Path) -> None:
    """The child that is started looks at its own socket, and prints what it sees."""
    seen = tmp_path / "seen"
    look = "import os, sys; open(sys.argv[1], 'w').write(oct(os.stat(sys.argv[3]).st_mode))"

    async def scenario() -> None:
        with pytest.raises(EngineLost, match="before it connected"):
            await EngineLink.started(
                "fake", [sys.executable, "-c", look, str(seen)], tmp_path, WAIT
            )

    run(scenario())
    mode = int(seen.read_text(), 8)
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600
    assert not list(tmp_path.glob("*.sock"))


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_run_folder_with_a_long_path_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, everywhere: bool
) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    if everywhere:
        monkeypatch.setattr(tempfile, "tempdir", str(folder))

    async def scenario() -> None:
        async with supervised(folder) as (_, listener):
            await listener.until_ready()

    run(scenario())


def test_a_killed_engine_is_replaced(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with supervised(tmp_path) as (supervisor, listener):
            await listener.until_ready()
            first = supervisor.pid
            assert first is not None
            os.kill(first, signal.SIGKILL)
            await listener.until_ready(2)
            assert supervisor.pid not in (None, first)
            assert listener.events == ["ready", Loss.EXITED, "ready"]

    run(scenario())


def test_the_fourth_death_within_the_window_is_the_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with supervised(tmp_path) as (supervisor, listener):
            for life in range(1, 5):
                await listener.until_ready(life)
                assert supervisor.pid is not None
                os.kill(supervisor.pid, signal.SIGKILL)
            problem = await listener.until_down()
            assert "after 3 restarts" in problem
            assert listener.events.count(Loss.EXITED) == 3
            assert not supervisor.ready

    run(scenario())


@pytest.mark.parametrize(
    ("option", "limits", "loss"),
    [
        ("--wedge-after", EngineLimits(load=20.0, wedge=0.3, heartbeat=20.0), Loss.WEDGED),
        ("--silent-after", EngineLimits(load=20.0, wedge=20.0, heartbeat=0.3), Loss.SILENT),
    ],
)
def test_an_engine_that_only_looks_alive_is_killed(
    tmp_path: Path, option: str, limits: EngineLimits, loss: Loss
) -> None:
    options = [option, "0", "--once", str(tmp_path / "ill"), "--heartbeat-seconds", "0.05"]

    async def scenario() -> None:
        async with supervised(tmp_path, *options, limits=limits) as (supervisor, listener):
            await listener.until_ready()
            first = supervisor.pid
            assert first is not None
            supervisor.send(submit(1))
            listener.work = 1
            await listener.until(lambda events: loss in events)
            listener.work = 0
            await listener.until_ready(2)
            assert not alive(first)

    run(scenario())


def test_a_load_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    limits = EngineLimits(load=0.5, maximum_restarts=1)

    async def scenario() -> None:
        async with supervised(tmp_path, "--load-seconds", "60", limits=limits) as (_, listener):
            problem = await listener.until_down()
            assert listener.events[0] is Loss.LOAD_TIMEOUT
            assert "engine.load_seconds" in problem

    run(scenario())


def test_stopping_does_not_wait_for_an_engine_that_never_connects(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import threading; threading.Event().wait()"]

    async def scenario() -> None:
        async with supervised(tmp_path, command=command):
            # The supervisor's task begins before this one goes on.
            await asyncio.sleep(0)

    run(scenario())
    assert not list(tmp_path.glob("*.sock"))


def test_a_lasting_fault_is_not_retried(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with supervised(tmp_path, "--fault-lasting", "no such weights") as (_, listener):
            assert await listener.until_down() == "down: no such weights"
            assert len(listener.events) == 1

    run(scenario())


def test_a_passing_fault_is_retried(tmp_path: Path) -> None:
    options = ["--fault", "out of memory", "--once", str(tmp_path / "ill")]

    async def scenario() -> None:
        async with supervised(tmp_path, *options) as (_, listener):
            await listener.until_ready()
            assert listener.events[0] is Loss.EXITED

    run(scenario())


NONSENSE = """
import socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[2])
connection.sendall(b"\\0\\0\\0\\1x")
while connection.recv(4096):
    pass
"""


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["/no/such/program"], "cannot be started"),
        ([sys.executable, "-c", "raise SystemExit(3)"], "code 3 before it connected"),
        ([sys.executable, "-c", NONSENSE], "makes no sense"),
    ],
)
def test_a_program_that_is_no_engine_is_given_up(
    tmp_path: Path, command: list[str], words: str
) -> None:
    async def scenario() -> None:
        limits = EngineLimits(load=20.0, maximum_restarts=1)
        async with supervised(tmp_path, command=command, limits=limits) as (_, listener):
            assert words in await listener.until_down()

    run(scenario())


def test_what_an_engine_prints_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    words = "import sys; sys.stderr.write('WARNING hot\\nplain\\n' + 'x' * 10000)"

    async def scenario() -> None:
        with pytest.raises(EngineLost):
            await EngineLink.started("m", [sys.executable, "-c", words], tmp_path, WAIT)

    run(scenario())
    lines = [(r.levelno, r.getMessage()) for r in caplog.records if r.name == "sparklane.engine"]
    assert lines[:2] == [(logging.WARNING, "m: hot"), (logging.INFO, "m: plain")]
    assert all(len(line) < 5000 for _, line in lines)


def test_an_engine_ends_when_its_daemon_is_killed(tmp_path: Path) -> None:
    script = (
        "import asyncio, sys, pathlib, daemon.engine_link as e\n"
        "async def main():\n"
        "    link = await e.EngineLink.started('m', sys.argv[2:], pathlib.Path(sys.argv[1]), 30)\n"
        "    print(link.pid, flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )

    async def scenario() -> None:
        daemon = await asyncio.create_subprocess_exec(
            sys.executable, "-c", script, str(tmp_path), *FAKE, stdout=asyncio.subprocess.PIPE
        )
        assert daemon.stdout is not None
        async with asyncio.timeout(WAIT):
            engine = int(await daemon.stdout.readline())
            daemon.kill()
            await daemon.wait()
            await gone(engine)

    run(scenario())


async def gone(pid: int) -> None:
    """Wait for a process that is not ours to end; what is left of it may be a zombie."""
    with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
        if not hasattr(os, "pidfd_open"):  # not Linux
            await asyncio.to_thread(psutil.Process(pid).wait, WAIT)
            return
        descriptor = os.pidfd_open(pid)
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(descriptor, ended.set)
        await ended.wait()
        os.close(descriptor)


def test_an_engine_gets_no_secrets() -> None:
    environment = {
        "PATH": "/bin", "HOME": "/home/u", "MLX_METAL_DEBUG": "1", "CUDA_VISIBLE_DEVICES": "0",
        "SPARKLANE_BLAS": "auto", "PYTHONPATH": "/x", "LC_ALL": "C",
        "HF_TOKEN": "t", "OPENAI_API_KEY": "k", "SPARKLANE_API_KEY": "k", "DATABASE_URL": "u:p@h",
        "NOTIFY_SOCKET": "/run/notify", "AWS_SECRET_ACCESS_KEY": "s",
    }  # fmt: skip
    assert set(engine_environment(environment)) == {
        "PATH", "HOME", "MLX_METAL_DEBUG", "CUDA_VISIBLE_DEVICES", "SPARKLANE_BLAS", "PYTHONPATH",
        "LC_ALL",
    }  # fmt: skip


class Clock:
    """Time that moves only when told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


MEMORY = Memory(active=1, cache=1, peak=1)
WATCH_LIMITS = EngineLimits(wedge=10.0, heartbeat=5.0)


def test_idle_engines_are_never_wedged_and_busy_ones_are_in_time() -> None:
    clock, work = Clock(), [0]
    watch = EngineWatch(WATCH_LIMITS, clock, lambda: work[0])
    for _ in range(100):
        clock.now += 1.0
        watch.beat(Heartbeat(steps=7, pending=0, memory=MEMORY))
        assert watch.verdict() is None
    work[0] = 1
    for second in range(1, 12):
        clock.now += 1.0
        watch.beat(Heartbeat(steps=7, pending=0, memory=MEMORY))
        assert watch.verdict() is (Loss.WEDGED if second > 10 else None)


@pytest.mark.parametrize("by_step", [True, False])
def test_steps_keep_a_busy_engine_alive(by_step: bool) -> None:
    clock = Clock()
    watch = EngineWatch(WATCH_LIMITS, clock, lambda: 1)
    for second in range(100):
        clock.now += 1.0
        if by_step and second % 9 == 0:
            watch.progress()
        steps = 0 if by_step else second // 9
        watch.beat(Heartbeat(steps=steps, pending=1, memory=MEMORY))
        assert watch.verdict() is None


def test_a_silent_engine_is_noticed_even_when_idle() -> None:
    clock = Clock()
    watch = EngineWatch(WATCH_LIMITS, clock, lambda: 0)
    clock.now += 5.0
    assert watch.verdict() is None
    clock.now += 0.1
    assert watch.verdict() is Loss.SILENT


def test_restarts_are_counted_in_a_window() -> None:
    clock = Clock()
    budget = RestartBudget(EngineLimits(maximum_restarts=3, restart_window=60.0), clock)
    answers = []
    for _ in range(4):
        answers.append(budget.allows())
        budget.was_ready()
        clock.now += 10.0
    assert answers == [True, True, True, False]
    clock.now = 60.0
    assert budget.allows()


def test_loads_that_never_end_are_limited_without_a_window() -> None:
    clock = Clock()
    budget = RestartBudget(EngineLimits(maximum_restarts=2, restart_window=60.0), clock)
    answers = []
    for _ in range(3):
        clock.now += 600.0
        answers.append(budget.allows())
    assert answers == [True, True, False]
