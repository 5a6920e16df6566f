"""One row decoded exactly as DeepSpec's evaluation loop does it, at temperature 0.

Owns the plain caches of one decode; runs on the calling thread. It is the reference that a
drafter is checked with, round for round, and shares the drafter with the speculative lane but
none of its scheduling: one row, no batching, the values of every round read back. Sliding
layers get full caches here, whose masks apply the window, so a rejected draft is taken back by
shortening them.

Two of the loop's habits are kept because the record shows them: it drafts once more when a
single token of the budget is left, although nothing of that round is needed, and tokens beyond
the budget count in that round.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import msgspec
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from models.acceptance import count_matches
from models.dspark.drafter import Drafter
from models.dspark.heads import prefix_above
from models.taps import Taps


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """One draft, its verification and what was committed, in the words of DeepSpec's traces.

    `start` is the anchor's index in prompt + output; `base_argmax` is the best token of each
    block row without the Markov bias; `context_rows` were fed to the drafter before the draft.
    """

    start: int
    anchor: int
    context_rows: int
    draft_cache_before: int
    draft_cache_after: int
    draft_tokens: list[int]
    base_argmax: list[int]
    confidence_logits: list[float]
    draft_token_count: int
    verify_input_ids: list[int]
    target_argmax: list[int]
    target_margins: list[float]
    accepted_draft_tokens: int
    terminated_by_stop_token: bool
    effective_proposal_length: int
    committed: list[int]


class Transcript(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer: `output` is cut to the budget and after the first stop token."""

    first_token: int
    rounds: list[Round]
    output: list[int]


class ReferenceDecoder:
    """Decodes prompts with a target and a drafter. Removes its taps on `close`."""

    def __init__(
        self,
        target: nn.Module,
        drafter: Drafter,
        stop_tokens: Collection[int],
        threshold: float = 0.0,
    ) -> None:
        """`threshold` is DeepSpec's: drafts from the first confidence under it on are not
        verified. Raises `ValueError` for a target with other than attention caches."""
        caches = make_prompt_cache(target)
        if odd := {type(c).__name__ for c in caches if type(c) not in (KVCache, RotatingKVCache)}:
            raise ValueError(f"the target keeps state in {sorted(odd)}, which cannot roll back")
        self._cache_count = len(caches)
        self._target: Any = target
        self._drafter = drafter
        self._stops = frozenset(stop_tokens)
        self._threshold = threshold
        self._taps = Taps(target, drafter.configuration.tap_layers)

    def close(self) -> None:
        """Give the target its own layers back."""
        self._taps.remove()

    def decode(self, prompt: Sequence[int], max_tokens: int) -> Transcript:
        """Draft, verify, commit until a stop token or the budget."""
        cache = [KVCache() for _ in range(self._cache_count)]
        context = self._drafter.new_context()
        context.open_row()
        logits, taps = self._forward(prompt, cache)
        first: Any = mx.argmax(logits[0, -1]).item()
        sequence, rounds = [*prompt, first], []
        start = len(prompt)
        running = first not in self._stops
        while running and start < len(prompt) + max_tokens:
            before = context.lengths[0]
            self._drafter.extend(context, taps)
            context.advance([taps.shape[1]])
            round_, taps = self._round(sequence[start], start, before, cache, context)
            rounds.append(round_)
            sequence = sequence[: start + 1] + round_.committed
            start += len(round_.committed)
            for layer in cache:
                layer.trim(layer.offset - start)
            running = self._stops.isdisjoint(round_.committed)
        return Transcript(
            first_token=first,
            rounds=rounds,
            output=_cut(sequence[len(prompt) :], max_tokens, self._stops),
        )

    def _round(
        self, anchor: int, start: int, before: int, cache: list[KVCache], context: Any
    ) -> tuple[Round, mx.array]:
        """One round, and the taps of the tokens that it made final: the old anchor's and the
        accepted drafts', not the new anchor's."""
        anchors = mx.array([anchor], dtype=mx.int32)
        after = context.lengths[0]
        hidden = self._drafter.hidden(context, anchors)
        base = mx.argmax(self._drafter.base_logits(hidden), axis=-1)
        draft = self._drafter.draft(context, anchors)
        confidences = draft.confidence_logits
        mx.eval(draft.tokens, confidences, base)
        drafts = _integers(draft.tokens[0])
        logits = [] if confidences is None else cast(list[float], confidences[0].tolist())
        count = prefix_above([_sigmoid(value) for value in logits], self._threshold)
        if not logits:
            count = len(drafts)
        verified = [anchor, *drafts[:count]]
        rows, taps = self._forward(verified, cache)
        best = mx.argmax(rows, axis=-1).astype(mx.int32)
        ordered = mx.topk(rows[0], 2, axis=-1)
        (accepted,) = _integers(count_matches(draft.tokens[:, :count], best))
        targets = _integers(best[0])
        stop = next((i for i in range(accepted) if drafts[i] in self._stops), None)
        if stop is not None:
            accepted = stop + 1
        committed = drafts[:accepted] + ([] if stop is not None else [targets[accepted]])
        record = Round(
            start=start,
            anchor=anchor,
            context_rows=after - before,
            draft_cache_before=before,
            draft_cache_after=context.lengths[0],
            draft_tokens=drafts,
            base_argmax=_integers(base[0]),
            confidence_logits=logits,
            draft_token_count=count,
            verify_input_ids=verified,
            target_argmax=targets,
            target_margins=cast(list[float], mx.abs(ordered[:, 1] - ordered[:, 0]).tolist()),
            accepted_draft_tokens=accepted,
            terminated_by_stop_token=stop is not None,
            effective_proposal_length=count if stop is None else accepted,
            committed=committed,
        )
        return record, taps[:, : accepted + 1]

    def _forward(self, tokens: Sequence[int], cache: list[KVCache]) -> tuple[mx.array, mx.array]:
        logits = self._target(mx.array([list(tokens)], dtype=mx.int32), cache=cache)
        return logits.astype(mx.float32), self._taps.take()


def _integers(array: mx.array) -> list[int]:
    return cast(list[int], array.tolist())


def _cut(tokens: list[int], budget: int, stops: Collection[int]) -> list[int]:
    """To the budget, and after the first stop token, which stays."""
    tokens = tokens[:budget]
    end = next((i for i, token in enumerate(tokens) if token in stops), len(tokens))
    return tokens[: end + 1]


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))
