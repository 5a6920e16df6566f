"""Loading and saving drafter checkpoints.

Runs on the engine's MLX thread at start. Reads one or several safetensors files, drops the
drafter's copies of the target's embedding and head (more than half of a published drafter)
when the target's own can serve, quantizes on the way in, and refuses with `DrafterError` what
is missing, superfluous, of the wrong shape, or torn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model

from models.dspark.configuration import (
    DrafterConfiguration,
    DrafterError,
    TargetShape,
    check_fit,
    read_configuration,
)
from models.dspark.drafter import Drafter, DraftNetwork, TargetVocabulary, Vocabulary
from models.dspark.shortlist import Shortlist
from models.safetensors_header import HeaderError, read_header

_OWN_HEAD = ("embed_tokens", "lm_head")
_NEVER_QUANTIZED = "confidence_head"


def load_drafter(
    folder: Path,
    target: nn.Module,
    shape: TargetShape,
    *,
    bits: int | None = None,
    group_size: int = 64,
    own_head: bool = False,
    dtype: mx.Dtype | None = None,
    shortlist: bool = True,
) -> Drafter:
    """Load the drafter in `folder` for `target`, an mlx-lm model of the given shape.

    `bits` 4 or 8 quantizes everything but the confidence head in groups of `group_size`; 16
    and None leave the weights in `dtype`, by default that of the target's activations. A
    checkpoint that is stored quantized loads as it is, unless `bits` is 16: then its weights
    are spread out to `dtype`. `own_head` keeps the drafter's own embedding and head; they are
    kept also when the target's cannot be borrowed. A shortlist that is stored beside the drafter
    is used unless `shortlist` is false.
    """
    if bits not in (None, 4, 8, 16):
        raise DrafterError(f"draft bits is {bits}; 4, 8 and 16 are possible")
    configuration = read_configuration(folder)
    check_fit(configuration, shape)
    stored = Shortlist.load(folder, configuration.vocabulary_size) if shortlist else None
    weights = _read_weights(folder)
    stored_head = all(f"{name}.weight" in weights for name in _OWN_HEAD)
    vocabulary = _borrowed(configuration, target, own_head, stored_head)
    if vocabulary is not None:
        weights = {
            name: value for name, value in weights.items() if name.split(".", 1)[0] not in _OWN_HEAD
        }
    if dtype is None:
        dtype = _activation_dtype(target)
    network = DraftNetwork(configuration, own_head=vocabulary is None)
    if configuration.quantization is not None:
        _mirror_stored_quantization(network, configuration.quantization, weights)
    _check_names_and_shapes(network, weights)
    network.load_weights(
        [
            (name, value.astype(_dtype_of(name, dtype)) if _is_float(value) else value)
            for name, value in weights.items()
        ]
    )
    if configuration.quantization is None and bits in (4, 8):
        quantize(network, bits, group_size)
    if configuration.quantization is not None and bits == 16:
        dequantize_model(network)
    network.eval()
    drafter = Drafter(configuration, network, vocabulary or network, dtype)
    if stored is not None:
        # After all quantizing and expanding, so that the rows are those of the matrices in use.
        drafter.shorten(stored.tokens)
    mx.eval(network.parameters())
    return drafter


def quantize(network: DraftNetwork, bits: int, group_size: int) -> None:
    """Quantize every matrix but the confidence head's, in place."""

    def wanted(path: str, module: nn.Module) -> bool:
        if path.startswith(_NEVER_QUANTIZED) or not hasattr(module, "to_quantized"):
            return False
        inputs = module.weight.shape[-1]
        if inputs % group_size:
            raise DrafterError(
                f"{path} has {inputs} inputs, which groups of {group_size} do not divide: "
                "choose a smaller group size"
            )
        return True

    nn.quantize(network, group_size=group_size, bits=bits, class_predicate=wanted)


