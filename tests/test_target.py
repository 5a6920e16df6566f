"""Loading targets: precisions, text parts of multimodal checkpoints, refusals, prefill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from models import target as target_module
from models.backend import DeviceKind, device_kind, device_name, memory_counters
from models.checkpoint import CheckpointError
from models.target import Target
from tests.tiny_models import CONFIGURATIONS, VOCABULARY, build_tiny_model, save_tiny_checkpoint

TOKENS = mx.array([[(5 * i) % 90 + 1 for i in range(20)]], dtype=mx.int32)


def logits_of(target: Target) -> mx.array:
    batch = target.new_batch()
    batch.open_row()
    return target.forward(TOKENS, batch)


def dtypes(target: Target) -> set[mx.Dtype]:
    weights: Any = tree_flatten(target.model.parameters())
    return {weight.dtype for _, weight in weights}


def up_weight(target: Target) -> mx.array:
    layer = target.model.model.layers[0].mlp.up_proj
    if not hasattr(layer, "scales"):
        return layer.weight
    return mx.dequantize(layer.weight, layer.scales, layer.biases, layer.group_size, layer.bits)


def relative_error(found: mx.array, expected: mx.array) -> float:
    return (mx.abs(found - expected).mean() / mx.abs(expected).mean()).item()


def save_quantized(folder: Path, bits: int = 4) -> tuple[Path, nn.Module]:
    """A llama of packed weights with float16 scales, and the module it was saved from."""
    changes = {"hidden_size": 64}
    save_tiny_checkpoint("llama", folder, **changes)
    model = build_tiny_model("llama", **changes)
    model.set_dtype(mx.float16)
    nn.quantize(model, 32, bits)
    weights: Any = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization"] = {"group_size": 32, "bits": bits}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, model


@pytest.mark.parametrize("name", sorted(CONFIGURATIONS))
def test_what_was_saved_is_what_is_loaded(name: str, tmp_path: Path) -> None:
    loaded = Target.load(save_tiny_checkpoint(name, tmp_path))
    model: Any = build_tiny_model(name)
    assert mx.allclose(logits_of(loaded), model(TOKENS), atol=1e-5).item()
    assert loaded.precision == "float32"
    assert loaded.vocabulary_size == VOCABULARY
    weights: Any = tree_flatten(model.parameters())
    assert loaded.weight_bytes == sum(weight.nbytes for _, weight in weights)
    assert loaded.kv_bytes_per_token == loaded.facts.kv_bytes_per_token(4)


def test_prefill_in_chunks_commits_and_leaves_the_same_row(tmp_path: Path) -> None:
    loaded = Target.load(save_tiny_checkpoint("gemma4_text", tmp_path))
    whole = logits_of(loaded)
    batch = loaded.new_batch()
    batch.open_row()
    for start, stop in ((0, 1), (1, 15), (15, 19)):
        loaded.prefill(TOKENS[:, start:stop], batch)
        assert batch.lengths == [stop]
    last = loaded.forward(TOKENS[:, 19:], batch)
    assert mx.allclose(last[0, 0], whole[0, -1], atol=1e-4).item()
    assert batch.nbytes == loaded.cache_bytes(1, 20)


def test_prefill_computes_no_logits(tmp_path: Path) -> None:
    loaded = Target.load(save_tiny_checkpoint("llama", tmp_path, vocab_size=50_000))
    batch = loaded.new_batch()
    batch.open_row()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    loaded.prefill(mx.tile(TOKENS, (1, 20)), batch)
    assert mx.get_peak_memory() - before < 400 * 50_000 * 4 / 4


def test_packed_weights_become_float32_without_rounding(tmp_path: Path) -> None:
    folder, quantized = save_quantized(tmp_path)
    loaded = Target.load(folder)
    assert (loaded.precision, dtypes(loaded)) == ("float32", {mx.float32})
    layer: Any = quantized["model"]["layers"][0]["mlp"]["up_proj"]
    scales, biases = layer.scales.astype(mx.float32), layer.biases.astype(mx.float32)
    expected = mx.dequantize(layer.weight, scales, biases, 32, 4)
    assert mx.array_equal(loaded.model.model.layers[0].mlp.up_proj.weight, expected).item()


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        ("float32", {mx.float32}),
        ("bfloat16", {mx.bfloat16}),
        ("float16", {mx.float16}),
        # Scales are float32 on the CPU.
        ("4-bit", {mx.uint32, mx.float32}),
        ("8-bit", {mx.uint32, mx.float32}),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_precisions(precision: str, expected: set[mx.Dtype], packed: bool, tmp_path: Path) -> None:
    folder = (
        save_quantized(tmp_path)[0]
        if packed
        else save_tiny_checkpoint("llama", tmp_path, hidden_size=64, dtype=mx.bfloat16)
    )
    reference = Target.load(folder, "float32")
    loaded = Target.load(folder, precision)
    assert (loaded.precision, dtypes(loaded)) == (precision, expected)
    error = relative_error(up_weight(loaded), up_weight(reference))
    assert error < (0.15 if precision == "4-bit" else 0.01)
    assert mx.isfinite(logits_of(loaded)).all().item()
    bits = {"4-bit": 4, "8-bit": 8}.get(precision)
    assert getattr(loaded.model.model.layers[0].mlp.up_proj, "bits", None) == bits


def test_on_a_gpu_weights_stay_as_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_module, "device_kind", lambda: DeviceKind.METAL)
    packed = Target.load(save_quantized(tmp_path / "packed")[0])
    assert (packed.precision, dtypes(packed)) == ("4-bit", {mx.uint32, mx.float16})
    plain = Target.load(save_tiny_checkpoint("llama", tmp_path / "plain", dtype=mx.bfloat16))
    assert (plain.precision, dtypes(plain)) == ("bfloat16", {mx.bfloat16})


@pytest.mark.parametrize("model_type", ["gemma4", "gemma4_unified"])
def test_a_multimodal_checkpoint_is_loaded_for_its_text(model_type: str, tmp_path: Path) -> None:
    changes = {"tie_word_embeddings": True}
    save_tiny_checkpoint("gemma4_text", tmp_path, **changes)
    weights: Any = mx.load(str(tmp_path / "model.safetensors"))
    renamed = {
        f"model.language_model.{key.removeprefix('model.')}": value
        for key, value in weights.items()
    }
    renamed["model.vision_tower.patch.weight"] = mx.zeros((4, 4))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), renamed)
    text = CONFIGURATIONS["gemma4_text"] | changes
    config = {
        "model_type": model_type,
        "architectures": ["Gemma4ForConditionalGeneration"],
        "text_config": text,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = Target.load(tmp_path)
    model: Any = build_tiny_model("gemma4_text", **changes)
    assert mx.allclose(logits_of(loaded), model(TOKENS), atol=1e-5).item()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"auto_map": {"AutoModel": "model.Model"}}, "auto_map"),
        ({"model_file": "model.py"}, "model_file"),
        ({"model_type": "no_such_kind"}, "no_such_kind"),
        ({"num_hidden_layers": 4}, "cannot be loaded"),
        ({"intermediate_size": 65}, "cannot be loaded"),
        ({"rms_norm_eps": None, "num_attention_heads": 5}, "config.json|cannot be loaded"),
        ({"vocab_size": 97}, "cannot be loaded"),
    ],
)
def test_what_cannot_be_loaded_is_named(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = save_tiny_checkpoint("llama", tmp_path)
    marker = tmp_path / "ran"
    (folder / "model.py").write_text(f"open({str(marker)!r}, 'w')")
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=words):
        Target.load(folder)
    assert not marker.exists()


def test_an_unknown_precision_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="precision is '3-bit'"):
        Target.load(tmp_path, "3-bit")


def test_the_backend_is_described() -> None:
    assert device_kind() in DeviceKind
    assert device_name()
    held = mx.zeros((1000,))
    mx.eval(held)
    active, cache, peak = memory_counters()
    assert peak >= active >= held.nbytes
    assert cache >= 0
