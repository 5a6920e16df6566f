"""The step that calibrates: its prompts, its rounds, and the errors that it reports."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest

from models.calibration import Calibration, CalibrationError, fit
from models.checkpoint import inspect
from models.sampling_settings import Sampling
from models.target import Target
from models.workshop import calibration, export
from models.workshop.carried_error import Sample, carried_survival, fit_and_judge
from models.workshop.chat_text import ChatText
from models.workshop.held_out_prompts import prompts_of_corpus, prompts_of_file
from models.workshop.run_folder import RunError
from models.workshop.speculation import Answer, Decoder, Round
from tests.dspark.pairs import FIXTURES, make_drafter, target, trace
from tests.workshop.corpora import TARGET, write_corpus

DRAFTER = FIXTURES / "qwen3" / "drafter"
GOLDEN = json.loads((FIXTURES / "sts_alg1_goldens.json").read_text())["sts"]["qwen3"]


@functools.cache
def _decoder_target() -> Target:
    return Target(inspect(TARGET), target("qwen3"), "float32")


def _copy(tmp_path: Path) -> Path:
    export.export(TARGET, DRAFTER, tmp_path / "drafter", None, False)
    return tmp_path / "drafter"


def _result(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    line: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return line


def _lines(file: Path, *records: object) -> Path:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def test_its_rounds_fit_what_the_trace_fits() -> None:
    """The workshop's decoder, whole rounds only, against temperatures fitted on the trace."""
    decoder = Decoder(_decoder_target(), make_drafter("qwen3", dtype=mx.float32))
    answers = []
    try:
        for prompt in trace("qwen3")["prompts"]:
            # DeepSpec's loop drafts once more when a single token of the budget is left.
            count = prompt["max_new_tokens"] + 1
            settings = [Sampling(temperature=0.0)]
            answers += decoder.speculative([prompt["prompt_ids"]], settings, count).answers
    finally:
        decoder.close()
    sample = calibration.whole_rounds(answers)
    record = fit(sample.logits, sample.accepted.tolist())
    assert record.rounds == GOLDEN["rounds"]
    assert record.temperatures == GOLDEN["temperatures"]
    assert record.error_after == pytest.approx(GOLDEN["ece_after"], abs=2e-4)
    assert len(np.unique(sample.conversations)) == len(trace("qwen3")["prompts"])


