"""The load generator against a small server that answers as it is told."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from daemon.bench.http_load import HttpTarget, connections, first_model, run_load, stream_chat
from daemon.bench.timings import summarise

Write = Callable[[bytes], Awaitable[None]]


def event(data: object) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def chunk(text: str = "", finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]})


def usage(prompt: int, completion: int) -> bytes:
    return event(
        {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}}
    )


DONE = b"data: [DONE]\n\n"


class FakeServer:
    """Streams `max_tokens` words, unless a test replaces `answer`. Not a server of models."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.together = self.most_together = 0
        self.answer = self.words

    async def words(self, body: dict[str, Any], write: Write) -> None:
        await write(chunk())
        await write(b": keep-alive\n\n")
        for _ in range(body["max_tokens"]):
            # Each write must be an arrival of its own, so the client gets its turn.
            await write(chunk("word "))
            await asyncio.sleep(0.002)
        await write(chunk(finish="length") + usage(7, body["max_tokens"]) + DONE)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.together += 1
        self.most_together = max(self.most_together, self.together)
        try:
            if body["model"] == "absent":
                return web.json_response({"error": {"message": "no such model"}}, status=404)
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await self.answer(body, response.write)
            return response
        finally:
            self.together -= 1

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "one"}, {"id": "two"}]})


@contextlib.asynccontextmanager
async def fake_server() -> AsyncIterator[tuple[FakeServer, HttpTarget]]:
    fake = FakeServer()
    application = web.Application()
    application.router.add_post("/v1/chat/completions", fake.chat)
    application.router.add_get("/v1/models", fake.models)
    async with TestServer(application) as server:
        url = str(server.make_url("")).rstrip("/")
        yield fake, HttpTarget(url=url, model="one", extra={"ignore_eos": True})


def test_counts_tokens_by_usage_and_times_by_text() -> None:
    async def run() -> None:
        async with fake_server() as (fake, target), connections() as client:
            first = asyncio.Event()
            timing = await stream_chat(client, target, "say it", 5, first_token=first)
        assert timing.error is None
        assert (timing.tokens, timing.prompt_tokens) == (5, 7)
        assert 1 <= len(timing.arrivals) <= 5
        assert timing.sent <= timing.arrivals[0] <= timing.arrivals[-1] <= timing.ended
        assert first.is_set()
        (body,) = fake.bodies
        assert body["ignore_eos"] is True and body["stream"] is True
        assert body["messages"] == [{"role": "user", "content": "say it"}]

    asyncio.run(run())


def test_sends_everything_and_no_more_than_so_many_at_once() -> None:
    async def run() -> None:
        async with fake_server() as (fake, target), connections() as client:
            prompts = [f"prompt {number}" for number in range(9)]
            timings = await run_load(client, target, prompts, concurrency=3, max_tokens=4)
        summary = summarise(timings)
        assert (summary.requests, summary.errors, summary.tokens) == (9, 0, 36)
        assert sorted(body["messages"][0]["content"] for body in fake.bodies) == prompts
        assert fake.most_together == 3

    asyncio.run(run())


def test_an_error_status_is_recorded_with_its_words() -> None:
    async def run() -> None:
        async with fake_server() as (_, target), connections() as client:
            absent = HttpTarget(url=target.url, model="absent")
            timing = await stream_chat(client, absent, "hello", 4)
        assert timing.error is not None
        assert timing.error.startswith("HTTP 404") and "no such model" in timing.error

    asyncio.run(run())


def failing(answer: Callable[[dict[str, Any], Write], Awaitable[None]]) -> str | None:
    async def run() -> str | None:
        async with fake_server() as (fake, target), connections() as client:
            fake.answer = answer  # type: ignore[assignment]
            return (await stream_chat(client, target, "hello", 4)).error

    return asyncio.run(run())


def test_a_stream_that_breaks_off_is_lost() -> None:
    async def without_end(body: dict[str, Any], write: Write) -> None:
        await write(chunk("word"))

    async def without_done(body: dict[str, Any], write: Write) -> None:
        await write(chunk("word") + chunk(finish="stop"))

    assert failing(without_end) == "the stream broke off before its end"
    assert failing(without_done) == "the stream broke off before its end"


def test_an_error_inside_a_stream_is_recorded() -> None:
    async def error_event(body: dict[str, Any], write: Write) -> None:
        await write(chunk("word") + event({"error": {"message": "the engine is down"}}))

    found = failing(error_event)
    assert found is not None and "the engine is down" in found


def test_nonsense_is_recorded() -> None:
    async def nonsense(body: dict[str, Any], write: Write) -> None:
        await write(b"data: {nonsense\n\n")

    found = failing(nonsense)
    assert found is not None and "not valid JSON" in found


def test_a_server_that_is_not_there_is_recorded() -> None:
    async def run() -> str | None:
        async with fake_server() as (_, target):
            pass
        async with connections() as client:
            return (await stream_chat(client, target, "hello", 4)).error

    assert asyncio.run(run()) is not None


def test_without_a_usage_arrivals_count() -> None:
    async def no_usage(body: dict[str, Any], write: Write) -> None:
        await write(chunk("word"))
        await write(chunk(finish="stop") + DONE)

    async def run() -> int:
        async with fake_server() as (fake, target), connections() as client:
            fake.answer = no_usage
            return (await stream_chat(client, target, "hello", 4)).tokens

    assert asyncio.run(run()) == 1


def test_the_first_model_and_the_key() -> None:
    async def run() -> None:
        async with fake_server() as (fake, target), connections() as client:
            assert await first_model(client, target.url) == "one"
            keyed = HttpTarget(url=target.url, model="one", api_key="word")
            await stream_chat(client, keyed, "hello", 1)
        assert fake.headers[0]["Authorization"] == "Bearer word"

    asyncio.run(run())
