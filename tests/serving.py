"""A dispatcher with one model on a fake engine process, for tests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from daemon.bench.fake_engine import fake_tokens
from daemon.child_process import python_command
from daemon.dispatcher import ModelDispatcher
from daemon.engine_health import EngineLimits
from daemon.generation import FinishReason, Generation, Sampling
from daemon.metrics import Metrics
from daemon.model_service import ModelRoom, ModelService
from daemon.supervisor import Supervisor
from scheduler.admission import QueueLimits
from scheduler.ledger import KvCost
from scheduler.messages import Configure, Ready

FAKE_ENGINE = python_command("-m", "daemon.bench.fake_engine")
PATIENCE = 30.0
"""Seconds after which a test that waits has failed; nothing waits that long otherwise."""


class WatchedService(ModelService):
    """Tells a test when its first engine is ready."""

    def __init__(self, name: str, metrics: Metrics) -> None:
        super().__init__(name, metrics)
        self.seen_ready = asyncio.Event()

    def engine_ready(self, ready: Ready) -> None:
        super().engine_ready(ready)
        self.seen_ready.set()


class Signal(asyncio.Event):
    """Set by `check` once a condition holds."""

    def __init__(self, condition: Callable[[], bool]) -> None:
        super().__init__()
        self._condition = condition

    def check(self) -> None:
        if self._condition():
            self.set()


@dataclass(frozen=True)
class Serving:
    """What a test looks at."""

    dispatcher: ModelDispatcher
    service: WatchedService
    metrics: Metrics

    @property
    def engine_pid(self) -> int:
        pid = self.service.engine_pid
        assert pid is not None
        return pid

    def metric(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"sparklane_{name}", labels)

    def assert_empty(self) -> None:
        """Every reservation has come back."""
        assert self.service.live_requests == 0
        assert self.service.requests_running == self.service.requests_waiting == 0
        assert self.service.waiting_prompt_tokens == self.service.kv_reserved_bytes == 0


def make_service(
    metrics: Metrics, *, rows: int = 4, queue: int = 16, queue_tokens: int = 10_000
) -> WatchedService:
    """A model with room for `rows` rows of 4096 tokens, without an engine."""
    service = WatchedService("fake", metrics)
    cost = KvCost(bytes_per_token=10)
    room = ModelRoom(
        maximum_rows=rows,
        kv_budget=cost.rectangle(rows, 4096),
        kv_cost=cost,
        context_length=4096,
    )
    service.open(Path("/nowhere"), room, QueueLimits(requests=queue, prompt_tokens=queue_tokens))
    return service


@contextlib.asynccontextmanager
async def serving(
    folder: Path,
    *options: str,
    rows: int = 4,
    queue: int = 16,
    limits: EngineLimits | None = None,
) -> AsyncIterator[Serving]:
    """Serve the model "fake"; `options` are the fake engine's."""
    metrics = Metrics()
    service = make_service(metrics, rows=rows, queue=queue)
    supervisor = Supervisor(
        "fake",
        Configure(checkpoint="/nowhere", maximum_rows=rows),
        service,
        folder,
        limits or EngineLimits(load=PATIENCE, wedge=PATIENCE, heartbeat=PATIENCE),
        command=[*FAKE_ENGINE, *options],
        tick=0.05,
    )
    service.supervisor = supervisor
    task = asyncio.create_task(supervisor.run())
    try:
        async with asyncio.timeout(PATIENCE):
            yield Serving(ModelDispatcher([service], metrics), service, metrics)
    finally:
        supervisor.stop()
        await task


def generation(
    prompt: Sequence[int] = (1, 2, 3),
    max_tokens: int = 20,
    *,
    seed: int = 0,
    model: str = "fake",
    stop_tokens: Sequence[int] = (),
    logprobs: int | None = None,
) -> Generation:
    """A request for a model."""
    return Generation(
        model=model,
        prompt=list(prompt),
        sampling=Sampling(seed=seed),
        max_tokens=max_tokens,
        stop_tokens=list(stop_tokens),
        logprobs=logprobs,
    )


def expected(request: Generation, count: int | None = None) -> list[int]:
    """The tokens that the fake engine gives for a request."""
    return fake_tokens(request.prompt, request.sampling.seed, count or request.max_tokens)


async def collect(
    dispatcher: ModelDispatcher,
    request: Generation,
    tokens: list[int] | None = None,
    signal: Signal | None = None,
) -> tuple[list[int], FinishReason | None]:
    """All tokens of a generation, also into `tokens` as they come, and how it finished."""
    got = [] if tokens is None else tokens
    finish = None
    async with dispatcher.generate(request) as deltas:
        async for delta in deltas:
            assert finish is None
            got += delta.tokens
            finish = delta.finish
            if signal is not None:
                signal.check()
    return got, finish
