"""The engine with a drafter: what speculation says is what the serial lane says.

Real reference pairs (tiny targets with drafters trained for them), the real process and socket.
The reference BLAS gives a token the same bits in a block as alone, so equality is exact.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from models.dspark.shortlist import Shortlist
from scheduler.messages import (
    Cancel,
    Configure,
    DraftConfigure,
    Fault,
    LaneChoice,
    Loading,
    StepKind,
)
from tests.engine_client import EngineClient, running_engine, submit

FIXTURES = Path(__file__).parent / "fixtures" / "dspark"
TRACES = {
    family: json.loads((FIXTURES / family / "trace_float32_thr0.json").read_text())["prompts"]
    for family in ("qwen3", "gemma4")
}
PROMPTS: list[list[int]] = [trace["prompt_ids"] for trace in TRACES["qwen3"]]
STOP_TOKENS: dict[str, list[int]] = {
    family: json.loads((FIXTURES / family / "trace_float32_thr0.json").read_text())[
        "stop_token_ids"
    ]
    for family in ("qwen3", "gemma4")
}
SAMPLINGS: list[dict[str, object]] = [
    {},
    {"temperature": 0.3, "seed": 11, "top_p": 0.9},
    {"temperature": 0.7, "seed": 2**61 + 5, "top_k": 40},
    {"temperature": 1.0, "seed": 3, "min_p": 0.02},
    {"temperature": 1.0, "seed": 4, "logit_bias": {17: 2.0}},
]


def configure(family: str, **draft: object) -> Configure:
    folder = FIXTURES / family
    options: dict[str, object] = {
        "drafter": str(folder / "drafter"),
        "bits": 16,
        "always": True,
    } | draft
    return Configure(
        checkpoint=str(folder / "target"),
        maximum_rows=8,
        prefill_milliseconds=5.0,
        draft=DraftConfigure(**options),  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module", params=["qwen3", "gemma4"])
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def engine(family: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineClient]:
    with running_engine(tmp_path_factory.mktemp("run"), configure(family)) as client:
        ready = client.until_ready()
        assert ready.drafter_bytes > 0
        yield client


def both_lanes(
    engine: EngineClient, prompt: list[int], **options: object
) -> tuple[list[int], list[int]]:
    tokens = []
    for lane in LaneChoice:
        request = submit(900, prompt, lane=lane, **options)  # type: ignore[arg-type]
        tokens.append(engine.run(request)[900][0])
    return tokens[0], tokens[1]


def test_the_text_is_that_of_the_reference(engine: EngineClient, family: str) -> None:
    for trace in TRACES[family]:
        request = submit(
            1,
            trace["prompt_ids"],
            max_tokens=trace["max_new_tokens"],
            stop_tokens=STOP_TOKENS[family],
        )
        assert engine.run(request)[1][0] == trace["output_ids"]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_speculation_says_what_the_serial_lane_says(
    engine: EngineClient, sampling: dict[str, object]
) -> None:
    for prompt in PROMPTS[:4]:
        speculative, serial = both_lanes(engine, prompt, max_tokens=40, **sampling)
        assert speculative == serial


@pytest.mark.parametrize("count", [2, 3, 8])
def test_rows_together_say_what_each_says_alone(engine: EngineClient, count: int) -> None:
    requests = [
        (PROMPTS[i % len(PROMPTS)] + [i], SAMPLINGS[i % len(SAMPLINGS)]) for i in range(count)
    ]
    expected = [
        engine.run(submit(9, prompt, max_tokens=24, lane=LaneChoice.SERIAL, **sampling))[9][0]
        for prompt, sampling in requests
    ]
    engine.most_read_together = 0
    together = engine.run(
        *(
            submit(i, prompt, max_tokens=24, **sampling)
            for i, (prompt, sampling) in enumerate(requests)
        )
    )
    assert [together[i][0] for i in range(count)] == expected
    # Whether a few are all there before the first is read is up to the threads of the engine.
    assert count < 8 or engine.most_read_together > 1


def test_a_neighbour_that_left_before_the_group_was_read_changes_nothing(
    engine: EngineClient,
) -> None:
    expected = [both_lanes(engine, prompt, max_tokens=12)[1] for prompt in PROMPTS[:3]]
    requests = [submit(i, prompt, max_tokens=12) for i, prompt in enumerate(PROMPTS[:3])]
    engine.send_at_once(*requests, Cancel(1))
    texts: dict[int, list[int]] = {0: [], 2: []}
    ended = 0
    for output in engine.outputs():
        texts[output.request_id] += output.tokens
        ended += output.finish is not None
        if ended == 2:
            break
    assert texts == {0: expected[0], 2: expected[2]}


def test_both_lanes_at_once_change_nothing(engine: EngineClient) -> None:
    expected = [both_lanes(engine, prompt, max_tokens=20)[1] for prompt in PROMPTS[:4]]
    lanes = [LaneChoice.AUTO, LaneChoice.SERIAL] * 2
    together = engine.run(
        *(
            submit(i, prompt, max_tokens=20, lane=lane)
            for i, (prompt, lane) in enumerate(zip(PROMPTS, lanes, strict=False))
        )
    )
    assert [together[i][0] for i in range(4)] == expected


def test_a_replayed_prefix_goes_on_exactly(engine: EngineClient) -> None:
    whole, _ = both_lanes(engine, PROMPTS[1], max_tokens=30, temperature=0.8, seed=5)
    for cut in (1, 8, 29):
        rest = engine.run(
            submit(1, PROMPTS[1], produced=whole[:cut], max_tokens=30, temperature=0.8, seed=5)
        )[1][0]
        assert whole[:cut] + rest == whole


def test_a_stop_token_inside_a_block_ends_the_row(engine: EngineClient) -> None:
    whole, _ = both_lanes(engine, PROMPTS[1], max_tokens=40)
    for stop in set(whole[2:12]):
        request = submit(1, PROMPTS[1], max_tokens=40, stop_tokens=[stop])
        assert engine.run(request)[1][0] == whole[: whole.index(stop) + 1]


def test_every_budget_is_kept_exactly(engine: EngineClient) -> None:
    whole, _ = both_lanes(engine, PROMPTS[0], max_tokens=12)
    for budget in range(1, 12):
        request = submit(1, PROMPTS[0], max_tokens=budget)
        assert engine.run(request)[1][0] == whole[:budget]


def test_a_cancelled_neighbour_changes_nothing(engine: EngineClient) -> None:
    expected, _ = both_lanes(engine, PROMPTS[1], max_tokens=30)
    engine.send(submit(1, PROMPTS[0], max_tokens=200))
    engine.send(submit(2, PROMPTS[1], max_tokens=30))
    tokens: list[int] = []
    for output in engine.outputs():
        if output.request_id == 1 and output.finish is None:
            engine.send(Cancel(1))
        if output.request_id == 2:
            tokens += output.tokens
            if output.finish is not None:
                break
    assert tokens == expected


def test_penalties_go_through_the_serial_lane(engine: EngineClient) -> None:
    engine.send(submit(1, PROMPTS[0], max_tokens=6, presence_penalty=1.0))
    for step in engine.steps():
        assert step.kind is not StepKind.SPECULATIVE
        if any(output.finish for output in step.outputs):
            break


def test_logprobs_are_those_of_the_serial_lane(engine: EngineClient) -> None:
    found = []
    for lane in LaneChoice:
        engine.send(submit(1, PROMPTS[1], max_tokens=12, logprobs=3, lane=lane))
        details = []
        for output in engine.outputs():
            assert output.logprobs is not None
            assert len(output.logprobs) == len(output.tokens)
            details += output.logprobs
            if output.finish is not None:
                break
        found.append(details)
    for speculative, serial in zip(*found, strict=True):
        assert speculative.top_tokens == serial.top_tokens
        assert speculative.logprob == pytest.approx(serial.logprob, abs=1e-5)


def test_what_speculation_did_is_told(family: str, tmp_path: Path) -> None:
    """By a fixed rule, which measured times have no part in: any confidence is enough."""
    prompt, most, block = TRACES[family][0]["prompt_ids"], 40, 7
    sure = configure(family, confidence_threshold=1e-9)
    records, tokens = [], []
    with running_engine(tmp_path, sure) as client:
        client.until_ready()
        client.send(submit(1, prompt, max_tokens=most))
        for step in client.steps():
            if step.round is not None:
                records.append(step.round)
            tokens += [token for output in step.outputs for token in output.tokens]
            if any(output.finish for output in step.outputs):
                break
    (output,) = step.outputs
    speculation = output.speculation
    assert speculation is not None
    assert speculation.rounds == len(records)
    assert speculation.drafted == sum(record.drafted for record in records)
    assert speculation.accepted == sum(record.accepted for record in records) > 0
    assert len(tokens) == most == speculation.accepted + speculation.rounds
    # Behind the prompt nothing is drafted yet; at the end no more than can still be said.
    assert [record.drafted for record in records[:2]] == [0, block]
    for record in records:
        assert sum(record.accepted_by_position) == record.accepted
        assert record.drafted <= record.width - 1 <= block


@pytest.mark.parametrize("cap", [None, 3])
def test_rejection_that_always_speculates_verifies_whole_blocks(
    family: str, cap: int | None, tmp_path: Path
) -> None:
    """On these pairs no draft pays, so an early stop would never admit one."""
    drafted = configure(family, rejection=True, maximum_draft_tokens=cap)
    with running_engine(tmp_path, drafted) as client:
        client.until_ready()
        expected = client.run(submit(1, PROMPTS[0], max_tokens=40, lane=LaneChoice.SERIAL))[1][0]
        client.send(submit(1, PROMPTS[0], max_tokens=40))
        tokens: list[int] = []
        found: list[tuple[int, int]] = []
        for step in client.steps():
            left = 40 - len(tokens)
            tokens += [token for output in step.outputs for token in output.tokens]
            if step.round is not None:
                found.append((step.round.drafted, min(cap or 7, left - 1)))
            if any(output.finish for output in step.outputs):
                break
    assert tokens == expected
    # The first round gives the row its first token, and its first drafts.
    assert found[0][0] == 0
    assert [drafts for drafts, _ in found[1:]] == [most for _, most in found[1:]]
    assert len(found) < 40


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_drafter_changes_no_word(family: str, bits: int, tmp_path: Path) -> None:
    with running_engine(tmp_path, configure(family, bits=bits)) as client:
        client.until_ready()
        for sampling in SAMPLINGS[:2]:
            speculative, serial = both_lanes(client, PROMPTS[1], max_tokens=30, **sampling)
            assert speculative == serial


@pytest.fixture(scope="module")
def shortlisted(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The family's drafter with the commonest tokens of the recorded answers as its shortlist."""
    folder = tmp_path_factory.mktemp("shortlisted") / "drafter"
    shutil.copytree(FIXTURES / family / "drafter", folder, copy_function=shutil.copyfile)
    counts = Counter(token for trace in TRACES[family] for token in trace["output_ids"])
    tokens = tuple(sorted(token for token, _ in counts.most_common(24)))
    Shortlist(tokens=tokens, coverage=0.9, counted=counts.total(), corpus="").save(folder)
    return folder


