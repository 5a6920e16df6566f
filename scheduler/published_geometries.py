"""Shapes of published pairs of target and drafter, as mlx-lm and DeepSpec configurations.

Data only; free of mlx. `scheduler.bench_geometry` fills them with random weights.
"""

from __future__ import annotations

from typing import Any

_QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "rope_theta": 1e6,
}
_GEMMA4_ROPE = {
    "full_attention": {
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e6,
        "rope_type": "proportional",
    },
    "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
}
_GEMMA4_12B: dict[str, Any] = {
    "model_type": "gemma4_text",
    "hidden_size": 3840,
    "num_hidden_layers": 48,
    "intermediate_size": 15360,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 1,
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "use_double_wide_mlp": False,
    "rms_norm_eps": 1e-6,
    "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
    "max_position_embeddings": 131072,
    "sliding_window": 1024,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 8,
    "final_logit_softcapping": 30.0,
    "rope_parameters": _GEMMA4_ROPE,
    "tie_word_embeddings": True,
}
_DRAFT: dict[str, Any] = {
    "block_size": 7,
    "num_hidden_layers": 5,
    "layer_types": ["full_attention"] * 5,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
GEOMETRIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma-4-12b": (
        _GEMMA4_12B,
        _GEMMA4_12B
        | _DRAFT
        | {
            "architectures": ["Gemma4DSparkModel"],
            "hidden_activation": "gelu_pytorch_tanh",
            "mask_token_id": 4,
            "num_target_layers": 48,
            "target_layer_ids": [5, 17, 29, 41, 46],
        },
    ),
    "qwen3-8b": (
        _QWEN3_8B,
        _QWEN3_8B
        | _DRAFT
        | {
            "architectures": ["Qwen3DSparkModel"],
            "hidden_act": "silu",
            "mask_token_id": 151669,
            "num_target_layers": 36,
            "target_layer_ids": [1, 9, 17, 25, 33],
            "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
        },
    ),
}
