"""What a drafter checkpoint says about itself, and whether it fits a target.

Owns the reading of a DeepSpec `config.json` into a frozen record. Pure and free of mlx.
The family is told by `architectures[0]` and nothing else: `model_type` is that of the target,
and it changes when the file is saved again. Whatever is missing, unsupported or does not fit
the target raises `DrafterError` with the value and the remedy.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec


class DrafterError(Exception):
    """A drafter cannot be loaded, or does not fit its target; the message says why."""


class Family(enum.StrEnum):
    """The body of the drafter's layers, by the target it was made for."""

    QWEN3 = "Qwen3DSparkModel"
    GEMMA4 = "Gemma4DSparkModel"


class HeadKind(enum.StrEnum):
    """How a token of the block depends on the one before it. `NONE` is DFlash."""

    NONE = "none"
    VANILLA = "vanilla"
    GATED = "gated"
    RNN = "rnn"


class DrafterConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """One drafter's geometry. Token ids are the target's, tap layers count from 0.

    `block_size` is the number of rows of a block: the anchor and `block_size` - 1 masks, which
    predict `block_size` tokens. `values_are_keys` means that there is no value projection: the
    raw key projection serves as values. `rope` is the scaling record of the rotary embedding
    and `rope_theta` its base. `source` is the parsed file, kept for saving.
    """

    family: Family
    vocabulary_size: int
    hidden_size: int
    intermediate_size: int
    layer_count: int
    block_size: int
    mask_token: int
    tap_layers: tuple[int, ...]
    target_layer_count: int
    query_heads: int
    key_value_heads: int
    head_dim: int
    values_are_keys: bool
    attention_bias: bool
    norm_epsilon: float
    rope_theta: float
    rope: dict[str, Any]
    maximum_positions: int
    softcap: float | None
    markov_rank: int
    head_kind: HeadKind
    confidence_head: bool
    confidence_sees_token: bool
    stop_tokens: frozenset[int]
    start_token: int | None
    quantization: dict[str, Any] | None
    source: dict[str, Any]

    @property
    def tap_width(self) -> int:
        """Elements of one token's concatenated taps."""
        return len(self.tap_layers) * self.hidden_size


