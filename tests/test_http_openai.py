"""The OpenAI routes on a real socket with the official client; only the engine is fake."""

from __future__ import annotations

import json
import random
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from daemon.edge import HttpSettings
from daemon.generation import MeasuringProgress, ModelState, Refusal, RefusalKind
from daemon.text.side import TextSide
from scheduler.messages import Speculation
from tests.fake_dispatcher import FakeDispatcher, FakeModel, Server, serving

ANSWER = "Sloths 🦥 sleep; naïvely, 12 hours. END of it"


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2 / "tokenizer.json"))


@pytest.fixture
def dispatcher(smollm2: Path, tokenizer: Tokenizer) -> FakeDispatcher:
    end = TextSide(smollm2).stop_tokens[0]
    return FakeDispatcher(smollm2, [*tokenizer.encode(ANSWER, add_special_tokens=False).ids, end])


@pytest.fixture
def server(dispatcher: FakeDispatcher) -> Iterator[Server]:
    with serving(dispatcher) as found:
        yield found


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def chat(client: openai.OpenAI, **options: Any) -> Any:
    messages = options.pop("messages", [{"role": "user", "content": "Tell me of sloths."}])
    return client.chat.completions.create(model="fake", messages=messages, **options)


def post(server: Server, body: bytes | dict[str, Any], path: str = "/v1/chat/completions") -> Any:
    """Status, headers and JSON body of a raw request."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(
        server.url + path, data, headers={"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.headers, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, error.headers, json.loads(error.read())


def body(**changes: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": [{"role": "user", "content": "hi"}]} | changes


# Answers


def test_a_whole_answer(client: openai.OpenAI, dispatcher: FakeDispatcher) -> None:
    answer = chat(client, max_tokens=100, seed=5)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len(dispatcher.script)
    assert answer.usage.prompt_tokens == len(dispatcher.entered[0].prompt)
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert dispatcher.entered[0].sampling.seed == 5
    assert (dispatcher.finished, dispatcher.cancelled) == (1, 0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_tokens": 3},
        {"stop": "END"},
        {"stop": ["nothing", " sleep"]},
        {"n": 3, "seed": 1},
        {"logprobs": True, "top_logprobs": 1},
        {"logprobs": True, "stop": "sleep"},
    ],
)
def test_a_stream_says_what_the_whole_answer_says(
    client: openai.OpenAI, options: dict[str, Any]
) -> None:
    whole = chat(client, **options)
    texts: dict[int, str] = {}
    finishes: dict[int, str] = {}
    logprobs: dict[int, list[Any]] = {}
    usage = None
    for chunk in chat(client, stream=True, stream_options={"include_usage": True}, **options):
        if chunk.usage is not None:
            assert chunk.choices == []
            usage = chunk.usage
        for choice in chunk.choices:
            assert choice.index not in finishes
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.logprobs is not None:
                logprobs.setdefault(choice.index, []).extend(choice.logprobs.content)
            if choice.finish_reason is not None:
                finishes[choice.index] = choice.finish_reason
    assert usage == whole.usage
    for choice in whole.choices:
        assert texts[choice.index] == choice.message.content
        assert finishes[choice.index] == choice.finish_reason
        if choice.logprobs is not None:
            assert logprobs[choice.index] == choice.logprobs.content


def test_a_stop_string_ends_the_generation(
    client: openai.OpenAI, dispatcher: FakeDispatcher
) -> None:
    answer = chat(client, stop="END")
    assert answer.choices[0].message.content == ANSWER[: ANSWER.index("END")]
    assert answer.choices[0].finish_reason == "stop"
    dispatcher.wait_for(lambda: dispatcher.cancelled == 1)
    assert dispatcher.abandoned == 0
    list(chat(client, stop="END", stream=True))
    dispatcher.wait_for(lambda: dispatcher.cancelled == 2)
    assert dispatcher.abandoned == 0


def test_logprobs_have_the_bytes_of_every_token(client: openai.OpenAI) -> None:
    answer = chat(client, logprobs=True, top_logprobs=1)
    entries = answer.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries[:-1]).decode() == ANSWER
    assert all(entry.logprob == -0.25 for entry in entries)
    assert all(len(entry.top_logprobs) == 1 for entry in entries)


def test_text_completions_take_every_form_of_prompt(
    client: openai.OpenAI, dispatcher: FakeDispatcher
) -> None:
    for prompt, count in (("one", 1), (["one", "two"], 2), ([5, 6], 1), ([[5, 6], [7]], 2)):
        answer = client.completions.create(model="fake", prompt=prompt, max_tokens=100, logprobs=1)
        assert [choice.text for choice in answer.choices] == [ANSWER] * count
        logprobs = answer.choices[0].logprobs
        assert logprobs.text_offset[:2] == [0, len(logprobs.tokens[0])]
    assert dispatcher.entered[-2].prompt == [5, 6]


def test_text_completions_stream(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model="fake", prompt="x", max_tokens=100, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == ANSWER
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_request_may_ask_for_the_serial_lane(
    client: openai.OpenAI, dispatcher: FakeDispatcher
) -> None:
    chat(client)
    chat(client, extra_body={"lane": "serial"})
    assert [generation.lane for generation in dispatcher.entered] == ["auto", "serial"]


def test_the_usage_says_what_drafting_did(
    client: openai.OpenAI, dispatcher: FakeDispatcher
) -> None:
    details = chat(client).usage.completion_tokens_details.model_dump()
    assert (details["lane"], details["speculation"]) == ("serial", None)
    dispatcher.speculation = Speculation(rounds=4, drafted=12, accepted=6)
    details = chat(client, n=2).usage.completion_tokens_details.model_dump()
    assert details["lane"] == "speculative"
    assert details["speculation"] == {"rounds": 8, "drafted": 24, "accepted": 12, "tau": 2.5}


def test_seeds_of_choices_differ_and_are_fixed(
    client: openai.OpenAI, dispatcher: FakeDispatcher
) -> None:
    chat(client, n=3, seed=9)
    chat(client, n=3, seed=9)
    seeds = [generation.sampling.seed for generation in dispatcher.entered]
    assert len(set(seeds[:3])) == 3
    assert sorted(seeds[:3]) == sorted(seeds[3:])
    assert 9 in seeds


# The wire


def raw_stream(server: Server, **changes: Any) -> tuple[socket.socket, Any]:
    """HTTP/1.0, because its bodies are not cut into chunks."""
    data = json.dumps(body(stream=True, **changes)).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    connection.sendall(
        b"POST /v1/chat/completions HTTP/1.0\r\nHost: localhost\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data)
    )
    return connection, connection.makefile("rb")


def test_the_first_line_is_data_with_the_role_before_any_token(
    server: Server, dispatcher: FakeDispatcher
) -> None:
    dispatcher.hold = 0
    server.settings.keepalive_seconds = 0.05
    connection, lines = raw_stream(server)
    with connection:
        assert lines.readline().startswith(b"HTTP/1.0 200")
        while lines.readline() != b"\r\n":
            pass
        found: list[bytes] = []
        while not any(line.startswith(b":") for line in found):
            found.append(lines.readline())
        events = [line for line in found if line.startswith((b"data:", b":"))]
        assert b'"role":"assistant"' in events[0]
        assert events[-1] == b": keep-alive\n"
        # Every comment is followed by an empty line.
        assert lines.readline() == b"\n"
        server.call(dispatcher.release.set)
        rest = lines.read1(1 << 20)
        while b"[DONE]" not in rest:
            rest += lines.read1(1 << 20)
        assert b'"finish_reason":"stop"' in rest
        assert b"usage" not in rest


def test_no_comment_comes_when_they_are_off(server: Server, dispatcher: FakeDispatcher) -> None:
    server.settings.keepalive_seconds = 0.0
    connection, lines = raw_stream(server)
    with connection:
        seen = b""
        while b"[DONE]" not in seen:
            seen += lines.read1(1 << 20)
    assert b"keep-alive\n" not in seen


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("hold", [0, 3])
def test_a_client_that_leaves_ends_its_generation_once(
    server: Server, dispatcher: FakeDispatcher, stream: bool, hold: int
) -> None:
    dispatcher.hold = hold
    for _ in range(3):
        before = len(dispatcher.entered)
        connection, lines = raw_stream(server) if stream else raw_whole(server)
        dispatcher.wait_for(lambda before=before: len(dispatcher.entered) > before)
        if stream:
            lines.read(random.Random(hold).randrange(1, 120))
        connection.close()
        lines.close()
        dispatcher.wait_for(lambda: dispatcher.cancelled == len(dispatcher.entered))
    assert dispatcher.finished == 0
    assert dispatcher.abandoned == dispatcher.cancelled


def test_a_client_may_leave_at_any_byte_of_its_request(
    server: Server, dispatcher: FakeDispatcher, caplog: pytest.LogCaptureFixture
) -> None:
    data = json.dumps(body(stream=True)).encode()
    request = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(data), data)
    )
    for end in range(0, len(request), 5):
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
            connection.sendall(request[:end])
    assert post(server, body())[0] == 200
    assert len(dispatcher.entered) == dispatcher.finished == 1
    assert not [record for record in caplog.records if record.name == "sparklane.http"]


def test_a_client_may_leave_at_any_byte_of_its_answer(
    server: Server, dispatcher: FakeDispatcher, caplog: pytest.LogCaptureFixture
) -> None:
    """Every generation ends once, whether its end or the client's leaving came first."""
    _, lines = raw_stream(server)
    length = len(lines.read())
    for end in range(1, length, 97):
        connection, lines = raw_stream(server, n=2)
        lines.read(end)
        connection.close()
        lines.close()
    dispatcher.wait_for(
        lambda: dispatcher.finished + dispatcher.cancelled == len(dispatcher.entered)
    )
    assert post(server, body())[0] == 200
    assert not [record for record in caplog.records if record.name == "sparklane.http"]


