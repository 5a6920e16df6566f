"""Choosing a shortlist from a corpus."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.dspark.shortlist import Shortlist
from models.workshop import export, measurement, shortlist
from models.workshop.corpus import Conversation, Corpus, CorpusWriter
from models.workshop.run_folder import RunError
from tests.dspark.pairs import FIXTURES
from tests.workshop.corpora import TARGET, write_corpus

DRAFTER = FIXTURES / "qwen3" / "drafter"


def _drafter(folder: Path) -> Path:
    return Path(shutil.copytree(DRAFTER, folder, copy_function=shutil.copyfile))


def _answers(corpus: Corpus, indices: range) -> Counter[int]:
    """Counted one by one."""
    counts: Counter[int] = Counter()
    for index in indices:
        conversation = corpus[index]
        counts.update(conversation.tokens[conversation.answer :])
    return counts


def _run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    code = shortlist.main([str(argument) for argument in arguments])
    printed: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return code, printed


def test_the_commonest_tokens_of_the_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_corpus(tmp_path / "corpus")
    drafter = _drafter(tmp_path / "drafter")
    code, result = _run(
        capsys, "--corpus", folder, "--drafter", drafter, "--size", 60, "--held-out", 6
    )
    assert code == 0
    record = Shortlist.load(drafter, 512)
    assert record is not None and len(record.tokens) == result["tokens"] == 60
    counts = _answers(Corpus(folder), range(18))
    covered = sum(counts[token] for token in record.tokens)
    assert covered == sum(count for _, count in counts.most_common(60))
    assert record.counted == result["counted"] == counts.total()
    assert record.coverage == covered / counts.total()
    assert result["coverage"] == pytest.approx(record.coverage, abs=1e-6)
    others = _answers(Corpus(folder), range(18, 24))
    held_out = sum(others[token] for token in record.tokens) / others.total()
    assert result["held_out_coverage"] == pytest.approx(held_out, abs=1e-6)
    assert (drafter / "model.safetensors").read_bytes() == (
        DRAFTER / "model.safetensors"
    ).read_bytes()


def test_what_was_chosen_is_measured_with_and_goes_along(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_corpus(tmp_path / "corpus")
    drafter = _drafter(tmp_path / "drafter")
    assert _run(capsys, "--corpus", folder, "--drafter", drafter, "--size", 60)[0] == 0
    out = tmp_path / "out"
    export.export(TARGET, drafter, out, None, False)
    assert Shortlist.load(out, 512) == Shortlist.load(drafter, 512)
    # Others' readers take every such file for weights.
    export.export(TARGET, drafter, tmp_path / "theirs", None, True)
    assert [p.name for p in (tmp_path / "theirs").glob("*.safetensors")] == ["model.safetensors"]
    asked = tmp_path / "asked.jsonl"
    asked.write_text(json.dumps({"prompt": "count to 4"}) + "\n")
    arguments = f"--target {TARGET} --drafter {out} --prompts {asked} --max-tokens 8".split()
    for more, expected in ((), 60), (("--no-shortlist",), None):
        assert measurement.main([*arguments, *more]) == 0
        result = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert result["shortlist"] == expected
        assert result["divergences"] == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--size": 0}, "--size is 0; the drafter's vocabulary allows 1 to 512"),
        ({"--size": 513}, "--size is 513"),
        ({"--corpus": "nowhere"}, "holds no corpus"),
        ({"--drafter": "nowhere"}, "config.json"),
    ],
)
def test_what_cannot_be_is_refused(
    change: dict[str, object],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    drafter = _drafter(tmp_path / "drafter")
    arguments = {
        "--corpus": write_corpus(tmp_path / "corpus"),
        "--drafter": drafter,
        "--size": 10,
    } | change
    code, result = _run(capsys, *(part for pair in arguments.items() for part in pair))
    assert code == 2
    assert message in result["message"]
    assert Shortlist.load(drafter, 512) is None


def test_a_corpus_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path / "corpus")
    corpus = Corpus(folder)
    with pytest.raises(RunError, match="outside the vocabulary of 100"):
        corpus.answer_counts(np.arange(len(corpus)), 100)


@settings(max_examples=50, deadline=None)
@given(
    conversations=st.lists(
        st.tuples(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(0, 8)),
        min_size=1,
        max_size=6,
    ),
    data=st.data(),
)
def test_answers_are_counted_wherever_they_begin(
    conversations: list[tuple[list[int], int]],
    data: st.DataObject,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("corpus")
    writer = CorpusWriter(folder, {}, 10)
    writer.write([Conversation(tokens, min(at, len(tokens))) for tokens, at in conversations])
    corpus = Corpus(folder)
    chosen = data.draw(st.sets(st.integers(0, len(corpus) - 1)))
    counts = corpus.answer_counts(np.array(sorted(chosen), dtype=np.int64), 10)
    expected: Counter[int] = Counter()
    for index in chosen:
        tokens, at = conversations[index]
        expected.update(tokens[at:])
    assert counts.tolist() == [expected[token] for token in range(10)]
    size = data.draw(st.integers(1, 10))
    tokens = shortlist.most_frequent(counts, size)
    assert list(tokens) == sorted(set(tokens)) and len(tokens) == size
    assert sum(expected[t] for t in tokens) == sum(sorted(counts.tolist())[-size:])
