"""POST /v1/completions.

Runs on the event loop. Owns the forms that a prompt may have and OpenAI's text completion shapes.
"""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web
from msgspec import UNSET

from daemon.answering import answer, generations, new_id
from daemon.chat import check_room
from daemon.edge import DISPATCHER, SETTINGS, text_of
from daemon.errors import invalid
from daemon.logprobs import completion_logprobs
from daemon.openai_answers import Completion, CompletionChoice, Usage
from daemon.openai_requests import CompletionRequest, read, stops_of
from daemon.sequence import Piece, SequenceText
from daemon.text.side import TextSide

DEFAULT_MAX_TOKENS = 16
MAXIMUM_PROMPTS = 64


class CompletionFormat:
    """Answers as text completions."""

    def __init__(self, request: CompletionRequest, text: TextSide) -> None:
        self._id = new_id("cmpl")
        self._created = int(time.time())
        self._request = request
        self._text = text
        options = request.stream_options
        self._usage = None if options and options.include_usage else UNSET

    def openings(self) -> list[Completion]:
        """One empty event, so that the first line is data and comes at once."""
        return [self._completion([CompletionChoice(index=0, text="")])]

    def chunk(self, piece: Piece) -> Completion:
        """The text that a piece adds."""
        return self._completion([self._choice(piece.index, [piece])])

    def usage_chunk(self, usage: Usage) -> Completion:
        """The last event, without choices."""
        return Completion(
            id=self._id,
            created=self._created,
            model=self._request.model,
            choices=[],
            usage=usage,
        )

    def whole(self, answers: list[list[Piece]], usage: Usage) -> Completion:
        """All choices at once."""
        return Completion(
            id=self._id,
            created=self._created,
            model=self._request.model,
            choices=[self._choice(index, found) for index, found in enumerate(answers)],
            usage=usage,
        )

    def _completion(self, choices: list[CompletionChoice]) -> Completion:
        return Completion(
            id=self._id,
            created=self._created,
            model=self._request.model,
            choices=choices,
            usage=self._usage,
        )

    def _choice(self, index: int, found: list[Piece]) -> CompletionChoice:
        logprobs = None
        if self._request.logprobs is not None:
            details = [detail for piece in found for detail in piece.details]
            logprobs = completion_logprobs(details, self._text.token_bytes)
        return CompletionChoice(
            index=index,
            text="".join(piece.text for piece in found),
            logprobs=logprobs,
            finish_reason=found[-1].finish,
        )


async def completions(http: web.Request) -> web.StreamResponse:
    """Continue one or several prompts."""
    request = read(await http.read(), CompletionRequest)
    count = request.n or 1
    if request.echo:
        raise invalid("echo", "echo is true, which this server does not support; leave it out")
    if request.best_of is not None and request.best_of != count:
        raise invalid("best_of", f"best_of is {request.best_of}; only n ({count}) is supported")
    model, text = await text_of(http, request.model)
    prompts = await _prompts(request.prompt, text)
    sequences: list[SequenceText] = []
    for prompt in prompts:
        check_room(prompt, model.context_length, "prompt")
        for generation in generations(
            request,
            model,
            text,
            prompt,
            max_tokens=request.max_tokens or DEFAULT_MAX_TOKENS,
            logprobs=request.logprobs,
        ):
            index = len(sequences)
            sequences.append(SequenceText(index, generation, text, stops_of(request)))
    return await answer(
        http,
        http.app[DISPATCHER],
        request,
        sequences,
        CompletionFormat(request, text),
        prompt_tokens=sum(map(len, prompts)),
        keepalive_seconds=http.app[SETTINGS].keepalive_seconds,
    )


async def _prompts(prompt: str | list[Any], text: TextSide) -> list[list[int]]:
    """Each prompt as tokens: a text, several texts, tokens, or several lists of tokens."""
    several = [prompt] if isinstance(prompt, str) else prompt
    if several and all(_is_token(entry) for entry in several):
        several = [several]
    if not 1 <= len(several) <= MAXIMUM_PROMPTS:
        raise invalid(
            "prompt", f"prompt has {len(several)} entries; send 1 to {MAXIMUM_PROMPTS} of them"
        )
    found: list[list[int]] = []
    for entry in several:
        if isinstance(entry, str):
            found.append(await text.encode(entry, special_tokens=True))
        elif isinstance(entry, list) and all(_is_token(token) for token in entry):
            if unknown := [token for token in entry if token >= text.vocabulary_size]:
                raise invalid(
                    "prompt",
                    f"prompt has token {unknown[0]}; the vocabulary has {text.vocabulary_size}",
                )
            found.append(entry)
        else:
            raise invalid("prompt", "prompt must be text, token ids, or a list of either")
    return found


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
