"""The drafter and the decode loop against DeepSpec's own traces, round for round."""

from __future__ import annotations

from typing import Any

import pytest

from models.dspark import compare
from models.dspark.decode import ReferenceDecoder, Transcript

from .pairs import FAMILIES, FIXTURES, THRESHOLDS, make_drafter, target, trace


def decode_all(family: str, threshold: str) -> tuple[compare.Report, dict[str, Transcript]]:
    recorded = trace(family, threshold)
    decoder = ReferenceDecoder(
        target(family), make_drafter(family), recorded["stop_token_ids"], float(threshold)
    )
    transcripts: dict[str, Transcript] = {}
    prompts = iter(recorded["prompts"])

    def decode(ids: list[int], budget: int) -> Transcript:
        name = next(prompts)["id"]
        transcripts[name] = decoder.decode(ids, budget)
        return transcripts[name]

    try:
        return compare.replay(recorded, decode), transcripts
    finally:
        decoder.close()


@pytest.fixture(scope="module")
def replays() -> dict[tuple[str, str], tuple[compare.Report, dict[str, Transcript]]]:
    return {
        (family, threshold): decode_all(family, threshold)
        for family in FAMILIES
        for threshold in THRESHOLDS
    }


Replays = dict[tuple[str, str], tuple[compare.Report, dict[str, Transcript]]]


@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_round_equals_the_trace(replays: Replays, family: str, threshold: str) -> None:
    report, _ = replays[family, threshold]
    assert report.difference is None, str(report.difference)
    assert report.rounds == sum(len(p["rounds"]) for p in trace(family, threshold)["prompts"])
    # Far inside the tolerance: what is left is the order of float32 sums.
    assert report.worst_confidence < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_a_budget_of_one_token_still_drafts_once(replays: Replays, family: str) -> None:
    _, transcripts = replays[family, "0"]
    assert len(transcripts["one_token"].rounds) == 1
    assert len(transcripts["one_token"].output) == 1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["short_budget", "story_cut"])
def test_a_budget_cuts_inside_a_block(replays: Replays, family: str, name: str) -> None:
    _, transcripts = replays[family, "0"]
    transcript = transcripts[name]
    committed = 1 + sum(len(one.committed) for one in transcript.rounds)
    budget = next(p for p in trace(family)["prompts"] if p["id"] == name)["max_new_tokens"]
    assert len(transcript.output) == budget
    assert committed >= budget


def test_a_prompt_longer_than_the_window_rolls_back_exactly(replays: Replays) -> None:
    _, transcripts = replays["gemma4", "0"]
    assert any(
        one.accepted_draft_tokens < one.draft_token_count
        for one in transcripts["long_context"].rounds
    )
    prompt = next(p for p in trace("gemma4")["prompts"] if p["id"] == "long_context")
    assert len(prompt["prompt_ids"]) > 8 * 16  # eight windows


def test_rounds_without_a_draft_commit_one_token(replays: Replays) -> None:
    rounds = [
        one
        for transcript in replays["gemma4", "0.8"][1].values()
        for one in transcript.rounds
        if one.draft_token_count == 0
    ]
    assert rounds
    assert all(len(one.committed) == 1 for one in rounds)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stop_token_ends_the_answer_inside_a_block(replays: Replays, family: str) -> None:
    stops = set(trace(family)["stop_token_ids"])
    ended = [
        transcript
        for transcript in replays[family, "0"][1].values()
        if transcript.rounds and transcript.rounds[-1].terminated_by_stop_token
    ]
    assert ended
    for transcript in ended:
        last = transcript.rounds[-1]
        assert last.committed[-1] in stops
        assert last.accepted_draft_tokens == len(last.committed)
        assert transcript.output[-1] in stops


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_quantized_drafter_leaves_the_output_unchanged(family: str, bits: int) -> None:
    recorded = trace(family)
    drafter = make_drafter(family, bits=bits)
    decoder = ReferenceDecoder(target(family), drafter, recorded["stop_token_ids"])
    rounds: list[Any] = []
    try:
        for prompt in recorded["prompts"]:
            transcript = decoder.decode(prompt["prompt_ids"], prompt["max_new_tokens"])
            assert transcript.output == prompt["output_ids"], prompt["id"]
            rounds += transcript.rounds
    finally:
        decoder.close()
    assert sum(one.accepted_draft_tokens for one in rounds) > len(rounds)


class TestCommand:
    def arguments(self, family: str, *more: str, drafter: str | None = None) -> list[str]:
        folder = FIXTURES / family
        return [
            *("--trace", str(folder / "trace_float32_thr0.5.json")),
            *("--target", str(folder / "target")),
            *("--drafter", drafter or str(folder / "drafter")),
            *more,
        ]

    def test_equal(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert compare.main(self.arguments("qwen3")) == 0
        assert "8 prompts, 54 rounds equal" in capsys.readouterr().out

    def test_different(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert compare.main(self.arguments("qwen3", "--draft-bits", "4")) == 1
        printed = capsys.readouterr().out
        assert "prompt 'count', round 0" in printed
        assert "trace:" in printed and "replay:" in printed and "anchor" in printed

    def test_acceptance_only(self, capsys: pytest.CaptureFixture[str]) -> None:
        arguments = self.arguments("qwen3", "--acceptance-only", "--draft-bits", "8")
        assert compare.main(arguments) == 0
        printed = capsys.readouterr().out
        assert "trace" in printed and "tokens a round" in printed

    def test_a_drafter_for_another_target(self, capsys: pytest.CaptureFixture[str]) -> None:
        other = str(FIXTURES / "gemma4" / "drafter")
        assert compare.main(self.arguments("qwen3", drafter=other)) == 2
        assert "trained for another target" in capsys.readouterr().err
