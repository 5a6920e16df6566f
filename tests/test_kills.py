"""Twenty kills of real engines at random moments: every stream says what it would have said.

Tiny random weights and the reference BLAS, so that a replayed prefix has the very same bits.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest

from daemon.dispatcher import ModelDispatcher
from daemon.engine_health import EngineLimits
from daemon.generation import Generation, Sampling
from daemon.metrics import Metrics
from daemon.supervisor import Supervisor
from scheduler.messages import Configure
from tests.serving import WatchedService, make_service
from tests.tiny_models import save_tiny_checkpoint

KILLS = 20
ROWS = 8
TOKENS = 440
PATIENCE = 240.0

REQUESTS = [
    Generation(
        model="fake",
        prompt=[3 + index] * (5 + 7 * index),
        sampling=Sampling(temperature=index % 3 / 2, seed=index, top_p=0.95),
        max_tokens=TOKENS,
        stop_tokens=[],
    )
    for index in range(ROWS)
]


def test_twenty_kills_change_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARKLANE_BLAS", "reference")
    checkpoint = save_tiny_checkpoint("llama", tmp_path / "tiny")

    async def scenario() -> None:
        metrics = Metrics()
        service = make_service(metrics, rows=ROWS)
        supervisor = Supervisor(
            "fake",
            Configure(checkpoint=str(checkpoint), maximum_rows=ROWS),
            service,
            tmp_path,
            EngineLimits(load=PATIENCE, wedge=PATIENCE, heartbeat=PATIENCE, maximum_restarts=50),
            tick=0.05,
        )
        service.supervisor = supervisor
        task = asyncio.create_task(supervisor.run())
        dispatcher = ModelDispatcher([service], metrics)
        try:
            async with asyncio.timeout(PATIENCE):
                expected = await answers(dispatcher, service, kills=0)
                assert await answers(dispatcher, service, kills=KILLS) == expected
        finally:
            supervisor.stop()
            await task
        restarts = metrics.registry.get_sample_value(
            "sparklane_engine_restarts_total", {"model": "fake", "reason": "exited"}
        )
        assert restarts == KILLS
        assert service.live_requests == service.kv_reserved_bytes == 0

    asyncio.run(scenario())


async def answers(
    dispatcher: ModelDispatcher, service: WatchedService, *, kills: int
) -> list[list[int]]:
    """All tokens of all requests; the engine is killed after random numbers of tokens."""
    dice = random.Random(kills)
    done = 0
    since_kill = 0
    victim: int | None = None
    threshold = dice.randint(1, 40)

    def heard(count: int) -> None:
        nonlocal done, since_kill, victim, threshold
        pid = service.engine_pid
        if pid == victim:
            # What the dead engine had still sent.
            return
        since_kill += count
        if done < kills and since_kill >= threshold and pid is not None:
            victim, done, since_kill, threshold = pid, done + 1, 0, dice.randint(1, 40)
            os.kill(pid, signal.SIGKILL)

    async def collect(request: Generation) -> list[int]:
        tokens: list[int] = []
        async with dispatcher.generate(request) as deltas:
            async for delta in deltas:
                tokens += delta.tokens
                heard(len(delta.tokens))
        return tokens

    found = await asyncio.gather(*(collect(request) for request in REQUESTS))
    assert done == kills
    return found