def raw_whole(server: Server) -> tuple[socket.socket, Any]:
    data = json.dumps(body()).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    connection.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(data), data)
    )
    return connection, connection.makefile("rb")


def test_a_failure_in_a_stream_is_an_error_event(
    server: Server, dispatcher: FakeDispatcher
) -> None:
    dispatcher.failure = Refusal(RefusalKind.MODEL_DOWN, "the engine is gone for good")
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    for count in (1, 3):
        with pytest.raises(openai.APIError, match="gone for good"):
            list(chat(client, stream=True, n=count))
    # The choices that had not failed were not told that somebody had heard enough of them.
    dispatcher.wait_for(lambda: dispatcher.abandoned == dispatcher.cancelled == 4)


def test_an_error_event_is_the_last_thing_in_a_stream(
    server: Server, dispatcher: FakeDispatcher
) -> None:
    dispatcher.failure = ValueError("nobody foresaw this")
    connection, lines = raw_stream(server)
    with connection:
        events = [line for line in lines.read().split(b"\n") if line.startswith(b"data:")]
    assert json.loads(events[-1][6:])["error"]["code"] == "internal_error"
    assert b"foresaw" not in events[-1]
    assert sum(b"error" in event for event in events) == 1


def test_a_refused_stream_is_an_http_error_and_enters_nothing_for_good(
    server: Server, dispatcher: FakeDispatcher
) -> None:
    dispatcher.refuse_after = 2
    status, headers, _ = post(server, body(stream=True, n=4))
    assert status == 429
    assert headers["Retry-After"] == "7"
    assert headers["Content-Type"] == "application/json"
    dispatcher.wait_for(lambda: dispatcher.abandoned == len(dispatcher.entered) == 2)


