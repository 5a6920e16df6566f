"""What a target writes in lockstep is what it would say alone; what is kept is worth keeping."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.workshop import regeneration
from models.workshop.chat_text import ChatText
from models.workshop.corpus import Corpus
from models.workshop.generation import Generator, LockstepCache, WaveSettings
from models.workshop.lockstep_attention import lockstep_attention
from models.workshop.prompts import Prefix, PromptDraw, Source, write
from models.workshop.screening import Screen, Verdict, distinct_share, without_loop
from tests.dspark.pairs import target
from tests.workshop.corpora import TARGET


def _stops() -> frozenset[int]:
    return frozenset(json.loads((TARGET / "generation_config.json").read_text())["eos_token_id"])


def _greedy(model: Any, tokens: list[int], count: int, stops: frozenset[int]) -> list[int]:
    answer: list[int] = []
    while len(answer) < count and not (answer and answer[-1] in stops):
        logits = model(mx.array([tokens + answer]))
        answer.append(int(mx.argmax(logits[0, -1]).item()))
    return answer


def test_rows_of_different_prefixes_write_their_own_greedy_answers() -> None:
    model, text, stops = target("qwen3"), ChatText(TARGET), _stops()
    settings = WaveSettings(64, 6, 16, 0.9, (0.0,), 0.0)
    prefixes = [
        Prefix(text.prompt("count to five"), True, Source.QUESTION),
        Prefix(text.frame.before, False, Source.BARE),
        Prefix(text.frame.before + text.encode("say"), False, Source.OPENING),
        Prefix(text.prompt("x"), True, Source.QUESTION),
    ]
    rows = list(Generator(model, text.frame, stops, settings).write(prefixes, 3, 0))
    assert len(rows) == 4
    for row, prefix in zip(rows, prefixes, strict=True):
        tokens = row.tokens.tolist()
        assert tokens[: len(prefix.tokens)] == prefix.tokens
        before = tokens[: row.answer]
        assert before[-len(text.frame.after) :] == text.frame.after
        if prefix.answering:
            assert before == prefix.tokens
        else:
            written = len(before) - len(prefix.tokens) - len(text.frame.after)
            assert 0 <= written <= settings.user_tokens
        assert tokens[row.answer :] == _greedy(model, before, 16, stops)
        assert row.ended == (tokens[-1] in stops)


def test_leaving_out_rows_that_have_ended_changes_no_greedy_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, text = target("qwen3"), ChatText(TARGET)
    settings = WaveSettings(96, 6, 24, 0.9, (0.0,), 0.0)
    prefixes = [
        Prefix(text.prompt("count to five " * (1 + 3 * (row % 2))), True, Source.QUESTION)
        for row in range(6)
    ]

    def write(crowded: float) -> tuple[list[list[int]], int]:
        monkeypatch.setattr("models.workshop.generation._CROWDED", crowded)
        narrowed = Counter[str]()
        keep = LockstepCache.keep

        def counted(cache: LockstepCache, rows: mx.array) -> None:
            narrowed["layers"] += 1
            keep(cache, rows)

        monkeypatch.setattr(LockstepCache, "keep", counted)
        generator = Generator(model, text.frame, _stops(), settings)
        rows = [row.tokens.tolist() for row in generator.write(prefixes, 5, 0)]
        monkeypatch.setattr(LockstepCache, "keep", keep)
        return rows, narrowed["layers"]

    whole, none = write(0.0)
    narrow, layers = write(1.0)
    assert narrow == whole
    assert none == 0 and layers > 0


@pytest.mark.parametrize("family", ["qwen3", "gemma4"])
def test_heads_that_share_keys_attend_together_as_one_by_one(family: str) -> None:
    model = target(family)
    tokens = [mx.array([[3], [8]]), mx.array([[5], [1]]), mx.array([[4], [4]])]

    def logits() -> list[mx.array]:
        caches = [LockstepCache(4) for _ in model.layers]
        return [model(token, cache=caches) for token in tokens]

    module = sys.modules[type(model.layers[0].self_attn).__module__]
    original = module.scaled_dot_product_attention
    expected = logits()
    with lockstep_attention(model):
        assert module.scaled_dot_product_attention is not original
        actual = logits()
    assert module.scaled_dot_product_attention is original
    for one, other in zip(expected, actual, strict=True):
        assert mx.allclose(one, other, atol=1e-5)


def test_a_wave_is_a_function_of_its_seed_and_number() -> None:
    model, text = target("qwen3"), ChatText(TARGET)
    settings = WaveSettings(40, 8, 12, 1.0, (0.7,), 0.0)
    prefixes = [PromptDraw(text, 1, (1.0, 0.0)).draw(index) for index in range(6)]

    def tokens(seed: int, wave: int) -> list[list[int]]:
        generator = Generator(model, text.frame, _stops(), settings)
        return [row.tokens.tolist() for row in generator.write(prefixes, seed, wave)]

    assert tokens(1, 0) == tokens(1, 0)
    assert tokens(1, 0) != tokens(1, 1)
    assert tokens(1, 0) != tokens(2, 0)


def test_the_step_writes_a_corpus_that_can_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"count to {n}"}) + "\n" for n in range(9)))
    small = "--rows 9 --longest 96 --answer-length 24 --waves 2 --temperatures 1.0"
    arguments = f"--target {TARGET} --out {tmp_path / 'corpus'} --prompts {prompts} {small}"
    assert regeneration.main(arguments.split()) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["event"] for line in lines] == ["start", "progress", "progress", "result"]
    corpus = Corpus(tmp_path / "corpus")
    assert len(corpus) == lines[-1]["screened"].get("kept", 0) > 0
    assert corpus.answer_tokens == lines[-1]["answer_tokens"]
    text = ChatText(TARGET)
    asked = {tuple(text.prompt(f"count to {n}")) for n in range(9)}
    for index in range(len(corpus)):
        conversation = corpus[index]
        assert tuple(conversation.tokens[: conversation.answer]) in asked


def _regenerate(folder: Path, prompts: Path, *further: str) -> int:
    small = "--rows 9 --longest 48 --answer-length 16"
    arguments = f"--target {TARGET} --out {folder} --prompts {prompts} {small}"
    return regeneration.main([*arguments.split(), *further])


def _content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"count to {n}"}) + "\n" for n in range(9)))
    return file


@pytest.mark.parametrize("temperatures", [("0.0", "1.0"), ("0.0",)])
def test_a_run_that_is_gone_on_with_writes_the_corpus_of_one_without_a_break(
    temperatures: tuple[str, ...],
    tmp_path: Path,
    prompts: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At temperature 0 every answer behind the first wave is a repeat, so nothing is kept."""
    options = ("--temperatures", *temperatures)
    assert _regenerate(tmp_path / "whole", prompts, *options, "--waves", "4") == 0
    write, begun = Generator.write, []

    def interrupted(generator: Generator, prefixes: Any, seed: int, wave: int) -> Any:
        begun.append(wave)
        if begun.count(2) == 1 and wave == 2:
            raise KeyboardInterrupt
        return write(generator, prefixes, seed, wave)

    monkeypatch.setattr(Generator, "write", interrupted)
    parts = tmp_path / "parts"
    # There is nothing yet to go on with: it begins.
    with pytest.raises(KeyboardInterrupt):
        _regenerate(parts, prompts, *options, "--waves", "4", "--resume")
    assert _regenerate(parts, prompts, *options, "--waves", "4", "--resume") == 0
    assert begun == [0, 1, 2, 2, 3]
    assert _content(parts) == _content(tmp_path / "whole")
    shards = len(json.loads((parts / "manifest.json").read_text())["shards"])
    assert shards == (1 if temperatures == ("0.0",) else 4)


