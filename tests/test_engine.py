"""The real engine process on tiny random weights: exactness, joining, cancelling, replay.

The reference BLAS gives a row the same bits alone and beside others, so equality is exact.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from scheduler.messages import (
    Cancel,
    Configure,
    Fault,
    FinishReason,
    Loading,
    Rejected,
    Shutdown,
    StepKind,
    Submit,
)
from tests.engine_client import EngineClient, running_engine, submit
from tests.tiny_models import CONFIGURATIONS, save_tiny_checkpoint

PROMPTS = [[5, 9, 2, 7], list(range(3, 60)), [11] * 19, [40, 41]]


@pytest.fixture(scope="module", params=sorted(CONFIGURATIONS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def engine(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineClient]:
    configure = Configure(checkpoint=str(checkpoint), maximum_rows=8, prefill_milliseconds=1.0)
    with running_engine(tmp_path_factory.mktemp("run"), configure) as client:
        client.until_ready()
        yield client


def alone(engine: EngineClient, prompt: list[int], **options: object) -> list[int]:
    tokens, _ = engine.run(submit(900, prompt, **options))[900]  # type: ignore[arg-type]
    return tokens


def test_rows_together_say_what_each_says_alone(engine: EngineClient) -> None:
    expected = [alone(engine, prompt, max_tokens=24) for prompt in PROMPTS]
    together = engine.run(*(submit(i, prompt, max_tokens=24) for i, prompt in enumerate(PROMPTS)))
    assert [together[i][0] for i in range(len(PROMPTS))] == expected
    assert {finish for _, finish in together.values()} == {FinishReason.LENGTH}


def test_a_burst_with_settings_of_their_own_says_what_each_says_alone(
    engine: EngineClient,
) -> None:
    samplings: list[dict[str, object]] = [
        {},
        {"temperature": 0.8, "seed": 7, "top_p": 0.9},
        {"presence_penalty": 1.5, "frequency_penalty": 0.7},
        {"temperature": 1.0, "seed": 2**61 + 5, "presence_penalty": 0.5},
    ]
    requests = [
        ([(13 * i + j) % 90 + 1 for j in range(2 + 3 * i)], samplings[i % 4]) for i in range(8)
    ]
    expected = [alone(engine, prompt, max_tokens=8, **sampling) for prompt, sampling in requests]
    engine.most_read_together = 0
    together = engine.run(
        *(
            submit(i, prompt, max_tokens=8, **sampling)
            for i, (prompt, sampling) in enumerate(requests)
        )
    )
    assert [together[i][0] for i in range(8)] == expected
    assert engine.most_read_together > 1


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 7, "top_p": 0.9}])
def test_a_replayed_prefix_goes_on_exactly(
    engine: EngineClient, sampling: dict[str, object]
) -> None:
    whole = alone(engine, PROMPTS[1], max_tokens=20, **sampling)
    for cut in (1, 7, 19):
        rest = alone(engine, PROMPTS[1], produced=whole[:cut], max_tokens=20, **sampling)
        assert whole[:cut] + rest == whole


def test_penalties_survive_a_replay(engine: EngineClient) -> None:
    sampling = {"presence_penalty": 1.5, "frequency_penalty": 0.7}
    whole = alone(engine, PROMPTS[0], max_tokens=20, **sampling)
    rest = alone(engine, PROMPTS[0], produced=whole[:9], max_tokens=20, **sampling)
    assert whole[:9] + rest == whole
    assert whole != alone(engine, PROMPTS[0], max_tokens=20)


def test_a_stop_token_ends_a_row_and_is_reported(engine: EngineClient) -> None:
    whole = alone(engine, PROMPTS[2], max_tokens=24, temperature=1.0, seed=3)
    stop = whole[10]
    first = whole.index(stop)
    tokens, finish = engine.run(
        submit(1, PROMPTS[2], max_tokens=24, stop_tokens=[stop], temperature=1.0, seed=3)
    )[1]
    assert (tokens, finish) == (whole[: first + 1], FinishReason.STOP)


def test_a_cancelled_row_stops_and_its_neighbour_does_not_notice(engine: EngineClient) -> None:
    expected = alone(engine, PROMPTS[0], max_tokens=40)
    engine.send(submit(1, PROMPTS[1], max_tokens=100))
    engine.send(submit(2, PROMPTS[0], max_tokens=40))
    tokens: list[int] = []
    cancelled = False
    for output in engine.outputs():
        if output.request_id == 1 and not cancelled:
            engine.send(Cancel(1))
            cancelled = True
        if output.request_id == 2:
            tokens += output.tokens
            if output.finish is not None:
                break
    assert cancelled
    assert tokens == expected
    engine.send(submit(3, PROMPTS[3], max_tokens=2))
    assert [output.request_id for output in islice(engine.outputs(), 2)] == [3, 3]


def test_a_prompt_is_read_in_chunks_and_its_start_is_told(engine: EngineClient) -> None:
    engine.send(submit(1, [7] * 200, max_tokens=1))
    chunks = []
    for step in engine.steps():
        if step.kind is StepKind.PREFILL:
            chunks.append((step.tokens, step.started))
        if step.outputs:
            break
    assert sum(tokens for tokens, _ in chunks) == 199
    assert [started for _, started in chunks] == [[1]] + [[]] * (len(chunks) - 1)


def test_logprobs_are_of_the_chosen_and_the_best(engine: EngineClient) -> None:
    engine.send(submit(1, PROMPTS[0], max_tokens=3, logprobs=4))
    outputs = list(islice(engine.outputs(), 3))
    for output in outputs:
        assert output.logprobs is not None
        (detail,) = output.logprobs
        assert detail.top_tokens[0] == output.tokens[0]
        assert detail.top_logprobs[0] == pytest.approx(detail.logprob, abs=1e-5)
        assert len(detail.top_tokens) == 4
        assert detail.top_logprobs == sorted(detail.top_logprobs, reverse=True)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (submit(5, [1, 10**9], max_tokens=4), "vocabulary"),
        (submit(5, [1, -3], max_tokens=4), "-3"),
        (submit(5, [1] * 8, max_tokens=10**6), "context"),
        (submit(5, [], max_tokens=4), "no tokens"),
        (submit(5, [1], max_tokens=4, logit_bias={10**7: 1.0}), "logit_bias"),
        (submit(5, [1], max_tokens=4, temperature=-1.0), "temperature"),
    ],
)
def test_what_cannot_be_served_is_rejected_alone(
    engine: EngineClient, request_: Submit, words: str
) -> None:
    engine.send(request_)
    while not isinstance(message := engine.receive(), Rejected):
        assert message is not None
    assert message.request_id == 5
    assert words in message.message
    assert alone(engine, PROMPTS[0], max_tokens=2)


def test_shutdown_ends_with_code_zero(tmp_path: Path) -> None:
    folder = save_tiny_checkpoint("llama", tmp_path / "model")
    with running_engine(tmp_path, Configure(checkpoint=str(folder))) as client:
        client.until_ready()
        client.send(Shutdown())
        while client.receive() is not None:
            pass
        assert client.process.wait(timeout=30) == os.EX_OK


def test_an_engine_ends_when_its_daemon_goes(tmp_path: Path) -> None:
    folder = save_tiny_checkpoint("llama", tmp_path / "model")
    with running_engine(tmp_path, Configure(checkpoint=str(folder))) as client:
        client.until_ready()
        client.send(submit(1, [3, 4], max_tokens=400))
        client.connection.shutdown(2)
        assert client.process.wait(timeout=30) == os.EX_OK
        assert client.process.returncode != -signal.SIGKILL


def test_an_unreadable_checkpoint_is_a_fault_that_no_restart_mends(tmp_path: Path) -> None:
    folder = save_tiny_checkpoint("llama", tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with running_engine(tmp_path, Configure(checkpoint=str(folder))) as client:
        while isinstance(message := client.receive(), Loading):
            pass
        assert isinstance(message, Fault)
        assert not message.restartable
        assert "model.safetensors" in message.message
        assert client.process.wait(timeout=30) == os.EX_DATAERR
