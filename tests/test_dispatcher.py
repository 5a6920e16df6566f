"""The dispatcher on a fake engine that is a real process, killed, wedged and cancelled.

The fake's tokens depend on everything that came before, so equality proves a replay exact.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from daemon.engine_health import EngineLimits, Loss
from daemon.generation import Delta, FinishReason, ModelState, Refusal, RefusalKind
from daemon.live_request import LiveRequest
from daemon.metrics import Metrics
from scheduler.messages import Output, Ready, Rejected, Step, StepKind
from tests.serving import (
    PATIENCE,
    Serving,
    Signal,
    collect,
    expected,
    generation,
    make_service,
    serving,
)

FOUR = [generation((7, index), 20, seed=index) for index in range(4)]


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


async def all_of(served: Serving) -> None:
    """Four requests together give what each has to give."""
    results = await asyncio.gather(*(collect(served.dispatcher, request) for request in FOUR))
    assert [tokens for tokens, _ in results] == [expected(request) for request in FOUR]
    assert {finish for _, finish in results} == {FinishReason.LENGTH}
    served.assert_empty()


def test_requests_together_get_their_own_tokens(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as served:
            await all_of(served)
            assert served.metric("requests_total", model="fake", finish_reason="length") == 4
            assert served.metric("prompt_tokens_total", model="fake") == 8
            assert served.metric("generated_tokens_total", model="fake", lane="serial") == 80
            assert served.metric("engine_restarts_total", model="fake", reason="exited") == 0
            assert served.dispatcher.models["fake"].state is ModelState.READY

    run(scenario())


def test_more_requests_than_rows_all_come_to_their_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, rows=1) as served:
            await all_of(served)

    run(scenario())


def test_streams_go_on_exactly_after_a_kill(tmp_path: Path) -> None:
    """The engine holds still in mid-stream, so the kill cannot come too late."""
    options = ["--wedge-after", "13", "--once", str(tmp_path / "ill")]

    async def scenario() -> None:
        async with serving(tmp_path, *options) as served:
            got: list[list[int]] = [[] for _ in FOUR]
            midway = Signal(lambda: sum(map(len, got)) >= 13)
            streams = [
                asyncio.create_task(collect(served.dispatcher, request, tokens, midway))
                for request, tokens in zip(FOUR, got, strict=True)
            ]
            await midway.wait()
            assert not any(stream.done() for stream in streams)
            os.kill(served.engine_pid, signal.SIGKILL)
            await asyncio.gather(*streams)
            assert got == [expected(request) for request in FOUR]
            assert served.metric("replayed_requests_total", model="fake") == 4
            assert served.metric("engine_restarts_total", model="fake", reason="exited") == 1
            served.assert_empty()

    run(scenario())


def test_streams_survive_an_engine_that_keeps_dying(tmp_path: Path) -> None:
    """Every process kills itself after ten tokens; eighty are wanted."""

    async def scenario() -> None:
        limits = EngineLimits(load=PATIENCE, maximum_restarts=50)
        async with serving(tmp_path, "--die-after", "10", limits=limits) as served:
            await all_of(served)
            restarts = served.metric("engine_restarts_total", model="fake", reason="exited")
            assert restarts is not None and restarts >= 6

    run(scenario())


def test_a_wedged_engine_costs_a_pause_only(tmp_path: Path) -> None:
    options = ["--wedge-after", "9", "--once", str(tmp_path / "ill")]

    async def scenario() -> None:
        limits = EngineLimits(load=PATIENCE, wedge=0.3, heartbeat=PATIENCE)
        async with serving(tmp_path, *options, limits=limits) as served:
            await all_of(served)
            assert served.metric("engine_restarts_total", model="fake", reason="wedged") == 1

    run(scenario())


def test_a_model_that_is_down_refuses_running_waiting_and_new(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, "--die-after", "1", rows=2) as served:
            results = await asyncio.gather(
                *(collect(served.dispatcher, request) for request in FOUR),
                return_exceptions=True,
            )
            for result in results:
                assert isinstance(result, Refusal)
                assert result.kind is RefusalKind.MODEL_DOWN
                assert "3 restarts" in result.message
            assert served.dispatcher.models["fake"].state is ModelState.DOWN
            with pytest.raises(Refusal) as refusal:
                await collect(served.dispatcher, FOUR[0])
            assert refusal.value.kind.status == 503
            served.assert_empty()

    run(scenario())


def test_a_lasting_fault_tells_its_message(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, "--fault-lasting", "shard 2 is missing") as served:
            with pytest.raises(Refusal, match="shard 2 is missing"):
                await collect(served.dispatcher, FOUR[0])
            served.assert_empty()

    run(scenario())


def test_leaving_gives_the_row_to_the_next_and_late_tokens_go_nowhere(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, "--tokens-per-second", "500", rows=1) as served:
            queued = asyncio.create_task(collect(served.dispatcher, FOUR[1]))
            for _ in range(3):
                with pytest.raises(ConnectionResetError):
                    async with served.dispatcher.generate(generation(max_tokens=4000)) as deltas:
                        await anext(deltas)
                        raise ConnectionResetError
            assert await queued == (expected(FOUR[1]), FinishReason.LENGTH)
            served.assert_empty()
            assert served.metric("cancellations_total", model="fake", reason="decode") == 3

    run(scenario())


def test_a_cancelled_task_gives_its_reservation_back_wherever_it_is(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, "--wedge-after", "0", rows=1) as served:
            tasks = [asyncio.create_task(collect(served.dispatcher, request)) for request in FOUR]
            await served.service.seen_ready.wait()
            assert served.service.requests_running == 1
            assert served.service.requests_waiting == 3
            for left, task in zip((3, 2, 1, 0), reversed(tasks), strict=True):
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert served.service.live_requests == left
            served.assert_empty()
            assert served.metric("cancellations_total", model="fake", reason="queued") == 3
            assert served.metric("cancellations_total", model="fake", reason="prefill") == 1

    run(scenario())


def test_taking_enough_is_a_stop(tmp_path: Path) -> None:
    """A stop string is found by the reader of the tokens: no client has gone away."""

    async def scenario() -> None:
        async with serving(tmp_path) as served:
            async with served.dispatcher.generate(generation(max_tokens=4000)) as deltas:
                await anext(deltas)
            assert served.metric("requests_total", model="fake", finish_reason="stop") == 1
            assert served.metric("cancellations_total", model="fake", reason="decode") == 0
            served.assert_empty()

    run(scenario())


def test_entering_never_waits_not_even_while_the_engine_loads(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, "--load-seconds", "3600") as served:
            assert served.dispatcher.models["fake"].state is ModelState.LOADING
            context = served.dispatcher.generate(FOUR[0])
            request = immediately(context.__aenter__())
            assert isinstance(request, LiveRequest)
            assert served.service.requests_waiting == 1
            await context.__aexit__(None, None, None)
            served.assert_empty()

    run(scenario())


def test_a_full_queue_refuses_at_once_and_says_when_to_come_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, "--load-seconds", "3600", queue=2) as served:
            waiting = [served.dispatcher.generate(request) for request in FOUR[:2]]
            for context in waiting:
                await context.__aenter__()
            with pytest.raises(Refusal) as refusal:
                await served.dispatcher.generate(FOUR[2]).__aenter__()
            assert refusal.value.kind is RefusalKind.QUEUE_FULL
            assert refusal.value.kind.status == 503
            assert refusal.value.retry_after is not None and refusal.value.retry_after >= 1.0
            assert served.metric("refusals_total", model="fake", kind="queue_full") == 1
            for context in waiting:
                await context.__aexit__(None, None, None)
            served.assert_empty()

    run(scenario())


@pytest.mark.parametrize(
    ("request_", "kind", "status"),
    [
        (generation(model="other"), RefusalKind.UNKNOWN_MODEL, 404),
        (generation([1] * 4096), RefusalKind.CONTEXT_LENGTH, 400),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(
    tmp_path: Path, request_: Any, kind: RefusalKind, status: int
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as served:
            with pytest.raises(Refusal) as refusal:
                await served.dispatcher.generate(request_).__aenter__()
            assert (refusal.value.kind, refusal.value.kind.status) == (kind, status)
            served.assert_empty()

    run(scenario())


def test_max_tokens_is_clamped_and_ends_with_length(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as served:
            request = generation([5] * 4090, max_tokens=10**9)
            tokens, finish = await collect(served.dispatcher, request)
            assert tokens == expected(request, 6)
            assert finish is FinishReason.LENGTH

    run(scenario())


def test_what_the_engine_rejects_ends_alone(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, "--reject-token", "66") as served:
            bad, good = await asyncio.gather(
                collect(served.dispatcher, generation([66])),
                collect(served.dispatcher, FOUR[0]),
                return_exceptions=True,
            )
            assert isinstance(bad, Refusal)
            assert (bad.kind, bad.kind.status) == (RefusalKind.INVALID, 400)
            assert good == (expected(FOUR[0]), FinishReason.LENGTH)
            served.assert_empty()

    run(scenario())


def test_stop_tokens_and_logprobs_come_through(tmp_path: Path) -> None:
    async def scenario() -> None:
        request = generation(max_tokens=50)
        stop = expected(request)[7]
        asked = generation(max_tokens=50, stop_tokens=[stop], logprobs=2)
        deltas: list[Delta] = []
        async with serving(tmp_path) as served, served.dispatcher.generate(asked) as stream:
            async for delta in stream:
                deltas.append(delta)
        tokens = [token for delta in deltas for token in delta.tokens]
        first = expected(request).index(stop)
        assert tokens == expected(request)[: first + 1]
        assert deltas[-1].finish is FinishReason.STOP
        for delta in deltas:
            assert delta.logprobs is not None
            assert [detail.top_tokens[0] for detail in delta.logprobs] == delta.tokens

    run(scenario())


def test_draining_finishes_what_was_accepted_and_takes_nothing_new(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, "--tokens-per-second", "200", rows=1) as served:
            streams = [asyncio.create_task(collect(served.dispatcher, request)) for request in FOUR]
            await asyncio.sleep(0)
            draining = asyncio.create_task(served.dispatcher.drain(PATIENCE))
            await asyncio.sleep(0)
            with pytest.raises(Refusal) as refusal:
                await collect(served.dispatcher, FOUR[0])
            assert (refusal.value.kind, refusal.value.kind.status) == (RefusalKind.DRAINING, 503)
            assert served.dispatcher.draining
            assert await draining
            results = await asyncio.gather(*streams)
            assert [tokens for tokens, _ in results] == [expected(request) for request in FOUR]

    run(scenario())


def test_the_end_of_grace_ends_streams_with_a_refusal(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, "--wedge-after", "3", rows=1) as served:
            got: list[int] = []
            stuck = Signal(lambda: len(got) == 3)
            running = asyncio.create_task(collect(served.dispatcher, FOUR[0], got, stuck))
            waiting = asyncio.create_task(collect(served.dispatcher, FOUR[1]))
            await stuck.wait()
            assert not await served.dispatcher.drain(0.05)
            for stream in (running, waiting):
                with pytest.raises(Refusal, match=r"server\.grace_seconds") as refusal:
                    await stream
                assert refusal.value.kind is RefusalKind.DRAINING
            assert got == expected(FOUR[0], 3)
            served.assert_empty()

    run(scenario())


def immediately(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that must not wait for anything."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits")


READY = Ready(
    backend="", device="", precision="", blas="", vocabulary_size=1, context_length=1,
    maximum_rows=1, kv_bytes_per_token=0, weight_bytes=0, load_seconds=0.0,
)  # fmt: skip


class ServiceWalk(RuleBasedStateMachine):
    """Requests, an engine that comes and goes, and clients that leave, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.service = make_service(Metrics(), rows=3, queue=4, queue_tokens=5000)
        self.contexts: dict[int, Any] = {}
        self.requests: dict[int, LiveRequest] = {}
        self.is_open = False

    def step(self, *outputs: Output, started: tuple[int, ...] = ()) -> None:
        self.service.engine_stepped(
            Step(
                kind=StepKind.SERIAL,
                seconds=0.1,
                rows=len(outputs),
                tokens=len(outputs),
                outputs=list(outputs),
                started=list(started),
            )
        )

    @rule(prompt=st.integers(1, 5000), maximum=st.integers(1, 5000))
    def arrive(self, prompt: int, maximum: int) -> None:
        context = self.service.generate(generation([1] * prompt, maximum))
        before = self.service.live_requests
        try:
            request = immediately(context.__aenter__())
        except Refusal as refusal:
            assert refusal.message
            assert self.service.live_requests == before
            return
        self.contexts[request.request_id] = context
        self.requests[request.request_id] = request

    @rule()
    def engine_comes(self) -> None:
        self.is_open = True
        self.service.engine_ready(READY)

    @rule()
    def engine_goes(self) -> None:
        self.is_open = False
        self.service.engine_lost(Loss.EXITED)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), finish=st.sampled_from([None, *FinishReason]))
    def output(self, data: st.DataObject, finish: FinishReason | None) -> None:
        key = data.draw(st.sampled_from(sorted(self.requests)))
        self.step(Output(key, [5], finish), Output(10**6, [6], finish), started=(key, 10**6))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def reject(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.requests)))
        self.service.engine_rejected(Rejected(key, "no"))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), error=st.sampled_from([None, ConnectionResetError]))
    def leave(self, data: st.DataObject, error: type[Exception] | None) -> None:
        key = data.draw(st.sampled_from(sorted(self.requests)))
        self.requests.pop(key)
        context = self.contexts.pop(key)
        raised = error() if error else None
        try:
            immediately(context.__aexit__(error, raised, None))
        except ConnectionResetError as again:
            assert again is raised

    @invariant()
    def the_books_are_right(self) -> None:
        service = self.service
        assert service.requests_running + service.requests_waiting == service.live_requests
        assert service.live_requests <= len(self.requests)
        assert service.requests_running <= 3
        assert 0 <= service.kv_reserved_bytes <= service.kv_budget_bytes
        assert bool(service.kv_reserved_bytes) == bool(service.requests_running)
        if self.is_open and service.requests_waiting:
            assert service.requests_running

    def teardown(self) -> None:
        self.service.engine_down("the end")
        assert self.service.live_requests == 0
        assert self.service.kv_reserved_bytes == 0
        for context in self.contexts.values():
            immediately(context.__aexit__(None, None, None))


TestServiceWalk = ServiceWalk.TestCase
TestServiceWalk.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
