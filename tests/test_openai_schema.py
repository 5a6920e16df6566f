"""No JSON that anybody can think of gets anything but an answer or a 400 that says why."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.chat import messages_of
from daemon.errors import ApiError
from daemon.openai_requests import (
    UNSUPPORTED,
    UNSUPPORTED_IN_MESSAGES,
    ChatRequest,
    CompletionRequest,
    Unsupported,
    logit_bias_of,
    read,
    stops_of,
)

KINDS = {ChatRequest: {"messages": [{"role": "user", "content": "x"}]}, CompletionRequest: {}}

Json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["user", "text", "auto", "none", "serial"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text(max_size=4)
            | st.sampled_from(["role", "content", "type", "text", "1", "tools"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)


def fields(kind: type[msgspec.Struct]) -> list[str]:
    return [*kind.__struct_fields__, *(parameter.name for parameter in UNSUPPORTED)]


def use(kind: type[Any], raw: bytes) -> None:
    """What a handler does with a request before anything is generated."""
    try:
        request = read(raw, kind)
        stops_of(request)
        logit_bias_of(request, 1000)
        if isinstance(request, ChatRequest):
            messages_of(request.messages)
    except ApiError as error:
        assert error.status == 400
        assert error.answer.error.message
        json.loads(msgspec.json.encode(error.answer))


@pytest.mark.parametrize("kind", KINDS)
@given(body=Json)
def test_any_json(kind: type[Any], body: Any) -> None:
    use(kind, json.dumps(body).encode())


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_any_value_of_a_known_field(kind: type[Any], data: st.DataObject) -> None:
    valid = {"model": "m", "prompt": "x"} | KINDS[kind]
    changes = data.draw(st.dictionaries(st.sampled_from(fields(kind)), Json, max_size=3))
    use(kind, json.dumps(valid | changes).encode())


@pytest.mark.parametrize("kind", KINDS)
@given(body=st.binary(max_size=40))
def test_any_bytes(kind: type[Any], body: bytes) -> None:
    use(kind, body)


@given(message=st.dictionaries(st.sampled_from(["role", "content", "name", "audio"]), Json))
def test_any_message(message: dict[str, Any]) -> None:
    use(ChatRequest, json.dumps({"model": "m", "messages": [message]}).encode())


@pytest.mark.parametrize("parameter", UNSUPPORTED, ids=lambda parameter: parameter.name)
def test_what_cannot_be_honoured_is_named_unless_it_asks_for_nothing(
    parameter: Unsupported,
) -> None:
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    for value in parameter.harmless:
        read(json.dumps(body | {parameter.name: value}).encode(), ChatRequest)
    with pytest.raises(ApiError) as error:
        read(json.dumps(body | {parameter.name: {"some": "thing"}}).encode(), ChatRequest)
    assert error.value.answer.error.param == parameter.name
    assert error.value.answer.error.code == "unsupported_parameter"


@pytest.mark.parametrize("parameter", UNSUPPORTED_IN_MESSAGES, ids=lambda each: each.name)
def test_the_same_inside_messages(parameter: Unsupported) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", parameter.name: {"a": 1}}]
    with pytest.raises(ApiError) as error:
        read(json.dumps({"model": "m", "messages": messages}).encode(), ChatRequest)
    assert error.value.answer.error.param == f"messages[1].{parameter.name}"


@pytest.mark.parametrize(
    "field",
    ["user", "metadata", "safety_identifier", "prompt_cache_key", "parallel_tool_calls", "unheard"],
)
def test_what_openai_ignores_is_ignored(field: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], field: "value"}
    read(json.dumps(body).encode(), ChatRequest)