class TargetShape(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a target that a drafter must agree with."""

    vocabulary_size: int
    hidden_size: int
    layer_count: int
    stop_tokens: frozenset[int]
    start_token: int | None

    @classmethod
    def parse(cls, source: Mapping[str, Any]) -> TargetShape:
        """From a target's `config.json`; a multimodal one is described by its text part."""
        text = source.get("text_config") or source

        def integer(key: str) -> int:
            value = text.get(key, source.get(key))
            if not isinstance(value, int):
                raise DrafterError(
                    f"target config.json: {key} is {value!r}, an integer is needed to check that "
                    "the drafter fits"
                )
            return value

        return cls(
            vocabulary_size=integer("vocab_size"),
            hidden_size=integer("hidden_size"),
            layer_count=integer("num_hidden_layers"),
            stop_tokens=_token_set(source.get("eos_token_id"))
            | _token_set(text.get("eos_token_id")),
            start_token=text.get("bos_token_id"),
        )

    @classmethod
    def read(cls, folder: Path) -> TargetShape:
        """From the `config.json` in a target's folder."""
        return cls.parse(_read_json(folder / "config.json"))


def read_configuration(folder: Path) -> DrafterConfiguration:
    """Read the drafter's `config.json` in `folder`. Raises `DrafterError`."""
    return parse_configuration(_read_json(folder / "config.json"))


def parse_configuration(source: Mapping[str, Any]) -> DrafterConfiguration:
    """Turn a parsed DeepSpec `config.json` into a record. Raises `DrafterError`."""
    fields = _Fields(source)
    architectures = source.get("architectures") or []
    known = ", ".join(Family)
    if not architectures or architectures[0] not in tuple(Family):
        raise DrafterError(
            f"config.json: architectures is {architectures!r}; a drafter names one of {known}. "
            "An ordinary model cannot draft"
        )
    family = Family(architectures[0])
    gemma = family is Family.GEMMA4
    layer_types = source.get("layer_types") or []
    if any(kind != "full_attention" for kind in layer_types):
        raise DrafterError(
            f"config.json: layer_types is {layer_types!r}; a drafter's layers attend in full"
        )
    activation, expected = (
        ("hidden_activation", "gelu_pytorch_tanh") if gemma else ("hidden_act", "silu")
    )
    if source.get(activation, expected) != expected:
        raise DrafterError(
            f"config.json: {activation} is {source[activation]!r}; only {expected} is known"
        )
    values_are_keys = gemma and bool(source.get("attention_k_eq_v", False))
    head_dim, key_value_heads = (
        _gemma_heads(fields, values_are_keys)
        if gemma
        else (fields.integer("head_dim"), fields.integer("num_key_value_heads"))
    )
    rope = _rope(source, gemma)
    theta = rope.get("rope_theta", source.get("rope_theta"))
    if not isinstance(theta, int | float):
        raise DrafterError(f"config.json: rope_theta is {theta!r}, a number is needed")
    rank = fields.integer("markov_rank")
    softcap = source.get("final_logit_softcapping") if gemma else None
    return DrafterConfiguration(
        family=family,
        vocabulary_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        layer_count=fields.integer("num_hidden_layers"),
        block_size=fields.integer("block_size"),
        mask_token=fields.integer("mask_token_id"),
        tap_layers=fields.integers("target_layer_ids"),
        target_layer_count=fields.integer("num_target_layers"),
        query_heads=fields.integer("num_attention_heads"),
        key_value_heads=key_value_heads,
        head_dim=head_dim,
        values_are_keys=values_are_keys,
        attention_bias=bool(source.get("attention_bias", False)),
        norm_epsilon=float(source.get("rms_norm_eps", 1e-6)),
        rope_theta=float(theta),
        rope=rope,
        maximum_positions=fields.integer("max_position_embeddings"),
        softcap=None if softcap is None else float(softcap),
        markov_rank=rank,
        head_kind=_head_kind(source, rank),
        # Without a Markov head the checkpoint of DFlash may still carry the flag's default.
        confidence_head=bool(source.get("enable_confidence_head", False)),
        confidence_sees_token=rank > 0 and bool(source.get("confidence_head_with_markov", False)),
        stop_tokens=_token_set(source.get("eos_token_id")),
        start_token=source.get("bos_token_id"),
        quantization=source.get("quantization") or source.get("quantization_config"),
        source=dict(source),
    )


def check_taps(layers: Sequence[int], layer_count: int) -> None:
    """Raise `DrafterError` when a drafter cannot be fed from `layers` of a target with
    `layer_count` of them."""
    last = layer_count - 1
    if not layers or list(layers) != sorted(set(layers)):
        raise DrafterError(f"target_layer_ids {list(layers)} must be strictly increasing")
    if layers[0] < 0 or layers[-1] > last:
        raise DrafterError(
            f"target_layer_ids {list(layers)} reach outside the target's layers 0 to {last}"
        )
    if layers[-1] == last:
        raise DrafterError(
            f"target_layer_ids {list(layers)} tap the target's last layer {last}: what a drafter "
            "saw of it in training is not what it gets when it drafts, so it is not allowed"
        )


def check_fit(drafter: DrafterConfiguration, target: TargetShape) -> None:
    """Raise `DrafterError` when `drafter` was not made for a target of this shape."""
    for name, own, other in (
        ("vocabulary", drafter.vocabulary_size, target.vocabulary_size),
        ("hidden size", drafter.hidden_size, target.hidden_size),
        ("number of target layers", drafter.target_layer_count, target.layer_count),
    ):
        if own != other:
            raise DrafterError(
                f"the drafter's {name} is {own}, the target's is {other}: "
                "this drafter was trained for another target"
            )
    check_taps(drafter.tap_layers, target.layer_count)
    if not 0 <= drafter.mask_token < target.vocabulary_size:
        raise DrafterError(
            f"mask_token_id {drafter.mask_token} is outside the target's vocabulary of "
            f"{target.vocabulary_size}"
        )
    if (
        drafter.stop_tokens
        and target.stop_tokens
        and drafter.stop_tokens.isdisjoint(target.stop_tokens)
    ):
        raise DrafterError(
            f"the drafter stops at tokens {sorted(drafter.stop_tokens)}, the target at "
            f"{sorted(target.stop_tokens)}: their tokenizers differ"
        )
    if None not in (drafter.start_token, target.start_token) and (
        drafter.start_token != target.start_token
    ):
        raise DrafterError(
            f"the drafter's bos_token_id is {drafter.start_token}, the target's is "
            f"{target.start_token}: their tokenizers differ"
        )


class _Fields:
    """Typed access to the file; a missing or wrong value is named."""

    def __init__(self, source: Mapping[str, Any]) -> None:
        self._source = source

    def integer(self, key: str) -> int:
        value = self._source.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise DrafterError(f"config.json: {key} is {value!r}, a non-negative integer is needed")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        value = self._source.get(key)
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            raise DrafterError(f"config.json: {key} is {value!r}, a list of integers is needed")
        return tuple(value)

    def get(self, key: str) -> Any:
        return self._source.get(key)


def _gemma_heads(fields: _Fields, values_are_keys: bool) -> tuple[int, int]:
    """Head dimension and key/value heads of the full-attention layers, in either spelling.

    Older files have `global_head_dim` and `num_global_key_value_heads`; newer ones fold them
    into `per_layer_config`, keyed by layer, where only full-attention layers have entries.
    """
    head_dim, heads = fields.get("global_head_dim"), fields.get("num_global_key_value_heads")
    per_layer: dict[str, dict[str, Any]] = fields.get("per_layer_config") or {}

    def folded(key: str) -> int | None:
        values = {entry[key] for entry in per_layer.values() if entry.get(key) is not None}
        if len(values) > 1:
            raise DrafterError(
                f"config.json: per_layer_config gives {key} as {sorted(values)}; a drafter's "
                "layers are all alike"
            )
        return next(iter(values), None)

    if head_dim is None:
        head_dim = folded("head_dim")
    if heads is None:
        heads = folded("num_key_value_heads")
    return (
        fields.integer("head_dim") if head_dim is None else int(head_dim),
        int(heads)
        if heads is not None and values_are_keys
        else fields.integer("num_key_value_heads"),
    )


def _rope(source: Mapping[str, Any], gemma: bool) -> dict[str, Any]:
    """The rotary record of the full-attention layers.

    Gemma's saved drafters have a stray `rope_theta: null, rope_type: default` beside the
    records by layer type; only `full_attention` counts.
    """
    parameters = source.get("rope_parameters") or source.get("rope_scaling") or {}
    if gemma:
        if not isinstance(parameters.get("full_attention"), dict):
            raise DrafterError(
                f"config.json: rope_parameters is {parameters!r}; its full_attention entry is "
                "missing"
            )
        parameters = parameters["full_attention"]
    return {"rope_type": "default", **parameters}


def _head_kind(source: Mapping[str, Any], rank: int) -> HeadKind:
    if rank == 0:
        return HeadKind.NONE
    name = source.get("markov_head_type", "vanilla")
    if name not in tuple(HeadKind) or name == HeadKind.NONE:
        raise DrafterError(
            f"config.json: markov_head_type is {name!r}; vanilla, gated and rnn are known"
        )
    return HeadKind(name)


def _token_set(value: Any) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset([value] if isinstance(value, int) else value)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(path.read_text())
    except OSError as error:
        raise DrafterError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DrafterError(f"{path} is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise DrafterError(f"{path} does not hold a JSON object")
    return parsed