def save_drafter(drafter: Drafter, folder: Path) -> None:
    """Write `config.json` and `model.safetensors`, as loaded: quantized if it is, and without
    embedding and head if those are the target's. Raises `DrafterError` for a drafter with a
    shortlist, which no longer has the whole of its Markov head."""
    if drafter.short_head is not None:
        raise DrafterError("a drafter with a shortlist is not whole: load it without, to save it")
    folder.mkdir(parents=True, exist_ok=True)
    parameters = dict(tree_flatten(drafter.network.parameters()))
    config = dict(drafter.configuration.source)
    config.pop("quantization_config", None)
    modules = dict(drafter.network.named_modules())
    quantized = [module for module in modules.values() if hasattr(module, "bits")]
    if quantized:
        config["quantization"] = {
            "group_size": quantized[0].group_size,
            "bits": quantized[0].bits,
        }
    mx.save_safetensors(str(folder / "model.safetensors"), parameters, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _borrowed(
    configuration: DrafterConfiguration, target: nn.Module, own_head: bool, stored_head: bool
) -> Vocabulary | None:
    """The target's vocabulary, or None where the drafter's own is to be used."""
    if own_head:
        if not stored_head:
            raise DrafterError(
                "the drafter was asked to use its own head, but the checkpoint has no "
                "embed_tokens and lm_head"
            )
        return None
    try:
        return TargetVocabulary(target, configuration.vocabulary_size, configuration.hidden_size)
    except DrafterError:
        if not stored_head:
            raise
        return None


def _read_weights(folder: Path) -> dict[str, mx.array]:
    """All tensors of the checkpoint, lazily: what is dropped is never read."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise DrafterError(f"{index} is not a safetensors index") from error
        files = [folder / name for name in names]
    else:
        files = [folder / "model.safetensors"]
    weights: dict[str, mx.array] = {}
    for file in files:
        _check_length(file)
        loaded = mx.load(str(file))
        assert isinstance(loaded, dict)
        weights.update(loaded)
    return weights


def _check_length(file: Path) -> None:
    """A torn file would only fail later, deep in a lazy read."""
    try:
        read_header(file)
    except HeaderError as error:
        raise DrafterError(f"{file}: {error}. Fetch the drafter again") from error


def _mirror_stored_quantization(
    network: DraftNetwork, quantization: Mapping[str, Any], weights: Mapping[str, mx.array]
) -> None:
    """Give the network the quantized layers that the checkpoint has."""
    if "group_size" not in quantization or "bits" not in quantization:
        raise DrafterError(
            f"config.json: quantization is {dict(quantization)!r}; group_size and bits are needed"
        )

    def wanted(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized") or f"{path}.scales" not in weights:
            return False
        override = quantization.get(path)
        return dict(override) if isinstance(override, Mapping) else True

    nn.quantize(
        network,
        group_size=int(quantization["group_size"]),
        bits=int(quantization["bits"]),
        mode=quantization.get("mode", "affine"),
        class_predicate=wanted,
    )


def _check_names_and_shapes(network: DraftNetwork, weights: Mapping[str, mx.array]) -> None:
    parameters: Any = tree_flatten(network.parameters())
    expected = {name: value.shape for name, value in parameters}
    if missing := sorted(expected.keys() - weights.keys()):
        raise DrafterError(f"the drafter's checkpoint lacks {', '.join(missing)}")
    if unknown := sorted(weights.keys() - expected.keys()):
        raise DrafterError(
            f"the drafter's checkpoint has {', '.join(unknown)}, which its config.json does not "
            "account for"
        )
    for name, shape in expected.items():
        if weights[name].shape != shape:
            raise DrafterError(
                f"{name} has the shape {weights[name].shape}, config.json asks for {shape}"
            )


def _activation_dtype(target: nn.Module) -> mx.Dtype:
    outer = getattr(target, "language_model", target)
    inner = getattr(outer, "model", outer)
    embedding = getattr(inner, "embed_tokens", None)
    if embedding is None:
        raise DrafterError("the target has no embed_tokens, so its dtype is unknown: give one")
    embedded: mx.array = embedding(mx.zeros((1,), dtype=mx.int32))
    return embedded.dtype


def _is_float(value: mx.array) -> bool:
    return mx.issubdtype(value.dtype, mx.floating)


def _dtype_of(name: str, dtype: mx.Dtype) -> mx.Dtype:
    return mx.float32 if name.startswith(_NEVER_QUANTIZED) else dtype