def test_a_failure_of_one_choice_ends_all(server: Server, dispatcher: FakeDispatcher) -> None:
    dispatcher.failure = Refusal(RefusalKind.MODEL_DOWN, "the engine is gone for good")
    status, _, answer = post(server, body(n=3))
    assert status == 503
    assert "gone for good" in answer["error"]["message"]
    dispatcher.wait_for(lambda: dispatcher.cancelled == 3)


# Refusals


def test_a_refusal_carries_its_wait(server: Server, dispatcher: FakeDispatcher) -> None:
    dispatcher.refusal = Refusal(RefusalKind.QUEUE_FULL, "the queue is full: 8 of 8", 2.3)
    status, headers, answer = post(server, body(stream=True))
    assert (status, headers["Retry-After"]) == (503, "3")
    assert answer["error"]["code"] == "queue_full"


@pytest.mark.parametrize(
    ("changes", "param", "words"),
    [
        ({"temperature": 3.5}, "temperature", "3.5"),
        ({"temperature": "hot"}, "temperature", "hot"),
        ({"top_p": -0.1}, "top_p", "-0.1"),
        ({"max_tokens": 0}, "max_tokens", "0"),
        ({"n": 0}, "n", "0"),
        ({"n": 99}, "n", "16"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "4"),
        ({"stop": ""}, "stop", ""),
        ({"presence_penalty": 5}, "presence_penalty", "5"),
        ({"logit_bias": {"abc": 1}}, "logit_bias", ""),
        ({"logit_bias": {"9999999": 1}}, "logit_bias", "9999999"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "101"),
        ({"messages": []}, "messages", ""),
        ({"messages": "hi"}, "messages", "hi"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "user"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "1"),
        (
            {"messages": [{"role": "system", "content": "x-anthropic-billing-header: 1"}]},
            "messages",
            "user",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]},
            "messages[0].tool_calls",
            "not support",
        ),
        ({"top_k": 2**64}, "top_k", "2147483647"),
        ({"tool_choice": "required"}, "tool_choice", "required"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "robot"),
        ({"top_logprobs": 3}, "top_logprobs", "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "21"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "6"),
        ({"tools": [{"type": "function"}]}, "tools", "not support"),
        ({"response_format": {"type": "json_object"}}, "response_format", "json_object"),
        ({"lane": "fast"}, "lane", "fast"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
            "image_url",
        ),
    ],
)
def test_a_bad_parameter_is_named(
    server: Server, changes: dict[str, Any], param: str, words: str
) -> None:
    status, _, answer = post(server, body(**changes))
    error = answer["error"]
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert str(error["param"]).startswith(param)
    assert words in error["message"]


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (b"{", 400, "invalid_json"),
        (b"[]", 400, "invalid_json"),
        (b'{"model": "\xff"}', 400, "invalid_json"),
        (b"[" * 100_000, 400, "invalid_json"),
        (b'{"messages": []}', 400, None),
        (b" " * 10_000_000, 413, "request_too_large"),
    ],
)
def test_broken_bodies(server: Server, data: bytes, status: int, code: str | None) -> None:
    found, _, answer = post(server, data)
    assert found == status
    if code is not None:
        assert answer["error"]["code"] == code


