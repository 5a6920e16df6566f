"""From an admitted request to its answer, streamed or whole.

Pure plumbing on the event loop: it enters the generations, turns their tokens into pieces and
gives those to a format (chat or text completion). A refusal before the first byte is an HTTP
error; one after it is an error event, which ends the stream. A client that leaves takes its
generations along, wherever they are.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import msgspec
from aiohttp import web

from daemon.errors import json_response
from daemon.generation import Dispatcher, Generation, LaneChoice, Sampling, ServedModel
from daemon.openai_answers import CompletionTokensDetails, SpeculationDetails, Usage
from daemon.openai_requests import CommonRequest, logit_bias_of
from daemon.sequence import Piece, SequenceText, pieces
from daemon.sse import EventStream
from daemon.text.side import TextSide

UNLIMITED = 2**31 - 1
_SEED_STEP = 0x9E3779B97F4A7C15


class Format(Protocol):
    """How one kind of completion is written down."""

    def openings(self) -> Sequence[msgspec.Struct]:
        """Events before any token."""

    def chunk(self, piece: Piece) -> msgspec.Struct:
        """An event of a stream."""

    def usage_chunk(self, usage: Usage) -> msgspec.Struct:
        """The event with the usage."""

    def whole(self, answers: list[list[Piece]], usage: Usage) -> msgspec.Struct:
        """The answer without streaming: the pieces of each choice."""


def new_id(prefix: str) -> str:
    """An id for an answer."""
    return f"{prefix}-{secrets.token_hex(12)}"


def generations(
    request: CommonRequest,
    model: ServedModel,
    text: TextSide,
    prompt: list[int],
    *,
    max_tokens: int,
    logprobs: int | None,
) -> list[Generation]:
    """The `n` generations of one prompt. Without a seed one is drawn, so that a generation can
    always be replayed; the others' follow from the first."""
    seed = secrets.randbits(63) if request.seed is None else request.seed
    temperature = 1.0 if request.temperature is None else request.temperature
    return [
        Generation(
            model=model.name,
            prompt=prompt,
            sampling=Sampling(
                temperature=temperature,
                top_p=1.0 if request.top_p is None else request.top_p,
                top_k=max(request.top_k or 0, 0),
                min_p=request.min_p or 0.0,
                seed=(seed + choice * _SEED_STEP) % 2**64,
                presence_penalty=request.presence_penalty or 0.0,
                frequency_penalty=request.frequency_penalty or 0.0,
                logit_bias=logit_bias_of(request, text.vocabulary_size),
            ),
            max_tokens=max_tokens,
            stop_tokens=[] if request.ignore_eos else text.stop_tokens,
            logprobs=logprobs,
            lane=LaneChoice(request.lane),
        )
        for choice in range(request.n or 1)
    ]


async def answer(
    http: web.Request,
    dispatcher: Dispatcher,
    request: CommonRequest,
    sequences: Sequence[SequenceText],
    format_: Format,
    *,
    prompt_tokens: int,
    keepalive_seconds: float,
) -> web.StreamResponse:
    """Run the generations of `sequences` and write what they say."""

    def usage() -> Usage:
        generated = sum(sequence.generated for sequence in sequences)
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=generated,
            total_tokens=prompt_tokens + generated,
            completion_tokens_details=_completion_details(sequences),
        )

    if not request.stream:
        answers: list[list[Piece]] = [[] for _ in sequences]
        async with _accepted(dispatcher, sequences) as found:
            async for piece in found:
                answers[piece.index].append(piece)
        return json_response(format_.whole(answers, usage()))

    # Outside of the generations: what goes wrong with the stream must reach them as an exception,
    # by which they know a client that has left from one that has heard enough.
    async with EventStream(http, keepalive_seconds) as events:
        async with _accepted(dispatcher, sequences) as found:
            await events.start()
            for opening in format_.openings():
                await events.send(opening)
            async for piece in found:
                await events.send(format_.chunk(piece))
        if request.stream_options and request.stream_options.include_usage:
            await events.send(format_.usage_chunk(usage()))
        await events.done()
    return events.response


def _completion_details(sequences: Sequence[SequenceText]) -> CompletionTokensDetails:
    """Where the tokens came from, all choices together."""
    known = [s.speculation for s in sequences if s.speculation is not None]
    rounds = sum(speculation.rounds for speculation in known)
    if not rounds:
        return CompletionTokensDetails(lane=sequences[-1].lane)
    accepted = sum(speculation.accepted for speculation in known)
    return CompletionTokensDetails(
        lane=sequences[-1].lane,
        speculation=SpeculationDetails(
            rounds=rounds,
            drafted=sum(speculation.drafted for speculation in known),
            accepted=accepted,
            tau=(accepted + rounds) / rounds,
        ),
    )


@contextlib.asynccontextmanager
async def _accepted(
    dispatcher: Dispatcher, sequences: Sequence[SequenceText]
) -> AsyncIterator[AsyncIterator[Piece]]:
    """Enter all generations, or none of them, and give their pieces."""
    async with contextlib.AsyncExitStack() as stack:
        sources = [
            await stack.enter_async_context(dispatcher.generate(sequence.generation))
            for sequence in sequences
        ]
        yield await stack.enter_async_context(contextlib.aclosing(pieces(sequences, sources)))
