"""The objective against a recorded training forward of DeepSpec's own loss."""

from __future__ import annotations

import json
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from models.dspark.drafter import Drafter
from models.workshop.anchors import make_blocks, valid_anchors
from models.workshop.objective import Batch, HeadWeights, Losses, loss, position_gradients
from models.workshop.sequences import train_on_sequences
from tests.dspark.pairs import FAMILIES, FIXTURES, make_drafter


def _golden(family: str) -> tuple[dict[str, mx.array], dict[str, Any]]:
    arrays = mx.load(str(FIXTURES / family / "loss_golden.safetensors"))
    assert isinstance(arrays, dict)
    return arrays, json.loads((FIXTURES / family / "loss_golden.json").read_text())


def _blocks(arrays: dict[str, mx.array], block_size: int) -> Any:
    return make_blocks(
        np.array(arrays["input_ids"]),
        np.array(arrays["loss_mask"]).astype(bool),
        np.array(arrays["anchor_positions"]),
        np.array(arrays["block_keep_mask"]).astype(bool),
        block_size,
    )


def _run(family: str, rows: int) -> tuple[Losses, dict[str, mx.array], dict[str, Any]]:
    arrays, record = _golden(family)
    drafter: Drafter = make_drafter(family, own_head=True, dtype=mx.float32)
    network = drafter.network
    train_on_sequences(network)
    network.freeze(keys=["embed_tokens", "lm_head"], recurse=False)
    network.embed_tokens.freeze()
    network.lm_head.freeze()
    blocks = _blocks(arrays, drafter.block_size)
    batch = Batch(
        arrays["target_hidden_states"].astype(mx.float32),
        arrays["target_last_hidden_states"].astype(mx.float32),
        *(mx.array(part) for part in blocks),
    )
    kept: list[Losses] = []

    def total(network: Any) -> mx.array:
        losses = loss(drafter, network, batch, network.lm_head.weight, rows)
        kept.append(losses)
        return losses.total

    _, gradients = nn.value_and_grad(network, total)(network)
    return kept[0], dict(tree_flatten(gradients)), record


@pytest.mark.parametrize("family", FAMILIES)
def test_labels_and_masks_are_the_recorded_ones(family: str) -> None:
    arrays, record = _golden(family)
    blocks = _blocks(arrays, record["settings"]["block_size"])
    expected = np.array(arrays["eval_mask"]).astype(bool)
    assert (blocks.counted == expected).all()
    assert (blocks.labels == np.array(arrays["target_ids"]))[expected].all()
    valid = valid_anchors(np.array(arrays["loss_mask"]).astype(bool)).sum(axis=1).mean()
    assert valid == record["metrics"]["train/valid_anchors_abs"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", [1000, 17])
def test_losses_and_gradients_are_the_recorded_ones(family: str, rows: int) -> None:
    losses, gradients, record = _run(family, rows)
    metrics = record["metrics"]
    assert losses.total.item() == pytest.approx(record["total_loss"], abs=1e-4)
    for name, value in (
        ("ce_loss", losses.cross_entropy),
        ("l1_loss", losses.distance),
        ("confidence_loss", losses.confidence),
    ):
        assert value.item() == pytest.approx(metrics[f"train/{name}"], abs=1e-4), name
    for position in range(7):
        expected = metrics[f"train/accept_rate@{position}"]
        assert losses.accepted[position].item() == pytest.approx(expected, abs=1e-4)
    assert losses.tokens_per_round.item() == pytest.approx(
        metrics["train/tau_probabilistic"], abs=1e-3
    )
    norms = record["grad_norms"]
    assert set(norms) <= set(gradients)
    for name, expected in norms.items():
        norm = mx.linalg.norm(gradients[name].reshape(-1)).item()
        assert norm == pytest.approx(expected, abs=1e-4, rel=1e-4), name


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_gradients_of_the_head_are_those_of_automatic_differentiation(
    softcap: float | None,
) -> None:
    key = mx.random.split(mx.random.key(3), 6)
    hidden, states = (mx.random.normal((5, 8), key=key[i]) for i in range(2))
    features, markov = mx.random.normal((5, 4), key=key[2]), mx.random.normal((11, 4), key=key[3])
    vocabulary, weights = mx.random.normal((11, 8), key=key[4]), mx.random.uniform(shape=(5,))
    labels = mx.array([0, 3, 10, 3, 7])

    def cap(logits: mx.array) -> mx.array:
        return logits if softcap is None else mx.tanh(logits / softcap) * softcap

    def plain(hidden: mx.array, features: mx.array, markov: mx.array) -> mx.array:
        logits = cap(hidden @ vocabulary.T) + features @ markov.T
        p, q = mx.softmax(logits, -1), mx.softmax(cap(states @ vocabulary.T), -1)
        entropy = nn.losses.cross_entropy(logits, labels)
        return (weights * (0.1 * entropy + 0.9 * mx.abs(p - q).sum(-1))).sum()

    expected = mx.grad(plain, argnums=(0, 1, 2))(hidden, features, markov)
    actual = position_gradients(
        hidden, features, states, labels, weights, HeadWeights(vocabulary, markov, softcap), 2
    )
    for one, other in zip(expected, (actual.hidden, actual.features, actual.markov), strict=True):
        assert other is not None and mx.allclose(one, other, atol=1e-5)
