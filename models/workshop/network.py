"""A new drafter for a target: its configuration, its first weights, another one's warm start.

Runs on the calling thread. Everything that is not the drafter's own business, such as widths,
heads and rotary base, is copied from the target's `config.json`, as DeepSpec does, so that its
reader accepts what is exported.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map_with_path

from models.dspark.configuration import (
    DrafterConfiguration,
    DrafterError,
    Family,
    HeadKind,
    parse_configuration,
)
from models.dspark.drafter import DraftNetwork

INITIAL_DEVIATION = 0.02
_ARCHITECTURES = {"gemma4": Family.GEMMA4}


def spread_taps(layer_count: int, wanted: int = 5) -> list[int]:
    """Tap layers from the second to the third last, evenly: 30 layers give 1, 8, 14, 21, 27."""
    first, last = (1, layer_count - 3) if layer_count > 5 else (0, layer_count - 2)
    if last < first:
        raise DrafterError(f"a target of {layer_count} layers has none that may be tapped")
    count = min(wanted, last - first + 1)
    if count == 1:
        return [last]
    gap = (last - first) / (count - 1)
    return [math.floor(first + index * gap + 0.5) for index in range(count)]


def new_configuration(
    target: Mapping[str, Any],
    *,
    tap_layers: Sequence[int],
    layers: int,
    block_size: int,
    rank: int,
    head: HeadKind,
    mask_token: int,
) -> DrafterConfiguration:
    """The drafter's configuration beside a target's parsed `config.json`. Raises `DrafterError`."""
    text = dict(target.get("text_config") or target)
    for key in ("quantization", "quantization_config", "auto_map", "rope_scaling"):
        if text.get(key) is None or key.startswith(("quantization", "auto")):
            text.pop(key, None)
    kind = str(text.get("model_type", ""))
    family = next((f for name, f in _ARCHITECTURES.items() if kind.startswith(name)), Family.QWEN3)
    if family is Family.QWEN3:
        text["model_type"] = "qwen3"
        text["hidden_act"] = "silu"
        text["attention_bias"] = False
        text.setdefault("head_dim", text["hidden_size"] // text["num_attention_heads"])
        text.setdefault("num_key_value_heads", text["num_attention_heads"])
        text.setdefault("use_sliding_window", False)
    if "eos_token_id" not in text and "eos_token_id" in target:
        text["eos_token_id"] = target["eos_token_id"]
    return parse_configuration(
        {
            **text,
            "architectures": [str(family)],
            "num_target_layers": text["num_hidden_layers"],
            "num_hidden_layers": layers,
            "layer_types": ["full_attention"] * layers,
            "tie_word_embeddings": False,
            "block_size": block_size,
            "mask_token_id": mask_token,
            "target_layer_ids": list(tap_layers),
            "enable_confidence_head": True,
            "confidence_head_with_markov": head is not HeadKind.NONE,
            "markov_rank": 0 if head is HeadKind.NONE else rank,
            "markov_head_type": str(HeadKind.VANILLA if head is HeadKind.NONE else head),
        }
    )


def find_mask_token(folder: Path, vocabulary_size: int, stops: frozenset[int]) -> int:
    """A token that text never holds: a mask token, a row behind the tokenizer's, or the last
    special one that does not end a turn. Raises `DrafterError`."""
    try:
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
    except (OSError, ValueError) as error:
        raise DrafterError(f"{folder / 'tokenizer.json'} cannot be read: {error}") from error
    added = {entry["content"]: entry["id"] for entry in tokenizer.get("added_tokens", [])}
    for name in ("<mask>", "[MASK]", "<|mask|>"):
        if name in added:
            return int(added[name])
    known = [*added.values(), *tokenizer["model"]["vocab"].values()]
    if max(known) + 1 < vocabulary_size:
        return int(max(known) + 1)
    # Tokens that open or close a turn are seen in every text.
    spare = [i for name, i in added.items() if i not in stops and "im_" not in name and i]
    if not spare:
        raise DrafterError("the tokenizer has no spare token: choose one with --mask-token")
    return int(spare[-1])


def initialise(network: DraftNetwork, seed: int, final_norm: mx.array | None) -> None:
    """Give `network` its first weights, float32: matrices normal, norms 1, biases 0.

    The final norm begins as the target's, whose head reads what comes out of it.
    """
    key = mx.random.key(seed)

    def first(path: str, value: mx.array) -> mx.array:
        nonlocal key
        key, own = mx.random.split(key)
        if path.endswith("bias"):
            return mx.zeros(value.shape)
        if value.ndim == 1:
            return mx.ones(value.shape)
        return mx.random.normal(value.shape, key=own) * INITIAL_DEVIATION

    network.update(tree_map_with_path(first, network.parameters()))
    if final_norm is not None:
        # A copy: a compiled step must not have one array as its input and as a constant.
        network.norm.weight = final_norm.astype(mx.float32) * 1.0
    mx.eval(network.parameters())


def warm_start(network: DraftNetwork, kind: HeadKind, weights: Mapping[str, mx.array]) -> None:
    """Load `weights` of a drafter with a vanilla head into `network`, whatever its head.

    A gated or recurrent head begins as the vanilla one that it replaces: the gate open; the
    output gate a scaled-down copy of the embedding, where tanh is the identity.
    """
    own: dict[str, mx.array] = {
        name: value
        for name, value in weights.items()
        if name.split(".", 1)[0] not in ("embed_tokens", "lm_head")
    }
    own = {name: value.astype(mx.float32) for name, value in own.items()}
    known: Any = dict(tree_flatten(network.parameters()))
    rank = known["markov_head.markov_w1.weight"].shape[1] if kind is not HeadKind.NONE else 0
    if kind is HeadKind.GATED and "markov_head.gate_proj.weight" not in own:
        opening = 12.0
        own["markov_head.gate_proj.weight"] = mx.zeros_like(known["markov_head.gate_proj.weight"])
        own["markov_head.gate_proj.bias"] = mx.full((rank,), opening)
        own["markov_head.markov_w2.weight"] /= mx.sigmoid(mx.array(opening))
    if kind is HeadKind.RNN and "markov_head.joint_proj.weight" not in own:
        scale = 1e-2 / mx.maximum(mx.abs(own["markov_head.markov_w1.weight"]).max(), 1e-6)
        joint = mx.zeros_like(known["markov_head.joint_proj.weight"])
        joint[2 * rank :, rank : 2 * rank] = mx.eye(rank) * scale
        own["markov_head.joint_proj.weight"] = joint
        own["markov_head.joint_proj.bias"] = mx.zeros((3 * rank,))
        own["markov_head.markov_w2.weight"] = own["markov_head.markov_w2.weight"] / scale
    for name, value in known.items():
        if name not in own or own[name].shape != value.shape:
            found = own[name].shape if name in own else "nothing"
            raise DrafterError(
                f"cannot start from this drafter: {name} is {found}, {value.shape} is needed"
            )
    network.load_weights([(name, own[name]) for name in known])