def test_enough_is_enough_wherever_the_break_was(tmp_path: Path, prompts: Path) -> None:
    enough = ("--answer-tokens", "150")
    assert _regenerate(tmp_path / "whole", prompts, *enough) == 0
    whole = _content(tmp_path / "whole")
    waves = json.loads(whole["manifest.json"])["waves"]
    assert waves >= 3
    for done in range(1, waves + 1):
        folder = tmp_path / f"parts{done}"
        assert _regenerate(folder, prompts, "--waves", str(done)) == 0
        assert _regenerate(folder, prompts, *enough, "--resume") == 0
        assert _content(folder) == whole


def test_a_corpus_is_neither_overwritten_nor_gone_on_with_in_another_way(
    tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "corpus"
    assert _regenerate(folder, prompts, "--waves", "1") == 0
    before = _content(folder)
    capsys.readouterr()

    def refusal(file: Path, *further: str) -> str:
        assert _regenerate(folder, file, "--waves", "2", *further) == 2
        assert _content(folder) == before
        return "".join(capsys.readouterr())

    assert "holds a corpus already: go on with it by --resume" in refusal(prompts)
    assert "has seed 0, now it is 1" in refusal(prompts, "--resume", "--seed", "1")
    assert "has rows 9, now it is 8" in refusal(prompts, "--resume", "--rows", "8")
    assert "'longest': 48" in refusal(prompts, "--resume", "--longest", "47")
    assert "has material" in refusal(prompts, "--resume", "--exclude", str(prompts))
    prompts.write_text(json.dumps({"prompt": "another"}) + "\n")
    assert "has material" in refusal(prompts, "--resume")


def test_questions_are_many_and_leave_no_slot_open() -> None:
    questions = [write(random.Random(index)) for index in range(2000)]
    assert len(set(questions)) > 1500
    assert not [question for question in questions if "{" in question.replace("boxed{}", "")]


def test_loops_repeats_and_excluded_texts_are_thrown_away() -> None:
    chance = np.random.default_rng(0)
    lively = [chance.integers(0, 400, 60).tolist() for _ in range(4)]
    question = " ".join(f"word{index}" for index in range(20))
    instruction = " ".join(f"always{index}" for index in range(15))
    screen = Screen([f"{question} {instruction}", *[f"{n} {instruction}" for n in "abcd"]])
    assert screen.judge([1, 2, *lively[0]], 2, "nothing") is Verdict.KEPT
    assert screen.judge([9, 9, *lively[0]], 2, "nothing") is Verdict.REPEATED
    assert screen.judge([1, 2] + [5, 6, 7] * 20, 2, "nothing") is Verdict.LOOP
    assert screen.judge([1, 2, 3, 4], 2, "nothing") is Verdict.SHORT
    assert screen.judge(lively[1], 2, f"He said: {question.upper()}!") is Verdict.EXCLUDED
    assert screen.judge(lively[2], 2, f"Do so. {instruction}") is Verdict.KEPT


def test_a_loop_is_cut_where_it_has_long_been_one() -> None:
    prompt, told = [1, 2, 3], list(range(100, 180))
    loop = [7, 8, 9] * 60
    cut = without_loop(prompt + told + loop, len(prompt))
    assert list(cut) == (prompt + told + loop)[: len(cut)]
    assert 30 < len(cut) - len(prompt + told) < 50
    whole = prompt + told + loop[:30]
    assert without_loop(whole, len(prompt)) == whole
    # A repeated sentence within a text is no loop.
    chorus = prompt + told[:30] + list(range(300, 380)) + told[:30] + list(range(400, 480))
    assert without_loop(chorus, len(prompt)) == chorus
    assert without_loop(prompt, 3) == prompt


@given(st.lists(st.integers(0, 3), max_size=200))
def test_what_is_left_of_a_loop_is_its_beginning(body: list[int]) -> None:
    left = list(without_loop([9, 9, *body], 2))
    assert left == [9, 9, *body][: len(left)] and len(left) >= min(len(body) + 2, 50)


def test_the_share_of_distinct_grams() -> None:
    assert distinct_share(np.arange(50)) == 1.0
    assert distinct_share(np.array([3, 4] * 50)) == pytest.approx(2 / 97)
