"""Logprobs in OpenAI's two shapes. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from daemon.openai_answers import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from daemon.sequence import TokenDetail
from daemon.text.token_bytes import TokenBytes


def chat_logprobs(details: Sequence[TokenDetail], token_bytes: TokenBytes) -> ChatLogprobs:
    """One entry a token, each with its bytes: the text of half a character is no text."""
    return ChatLogprobs(
        content=[
            TokenLogprob(
                token=_text(token_bytes.of(detail.token)),
                logprob=detail.logprobs.logprob,
                bytes=list(token_bytes.of(detail.token)),
                top_logprobs=[
                    TopLogprob(
                        token=_text(token_bytes.of(token)),
                        logprob=logprob,
                        bytes=list(token_bytes.of(token)),
                    )
                    for token, logprob in zip(
                        detail.logprobs.top_tokens, detail.logprobs.top_logprobs, strict=True
                    )
                ],
            )
            for detail in details
        ]
    )


def completion_logprobs(
    details: Sequence[TokenDetail], token_bytes: TokenBytes
) -> CompletionLogprobs:
    """Parallel lists, as text completions have them."""
    return CompletionLogprobs(
        tokens=[_text(token_bytes.of(detail.token)) for detail in details],
        token_logprobs=[detail.logprobs.logprob for detail in details],
        top_logprobs=[
            {
                _text(token_bytes.of(token)): logprob
                for token, logprob in zip(
                    detail.logprobs.top_tokens, detail.logprobs.top_logprobs, strict=True
                )
            }
            for detail in details
        ],
        text_offset=[detail.offset for detail in details],
    )


def _text(value: bytes) -> str:
    return value.decode(errors="replace")
