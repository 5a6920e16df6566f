"""Faults of a drafter that leave the text right, each of which the traces must catch.

This is why lossless output does not test a drafter: every one of these still says what the
target would have said.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
import pytest

from models.dspark import compare
from models.dspark.context import DraftContext, Placement
from models.dspark.decode import ReferenceDecoder, Transcript
from models.dspark.drafter import Drafter
from models.dspark.heads import ConfidenceHead, HeadStep, VanillaHead

from .pairs import make_drafter, target, trace

Patch = pytest.MonkeyPatch
BLOCK = 7


def reconfigured(drafter: Drafter, **changes: Any) -> None:
    drafter.configuration = msgspec.structs.replace(drafter.configuration, **changes)


def taps_one_layer_late(drafter: Drafter, patch: Patch) -> None:
    taps = drafter.configuration.tap_layers
    reconfigured(drafter, tap_layers=tuple(layer + 1 for layer in taps))


def causal_mask_inside_the_block(drafter: Drafter, patch: Patch) -> None:
    def mask(self: Placement) -> mx.array | None:
        if self.count != BLOCK:
            return None
        columns = mx.arange(self.end)
        return columns[None] <= (mx.arange(BLOCK) + self.end - BLOCK)[:, None]

    patch.setattr(Placement, "mask", property(mask))


def no_bias_at_position_1(drafter: Drafter, patch: Patch) -> None:
    calls = iter(range(1_000_000))

    def step(self: VanillaHead, *arguments: Any) -> HeadStep:
        result = original(self, *arguments)
        first = next(calls) % BLOCK == 0
        return result._replace(bias=result.bias * 0) if first else result

    original = VanillaHead.step
    patch.setattr(VanillaHead, "step", step)


def no_norm_of_the_context(drafter: Drafter, patch: Patch) -> None:
    drafter.network.hidden_norm = nn.Identity()


def norm_weight_counts_from_1(drafter: Drafter, patch: Patch) -> None:
    drafter.network.hidden_norm.weight = drafter.network.hidden_norm.weight + 1


def context_through_the_input_norm(drafter: Drafter, patch: Patch) -> None:
    def extend(self: Drafter, context: DraftContext, taps: mx.array) -> None:
        features = self.network.features(taps)
        placement = context.place(taps.shape[1])
        for index, layer in enumerate(self.network.layers):
            normed = layer.input_layernorm(features)
            keys, values = layer.self_attn.keys_and_values(normed, placement.offset)
            context.write(index, placement, keys, values)

    patch.setattr(Drafter, "extend", extend)


def block_one_position_late(drafter: Drafter, patch: Patch) -> None:
    def place(self: DraftContext, count: int, *arguments: Any) -> Placement:
        placement = original(self, count, *arguments)
        if count == BLOCK:
            placement.offset = placement.offset + 1
        return placement

    original = DraftContext.place
    patch.setattr(DraftContext, "place", place)


def scrap_visible_before_the_block(drafter: Drafter, patch: Patch) -> None:
    """One row of scrap stays visible between the context and the block."""

    def place(self: DraftContext, count: int, *arguments: Any) -> Placement:
        placement = original(self, count, *arguments)
        if count == BLOCK and self.lengths[0] > 40:
            placement.end += 1
        return placement

    original = DraftContext.place
    patch.setattr(DraftContext, "place", place)


def another_mask_token(drafter: Drafter, patch: Patch) -> None:
    reconfigured(drafter, mask_token=drafter.configuration.mask_token + 1)


def confidence_without_its_bias(drafter: Drafter, patch: Patch) -> None:
    drafter.network.confidence_head.proj.bias = mx.zeros((1,))


def confidence_sees_the_token_first(drafter: Drafter, patch: Patch) -> None:
    def call(self: ConfidenceHead, hidden: mx.array, embeddings: mx.array) -> mx.array:
        logits: mx.array = self.proj(mx.concatenate([embeddings, hidden], axis=-1))
        return logits.squeeze(-1)

    patch.setattr(ConfidenceHead, "__call__", call)


def confidence_sees_the_token_after(drafter: Drafter, patch: Patch) -> None:
    def call(self: ConfidenceHead, hidden: mx.array, embeddings: mx.array) -> mx.array:
        shifted = mx.concatenate([embeddings[:, 1:], embeddings[:, -1:]], axis=1)
        return original(self, hidden, shifted)

    original = ConfidenceHead.__call__
    patch.setattr(ConfidenceHead, "__call__", call)


def softcap_missing_before_the_bias(drafter: Drafter, patch: Patch) -> None:
    reconfigured(drafter, softcap=None)


def values_not_normed(drafter: Drafter, patch: Patch) -> None:
    for layer in drafter.network.layers:
        layer.self_attn.normalizes_values = False


def rope_over_the_whole_head(drafter: Drafter, patch: Patch) -> None:
    for layer in drafter.network.layers:
        layer.self_attn.rope = nn.RoPE(layer.self_attn.head_dim, base=1e6)


def scores_scaled(drafter: Drafter, patch: Patch) -> None:
    for layer in drafter.network.layers:
        layer.self_attn.scale = layer.self_attn.head_dim**-0.5


def block_not_scaled(drafter: Drafter, patch: Patch) -> None:
    drafter.embedding_scale = None


def block_scaled_as_in_bfloat16(drafter: Drafter, patch: Patch) -> None:
    drafter.embedding_scale = 11.3125


Mutation = Callable[[Drafter, Patch], None]
BOTH: tuple[Mutation, ...] = (
    taps_one_layer_late,
    causal_mask_inside_the_block,
    no_bias_at_position_1,
    no_norm_of_the_context,
    norm_weight_counts_from_1,
    context_through_the_input_norm,
    block_one_position_late,
    scrap_visible_before_the_block,
    another_mask_token,
    confidence_without_its_bias,
    confidence_sees_the_token_first,
    confidence_sees_the_token_after,
)
GEMMA: tuple[Mutation, ...] = (
    softcap_missing_before_the_bias,
    values_not_normed,
    rope_over_the_whole_head,
    scores_scaled,
    block_not_scaled,
    block_scaled_as_in_bfloat16,
)
CASES = [("qwen3", one) for one in BOTH] + [("gemma4", one) for one in (*BOTH, *GEMMA)]


@pytest.mark.parametrize(
    ("family", "mutation"), CASES, ids=[f"{family}-{one.__name__}" for family, one in CASES]
)
def test_the_trace_catches_it(family: str, mutation: Mutation, monkeypatch: Patch) -> None:
    recorded = trace(family)
    drafter = make_drafter(family)
    mutation(drafter, monkeypatch)
    decoder = ReferenceDecoder(target(family), drafter, recorded["stop_token_ids"])
    outputs = []

    def decode(prompt: list[int], budget: int) -> Transcript:
        transcript = decoder.decode(prompt, budget)
        outputs.append(transcript.output)
        return transcript

    try:
        report = compare.replay(recorded, decode)
    finally:
        decoder.close()
    assert report.difference is not None
    assert report.difference.field != "output_ids"
    wanted = [prompt["output_ids"] for prompt in recorded["prompts"]]
    assert outputs == wanted[: len(outputs)]
