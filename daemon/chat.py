"""POST /v1/chat/completions.

Runs on the event loop. Owns how a conversation becomes a prompt and how an answer is written in
OpenAI's chat shapes.
"""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web
from msgspec import UNSET

from daemon.answering import UNLIMITED, answer, generations, new_id
from daemon.edge import DISPATCHER, SETTINGS, text_of
from daemon.errors import ApiError, invalid
from daemon.logprobs import chat_logprobs
from daemon.openai_answers import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Usage,
)
from daemon.openai_requests import ChatRequest, Message, read, stops_of
from daemon.sequence import Piece, SequenceText
from daemon.text.chat_template import TemplateRefusal
from daemon.text.side import TextSide

# Changes at every turn: in the prompt it would keep a prefix from ever being found again.
_BILLING_HEADER = "x-anthropic-billing-header"


class ChatFormat:
    """Answers as chat completions."""

    def __init__(self, request: ChatRequest, text: TextSide) -> None:
        self._id = new_id("chatcmpl")
        self._created = int(time.time())
        self._request = request
        self._text = text
        options = request.stream_options
        self._usage = None if options and options.include_usage else UNSET

    def openings(self) -> list[ChatChunk]:
        """One event a choice with the role, so that the first line is data and comes at once."""
        delta = ChatDelta(role="assistant", content="")
        return [
            self._chunk(ChatChunkChoice(index=index, delta=delta))
            for index in range(self._request.n or 1)
        ]

    def chunk(self, piece: Piece) -> ChatChunk:
        """The content that a piece adds, with the finish reason if it is the last."""
        delta = ChatDelta(content=piece.text) if piece.text or piece.details else ChatDelta()
        return self._chunk(
            ChatChunkChoice(
                index=piece.index,
                delta=delta,
                logprobs=self._logprobs([piece]) if piece.details else None,
                finish_reason=piece.finish,
            )
        )

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        """The last event, without choices."""
        return ChatChunk(
            id=self._id,
            created=self._created,
            model=self._request.model,
            choices=[],
            usage=usage,
        )

    def whole(self, answers: list[list[Piece]], usage: Usage) -> ChatCompletion:
        """All choices at once."""
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._request.model,
            choices=[
                ChatChoice(
                    index=index,
                    message=ChatMessage(content="".join(piece.text for piece in found)),
                    logprobs=self._logprobs(found) if self._request.logprobs else None,
                    finish_reason=str(found[-1].finish),
                )
                for index, found in enumerate(answers)
            ],
            usage=usage,
        )

    def _chunk(self, choice: ChatChunkChoice) -> ChatChunk:
        return ChatChunk(
            id=self._id,
            created=self._created,
            model=self._request.model,
            choices=[choice],
            usage=self._usage,
        )

    def _logprobs(self, found: list[Piece]) -> ChatLogprobs:
        return chat_logprobs([d for piece in found for d in piece.details], self._text.token_bytes)


async def chat_completions(http: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    request = read(await http.read(), ChatRequest)
    model, text = await text_of(http, request.model)
    try:
        prompt_text = text.render(messages_of(request.messages))
    except TemplateRefusal as error:
        raise invalid("messages", f"the chat template refuses the messages: {error}") from error
    prompt = await text.encode(prompt_text, special_tokens=False)
    check_room(prompt, model.context_length, "messages")
    sequences = [
        SequenceText(index, generation, text, stops_of(request))
        for index, generation in enumerate(
            generations(
                request,
                model,
                text,
                prompt,
                max_tokens=_max_tokens(request),
                logprobs=_logprobs(request),
            )
        )
    ]
    return await answer(
        http,
        http.app[DISPATCHER],
        request,
        sequences,
        ChatFormat(request, text),
        prompt_tokens=len(prompt),
        keepalive_seconds=http.app[SETTINGS].keepalive_seconds,
    )


def messages_of(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages as templates expect them: content is one text, `developer` is `system`.

    Raises:
        ApiError: 400, a message without content or none that says anything.
    """
    found: list[dict[str, Any]] = []
    for place, message in enumerate(messages):
        role = "system" if message.role == "developer" else message.role
        content = message.content
        if content is None and role != "assistant":
            param = f"messages[{place}].content"
            raise invalid(param, f"{param} is missing; a message of {role!r} needs some")
        texts = [content or ""] if not isinstance(content, list) else [p.text for p in content]
        if role == "system":
            texts = [part for part in texts if not part.startswith(_BILLING_HEADER)]
            if not texts:
                continue
        entry = {"role": role, "content": "\n".join(texts)}
        if message.name is not None:
            entry["name"] = message.name
        found.append(entry)
    if not found:
        raise invalid("messages", "messages has nothing for the model; send a message of a user")
    return found


def check_room(prompt: list[int], context_length: int, param: str) -> None:
    """Refuse a prompt that can never fit, in the words that agents know as a context limit."""
    if not prompt:
        raise invalid(param, f"{param} has no tokens; send some text")
    if context_length and len(prompt) >= context_length:
        raise ApiError(
            400,
            f"This model's maximum context length is {context_length} tokens. However, your "
            f"{param} resulted in {len(prompt)} tokens. Please reduce the length of the {param}.",
            param=param,
            code="context_length_exceeded",
        )


def _max_tokens(request: ChatRequest) -> int:
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise invalid(
            "max_tokens",
            f"max_tokens is {old} and max_completion_tokens is {new}; send one of them",
        )
    return new or old or UNLIMITED


def _logprobs(request: ChatRequest) -> int | None:
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise invalid(
            "top_logprobs",
            f"top_logprobs is {request.top_logprobs} and logprobs is not true; set logprobs",
        )
    return None
