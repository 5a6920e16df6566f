"""The memory plan: what serving a model will take, added up before anything is loaded.

Pure arithmetic; used by the daemon before it starts an engine. Weights, prefill transients,
the process itself and the reserve are fixed; what the limit leaves is for keys and values, up
to what all rows at full length could use. Raises `DoesNotFit` when what is left cannot hold a
single row of the length asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from scheduler.ledger import KvCost

PROCESS_BYTES = 400_000_000
"""An engine process before it has loaded anything: interpreter, MLX, its compiled kernels."""


class MemoryLimit(msgspec.Struct, frozen=True):
    """Bytes that may be used, and who says so: "the machine", "the control group ..."."""

    bytes: int
    source: str


class ActivationShape(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes that decide what a forward holds beside weights and caches.

    `scores` tells whether attention writes its scores to memory (it does on the CPU).
    """

    hidden: int
    intermediate: int
    attention_heads: int
    scores: bool


class MemoryNeeds(msgspec.Struct, frozen=True, kw_only=True):
    """What a model asks for. `weight_bytes` at the precision it runs in.

    `minimum_tokens` is the shortest row that must fit, `context_length` the longest allowed.
    """

    model: str
    weight_bytes: int
    kv_cost: KvCost
    activations: ActivationShape
    element_bytes: int
    chunk_tokens: int
    maximum_rows: int
    context_length: int
    minimum_tokens: int


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Where the bytes go. `kv_budget` bounds the admission ledger."""

    weights: int
    kv_budget: int
    transients: int
    process: int
    limit: MemoryLimit

    @property
    def total(self) -> int:
        """What the engine may come to use."""
        return self.weights + self.kv_budget + self.transients + self.process


class DoesNotFit(Exception):
    """The model does not fit. Names the limit, its value, the need and the remedy."""


def plan_memory(needs: MemoryNeeds, limit: MemoryLimit, reserve: int) -> MemoryPlan:
    """Share `limit` out for one model. `reserve` bytes are kept free for whatever else runs."""
    return plan_together([needs], limit, reserve)[0]


def plan_together(
    models: Sequence[MemoryNeeds], limit: MemoryLimit, reserve: int
) -> list[MemoryPlan]:
    """Share `limit` out among models that are served at the same time, in their order.

    Each gets what it needs at least; what is left is shared equally, and what one has no use
    for goes to the others.
    """
    left = limit.bytes - reserve - sum(_least(needs) for needs in models)
    if left < 0:
        raise DoesNotFit(_refusal(models, limit, reserve))
    budgets: dict[int, int] = {}
    by_use = sorted(range(len(models)), key=lambda index: _useful(models[index]))
    for done, index in enumerate(by_use):
        share = min(left // (len(models) - done), _useful(models[index]))
        budgets[index] = _minimum_row(models[index]) + share
        left -= share
    return [
        MemoryPlan(
            weights=needs.weight_bytes,
            kv_budget=budgets[index],
            transients=prefill_transients(needs),
            process=PROCESS_BYTES,
            limit=limit,
        )
        for index, needs in enumerate(models)
    ]


def prefill_transients(needs: MemoryNeeds) -> int:
    """Bytes that one prefill chunk holds at its peak, on top of weights and caches."""
    shape = needs.activations
    # The residual stream, its norm, and queries to outputs: about four times the hidden size;
    # gate, up and their product: three times the intermediate one.
    row = 4 * shape.hidden + 3 * shape.intermediate
    if shape.scores:
        row += shape.attention_heads * needs.context_length
    return min(needs.chunk_tokens, needs.context_length) * row * needs.element_bytes


def _minimum_row(needs: MemoryNeeds) -> int:
    return needs.kv_cost.rectangle(1, needs.minimum_tokens)


def _least(needs: MemoryNeeds) -> int:
    fixed = needs.weight_bytes + prefill_transients(needs) + PROCESS_BYTES
    return fixed + _minimum_row(needs)


def _useful(needs: MemoryNeeds) -> int:
    """Bytes of keys and values beyond the minimum that all rows at full length could use."""
    most = needs.kv_cost.rectangle(needs.maximum_rows, needs.context_length)
    return max(most - _minimum_row(needs), 0)


def _refusal(models: Sequence[MemoryNeeds], limit: MemoryLimit, reserve: int) -> str:
    parts = []
    for needs in models:
        working = prefill_transients(needs) + PROCESS_BYTES
        parts.append(
            f"{needs.model} needs {_gigabytes(_least(needs))}: "
            f"{_gigabytes(needs.weight_bytes)} of weights, {_gigabytes(_minimum_row(needs))} for "
            f"one row of {needs.minimum_tokens} tokens, {_gigabytes(working)} to work with"
        )
    return (
        f"not enough memory: {'; '.join(parts)}. {limit.source} leaves {_gigabytes(limit.bytes)}, "
        f"of which memory.reserve_bytes keeps {_gigabytes(reserve)} free. Choose a smaller model "
        "or precision, lower maximum_context or memory.reserve_bytes, or free memory"
    )


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB"