def test_a_body_that_is_not_what_its_encoding_says(server: Server) -> None:
    data = json.dumps(body()).encode()
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    request = urllib.request.Request(server.url + "/v1/chat/completions", data, headers)
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(request, timeout=20)
    assert error.value.code == 400
    assert json.loads(error.value.read())["error"]["code"] == "invalid_body"


def test_a_body_is_json_whatever_its_content_type_says(server: Server) -> None:
    data = json.dumps(body(user="x", metadata={}, store=False, unheard_of=[1])).encode()
    headers = {"Content-Type": "text/plain"}
    request = urllib.request.Request(server.url + "/v1/chat/completions", data, headers)
    with urllib.request.urlopen(request, timeout=20) as answer:
        assert answer.status == 200


def test_an_unknown_model_and_an_unknown_route(server: Server) -> None:
    status, _, answer = post(server, body(model="gpt-9"))
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert "fake" in answer["error"]["message"]
    status, _, answer = post(server, body(), "/v1/nothing")
    assert (status, answer["error"]["code"]) == (404, "not_found")
    status, headers, answer = post(server, body(), "/livez")
    assert (status, answer["error"]["code"]) == (405, "method_not_allowed")
    assert "GET" in headers["Allow"]


def test_models_are_listed_and_found_by_any_name(
    client: openai.OpenAI, server: Server, dispatcher: FakeDispatcher
) -> None:
    name = "org/repo-0.5b"
    dispatcher.models[name] = FakeModel(name, dispatcher.folder)
    assert [model.id for model in client.models.list()] == ["fake", name]
    assert client.models.retrieve(name).id == name
    with urllib.request.urlopen(f"{server.url}/v1/models/{name}", timeout=10) as answer:
        assert json.loads(answer.read())["id"] == name
    with pytest.raises(openai.NotFoundError, match="org/repo"):
        client.models.retrieve("another")


