"""Training runs: they learn, they resume to the bit, and what they leave drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from models.dspark.configuration import TargetShape
from models.dspark.drafter import Drafter
from models.dspark.loader import load_drafter
from models.workshop import training
from models.workshop.checkpoint_files import write_drafter
from models.workshop.dequantized import dequantize_network
from models.workshop.quantization import Recipe, quantize_by_recipe
from models.workshop.sequences import block_hidden, train_on_sequences
from models.workshop.training_step import finished_weights
from tests.dspark.pairs import make_drafter, target
from tests.workshop.corpora import TARGET, write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def _arguments(corpus: Path, run: Path, *more: str) -> list[str]:
    small = "--layers 1 --rank 8 --anchors 16 --batch-tokens 128 --longest 64 --held-out 2"
    fixed = f"--target {TARGET} --corpus {corpus} --run {run} --mask-token 505 --log-every 1"
    return [*fixed.split(), *small.split(), *more]


def _result(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def _weights(run: Path) -> dict[str, mx.array]:
    loaded = mx.load(str(run / "drafter" / "model.safetensors"))
    assert isinstance(loaded, dict)
    return loaded


def test_a_resumed_run_is_the_uninterrupted_one(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    whole, halted = tmp_path / "whole", tmp_path / "halted"
    assert training.main(_arguments(corpus, whole, "--steps", "4")) == 0
    original = training.Training._record

    def stop_after_two(self: training.Training, *arguments: Any) -> dict[str, Any]:
        record = original(self, *arguments)
        if self.steps == 2:
            self.save()
            raise KeyboardInterrupt
        return record

    monkeypatch.setattr(training.Training, "_record", stop_after_two)
    with pytest.raises(KeyboardInterrupt):
        training.main(_arguments(corpus, halted, "--steps", "4"))
    monkeypatch.undo()
    assert training.main(_arguments(corpus, halted, "--steps", "4", "--resume")) == 0
    assert (
        next(line for line in reversed(_result(capsys)) if line["event"] == "start")["resumed_at"]
        == 2
    )
    first, second = _weights(whole), _weights(halted)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert mx.array_equal(value, second[name]), name


@pytest.mark.parametrize(
    ("head", "optimizer"), [("vanilla", "muon"), ("gated", "adamw"), ("rnn", "adamw")]
)
def test_a_step_of_every_head_lowers_the_loss_and_leaves_a_drafter_that_loads(
    head: str, optimizer: str, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = f"--optimizer {optimizer} --matrix-rate 0.02 --rate 0.01 --markov-rate 0.01".split()
    assert training.main(_arguments(corpus, tmp_path, "--head", head, "--steps", "12", *rates)) == 0
    losses = [line["cross_entropy"] for line in _result(capsys) if line["event"] == "progress"]
    assert len(losses) == 12 and min(losses[-4:]) < losses[0] - 0.05
    drafter = load_drafter(tmp_path / "drafter", target("qwen3"), TargetShape.read(TARGET))
    assert drafter.configuration.head_kind == head


def test_a_run_that_starts_from_a_drafter_begins_where_it_stood(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Though the projection that it reads has the scale of the taps in it."""
    assert training.main(_arguments(corpus, tmp_path / "first", "--steps", "4")) == 0
    begin = ["--start-from", str(tmp_path / "first" / "drafter"), "--steps", "1"]
    still = ["--rate", "0", "--matrix-rate", "0", "--markov-rate", "0"]
    assert training.main(_arguments(corpus, tmp_path / "second", *begin, *still)) == 0
    first, second = _weights(tmp_path / "first"), _weights(tmp_path / "second")
    for name, value in first.items():
        # Out of the projection and into it again: bfloat16 rounds twice.
        assert mx.allclose(second[name], value, rtol=1e-2, atol=1e-6), name


def test_weights_learned_rounded_lose_nothing_when_they_are(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rounded = ["--quantize-aware", "2:32,markov_head=16", "--steps", "6"]
    assert training.main(_arguments(corpus, tmp_path / "run", *rounded)) == 0
    told = _result(capsys)[-1]["held_out_loss"]
    drafter = load_drafter(tmp_path / "run" / "drafter", target("qwen3"), TargetShape.read(TARGET))
    before = drafter.network.layers[0].mlp.up_proj.weight
    quantize_by_recipe(drafter.network, Recipe.parse("2:32,markov_head=16"))
    dequantize_network(drafter.network)
    after = drafter.network.layers[0].mlp.up_proj.weight
    assert not mx.allclose(before.astype(mx.float32), after.astype(mx.float32), atol=1e-3)
    write_drafter(
        tmp_path / "rounded",
        drafter.configuration,
        dict(tree_flatten(drafter.network.parameters())),
    )
    still = ["--rate", "0", "--matrix-rate", "0", "--markov-rate", "0", "--steps", "1"]

    def loss_of(drafter: Path, run: str) -> float:
        begin = ["--start-from", str(drafter)]
        assert training.main(_arguments(corpus, tmp_path / run, *begin, *still)) == 0
        return float(_result(capsys)[-1]["held_out_loss"])

    whole = loss_of(tmp_path / "run" / "drafter", "whole")
    rounded_loss = loss_of(tmp_path / "rounded", "again")
    assert abs(rounded_loss - told) < 0.2 * abs(whole - told)


def test_other_settings_are_refused_in_the_same_run_folder(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert training.main(_arguments(corpus, tmp_path, "--steps", "1")) == 0
    capsys.readouterr()
    other = _arguments(corpus, tmp_path, "--steps", "2", "--resume", "--tap-layers", "0", "2")
    assert training.main(other) == 2
    (refusal,) = _result(capsys)
    assert "this run has drafter" in refusal["message"]


def test_a_corpus_of_another_target_is_refused(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "corpus"
    copy.mkdir()
    for file in corpus.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["fingerprint"]["tokenizer"] = "0" * 64
    (copy / "manifest.json").write_text(json.dumps(manifest))
    assert training.main(_arguments(copy, tmp_path / "run", "--steps", "1")) == 2
    assert "run regen with this target" in _result(capsys)[0]["message"]


def test_blocks_of_a_sequence_are_those_that_are_drafted_one_by_one() -> None:
    """Also with the taps' scale folded in: training and drafting see the same network."""
    drafter: Drafter = make_drafter("qwen3", dtype=mx.float32)
    c = drafter.configuration
    random = np.random.default_rng(3)
    taps = mx.array(random.normal(size=(1, 12, c.tap_width)), dtype=mx.float32)
    scale = mx.array(random.uniform(0.1, 3.0, c.tap_width), dtype=mx.float32)
    anchors, tokens = [2, 5, 11], [40, 41, 42]
    expected = []
    for anchor, token in zip(anchors, tokens, strict=True):
        context = drafter.new_context()
        context.open_row()
        drafter.extend(context, taps[:, :anchor])
        context.advance([anchor])
        expected.append(drafter.hidden(context, mx.array([token])))
    network = drafter.network
    unscaled = network.fc.weight / scale
    folded = finished_weights({"fc.weight": unscaled}, scale)["fc.weight"]
    assert mx.allclose(folded, network.fc.weight, atol=1e-6)
    network.fc.weight = unscaled
    train_on_sequences(network)
    actual = block_hidden(drafter, network, taps * scale, mx.array([anchors]), mx.array([tokens]))
    assert mx.allclose(actual[0], mx.concatenate(expected), atol=2e-5)
