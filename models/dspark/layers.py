"""The drafter's transformer layers, in the Qwen and the Gemma shape.

Pure modules, run on the engine's MLX thread. Tensor names follow the checkpoint. A layer reads
two sources: the context, which is the target's hidden states and is not passed through the
layer's input norm, and the block. Every row of the block sees the whole context and the whole
block: no mask inside it.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import initialize_rope

from models.dspark.configuration import DrafterConfiguration, Family
from models.dspark.context import DraftContext, Placement
from models.ragged_attention import fits, ragged_attention


class BlockAttention(nn.Module):
    """Attention of block rows to context and block."""

    def __init__(self, configuration: DrafterConfiguration) -> None:
        super().__init__()
        hidden, dim = configuration.hidden_size, configuration.head_dim
        gemma = configuration.family is Family.GEMMA4
        bias = configuration.attention_bias
        self.query_heads = configuration.query_heads
        self.key_value_heads = configuration.key_value_heads
        self.head_dim = dim
        self.norm_epsilon = configuration.norm_epsilon
        self.normalizes_values = gemma
        # Gemma's query norm already sets the size of the scores.
        self.scale = 1.0 if gemma else dim**-0.5
        self.q_proj = nn.Linear(hidden, self.query_heads * dim, bias=bias)
        self.k_proj = nn.Linear(hidden, self.key_value_heads * dim, bias=bias)
        if not configuration.values_are_keys:
            self.v_proj = nn.Linear(hidden, self.key_value_heads * dim, bias=bias)
        self.o_proj = nn.Linear(self.query_heads * dim, hidden, bias=bias)
        self.q_norm = nn.RMSNorm(dim, eps=configuration.norm_epsilon)
        self.k_norm = nn.RMSNorm(dim, eps=configuration.norm_epsilon)
        self.rope = initialize_rope(
            dim,
            base=configuration.rope_theta,
            traditional=False,
            scaling_config=configuration.rope,
            max_position_embeddings=configuration.maximum_positions,
        )

    def keys_and_values(self, source: mx.array, offset: int | mx.array) -> Any:
        """Of `source` [R, n, H] at positions `offset`..: two arrays [R, heads, n, head_dim]."""
        rows, count, _ = source.shape
        shape = (rows, count, self.key_value_heads, self.head_dim)
        projected = self.k_proj(source).reshape(shape)
        values = self.v_proj(source).reshape(shape) if "v_proj" in self else projected
        if self.normalizes_values:
            values = mx.fast.rms_norm(values, None, self.norm_epsilon)
        keys = self.rope(self.k_norm(projected).transpose(0, 2, 1, 3), offset=offset)
        return keys, values.transpose(0, 2, 1, 3)

    def __call__(
        self, block: mx.array, context: DraftContext, layer: int, placement: Placement
    ) -> mx.array:
        """Attend from `block` [R, B, H], already normed, placed behind each row's context."""
        rows, count, _ = block.shape
        queries = self.q_proj(block).reshape(rows, count, self.query_heads, self.head_dim)
        queries = self.rope(self.q_norm(queries).transpose(0, 2, 1, 3), offset=placement.offset)
        keys, values = context.write(
            layer, placement, *self.keys_and_values(block, placement.offset)
        )
        if fits(queries, keys, values):
            attended = ragged_attention(
                queries, keys, values, placement.starts, scale=self.scale, causal=False
            )
        else:
            attended = mx.fast.scaled_dot_product_attention(
                queries, keys, values, scale=self.scale, mask=placement.mask
            )
        return self.o_proj(attended.transpose(0, 2, 1, 3).reshape(rows, count, -1))


class GatedMLP(nn.Module):
    """Gate, up and down projections with the family's activation."""

    def __init__(self, configuration: DrafterConfiguration) -> None:
        super().__init__()
        hidden, inner = configuration.hidden_size, configuration.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)
        self.activation = nn.gelu_approx if configuration.family is Family.GEMMA4 else nn.silu

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class QwenLayer(nn.Module):
    """Norm before attention, norm before the MLP."""

    def __init__(self, configuration: DrafterConfiguration) -> None:
        super().__init__()
        hidden, epsilon = configuration.hidden_size, configuration.norm_epsilon
        self.self_attn = BlockAttention(configuration)
        self.mlp = GatedMLP(configuration)
        self.input_layernorm = nn.RMSNorm(hidden, eps=epsilon)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=epsilon)

    def __call__(
        self, x: mx.array, context: DraftContext, layer: int, placement: Placement
    ) -> mx.array:
        x = x + self.self_attn(self.input_layernorm(x), context, layer, placement)
        return x + self.mlp(self.post_attention_layernorm(x))


class GemmaLayer(nn.Module):
    """Norms on both sides of attention and MLP, and a scalar on the sum."""

    def __init__(self, configuration: DrafterConfiguration) -> None:
        super().__init__()
        hidden, epsilon = configuration.hidden_size, configuration.norm_epsilon
        self.self_attn = BlockAttention(configuration)
        self.mlp = GatedMLP(configuration)
        self.input_layernorm = nn.RMSNorm(hidden, eps=epsilon)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=epsilon)
        self.pre_feedforward_layernorm = nn.RMSNorm(hidden, eps=epsilon)
        self.post_feedforward_layernorm = nn.RMSNorm(hidden, eps=epsilon)
        self.layer_scalar = mx.ones((1,))

    def __call__(
        self, x: mx.array, context: DraftContext, layer: int, placement: Placement
    ) -> mx.array:
        attended = self.self_attn(self.input_layernorm(x), context, layer, placement)
        x = x + self.post_attention_layernorm(attended)
        inner = self.mlp(self.pre_feedforward_layernorm(x))
        output: mx.array = (x + self.post_feedforward_layernorm(inner)) * self.layer_scalar
        return output
