"""Anchors, batches, schedules, heads and run folders."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optimizers
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from safetensors.numpy import load_file, save_file

from models.dspark.configuration import DrafterError, HeadKind
from models.dspark.drafter import DraftNetwork
from models.workshop.anchors import choose_anchors, make_blocks, valid_anchors
from models.workshop.corpus import Corpus
from models.workshop.network import initialise, new_configuration, spread_taps, warm_start
from models.workshop.objective import head_features
from models.workshop.optimizer import StackedMuon, group_of, rate_share
from models.workshop.quantization import (
    Recipe,
    as_quantized,
    quantize_by_recipe,
    stored_weights,
)
from models.workshop.run_folder import RunError, RunFolder
from tests.tiny_models import CONFIGURATIONS
from tests.workshop.corpora import write_corpus

masks = st.lists(st.lists(st.booleans(), min_size=9, max_size=9), min_size=1, max_size=4)


@given(masks, st.integers(1, 12), st.integers(0, 5))
def test_anchors_are_valid_distinct_and_as_many_as_there_are(
    rows: list[list[bool]], count: int, seed: int
) -> None:
    supervised = np.array(rows)
    anchors, kept = choose_anchors(supervised, count, np.random.default_rng(seed))
    valid = valid_anchors(supervised)
    for row in range(len(supervised)):
        own = anchors[row][kept[row]]
        assert valid[row][own].all()
        assert len(set(own.tolist())) == len(own) == min(count, int(valid[row].sum()))
        assert (np.diff(own) > 0).all()


@given(masks, st.integers(1, 8))
def test_a_position_counts_only_while_all_before_it_do(
    rows: list[list[bool]], block_size: int
) -> None:
    supervised = np.array(rows)
    tokens = np.arange(supervised.size, dtype=np.int32).reshape(supervised.shape)
    anchors, kept = choose_anchors(supervised, 4, np.random.default_rng(0))
    blocks = make_blocks(tokens, supervised, anchors, kept, block_size)
    for row, column in np.ndindex(anchors.shape):
        alive = bool(kept[row, column])
        for k in range(block_size):
            at = anchors[row, column] + k + 1
            alive = alive and at < supervised.shape[1] and bool(supervised[row, at])
            assert blocks.counted[row, column, k] == alive
            if alive:
                assert blocks.labels[row, column, k] == tokens[row, at]
                assert blocks.previous[row, column, k] == tokens[row, at - 1]
                assert blocks.places[row, column, k] == at - 1


def test_taps_are_spread_as_in_the_published_drafters() -> None:
    assert spread_taps(36) == [1, 9, 17, 25, 33]
    assert spread_taps(40) == [1, 10, 19, 28, 37]
    assert spread_taps(30) == [1, 8, 14, 21, 27]
    assert spread_taps(3) == [0, 1]
    with pytest.raises(DrafterError):
        spread_taps(1)


def test_rates_rise_and_fall() -> None:
    assert rate_share(0.0, 0.04) == 0.0
    assert rate_share(0.02, 0.04) == pytest.approx(0.5)
    assert rate_share(0.04, 0.04) == pytest.approx(1.0)
    assert rate_share(0.52, 0.04) == pytest.approx(0.5)
    assert rate_share(1.0, 0.04) == pytest.approx(0.0)


def test_only_hidden_matrices_are_moved_by_muon() -> None:
    matrix, vector = mx.zeros((4, 4)), mx.zeros((4,))
    assert group_of("layers.0.mlp.up_proj.weight", matrix) == "matrix"
    assert group_of("fc.weight", matrix) == "matrix"
    assert group_of("layers.0.input_layernorm.weight", vector) == "other"
    assert group_of("confidence_head.proj.weight", matrix) == "other"
    assert group_of("markov_head.markov_w1.weight", matrix) == "markov"


def test_matrices_moved_together_move_as_one_by_one() -> None:
    """As mlx's own optimizer moves them, the momentum of earlier steps included."""
    shapes = {"q": (8, 8), "up": (20, 8), "down": (8, 20), "fc": (8, 40), "gate": (20, 8)}
    parameters = {
        name: mx.random.normal(shape, key=mx.random.key(number))
        for number, (name, shape) in enumerate(shapes.items())
    }
    alone = optimizers.Muon(learning_rate=0.05, weight_decay=0.0)
    together = StackedMuon(learning_rate=0.05, weight_decay=0.0)
    alone.init(parameters)
    together.init(parameters)
    expected = actual = parameters
    for step in range(3):
        gradients = {
            name: mx.random.normal(value.shape, key=mx.random.key(100 * step + value.size))
            for name, value in parameters.items()
        }
        expected = alone.apply_gradients(gradients, expected)
        actual = together.apply_gradients(gradients, actual)
    for name, value in expected.items():
        assert mx.allclose(actual[name], value, atol=1e-5), name
        assert mx.array_equal(together.state[name]["v"], alone.state[name]["v"])


