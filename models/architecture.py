"""Which layers of a model keep keys and values, and how large they are.

Reads the fields of a `config.json` as mlx-lm's model classes do, without importing them, so
that memory is planned before anything is loaded. Pure; free of mlx; any thread. Raises
`ArchitectureError` for a model whose cache this arithmetic does not describe: a wrong plan
would be worse than none.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

_Size = Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)]
_Layers = Annotated[int, msgspec.Meta(gt=0, le=4096)]

FULL = "full_attention"
SLIDING = "sliding_attention"

# What mlx-lm fills in where a family's published configs leave a field out.
_FAMILY_DEFAULTS: dict[str, dict[str, int]] = {
    "gemma3": {
        "vocab_size": 262144,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 131072,
    },
    "gemma4": {
        "vocab_size": 262144,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "global_head_dim": 512,
        "sliding_window": 512,
        "sliding_window_pattern": 5,
        "max_position_embeddings": 131072,
    },
}
# Families whose mlx-lm classes use a rotating cache for the layers that `layer_types` calls
# sliding. Elsewhere every layer is counted as full, which can only reserve too much.
_HONOUR_LAYER_TYPES = ("llama", "mistral", "ministral3", "gemma4")


class ArchitectureError(Exception):
    """A config that cannot be served, and what to do about it."""

    def __init__(self, problem: str, remedy: str = "fetch the checkpoint again") -> None:
        super().__init__(problem)
        self.remedy = remedy


class KvLayers(msgspec.Struct, frozen=True, kw_only=True):
    """`layers` layers whose caches are alike. `window` None = every token is kept."""

    layers: int
    heads: int
    head_dim: int
    window: int | None = None

    @property
    def elements_per_token(self) -> int:
        """Elements of keys and values that one token adds, all these layers together."""
        return 2 * self.layers * self.heads * self.head_dim


class Config(msgspec.Struct, kw_only=True):
    """The fields of config.json that matter here; `raw` is the whole file."""

    model_type: str
    raw: dict[str, Any]
    architectures: tuple[str, ...] | None = None
    vocab_size: _Size | None = None
    hidden_size: _Size | None = None
    num_hidden_layers: _Layers | None = None
    num_attention_heads: _Size | None = None
    num_key_value_heads: _Size | None = None
    head_dim: _Size | None = None
    max_position_embeddings: _Size | None = None
    n_positions: _Size | None = None
    max_sequence_length: _Size | None = None
    eos_token_id: int | list[int] | None = None
    layer_types: list[str] | None = None
    sliding_window: _Size | None = None
    sliding_window_pattern: _Size | None = None
    num_kv_shared_layers: Annotated[int, msgspec.Meta(ge=0, le=4096)] | None = None
    attention_k_eq_v: bool | None = None
    global_head_dim: _Size | None = None
    num_global_key_value_heads: _Size | None = None
    per_layer_config: dict[str, dict[str, Any]] | None = None
    kv_lora_rank: int | None = None

    @property
    def family(self) -> str:
        """The model type without the words for its multimodal and text-only variants."""
        return self.model_type.removesuffix("_text").removesuffix("_unified")

    def get(self, field: str) -> int | None:
        """A field, or what its family leaves out."""
        value: int | None = getattr(self, field)
        return _FAMILY_DEFAULTS.get(self.family, {}).get(field) if value is None else value

    def require(self, field: str) -> int:
        """A field that must be known."""
        value = self.get(field)
        if value is None:
            raise ArchitectureError(f"has no {field!r}")
        return value

    def context_length(self) -> int:
        """The positions that the model was made for."""
        for field in ("max_position_embeddings", "n_positions", "max_sequence_length"):
            if (value := self.get(field)) is not None:
                return value
        remedy = "add the model's context length to it"
        raise ArchitectureError("has no 'max_position_embeddings'", remedy)


def kv_layers(config: Config) -> tuple[KvLayers, ...]:
    """The caches of a model, alike ones counted together, in order of first appearance."""
    if config.kv_lora_rank is not None:
        raise ArchitectureError(
            f"model_type {config.model_type!r} has latent attention (kv_lora_rank "
            f"{config.kv_lora_rank}), which is not served",
            "choose a model with plain attention",
        )
    count = config.require("num_hidden_layers")
    kinds = _layer_kinds(config, count)
    # The last layers of gemma4 read the keys and values of earlier ones and keep none.
    keeping = count - (config.num_kv_shared_layers or 0)
    if keeping <= 0:
        raise ArchitectureError(
            f"num_kv_shared_layers {config.num_kv_shared_layers} leaves none of "
            f"{count} layers with keys and values"
        )
    groups: dict[KvLayers, int] = {}
    for index, kind in enumerate(kinds[:keeping]):
        heads, head_dim = _layer_shape(config, index, kind)
        window = config.require("sliding_window") if kind == SLIDING else None
        key = KvLayers(layers=1, heads=heads, head_dim=head_dim, window=window)
        groups[key] = groups.get(key, 0) + 1
    return tuple(msgspec.structs.replace(key, layers=n) for key, n in groups.items())


def config_overrides(config: Config) -> dict[str, Any]:
    """Fields respelled as mlx-lm reads them; empty where config.json already is so.

    transformers 5 folds gemma4's `global_head_dim` and `num_global_key_value_heads` into
    `per_layer_config`, which mlx-lm does not know; and mlx-lm takes the vocabulary's size of
    a multimodal gemma4 from the outer config, where it is often absent.
    """
    if config.family != "gemma4":
        return {}
    text = config.raw.get("text_config")
    found: dict[str, Any] = {}
    if config.per_layer_config:
        count = config.require("num_hidden_layers")
        kinds = _layer_kinds(config, count)
        shapes = {_layer_shape(config, i, k) for i, k in enumerate(kinds) if k == FULL}
        if len(shapes) > 1:
            raise ArchitectureError(
                "per_layer_config gives full-attention layers different shapes",
                "choose a model whose full-attention layers are alike",
            )
        for heads, head_dim in shapes:
            found = {"global_head_dim": head_dim, "num_global_key_value_heads": heads}
    if not isinstance(text, dict):
        return found
    overrides: dict[str, Any] = {"text_config": {**text, **found}} if found else {}
    if config.raw.get("vocab_size") is None and text.get("vocab_size") is not None:
        overrides["vocab_size"] = text["vocab_size"]
    return overrides


def _layer_kinds(config: Config, count: int) -> list[str]:
    for kind in config.layer_types or ():
        if kind not in (FULL, SLIDING):
            raise ArchitectureError(
                f"layer_types holds {kind!r}; only {FULL!r} and {SLIDING!r} layers are served",
                "choose a model with plain attention",
            )
    if config.layer_types is not None and len(config.layer_types) != count:
        raise ArchitectureError(
            f"layer_types has {len(config.layer_types)} entries for {count} layers"
        )
    if config.family in _HONOUR_LAYER_TYPES and config.layer_types is not None:
        return config.layer_types
    pattern = config.get("sliding_window_pattern")
    if config.family in _FAMILY_DEFAULTS and pattern is not None:
        return [FULL if (i + 1) % pattern == 0 else SLIDING for i in range(count)]
    return [FULL] * count


def _layer_shape(config: Config, index: int, kind: str) -> tuple[int, int]:
    """(key-value heads, head dimension) of a layer."""
    query_heads = config.require("num_attention_heads")
    heads = config.get("num_key_value_heads") or query_heads
    head_dim = config.get("head_dim") or config.require("hidden_size") // query_heads
    if config.family == "gemma4" and kind == FULL:
        if (own := (config.per_layer_config or {}).get(str(index))) is not None:
            heads = _override(own, "num_key_value_heads", index, heads)
            head_dim = _override(own, "head_dim", index, head_dim)
        elif config.per_layer_config is None:
            head_dim = config.get("global_head_dim") or head_dim
            if config.attention_k_eq_v:
                heads = config.get("num_global_key_value_heads") or heads
    if head_dim == 0:
        raise ArchitectureError(f"has more attention heads ({query_heads}) than hidden_size")
    return heads, head_dim


def _override(own: dict[str, Any], field: str, index: int, otherwise: int) -> int:
    value = own.get(field, otherwise)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 31:
        raise ArchitectureError(f"per_layer_config[{index}].{field} is {value!r}")
    return value