def test_a_shortlist_changes_no_word(
    engine: EngineClient, family: str, shortlisted: Path, tmp_path: Path
) -> None:
    samplings: list[dict[str, object]] = [
        {},
        {"temperature": 0.7, "seed": 9},
        {"temperature": 0.7, "seed": 9, "top_p": 0.9},
    ]
    with running_engine(tmp_path, configure(family, drafter=str(shortlisted))) as client:
        client.until_ready()
        for sampling in samplings:
            accepted = 0
            for prompt in (trace["prompt_ids"] for trace in TRACES[family][:4]):
                expected = engine.run(
                    submit(1, prompt, max_tokens=30, lane=LaneChoice.SERIAL, **sampling)  # type: ignore[arg-type]
                )[1][0]
                client.send(submit(1, prompt, max_tokens=30, **sampling))  # type: ignore[arg-type]
                tokens: list[int] = []
                for output in client.outputs():
                    tokens += output.tokens
                    if output.finish is not None:
                        assert output.speculation is not None
                        accepted += output.speculation.accepted
                        break
                assert tokens == expected
            assert accepted > 0


def test_a_shortlist_is_used_unless_it_is_turned_off(
    engine: EngineClient, family: str, shortlisted: Path, tmp_path: Path
) -> None:
    sizes, costs = {}, tmp_path / "costs"
    for used in (True, False):
        options = {"drafter": str(shortlisted), "shortlist": used, "costs_folder": str(costs)}
        with running_engine(tmp_path, configure(family, **options)) as client:
            sizes[used] = client.until_ready().drafter_bytes
    assert sizes[True] != sizes[False]
    # Drafts cost something else, so they are measured apart.
    assert len(list(costs.iterdir())) == 2


def test_a_lane_that_does_not_pay_parks_and_says_the_same(family: str, tmp_path: Path) -> None:
    """On these pairs, with a kernel that costs by the token, drafting never pays."""
    with running_engine(tmp_path, configure(family, always=False)) as client:
        client.until_ready()
        expected = client.run(submit(1, PROMPTS[1], max_tokens=60, lane=LaneChoice.SERIAL))[1]
        requests = [submit(i, PROMPTS[1], max_tokens=60) for i in range(3)]
        assert set(map(tuple, (t for t, _ in client.run(*requests).values()))) == {
            tuple(expected[0])
        }


def test_a_drafter_of_another_target_is_a_fault(tmp_path: Path) -> None:
    wrong = Configure(
        checkpoint=str(FIXTURES / "qwen3" / "target"),
        draft=DraftConfigure(drafter=str(FIXTURES / "gemma4" / "drafter")),
    )
    with running_engine(tmp_path, wrong) as client:
        while isinstance(message := client.receive(), Loading):
            pass
        assert isinstance(message, Fault)
        assert not message.restartable
