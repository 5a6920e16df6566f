"""A load of streaming chat requests against any server that speaks OpenAI's API.

Runs on an event loop of the benchmark's own process. A request that fails is recorded, never
raised: a load tells how many were lost. What comes before the first text (the role, comments
that keep a connection alive) is no token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import msgspec

from daemon.bench.event_stream import EventStream
from daemon.bench.prompts import messages
from daemon.bench.timings import StreamTiming

TIMEOUT_SECONDS = 600.0


class HttpTarget(msgspec.Struct, frozen=True, kw_only=True):
    """Where to send. `url` is the server's root, without /v1. `extra` is added to every body."""

    url: str
    model: str
    api_key: str | None = None
    extra: dict[str, Any] = {}

    @property
    def headers(self) -> dict[str, str]:
        """What every request carries."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


def connections(limit: int = 0) -> aiohttp.ClientSession:
    """A client that opens as many connections as it is asked for (or `limit`)."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=limit),
        timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS),
    )


async def first_model(client: aiohttp.ClientSession, url: str, api_key: str | None = None) -> str:
    """The first model that a server lists.

    Raises:
        ValueError: it lists none.
        aiohttp.ClientError: it does not answer.
    """
    headers = HttpTarget(url=url, model="", api_key=api_key).headers
    async with client.get(f"{url}/v1/models", headers=headers) as answer:
        answer.raise_for_status()
        found = (await answer.json()).get("data") or []
    if not found:
        raise ValueError(f"{url} serves no model; name one with --model")
    return str(found[0]["id"])


async def stream_chat(
    client: aiohttp.ClientSession,
    target: HttpTarget,
    prompt: str,
    max_tokens: int,
    *,
    first_token: asyncio.Event | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> StreamTiming:
    """One streamed answer of `max_tokens` greedy tokens. `first_token` is set at the first."""
    body = {
        "model": target.model,
        "messages": messages(prompt),
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **target.extra,
    }
    timing = StreamTiming(sent=clock())
    try:
        async with client.post(
            f"{target.url}/v1/chat/completions", json=body, headers=target.headers
        ) as answer:
            if answer.status != 200:
                text = (await answer.text())[:200]
                timing.error = f"HTTP {answer.status}: {text}"
                return timing
            await _read(answer.content, timing, first_token, clock)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        timing.error = f"{type(error).__name__}: {error}"
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        timing.error = f"an event is not valid JSON: {error}"
    finally:
        timing.ended = clock()
    return timing


async def run_load(
    client: aiohttp.ClientSession,
    target: HttpTarget,
    prompts: Sequence[str],
    *,
    concurrency: int,
    max_tokens: int,
) -> list[StreamTiming]:
    """Send all prompts, `concurrency` at a time, the next as soon as one ends."""
    waiting = iter(prompts)
    timings: list[StreamTiming] = []

    async def one_after_the_other() -> None:
        for prompt in waiting:
            timings.append(await stream_chat(client, target, prompt, max_tokens))

    await asyncio.gather(*(one_after_the_other() for _ in range(concurrency)))
    return timings


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    @property
    def has_text(self) -> bool:
        return bool(self.content or self.reasoning or self.reasoning_content)


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Chunk)


async def _read(
    content: aiohttp.StreamReader,
    timing: StreamTiming,
    first_token: asyncio.Event | None,
    clock: Callable[[], float],
) -> None:
    events = EventStream()
    usage: _Usage | None = None
    finished = done = False
    async for piece in content.iter_any():
        now = clock()
        has_text = False
        for event in events.feed(piece):
            if event == b"[DONE]":
                done = True
                continue
            chunk = _decoder.decode(event)
            if chunk.error is not None:
                timing.error = f"the stream ended with an error: {chunk.error}"
                return
            usage = chunk.usage or usage
            has_text = has_text or any(choice.delta.has_text for choice in chunk.choices)
            finished = finished or any(choice.finish_reason for choice in chunk.choices)
        if has_text:
            timing.arrivals.append(now)
            if first_token is not None:
                first_token.set()
    if usage is not None:
        timing.tokens, timing.prompt_tokens = usage.completion_tokens, usage.prompt_tokens
    else:
        # Without a usage, a token counts as an arrival: right for servers that send each.
        timing.tokens = len(timing.arrivals)
    if not (finished and done):
        timing.error = "the stream broke off before its end"
