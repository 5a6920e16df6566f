"""Tiny models of random float32 weights, as modules and as checkpoint folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import gemma4_text, llama, qwen3

VOCABULARY = 96
WINDOW = 12

_COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "llama": {
        **_COMMON,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 3,
        "rope_theta": 10000.0,
    },
    "qwen3": {
        **_COMMON,
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": 2,
        "head_dim": 16,
        "rope_theta": 10000.0,
    },
    # Two sliding layers and a full one, then a layer of each kind that shares their keys.
    # Untied, because its scaled embeddings would make every token predict itself.
    "gemma4_text": {
        **_COMMON,
        "model_type": "gemma4_text",
        "architectures": ["Gemma4ForCausalLM"],
        "num_hidden_layers": 5,
        "num_kv_shared_layers": 2,
        "layer_types": [
            "sliding_attention",
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "full_attention",
        ],
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": WINDOW,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": False,
    },
}
_CLASSES: dict[str, Any] = {"llama": llama, "qwen3": qwen3, "gemma4_text": gemma4_text}


def build_tiny_model(name: str, seed: int = 7, **changes: Any) -> nn.Module:
    """The model of `CONFIGURATIONS[name]`, some fields changed, in float32.

    Weights are large enough that greedy text is lively instead of one token repeated.
    """
    module = _CLASSES[name]
    configuration = {**CONFIGURATIONS[name], **changes}
    model: nn.Module = module.Model(module.ModelArgs.from_dict(configuration))
    key = mx.random.key(seed)

    def draw(weight: mx.array) -> mx.array:
        nonlocal key
        key, own = mx.random.split(key)
        noise = mx.random.normal(weight.shape, key=own)
        return noise * 0.25 if weight.ndim > 1 else 1.0 + 0.1 * noise

    model.update(tree_map(draw, model.parameters()))
    mx.eval(model.parameters())
    return model


def save_tiny_checkpoint(
    name: str, folder: Path, *, seed: int = 7, dtype: mx.Dtype = mx.float32, **changes: Any
) -> Path:
    """Write `build_tiny_model(name)` as a checkpoint folder without a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    model = build_tiny_model(name, seed, **changes)
    weights = {key: value.astype(dtype) for key, value in tree_flatten(model.parameters())}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    configuration = {**CONFIGURATIONS[name], **changes, "eos_token_id": []}
    (folder / "config.json").write_text(json.dumps(configuration, indent=1))
    return folder