def test_a_prompt_that_cannot_fit_is_told_in_known_words(server: Server) -> None:
    status, _, answer = post(server, body(messages=[{"role": "user", "content": "word " * 600}]))
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert "maximum context length is 512 tokens" in answer["error"]["message"]


def test_a_model_that_is_down_or_not_there_yet(server: Server, dispatcher: FakeDispatcher) -> None:
    model = dispatcher.models["fake"]
    model.folder = None
    assert post(server, body())[0] == 503
    model.state, model.problem = ModelState.DOWN, "it burnt"
    status, _, answer = post(server, body())
    assert status == 503
    assert "it burnt" in answer["error"]["message"]


def test_health_says_how_far_a_measurement_is(server: Server, dispatcher: FakeDispatcher) -> None:
    for measuring, words in ((MeasuringProgress(12, 144), "costs 12/144"), (None, None)):
        dispatcher.models["fake"].measuring = measuring
        with urllib.request.urlopen(f"{server.url}/health", timeout=10) as answer:
            assert json.load(answer)["models"]["fake"]["measuring"] == words


def test_health(server: Server, dispatcher: FakeDispatcher) -> None:
    def status(path: str) -> int:
        try:
            with urllib.request.urlopen(server.url + path, timeout=10) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    assert [status(path) for path in ("/livez", "/readyz", "/health")] == [200, 200, 200]
    dispatcher.models["fake"].state = ModelState.LOADING
    assert [status(path) for path in ("/livez", "/readyz")] == [200, 503]
    dispatcher.models["fake"].state = ModelState.READY
    dispatcher.draining = True
    assert [status(path) for path in ("/livez", "/readyz")] == [200, 503]
    dispatcher.draining, dispatcher.wedged = False, True
    assert [status(path) for path in ("/livez", "/readyz")] == [503, 503]
    assert status("/metrics") == 200


def test_keys_hosts_and_origins(dispatcher: FakeDispatcher) -> None:
    settings = HttpSettings(
        api_keys=frozenset({"secret"}),
        allowed_hosts=frozenset({"127.0.0.1", "[::1]"}),
        cors_origins=frozenset({"https://app.example"}),
    )
    with serving(dispatcher, settings) as server:

        def get(path: str, **headers: str) -> tuple[int, Any]:
            request = urllib.request.Request(server.url + path, headers=headers)
            try:
                with urllib.request.urlopen(request, timeout=10) as answer:
                    return answer.status, answer.headers
            except urllib.error.HTTPError as error:
                return error.code, error.headers

        key = {"Authorization": "Bearer secret"}
        status, headers = get("/v1/models")
        assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
        assert get("/v1/models", Authorization="Basic secret")[0] == 401
        assert get("/metrics", Authorization="Bearer wrong")[0] == 401
        assert get("/v1/models", **key)[0] == 200
        assert get("/livez")[0] == 200
        assert get("/livez", Host="evil.example")[0] == 403
        assert get("/livez", Host="[::1]:8090")[0] == 200
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
            connection.sendall(b"GET /livez HTTP/1.0\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.0 403")
        headers = get("/livez", Origin="https://app.example")[1]
        assert headers["Access-Control-Allow-Origin"] == "https://app.example"
        assert get("/livez", Origin="https://b.example")[1]["Access-Control-Allow-Origin"] is None


def test_a_changing_billing_header_stays_out_of_the_prompt(
    client: openai.OpenAI, dispatcher: FakeDispatcher
) -> None:
    for number in range(2):
        header = {"type": "text", "text": f"x-anthropic-billing-header: cc={number}"}
        system = {"role": "system", "content": [header, {"type": "text", "text": "Be brief."}]}
        chat(client, messages=[system, {"role": "user", "content": "hi"}])
    assert dispatcher.entered[0].prompt == dispatcher.entered[1].prompt


def test_long_prompts_are_encoded_off_the_event_loop(
    server: Server, dispatcher: FakeDispatcher
) -> None:
    dispatcher.models["fake"].context_length = 10**6
    status, _, _ = post(server, body(messages=[{"role": "user", "content": "word " * 20_000}]))
    assert status == 200
    assert len(dispatcher.entered[0].prompt) > 20_000
