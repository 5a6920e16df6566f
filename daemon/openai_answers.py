"""What OpenAI's clients get back, as msgspec schemas.

Pure. Fields that OpenAI leaves out are UNSET, fields that it sends as null are None.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """`cached_tokens` did not have to be read."""

    cached_tokens: int = 0


class SpeculationDetails(msgspec.Struct, frozen=True, kw_only=True):
    """What drafting did: rounds of verification, tokens drafted and accepted, and `tau`, the
    tokens that a round committed on average, the target's own included."""

    rounds: int
    drafted: int
    accepted: int
    tau: float


class CompletionTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """`lane` is where the last token was decoded; `speculation` is null without a drafter."""

    lane: str = "serial"
    speculation: SpeculationDetails | None = None


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a request, all its choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails()
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails()


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """A token and its natural-log probability."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob, frozen=True, kw_only=True):
    """A generated token beside the most probable ones."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Of a chat answer."""

    content: list[TokenLogprob]
    refusal: None = None


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The assistant's turn."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One of the `n` answers."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of /v1/chat/completions without streaming."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What a chunk adds to a message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """What a chunk adds to a choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream. `usage` is there, null until the last, only when asked for."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Of a text completion, in parallel lists; offsets count characters of the text."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One completion, whole or, in a stream, a piece."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of /v1/completions, and one event of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "sparklane"
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
