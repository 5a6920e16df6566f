"""Taps leave the model as it was."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import gemma4_text, llama, qwen3

from models.taps import Taps

COMMON = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": 64,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def tiny(kind: str) -> nn.Module:
    mx.random.seed(11)
    if kind == "llama":
        arguments = llama.ModelArgs(model_type="llama", num_hidden_layers=3, **COMMON)
        return llama.Model(arguments)
    if kind == "qwen3":
        arguments = qwen3.ModelArgs(
            model_type="qwen3",
            num_hidden_layers=3,
            max_position_embeddings=128,
            tie_word_embeddings=False,
            rope_theta=1e4,
            **COMMON,
        )
        return qwen3.Model(arguments)
    arguments = gemma4_text.ModelArgs(
        num_hidden_layers=4,
        global_head_dim=32,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
        # "shared" has two layers that reuse the keys and values of earlier ones.
        num_kv_shared_layers=2 if kind == "gemma4 shared" else 0,
        vocab_size_per_layer_input=64,
        hidden_size_per_layer_input=8 if kind == "gemma4 shared" else 0,
        **COMMON,
    )
    return gemma4_text.Model(arguments)


KINDS = ("llama", "qwen3", "gemma4", "gemma4 shared")
TOKENS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5]]


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_parameters_are_unchanged(kind: str, bits: int | None) -> None:
    model: Any = tiny(kind)
    if bits is not None:
        nn.quantize(model, group_size=32, bits=bits, class_predicate=_divisible)
    names = [name for name, _ in tree_flatten(model.parameters())]
    classes = [type(layer) for layer in model.layers]
    tokens = mx.array(TOKENS)
    plain = model(tokens)
    taps = Taps(model, [0, 2])
    tapped = model(tokens)
    assert mx.array_equal(plain, tapped)
    assert taps.take().shape == (2, 12, 64)
    assert [name for name, _ in tree_flatten(model.parameters())] == names
    taps.remove()
    assert [type(layer) for layer in model.layers] == classes
    assert mx.array_equal(model(tokens), plain)


def test_a_tap_is_the_output_of_its_layer() -> None:
    model: Any = tiny("llama")
    tokens = mx.array(TOKENS)
    taps = Taps(model, [2, 0])  # in the order asked for
    model(tokens)
    last, first = mx.split(taps.take(), 2, axis=-1)
    taps.remove()
    x = model.model.embed_tokens(tokens)
    assert mx.allclose(first, model.layers[0](x, "causal"), atol=1e-6)
    logits = model.model.norm(last)
    logits = model.model.embed_tokens.as_linear(logits)
    assert mx.allclose(logits, model(tokens), atol=1e-5)


def test_what_was_taken_is_forgotten() -> None:
    model: Any = tiny("llama")
    taps = Taps(model, [1])
    with pytest.raises(RuntimeError, match="no forward"):
        taps.take()
    model(mx.array(TOKENS))
    taps.take()
    with pytest.raises(RuntimeError, match="no forward"):
        taps.take()


def test_impossible_layers() -> None:
    model = tiny("llama")
    with pytest.raises(ValueError, match=r"layers \[3\] do not exist"):
        Taps(model, [0, 3])
    taps = Taps(model, [0, 1])
    with pytest.raises(ValueError, match=r"\[1\] are tapped already"):
        Taps(model, [1, 2])
    taps.remove()
    Taps(model, [1, 2])


def _divisible(_: str, module: nn.Module) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0
