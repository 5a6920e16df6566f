"""What OpenAI's clients send, as msgspec schemas, and how they are read.

Pure. Limits stand in the schemas, so that decoding, the error and /openapi.json say the same.
Bad input raises `ApiError` 400 with the field, its value and the limit. Parameters that OpenAI
knows and this server cannot honour are named in a 400 unless their value asks for nothing.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from daemon.errors import ApiError, invalid

MAXIMUM_STOPS = 4
MAXIMUM_TOP_LOGPROBS = 20

Stop = Annotated[str, Meta(min_length=1)]
Stops = Stop | Annotated[list[Stop], Meta(max_length=MAXIMUM_STOPS)] | None
Tokens = Annotated[list[Annotated[int, Meta(ge=0, le=2**31 - 1)]], Meta(min_length=1)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)] | None
LogitBias = dict[
    Annotated[str, Meta(pattern=r"^[0-9]{1,10}$")], Annotated[float, Meta(ge=-100.0, le=100.0)]
]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`include_usage` asks for a last chunk with the usage."""

    include_usage: bool = False


class CommonRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What both kinds of completion take. `top_k`, `min_p`, `ignore_eos` and `lane` are
    extensions: filters that OpenAI lacks, generation to the full length, and the way to keep a
    request out of the speculative lane."""

    model: Annotated[str, Meta(min_length=1)]
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=16)] | None = 1
    stop: Stops = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    presence_penalty: Penalty = None
    frequency_penalty: Penalty = None
    logit_bias: LogitBias | None = None
    ignore_eos: bool = False
    lane: Literal["auto", "serial"] = "auto"
    user: str | None = None


class ContentPart(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a message. Only text is served."""

    type: Literal["text"]
    text: str


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a conversation. What a template makes of a role is its own affair."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Meta(min_length=1)] | None = None
    name: str | None = None


class ChatRequest(CommonRequest, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Meta(ge=0, le=MAXIMUM_TOP_LOGPROBS)] | None = None


class CompletionRequest(CommonRequest, frozen=True, kw_only=True):
    """POST /v1/completions. The prompt is text or tokens, one or several."""

    prompt: str | list[Any]
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    echo: bool | None = False
    best_of: Annotated[int, Meta(ge=1, le=16)] | None = None


class Unsupported(msgspec.Struct, frozen=True, kw_only=True):
    """A known parameter that cannot be honoured, and the values with which it asks for nothing."""

    name: str
    harmless: tuple[Any, ...] = (None,)


UNSUPPORTED = (
    Unsupported(name="tools", harmless=(None, [])),
    Unsupported(name="tool_choice", harmless=(None, "none")),
    Unsupported(name="functions", harmless=(None, [])),
    Unsupported(name="function_call", harmless=(None, "none")),
    Unsupported(name="response_format", harmless=(None, {"type": "text"})),
    Unsupported(name="modalities", harmless=(None, ["text"])),
    Unsupported(name="audio"),
    Unsupported(name="prediction"),
    Unsupported(name="reasoning_effort", harmless=(None, "none")),
    Unsupported(name="web_search_options"),
    Unsupported(name="verbosity", harmless=(None, "medium")),
    Unsupported(name="store", harmless=(None, False)),
    Unsupported(name="suffix", harmless=(None, "")),
    Unsupported(name="service_tier", harmless=(None, "auto", "default")),
    Unsupported(name="repetition_penalty", harmless=(None, 1, 1.0)),
    Unsupported(name="min_tokens", harmless=(None, 0)),
    Unsupported(name="guided_json"),
    Unsupported(name="guided_regex"),
    Unsupported(name="guided_choice"),
    Unsupported(name="guided_grammar"),
)

UNSUPPORTED_IN_MESSAGES = (
    Unsupported(name="tool_calls", harmless=(None, [])),
    Unsupported(name="function_call"),
    Unsupported(name="audio"),
)

Request = TypeVar("Request", ChatRequest, CompletionRequest)


def read(body: bytes, kind: type[Request]) -> Request:
    """Decode a request body.

    Raises:
        ApiError: 400, naming the field.
    """
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(raw, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    _refuse_unsupported(raw, UNSUPPORTED)
    messages = raw.get("messages")
    for place, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict):
            _refuse_unsupported(message, UNSUPPORTED_IN_MESSAGES, f"messages[{place}].")
    try:
        return msgspec.convert(raw, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise _explained(str(error), raw) from error


def stops_of(request: CommonRequest) -> tuple[str, ...]:
    """The stop strings."""
    if request.stop is None:
        return ()
    return (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)


def logit_bias_of(request: CommonRequest, vocabulary_size: int) -> dict[int, float]:
    """The bias by token id, checked against the vocabulary."""
    found = {}
    for key, value in (request.logit_bias or {}).items():
        if int(key) >= vocabulary_size:
            raise invalid(
                "logit_bias",
                f"logit_bias names token {key}; the vocabulary has {vocabulary_size} tokens",
            )
        found[int(key)] = value
    return found


def _refuse_unsupported(
    raw: dict[str, Any], parameters: tuple[Unsupported, ...], where: str = ""
) -> None:
    for parameter in parameters:
        value = raw.get(parameter.name)
        if value not in parameter.harmless:
            param = where + parameter.name
            raise ApiError(
                400,
                f"{param} is {_shown(value)}, which this server does not support; leave it out",
                param=param,
                code="unsupported_parameter",
            )


_PLACE = re.compile(r"^(?P<words>.*) - at (?:`key` in )?`\$(?P<path>.*)`$", re.DOTALL)
_STEP = re.compile(r"\.([A-Za-z_0-9]+)|\[(\d+|\.\.\.)\]")


def _explained(words: str, raw: dict[str, Any]) -> ApiError:
    """msgspec's words with the field's name and value."""
    match = _PLACE.match(words)
    if match is None:
        missing = re.search(r"required field `(\w+)`", words)
        param = missing[1] if missing else None
        return ApiError(400, words, param=param, code="missing_parameter" if missing else None)
    value: Any = raw
    param = ""
    for name, index in _STEP.findall(match["path"]):
        if name:
            param += f".{name}" if param else name
            value = value.get(name, UNSET) if isinstance(value, dict) else UNSET
        elif index.isdigit():
            param += f"[{index}]"
            inside = isinstance(value, list) and int(index) < len(value)
            value = value[int(index)] if inside else UNSET
        # Which entry of a mapping is meant, msgspec does not say: the whole of it is shown.
    words = match["words"][:1].lower() + match["words"][1:]
    shown = "" if value is UNSET or isinstance(value, UnsetType) else f" is {_shown(value)}:"
    return ApiError(400, f"{param}{shown} {words}", param=param, code="invalid_value")


def _shown(value: Any) -> str:
    text = msgspec.json.encode(value).decode(errors="replace")
    return text if len(text) <= 80 else text[:77] + "..."
