"""What DeepSpec's own reader is given: its tensors, its dtypes, its configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from models.dspark.configuration import HeadKind
from models.dspark.drafter import DraftNetwork
from models.safetensors_header import read_header
from models.workshop import export
from models.workshop.checkpoint_files import write_drafter
from models.workshop.network import initialise, new_configuration
from tests.dspark.pairs import FIXTURES

REQUIRED = {
    "architectures", "num_target_layers", "num_hidden_layers", "block_size", "layer_types",
    "tie_word_embeddings", "mask_token_id", "target_layer_ids", "num_anchors",
    "enable_confidence_head", "confidence_head_with_markov", "markov_rank", "markov_head_type",
}  # fmt: skip


def _expected(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a DeepSpec checkpoint, from its configuration alone."""
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    inner, rank = config["intermediate_size"], config["markov_rank"]
    gemma = config["architectures"] == ["Gemma4DSparkModel"]
    head = config["global_head_dim" if gemma else "head_dim"]
    shared = config.get("attention_k_eq_v", False)
    keys = config["num_global_key_value_heads" if shared else "num_key_value_heads"] * head
    queries = config["num_attention_heads"] * head
    tensors: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (vocabulary, hidden),
        "lm_head.weight": (vocabulary, hidden),
        "fc.weight": (hidden, hidden * len(config["target_layer_ids"])),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for index in range(config["num_hidden_layers"]):
        layer: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj.weight": (queries, hidden),
            "self_attn.k_proj.weight": (keys, hidden),
            "self_attn.o_proj.weight": (hidden, queries),
            "self_attn.q_norm.weight": (head,),
            "self_attn.k_norm.weight": (head,),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
        }
        if not shared:
            layer["self_attn.v_proj.weight"] = (keys, hidden)
        if gemma:
            layer["pre_feedforward_layernorm.weight"] = (hidden,)
            layer["post_feedforward_layernorm.weight"] = (hidden,)
            layer["layer_scalar"] = (1,)
        tensors |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    if rank:
        tensors["markov_head.markov_w1.weight"] = (vocabulary, rank)
        tensors["markov_head.markov_w2.weight"] = (vocabulary, rank)
    if rank and config["markov_head_type"] == "gated":
        tensors["markov_head.gate_proj.weight"] = (rank, hidden + rank)
        tensors["markov_head.gate_proj.bias"] = (rank,)
    if rank and config["markov_head_type"] == "rnn":
        tensors["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + hidden)
        tensors["markov_head.joint_proj.bias"] = (3 * rank,)
    if config["enable_confidence_head"]:
        seen = rank if config["confidence_head_with_markov"] else 0
        tensors["confidence_head.proj.weight"] = (1, hidden + seen)
        tensors["confidence_head.proj.bias"] = (1,)
    return tensors


def _read(folder: Path) -> tuple[dict[str, mx.array], dict[str, Any]]:
    loaded = mx.load(str(folder / "model.safetensors"))
    assert isinstance(loaded, dict)
    return loaded, json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("family", ["gemma4", "qwen3"])
def test_a_published_drafter_comes_back_to_the_bit(family: str, tmp_path: Path) -> None:
    """In small form and back: tensors, shapes, dtypes, values, and the configuration."""
    target, drafter = FIXTURES / family / "target", FIXTURES / family / "drafter"
    export.export(target, drafter, tmp_path / "small", None, False)
    export.export(target, tmp_path / "small", tmp_path / "full", None, True)
    original, full = (
        read_header(folder / "model.safetensors") for folder in (drafter, tmp_path / "full")
    )
    assert {name: (entry.dtype, entry.shape) for name, entry in full.items()} == {
        name: (entry.dtype, entry.shape) for name, entry in original.items()
    }
    (before, config), (after, written) = _read(drafter), _read(tmp_path / "full")
    for name, value in before.items():
        assert mx.array_equal(after[name], value), name
    assert written == config
    assert {name: entry.shape for name, entry in full.items()} == _expected(config)


def _new_drafter(family: str, head: HeadKind, folder: Path) -> DraftNetwork:
    """A drafter as training leaves it, of random weights."""
    configuration = new_configuration(
        json.loads((FIXTURES / family / "target" / "config.json").read_text()),
        tap_layers=[0, 2],
        layers=1,
        block_size=5,
        rank=8,
        head=head,
        mask_token=4,
    )
    network = DraftNetwork(configuration, own_head=False)
    initialise(network, 3, None)
    parameters: Any = dict(tree_flatten(network.parameters()))
    write_drafter(folder, configuration, parameters)
    return network


@pytest.mark.parametrize("head", list(HeadKind))
@pytest.mark.parametrize("family", ["gemma4", "qwen3"])
def test_a_drafter_of_ours_has_all_that_the_reader_asks_for(
    family: str, head: HeadKind, tmp_path: Path
) -> None:
    own, out = tmp_path / "own", tmp_path / "out"
    network = _new_drafter(family, head, own)
    export.export(FIXTURES / family / "target", own, out, None, True)
    entries = read_header(out / "model.safetensors")
    weights, config = _read(out)
    assert {name: entry.shape for name, entry in entries.items()} == _expected(config)
    assert {entry.dtype for entry in entries.values()} == {"BF16"}
    assert config.keys() >= REQUIRED
    assert "quantization" not in config
    assert config["architectures"] == [
        {"gemma4": "Gemma4DSparkModel", "qwen3": "Qwen3DSparkModel"}[family]
    ]
    parameters: Any = dict(tree_flatten(network.parameters()))
    for name, value in parameters.items():
        assert mx.array_equal(weights[name], value.astype(mx.bfloat16)), name
    # And in again: nothing is lost that was not rounded on the way out.
    export.export(FIXTURES / family / "target", out, tmp_path / "again", None, True)
    again, read = _read(tmp_path / "again")
    assert again.keys() == weights.keys() and read == config
    for name, value in weights.items():
        assert again[name].dtype == value.dtype and mx.array_equal(again[name], value), name


def test_heads_of_a_gemma_by_layer_are_told_as_the_reader_asks(tmp_path: Path) -> None:
    _new_drafter("gemma4", HeadKind.VANILLA, tmp_path / "own")
    file = tmp_path / "own" / "config.json"
    config = json.loads(file.read_text())
    head, keys = config.pop("global_head_dim"), config.pop("num_global_key_value_heads")
    config["per_layer_config"] = {"0": {"head_dim": head, "num_key_value_heads": keys}}
    file.write_text(json.dumps(config))
    export.export(FIXTURES / "gemma4" / "target", tmp_path / "own", tmp_path / "out", None, True)
    _, written = _read(tmp_path / "out")
    assert (written["global_head_dim"], written["num_global_key_value_heads"]) == (head, keys)