def test_a_rounded_weight_is_the_exported_one_and_learns_as_the_whole_one() -> None:
    network = _network(HeadKind.VANILLA)
    weight = mx.random.normal((16, 32), key=mx.random.key(4))
    module = nn.Linear(32, 16, bias=False)
    module.weight = weight
    network.fc = module
    quantize_by_recipe(network, Recipe(4, 32, {"layers": 16, "markov_head": 16}))
    stored = stored_weights(network)
    exported = mx.dequantize(
        stored["fc.weight"],
        *(stored[f"fc.{part}"].astype(mx.float32) for part in ("scales", "biases")),
        32,
        4,
    )
    assert mx.allclose(as_quantized(weight, 32, 4), exported, atol=1e-6)
    assert not mx.allclose(weight, exported, atol=1e-2)
    ramp = mx.arange(16 * 32).reshape(16, 32)
    slope = mx.grad(lambda value: (as_quantized(value, 32, 4) * ramp).sum())(weight)
    assert mx.array_equal(slope, ramp.astype(mx.float32))


def test_several_corpora_are_one_behind_the_other(tmp_path: Path) -> None:
    first, second = write_corpus(tmp_path / "a"), write_corpus(tmp_path / "b")
    one, both = Corpus(first), Corpus(first, second)
    assert len(both) == 2 * len(one)
    assert both.answer_tokens == 2 * one.answer_tokens
    assert [both[index] for index in range(len(both))] == 2 * [
        one[index] for index in range(len(one))
    ]
    assert both.shard_marks() == 2 * one.shard_marks()
    assert both.origins == 2 * one.origins
    both.check(dict(one_fingerprint(first)))
    with pytest.raises(RunError, match="was written with target"):
        both.check({"target": "f" * 64})
    with pytest.raises(RunError, match="holds no corpus"):
        Corpus(first, tmp_path / "nothing")


def test_a_torn_shard_is_named(tmp_path: Path) -> None:
    first, second = write_corpus(tmp_path / "a"), write_corpus(tmp_path / "b")
    shard = second / Corpus(second).shards[-1]
    arrays = load_file(shard)
    save_file({**arrays, "tokens": arrays["tokens"][:-1]}, shard)
    with pytest.raises(RunError, match=f"{shard} is torn"):
        Corpus(first, second)


def one_fingerprint(folder: Path) -> dict[str, str]:
    manifest: dict[str, dict[str, str]] = json.loads((folder / "manifest.json").read_text())
    return manifest["fingerprint"]


def _network(head: HeadKind) -> DraftNetwork:
    configuration = new_configuration(
        CONFIGURATIONS["llama"],
        tap_layers=[0, 1],
        layers=1,
        block_size=4,
        rank=6,
        head=head,
        mask_token=3,
    )
    network = DraftNetwork(configuration, own_head=False)
    initialise(network, 1, None)
    return network


@pytest.mark.parametrize("kind", [HeadKind.GATED, HeadKind.RNN])
def test_other_heads_start_as_the_markov_head_they_replace(kind: HeadKind) -> None:
    source, successor = _network(HeadKind.VANILLA), _network(kind)
    source.markov_head.markov_w1.weight *= 40
    source.markov_head.markov_w2.weight *= 40
    warm_start(successor, kind, dict(tree_flatten(source.parameters())))
    previous = mx.array([[[5, 9, 2, 7]]])
    hidden = mx.random.normal((1, 1, 4, 32), key=mx.random.key(0))

    def bias(network: DraftNetwork, kind: HeadKind) -> mx.array:
        _, features = head_features(network, kind, previous, hidden)
        assert features is not None
        out: mx.array = network.markov_head.markov_w2(features)
        return out

    expected = bias(source, HeadKind.VANILLA)
    assert mx.abs(expected).max().item() > 0.5
    assert mx.allclose(bias(successor, kind), expected, rtol=2e-4, atol=1e-4)


def test_an_epoch_has_every_conversation_that_fills_a_batch_once(tmp_path: Path) -> None:
    corpus = Corpus(write_corpus(tmp_path))
    train, held_out = corpus.split(4)
    assert len(train) == 20 and not set(train) & set(held_out)
    batches = list(corpus.batches(train, 256, 128, seed=1, epoch=0))
    again = list(corpus.batches(train, 256, 128, seed=1, epoch=0))
    assert all((a == b).all() for a, b in zip(batches, again, strict=True))
    seen = np.concatenate(batches).tolist()
    assert len(seen) == len(set(seen)) and set(seen) <= set(train.tolist())
    for batch in batches:
        packed = corpus.pack(batch, 128)
        assert packed.tokens.size == 256
        first = corpus[int(batch[0])]
        size = len(first.tokens)
        assert packed.tokens[0, :size].tolist() == first.tokens
        assert packed.supervised[0].nonzero()[0].tolist() == list(range(first.answer, size))


def test_a_folder_without_a_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="Run regen first"):
        Corpus(tmp_path)


def test_a_checkpoint_outlives_an_interrupted_write(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.save({"a": mx.array([1.0])}, {"step": 1})
    # Killed between the two renames of the next write.
    (tmp_path / "checkpoint").rename(tmp_path / ".checkpoint.old")
    stored = folder.load()
    assert stored is not None and stored[1] == {"step": 1}
    folder.save({"a": mx.array([2.0])}, {"step": 2})
    stored = folder.load()
    assert stored is not None and stored[0]["a"].item() == 2.0
