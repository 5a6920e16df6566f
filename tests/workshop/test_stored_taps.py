"""Stored taps are what training would compute, whole, and refused when they are another's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.dspark.configuration import TargetShape
from models.workshop import tap_storage, training
from models.workshop.corpus import Conversation, Corpus, CorpusWriter
from models.workshop.frozen_target import FrozenTarget
from models.workshop.network import spread_taps
from models.workshop.run_folder import RunError, fingerprint
from models.workshop.stored_taps import StoredTaps, TapManifest, TapSettings, shard_name
from tests.workshop.corpora import TARGET, write_corpus

LAYERS = spread_taps(TargetShape.read(TARGET).layer_count)
SHARDS = [shard_name(0), shard_name(1)]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus")


def _events(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def _store(capsys: pytest.CaptureFixture[str], corpus: Path, *more: object) -> dict[str, Any]:
    """Run the step; returns its result or refusal."""
    arguments = ["--target", TARGET, "--corpus", corpus, "--batch-tokens", 256, *more]
    code = tap_storage.main([str(argument) for argument in arguments])
    last = _events(capsys)[-1]
    assert code == (0 if last["event"] == "result" else 2)
    return last


def _train(
    capsys: pytest.CaptureFixture[str], corpus: Path, run: Path, *more: str
) -> list[dict[str, Any]]:
    small = "--layers 1 --rank 8 --anchors 16 --batch-tokens 128 --longest 64 --held-out 2"
    fixed = f"--target {TARGET} --corpus {corpus} --run {run} --mask-token 505 --log-every 1"
    code = training.main([*f"{fixed} {small} --steps 3".split(), *more])
    events = _events(capsys)
    assert code == (0 if events[-1]["event"] == "result" else 2)
    return events


def _settings(layers: list[int], precision: str) -> TapSettings:
    return TapSettings(
        tap_layers=tuple(layers),
        precision=precision,
        fingerprint=fingerprint(TARGET),
        hidden_size=TargetShape.read(TARGET).hidden_size,
    )


def _open(corpus: Path, layers: list[int] = LAYERS, precision: str = "float32") -> StoredTaps:
    conversations = Corpus(corpus)
    settings = _settings(layers, precision)
    return StoredTaps(corpus / "taps", conversations, settings, conversations.shard_marks())


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_what_is_stored_is_what_the_target_computes(
    precision: str, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = _store(capsys, corpus, "--precision", precision, "--tap-layers", 0, 3)
    conversations = Corpus(corpus)
    stored = _open(corpus, [0, 3], precision)
    frozen = FrozenTarget.load(TARGET, [0, 3], precision)
    exact = {"float32": 1e-5, "bfloat16": 6e-2, "float16": 8e-3}[precision]
    chosen = np.array([23, 0, 12, 11])
    packed = conversations.pack(chosen, 128)
    computed = frozen.read(mx.array(packed.tokens))
    for read, expected in zip(stored.read(chosen, packed.tokens.shape[1]), computed, strict=True):
        assert read.dtype == expected.dtype and read.shape == expected.shape
        for row, index in enumerate(chosen):
            size = int(conversations.sizes[index])
            one, other = read[row, :size], expected[row, :size]
            assert mx.allclose(one, other, rtol=exact, atol=exact)
            assert not read[row, size:].any()
    files = [corpus / "taps" / name for name in SHARDS]
    assert result["bytes"] == sum(file.stat().st_size for file in files)
    assert sorted(file.name for file in (corpus / "taps").iterdir()) == [*SHARDS, "taps.json"]
    loaded = mx.load(str(files[1]))
    assert isinstance(loaded, dict)
    hidden = TargetShape.read(TARGET).hidden_size
    tokens = int(conversations.sizes[12:].sum())
    assert {name: value.shape for name, value in loaded.items()} == {
        "taps": (tokens, 2 * hidden),
        "states": (tokens, hidden),
    }


def _log(run: Path) -> list[tuple[float, ...]]:
    fields = ("loss", "cross_entropy", "distance", "confidence", "tokens_per_round")
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [tuple(line[field] for field in fields) for line in lines]


def _checkpoint(run: Path) -> dict[str, mx.array]:
    loaded = mx.load(str(run / "checkpoint" / "state.safetensors"))
    assert isinstance(loaded, dict)
    return loaded


def test_training_from_stored_taps_is_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """To the bit: losses, parameters and the optimizer's state. All batches have one shape here,
    in storing and in training, and a product of another shape may round otherwise."""
    random = np.random.default_rng(1)
    writer = CorpusWriter(tmp_path / "corpus", {"fingerprint": fingerprint(TARGET)}, 512)
    for _ in range(2):
        writer.write([Conversation(random.integers(5, 500, 64).tolist(), 8) for _ in range(6)])
    _store(capsys, tmp_path / "corpus", "--batch-tokens", 128)
    _train(capsys, tmp_path / "corpus", tmp_path / "computed")
    events = _train(capsys, tmp_path / "corpus", tmp_path / "stored", "--stored-taps")
    assert events[0]["stored_taps"] and events[0]["taps"] == LAYERS
    assert len(_log(tmp_path / "stored")) == 3
    assert _log(tmp_path / "stored") == _log(tmp_path / "computed")
    computed, stored = _checkpoint(tmp_path / "computed"), _checkpoint(tmp_path / "stored")
    assert computed.keys() == stored.keys()
    for name, value in computed.items():
        assert mx.array_equal(value, stored[name]), name


def test_training_on_conversations_of_any_length(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Shorter and longer than what training cuts them to, stored in batches of other shapes."""
    out = tmp_path / "elsewhere"
    _store(capsys, corpus, "--batch-tokens", 900, "--out", out)
    _train(capsys, corpus, tmp_path / "computed")
    events = _train(capsys, corpus, tmp_path / "stored", "--stored-taps", str(out))
    assert [event["event"] for event in events].count("note") == 1  # of the missing plot
    for one, other in zip(_log(tmp_path / "stored"), _log(tmp_path / "computed"), strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def test_taps_that_are_there_are_not_used_unasked_and_not_kept_quiet_about(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _store(capsys, corpus)
    events = _train(capsys, corpus, tmp_path / "run")
    notes = [event["message"] for event in events if event["event"] == "note"]
    assert not events[0]["stored_taps"]
    assert "the corpus has stored taps: --stored-taps reads them" in notes


def test_the_target_is_not_run(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    _store(capsys, corpus)

    def refuse(self: FrozenTarget, tokens: mx.array) -> None:
        raise AssertionError("the target was run")

    monkeypatch.setattr(FrozenTarget, "read", refuse)
    _train(capsys, corpus, tmp_path / "run", "--stored-taps")


def test_a_stopped_run_goes_on(
    corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """Stopped inside the second shard: the first stays, the second is not there."""
    whole = _store(capsys, corpus, "--out", corpus / "whole")
    write, batches = tap_storage._store, 0

    def stop(*arguments: Any) -> int:
        nonlocal batches
        batches += 1
        if batches > whole_batches:
            raise KeyboardInterrupt
        return write(*arguments)

    whole_batches = len(list(tap_storage.like_lengths(Corpus(corpus), np.arange(12), 256))) + 1
    monkeypatch.setattr(tap_storage, "_store", stop)
    with pytest.raises(KeyboardInterrupt):
        _store(capsys, corpus)
    monkeypatch.undo()
    capsys.readouterr()
    first = corpus / "taps" / SHARDS[0]
    assert sorted(file.name for file in first.parent.iterdir()) == [SHARDS[0], "taps.json"]
    with pytest.raises(RunError, match="lacks the taps of 1 of 2 shards"):
        _open(corpus)
    # As after a kill, which leaves no time to tidy up.
    (first.parent / f".{SHARDS[1]}").write_bytes(b"half")
    stamp = first.stat().st_mtime_ns
    assert _store(capsys, corpus)["written"] == 1
    assert first.stat().st_mtime_ns == stamp
    assert _store(capsys, corpus)["written"] == 0
    assert sorted(file.name for file in first.parent.iterdir()) == [*SHARDS, "taps.json"]
    for name in SHARDS:
        assert (corpus / "taps" / name).read_bytes() == (corpus / "whole" / name).read_bytes()
    manifest = TapManifest.load(corpus / "taps")
    assert manifest is not None and manifest == TapManifest.load(corpus / "whole")
    assert (manifest.bytes, manifest.tokens) == (whole["bytes"], whole["tokens"])


def test_a_torn_shard_is_refused_and_written_again(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _store(capsys, corpus)
    shard = corpus / "taps" / SHARDS[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-100])
    refusal = _train(capsys, corpus, tmp_path / "run", "--stored-taps")[-1]
    assert f"{SHARDS[1]}: truncated" in refusal["message"]
    assert _store(capsys, corpus)["written"] == 1
    assert shard.read_bytes() == content


def test_a_shard_of_other_taps_is_refused_and_written_again(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the right shape even: the same conversations in another order."""
    _store(capsys, corpus)
    conversations = Corpus(corpus)
    facts = json.loads((corpus / "manifest.json").read_text())
    writer = CorpusWriter(tmp_path / "other", facts, 512)
    for first in (0, 12):
        writer.write([conversations[index] for index in reversed(range(first, first + 12))])
    _store(capsys, tmp_path / "other")
    kept = (corpus / "taps" / SHARDS[0]).read_bytes()
    foreign = tmp_path / "other" / "taps" / SHARDS[0]
    assert foreign.stat().st_size == len(kept)
    shutil.copyfile(foreign, corpus / "taps" / SHARDS[0])
    refusal = _train(capsys, corpus, tmp_path / "run", "--stored-taps")[-1]
    assert "was not made by this target from this corpus' shard" in refusal["message"]
    assert _store(capsys, corpus)["written"] == 1
    assert (corpus / "taps" / SHARDS[0]).read_bytes() == kept


@pytest.mark.parametrize(
    ("stored", "asked", "message"),
    [
        (("--tap-layers", 0, 2), (), "taps of layers [0, 2], this run has"),
        (("--precision", "bfloat16"), (), "precision bfloat16, this run has float32"),
        ((), ("--tap-layers", "1", "2"), "choose its --tap-layers"),
        ((), ("--precision", "float16"), "give --precision float32"),
    ],
)
def test_taps_of_other_settings_are_refused(
    stored: tuple[object, ...],
    asked: tuple[str, ...],
    message: str,
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _store(capsys, corpus, *stored)
    refusal = _train(capsys, corpus, tmp_path / "run", "--stored-taps", *asked)[-1]
    assert message in refusal["message"]
    assert message in _store(capsys, corpus, *asked)["message"] or not asked
    assert not (tmp_path / "run" / "drafter").exists()


def test_taps_of_another_corpus_or_target_are_refused(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _store(capsys, corpus)
    other = write_corpus(tmp_path / "other", seed=6)
    shutil.copytree(corpus / "taps", other / "taps")
    refusal = _train(capsys, other, tmp_path / "run", "--stored-taps")[-1]
    assert "holds taps of corpus" in refusal["message"]
    assert "holds taps of corpus" in _store(capsys, other)["message"]
    manifest = json.loads((corpus / "taps" / "taps.json").read_text())
    manifest["settings"]["fingerprint"]["target"] = "0" * 64
    (corpus / "taps" / "taps.json").write_text(json.dumps(manifest))
    refusal = _train(capsys, corpus, tmp_path / "run", "--stored-taps")[-1]
    assert "holds taps of target 000000000000" in refusal["message"]


def test_a_run_folder_keeps_its_precision_and_its_corpus(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _store(capsys, corpus, "--precision", "bfloat16")
    _train(capsys, corpus, tmp_path)
    more = ("--stored-taps", "--precision", "bfloat16")
    refusal = _train(capsys, corpus, tmp_path, "--resume", *more)[-1]
    assert "this run has precision 'float32'" in refusal["message"]
    # Run folders of before do not say.
    file = tmp_path / "configuration.json"
    configuration = json.loads(file.read_text())
    del configuration["precision"]
    file.write_text(json.dumps(configuration))
    _train(capsys, corpus, tmp_path, "--resume", *more)
    assert json.loads(file.read_text())["stored_taps"] is True


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(
    corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    needed = _store(capsys, corpus, "--out", corpus / "whole")["bytes"]
    for free, fits in ((needed - 1, False), (needed, True)):
        usage = SimpleNamespace(free=free)
        monkeypatch.setattr(tap_storage.shutil, "disk_usage", lambda _, usage=usage: usage)
        result = _store(capsys, corpus)
        if not fits:
            assert f"the taps take {needed:,} bytes" in result["message"]
            assert f"has room for {free:,}" in result["message"]
        assert len(list((corpus / "taps").iterdir())) == (3 if fits else 0)


def test_values_that_do_not_fit_are_refused(
    corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    read = FrozenTarget.read

    def large(self: FrozenTarget, tokens: mx.array) -> tuple[mx.array, mx.array]:
        taps, states = read(self, tokens)
        return taps.astype(mx.float32) * 1e6, states

    monkeypatch.setattr(FrozenTarget, "read", large)
    assert "does not fit float16" in _store(capsys, corpus, "--precision", "float16")["message"]
    assert list((corpus / "taps").iterdir()) == []
    _store(capsys, corpus, "--precision", "bfloat16")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--tap-layers", 2, 1), "must be strictly increasing"),
        (("--tap-layers", 0, 4), "the target's last layer 4"),
        (("--tap-layers", 9), "reach outside the target's layers 0 to 4"),
        (("--batch-tokens", 0), "--batch-tokens is 0"),
        (("--corpus", "nowhere"), "Run regen first"),
    ],
)
def test_what_cannot_be_is_refused(
    more: tuple[object, ...],
    message: str,
    corpus: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert message in _store(capsys, corpus, *more)["message"]
    assert not (corpus / "taps").exists()


def test_a_manifest_of_another_format_or_none_is_refused(
    corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RunError, match="run `sparklane drafter taps` first"):
        _open(corpus)
    _store(capsys, corpus)
    file = corpus / "taps" / "taps.json"
    manifest = json.loads(file.read_text())
    for content, message in (({**manifest, "format": 2}, "has format 2"), ({}, "cannot be read")):
        file.write_text(json.dumps(content))
        with pytest.raises(RunError, match=message):
            _open(corpus)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=30), st.integers(1, 100))
def test_every_conversation_is_in_one_batch(sizes: list[int], tokens: int) -> None:
    corpus: Any = SimpleNamespace(sizes=np.array(sizes))
    batches = list(tap_storage.like_lengths(corpus, np.arange(len(sizes)), tokens))
    seen = np.concatenate(batches).tolist() if batches else []
    assert sorted(seen) == [index for index, size in enumerate(sizes) if size]
    for batch in batches:
        assert len(batch) == 1 or len(batch) * corpus.sizes[batch].max() <= tokens
    assert corpus.sizes[seen].tolist() == sorted(filter(None, sizes), reverse=True)