class TestStep:
    def test_on_a_corpus(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        corpus, drafter = write_corpus(tmp_path / "corpus", 60), _copy(tmp_path)
        arguments = f"--target {TARGET} --drafter {drafter} --corpus {corpus} --held-out 30"
        more = "--rows 30 --max-tokens 32"
        assert calibration.main([*arguments.split(), *more.split()]) == 0
        result = _result(capsys)
        record = Calibration.load(drafter, 7)
        assert record is not None
        assert record.temperatures == result["temperatures"]
        assert [one.sampling_temperature for one in record.fits] == [0, 1]
        assert sum(one.rounds for one in record.fits) == record.rounds
        for one, told in zip(record.fits, result["fits"], strict=True):
            # An answer that stops at once has no rounds.
            assert 25 <= one.conversations <= 30 and one.rounds >= 40
            assert one.scales == pytest.approx(told["scales"], abs=1e-4)
            errors = (
                one.error_before,
                one.error_temperatures_only,
                one.error_after,
                one.noise_floor,
            )
            assert [len(error) for error in errors] == [7] * 4
            assert told["error_after"] == pytest.approx(one.error_after, abs=1e-4)

    def test_temperatures_alone_on_prompts(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        drafter = _copy(tmp_path)
        ids = [{"prompt_ids": prompt["prompt_ids"]} for prompt in trace("qwen3")["prompts"]]
        prompts = _lines(tmp_path / "prompts.jsonl", *ids)
        arguments = f"--target {TARGET} --drafter {drafter} --prompts {prompts} --method sts"
        more = "--temperatures 0 --max-tokens 48 --draft-bits 16 --precision float32"
        assert calibration.main([*arguments.split(), *more.split()]) == 0
        record = Calibration.load(drafter, 7)
        assert record is not None and record.fits == []
        assert set(record.temperatures) != {1.0}
        assert _result(capsys)["rounds"] == record.rounds >= 40

    @pytest.mark.parametrize(
        ("line", "more", "says"),
        [
            ({"prompt_ids": [1, 2, 3]}, "--max-tokens 4", "too few, at least 40"),
            ({"prompt_ids": [1, 99999]}, "", "token 99999, the target's vocabulary is 512"),
            ({"prompt_ids": [1, 2]}, "--temperatures -1", "temperature"),
        ],
    )
    def test_it_refuses(
        self,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        line: dict[str, Any],
        more: str,
        says: str,
    ) -> None:
        prompts = _lines(tmp_path / "prompts.jsonl", line)
        arguments = f"--target {TARGET} --drafter {DRAFTER} --prompts {prompts} {more}"
        assert calibration.main(arguments.split()) == 2
        assert says in capsys.readouterr().err
        assert not (DRAFTER / "calibration.json").exists()

    @pytest.mark.parametrize("source", ["", "--corpus a --prompts b", "--prompts b --held-out 4"])
    def test_prompts_come_from_one_place(self, source: str) -> None:
        with pytest.raises(SystemExit) as refused:
            calibration.main(f"--target a --drafter b {source}".split())
        assert refused.value.code == 2


class TestPrompts:
    def test_of_a_corpus_are_its_held_out_questions(self, tmp_path: Path) -> None:
        from models.workshop.corpus import Corpus

        folder = write_corpus(tmp_path, 24)
        corpus = Corpus(folder)
        expected = [list(corpus[index].tokens[:8]) for index in range(19, 24)]
        assert prompts_of_corpus(folder, TARGET, 5) == expected

    def test_of_a_file(self, tmp_path: Path) -> None:
        file = _lines(tmp_path / "a", {"prompt": "count to 4"}, {"prompt_ids": [5, 6], "id": "x"})
        assert prompts_of_file(file, TARGET) == [ChatText(TARGET).prompt("count to 4"), [5, 6]]

    @pytest.mark.parametrize(
        "line", [{}, {"prompt": 3}, {"prompt": "a", "prompt_ids": [1]}, {"prompt_ids": []},
                 {"prompt_ids": [True]}, {"prompt_ids": [-1]}, {"prompt_ids": ["a"]}, [1], 7]
    )  # fmt: skip
    def test_a_line_that_is_none(self, tmp_path: Path, line: object) -> None:
        file = _lines(tmp_path / "a", {"prompt_ids": [5]}, line)
        with pytest.raises(RunError, match="line 2"):
            prompts_of_file(file, TARGET)

    def test_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(RunError, match="cannot be read"):
            prompts_of_file(tmp_path / "none", TARGET)


def test_only_rounds_that_show_a_whole_block() -> None:
    first = Round(0, 2, 1, [0.1, 0.2], False)
    cut = Round(2, 2, 2, [0.3, 0.4], True)
    last = Round(0, 2, 0, [0.5, 0.6], False)
    answers = [Answer([1] * 4, [first, cut], []), Answer([1], [last], [])]
    sample = calibration.whole_rounds(answers)
    assert sample.logits.tolist() == [[0.1, 0.2], [0.5, 0.6]]
    assert sample.accepted.tolist() == [1, 0]
    assert sample.conversations.tolist() == [0, 1]
    with pytest.raises(CalibrationError, match="no confidence head"):
        calibration.whole_rounds([Answer([1], [Round(0, 2, 0, [], False)], [])])


@pytest.mark.parametrize("among_drafts", [False, True])
def test_a_round_counts_whole_unless_a_draft_ends_the_answer(among_drafts: bool) -> None:
    """The stop token as the target's own, last token of a round, or as an accepted draft."""
    prompt = trace("qwen3")["prompts"][0]
    seen, place = {prompt["first_token"]}, -2 if among_drafts else -1
    for number, one in enumerate(prompt["rounds"]):
        committed = one["committed"]
        if number and len(committed) > 1 and committed[place] not in seen | set(committed[:place]):
            break
        seen |= set(committed)
    else:
        raise AssertionError("the trace has no such round")
    facts = msgspec.structs.replace(inspect(TARGET), stop_tokens=(committed[place],))
    decoder = Decoder(
        Target(facts, target("qwen3"), "float32"), make_drafter("qwen3", dtype=mx.float32)
    )
    try:
        settings = [Sampling(temperature=0.0)]
        (found,) = decoder.speculative([prompt["prompt_ids"]], settings, 64).answers
    finally:
        decoder.close()
    assert found.tokens[-1] == committed[place]
    assert len(found.rounds) == number + 1
    assert [one.stopped for one in found.rounds] == [False] * number + [among_drafts]


class TestCarriedError:
    def sample(self, conversations: int, rounds: int, bias: float = -0.8) -> Sample:
        random = np.random.default_rng(11)
        names = np.repeat(np.arange(conversations), rounds)
        logits = random.normal(0.5, 1.5, size=(len(names), 3))
        passed = random.random(logits.shape) < 1 / (1 + np.exp(-(0.7 * logits + bias)))
        return Sample(logits, np.cumprod(passed, axis=1).sum(axis=1), names)

    def test_a_fit_that_is_right_carries(self) -> None:
        found = fit_and_judge(self.sample(100, 100), 0.5)
        assert (found.sampling_temperature, found.rounds, found.conversations) == (0.5, 10_000, 100)
        assert max(found.error_before[:2]) > 0.1
        assert max(found.error_temperatures_only) > 0.03
        assert max(found.error_after) < 0.02
        assert max(found.noise_floor) < 0.02

    def test_no_conversation_judges_itself(self) -> None:
        sample = self.sample(7, 5)
        seen: list[set[int]] = []

        def learn(others: Sample) -> Any:
            seen.append(set(others.conversations.tolist()))
            return lambda logits: np.full(logits.shape, len(seen), dtype=np.float64)

        survival = carried_survival(sample, learn, folds=3)
        assert len(seen) == 3
        for name in range(7):
            (fold,) = set(survival[sample.conversations == name].ravel().tolist())
            assert name not in seen[int(fold) - 1]
            assert all(name in others for at, others in enumerate(seen) if at != int(fold) - 1)

    def test_what_was_learned_by_heart_does_not_carry(self) -> None:
        """Confidences of pure noise, few rounds: the error on other conversations shows it."""
        sample = self.sample(6, 10)
        memory = {row.tobytes(): count for row, count in zip(*sample[:2], strict=True)}

        def learn(others: Sample) -> Any:
            known = {row.tobytes() for row in others.logits}
            return lambda logits: np.array(
                [[float(row.tobytes() in known and memory[row.tobytes()] > k) for k in range(3)]
                 for row in logits]
            )  # fmt: skip

        assert carried_survival(sample, learn).max() == 0

    def test_one_conversation_judges_nothing(self) -> None:
        with pytest.raises(CalibrationError, match="a single conversation"):
            fit_and_judge(self.sample(1, 50), 0.0)
