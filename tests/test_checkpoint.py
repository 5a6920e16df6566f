"""Checkpoint facts from tiny folders, and every way in which a folder can be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save, save_file

from models.architecture import KvLayers
from models.checkpoint import CheckpointError, inspect

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
}
WEIGHTS = {
    "model.embed_tokens.weight": numpy.zeros((32, 16), numpy.float16),
    "model.norm.weight": numpy.ones(16, numpy.float32),
}


def write(folder: Path, config: dict[str, Any] | None = None, **changes: Any) -> Path:
    """A folder with a config and the tiny weights."""
    folder.mkdir(exist_ok=True)
    content = {**(LLAMA if config is None else config), **changes}
    (folder / "config.json").write_text(json.dumps(content))
    save_file(WEIGHTS, folder / "model.safetensors")
    return folder


def without(*fields: str) -> dict[str, Any]:
    return {key: value for key, value in LLAMA.items() if key not in fields}


def test_the_facts_of_a_llama(tmp_path: Path) -> None:
    facts = inspect(write(tmp_path / "tiny"))
    assert facts.name == "tiny"
    assert facts.architectures == ("LlamaForCausalLM",)
    assert (facts.vocabulary_size, facts.context_length) == (32, 128)
    assert facts.stop_tokens == (2,)
    assert facts.parameters == 32 * 16 + 16
    assert facts.weight_bytes == 32 * 16 * 2 + 16 * 4
    assert facts.float32_bytes == 4 * facts.parameters
    assert facts.precision == "float16"
    assert facts.kv_layers == (KvLayers(layers=3, heads=2, head_dim=4),)
    assert facts.kv_bytes_per_token(4) == 4 * 2 * 3 * 2 * 4
    assert facts.kv_window_bytes(4) == 0


def test_the_facts_of_the_default_model(smollm2: Path) -> None:
    facts = inspect(smollm2)
    assert facts.parameters == 134_515_008
    assert facts.weight_bytes == 98_346_240
    assert facts.precision == "4-bit"
    assert facts.kv_bytes_per_token(4) == 4 * 2 * 30 * 3 * 64
    assert (facts.context_length, facts.stop_tokens) == (8192, (2,))


GEMMA4 = {
    **without("num_key_value_heads", "vocab_size"),
    "model_type": "gemma4_text",
    "vocab_size": 32,
    "num_hidden_layers": 6,
    "head_dim": 4,
    "num_key_value_heads": 2,
    "sliding_window": 8,
    "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
}
SLIDING_4 = KvLayers(layers=4, heads=2, head_dim=4, window=8)
FULL_2 = KvLayers(layers=2, heads=1, head_dim=16)


def test_gemma4_layers_differ_by_kind(tmp_path: Path) -> None:
    own = {"global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
    facts = inspect(write(tmp_path, GEMMA4, **own))
    assert facts.kv_layers == (SLIDING_4, FULL_2)
    assert facts.kv_bytes_per_token(2) == 2 * 2 * 2 * 1 * 16
    assert facts.kv_window_bytes(2) == 2 * 2 * 4 * 2 * 4 * 8
    assert facts.kv_window_bytes(2, extra_tokens=8) == 2 * facts.kv_window_bytes(2)
    assert facts.config_overrides == {}
    # Without attention_k_eq_v the full layers have as many heads as the others.
    facts = inspect(write(tmp_path, GEMMA4, **{**own, "attention_k_eq_v": False}))
    assert facts.kv_layers[1] == KvLayers(layers=2, heads=2, head_dim=16)


def test_gemma4_layers_spelled_per_layer(tmp_path: Path) -> None:
    own = {str(i): {"head_dim": 16, "num_key_value_heads": 1} for i in (2, 5)}
    facts = inspect(write(tmp_path, GEMMA4, per_layer_config=own))
    assert facts.kv_layers == (SLIDING_4, FULL_2)
    assert facts.config_overrides == {"global_head_dim": 16, "num_global_key_value_heads": 1}


def test_gemma4_layers_that_share_keys_and_values_keep_none(tmp_path: Path) -> None:
    facts = inspect(write(tmp_path, GEMMA4, num_kv_shared_layers=3, global_head_dim=16))
    assert [(k.layers, k.window) for k in facts.kv_layers] == [(2, 8), (1, None)]
    with pytest.raises(CheckpointError, match="num_kv_shared_layers 6 leaves none of 6 layers"):
        inspect(write(tmp_path, GEMMA4, num_kv_shared_layers=6))


def test_a_multimodal_gemma4_is_read_through_its_text_config(tmp_path: Path) -> None:
    text = {**GEMMA4, "model_type": "gemma4_unified_text", "global_head_dim": 16}
    outer = {"model_type": "gemma4_unified", "text_config": text, "eos_token_id": [1, 6]}
    write(tmp_path, outer)
    vision = {"model.vision_tower.weight": numpy.zeros(1000, numpy.float32)}
    save_file({**WEIGHTS, **vision}, tmp_path / "model.safetensors")
    facts = inspect(tmp_path)
    assert facts.model_type == "gemma4_unified"
    assert facts.parameters == 32 * 16 + 16  # no vision
    assert facts.kv_layers[0] == SLIDING_4
    # mlx-lm takes the vocabulary's size from the outer config.
    assert facts.config_overrides == {"vocab_size": 32}


def test_layers_whose_windows_mlx_lm_ignores_are_counted_as_full(tmp_path: Path) -> None:
    kinds = ["sliding_attention"] * 3
    facts = inspect(write(tmp_path, model_type="qwen3", layer_types=kinds, sliding_window=8))
    assert facts.kv_layers == (KvLayers(layers=3, heads=2, head_dim=4),)
    facts = inspect(write(tmp_path, layer_types=kinds, sliding_window=8))
    assert facts.kv_layers == (KvLayers(layers=3, heads=2, head_dim=4, window=8),)


def test_generation_config_says_where_text_ends(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 7, 5]}')
    assert inspect(tmp_path).stop_tokens == (5, 7)
    (tmp_path / "generation_config.json").write_text('{"temperature": 1}')
    assert inspect(tmp_path).stop_tokens == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 32}')
    with pytest.raises(CheckpointError, match="eos_token_id 32 is not in a vocabulary of 32"):
        inspect(tmp_path)


def quantized(folder: Path, **quantization: Any) -> Path:
    folder = write(folder, quantization={"bits": 4, "group_size": 32, **quantization})
    save_file(
        {
            "model.norm.weight": numpy.ones(64, numpy.float32),
            "lm_head.weight": numpy.zeros((10, 8), numpy.uint32),  # 10 x 64 in 4 bits
            "lm_head.scales": numpy.zeros((10, 2), numpy.float16),
            "lm_head.biases": numpy.zeros((10, 2), numpy.float16),
            "embed.weight": numpy.zeros((10, 16), numpy.uint32),  # 10 x 64 in 8 bits
            "embed.scales": numpy.zeros((10, 2), numpy.float16),
            "embed.biases": numpy.zeros((10, 2), numpy.float16),
        },
        folder / "model.safetensors",
    )
    return folder


def test_packed_weights_are_counted_by_what_they_unpack_to(tmp_path: Path) -> None:
    facts = inspect(quantized(tmp_path, embed={"bits": 8, "group_size": 32}))
    assert facts.parameters == 64 + 640 + 640
    assert facts.precision == "4-bit"
    with pytest.raises(CheckpointError, match=r"'embed.weight' has 4 bits in groups of 32"):
        inspect(quantized(tmp_path))


def test_shards_are_compared_with_their_index(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name, (tensor, value) in zip(names, WEIGHTS.items(), strict=True):
        save_file({tensor: value}, tmp_path / name)
    index = dict(zip(WEIGHTS, names, strict=True))
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": index}))
    assert inspect(tmp_path).parameters == 32 * 16 + 16
    path.write_text(json.dumps({"weight_map": {**index, "lm_head.weight": names[0]}}))
    with pytest.raises(CheckpointError, match=r"no shard has, such as 'lm_head.weight'"):
        inspect(tmp_path)
    path.write_text(json.dumps({"weight_map": {**index, "x": "../model.safetensors"}}))
    with pytest.raises(CheckpointError, match="names a file outside"):
        inspect(tmp_path)
    path.write_text(json.dumps({"weight_map": index}))
    (tmp_path / names[1]).unlink()
    with pytest.raises(CheckpointError, match=f"{names[1]}: missing, but the index names it"):
        inspect(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": "32"}, r"Expected `int \| null`, got `str` - at `\$.vocab_size`"),
        ({"vocab_size": 0}, r"Expected `int` >= 1 - at `\$.vocab_size`"),
        ({"num_hidden_layers": 10**9}, r"<= 4096 - at `\$.num_hidden_layers`"),
        ({"num_attention_heads": True}, r"at `\$.num_attention_heads`"),
        ({"num_attention_heads": 64}, r"more attention heads \(64\) than hidden_size"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 3 layers"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types holds 'linear_attention'"),
        ({"kv_lora_rank": 512}, "has latent attention"),
        ({"auto_map": {"AutoModel": "evil.py"}}, "'auto_map' asks to run Python code"),
        ({"model_file": "evil.py"}, "'model_file' asks to run Python code"),
        ({"quantization": {"bits": 4}}, "broken quantization"),
        ({"quantization": {"bits": 0, "group_size": 64}}, "0 bits in groups of 64"),
    ],
)
def test_configs_that_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    write(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=words) as caught:
        inspect(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)
    assert caught.value.remedy


@pytest.mark.parametrize("field", ["vocab_size", "num_hidden_layers", "max_position_embeddings"])
def test_fields_that_must_be_there(tmp_path: Path, field: str) -> None:
    write(tmp_path, without(field))
    with pytest.raises(CheckpointError, match=f"has no '{field}'"):
        inspect(tmp_path)


def test_code_named_by_the_tokenizer_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    content = {"auto_map": {"AutoTokenizer": ["evil.py", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json: 'auto_map'"):
        inspect(tmp_path)


def test_folders_that_hold_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config.json: not found"):
        inspect(tmp_path)
    with pytest.raises(CheckpointError, match=r"config.json: not found"):
        inspect(tmp_path / "absent")
    write(tmp_path)
    with pytest.raises(CheckpointError, match="Not a directory"):
        inspect(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"no model\*.safetensors \(there is pytorch_model"):
        inspect(tmp_path)


def test_a_weight_file_that_was_cut_short(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({"w": numpy.zeros(12_000_000, numpy.float16)}, path)
    with path.open("rb+") as file:
        file.truncate(file.seek(0, 2) - 13_000_000)
    with pytest.raises(CheckpointError, match="truncated: 11 of 24 MB; fetch the checkpoint"):
        inspect(tmp_path)


def test_tensors_that_overlap_are_refused(tmp_path: Path) -> None:
    write(tmp_path)
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    header = json.dumps({"a": entry, "b": entry}).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(16)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="'b' is not where its shape says"):
        inspect(tmp_path)


GOOD_CONFIG = json.dumps({**GEMMA4, "per_layer_config": {"2": {"head_dim": 16}}}).encode()
GOOD_WEIGHTS = save(WEIGHTS)


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """The content with a few bytes changed and, perhaps, its end cut off."""
    changed = bytearray(content)
    places = st.integers(0, len(content) - 1)
    for place in draw(st.lists(places, max_size=4)):
        changed[place] = draw(st.integers(0, 255))
    return bytes(changed[: draw(st.none() | places)])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
FUZZ = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


def only_checkpoint_errors(folder: Path) -> None:
    try:
        facts = inspect(folder)
    except CheckpointError as error:
        assert str(folder) in str(error)
    else:
        assert facts.vocabulary_size > 0 and facts.kv_bytes_per_token(4) >= 0


@FUZZ
@given(content=damaged(GOOD_CONFIG) | st.binary(max_size=200))
def test_no_bytes_of_a_config_surprise(tmp_path: Path, content: bytes) -> None:
    write(tmp_path)
    (tmp_path / "config.json").write_bytes(content)
    only_checkpoint_errors(tmp_path)


@FUZZ
@given(field=st.sampled_from([*GEMMA4, "per_layer_config", "quantization"]), value=JSON)
def test_no_value_in_a_config_surprises(tmp_path: Path, field: str, value: Any) -> None:
    write(tmp_path)
    content = msgspec.json.encode({**GEMMA4, field: value})
    (tmp_path / "config.json").write_bytes(content)
    only_checkpoint_errors(tmp_path)


@FUZZ
@given(content=damaged(GOOD_WEIGHTS) | st.binary(max_size=200))
def test_no_bytes_of_a_weight_file_surprise(tmp_path: Path, content: bytes) -> None:
    write(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    only_checkpoint_errors(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b"\xff\xfe", b'{"eos_token_id": "\xff"}', b"", b"null"]
)
def test_broken_json_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    write(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{name}: broken"):
        inspect(tmp_path)
