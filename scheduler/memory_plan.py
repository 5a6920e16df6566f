"""The memory plan: what serving a model will take, added up before anything is loaded.

Pure arithmetic; used by the daemon before it starts an engine. Weights, prefill transients,
the process itself and the reserve are fixed; what the limit leaves is for keys and values, up
to what all rows at full length could use. Raises `DoesNotFit` when what is left cannot hold a
single row of the length asked for.
"""

from __future__ import annotations

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
    reserve: int
    limit: MemoryLimit

    @property
    def total(self) -> int:
        """What the engine may come to use; the reserve is left alone."""
        return self.weights + self.kv_budget + self.transients + self.process


class DoesNotFit(Exception):
    """The model does not fit. Names the limit, its value, the need and the remedy."""


def plan_memory(needs: MemoryNeeds, limit: MemoryLimit, reserve: int) -> MemoryPlan:
    """Share `limit` out. `reserve` bytes are kept free for whatever else runs."""
    transients = prefill_transients(needs)
    fixed = needs.weight_bytes + transients + PROCESS_BYTES + reserve
    left = limit.bytes - fixed
    minimum = needs.kv_cost.rectangle(1, needs.minimum_tokens)
    if left < minimum:
        raise DoesNotFit(
            f"{needs.model} needs {_gigabytes(fixed + minimum)} ({_gigabytes(needs.weight_bytes)} "
            f"of weights, {_gigabytes(minimum)} for one row of {needs.minimum_tokens} tokens, "
            f"{_gigabytes(transients + PROCESS_BYTES)} to work with, {_gigabytes(reserve)} kept "
            f"free); {limit.source} leaves {_gigabytes(limit.bytes)}; choose a smaller model or "
            "precision, lower maximum_context or memory.reserve, or free memory"
        )
    most = needs.kv_cost.rectangle(needs.maximum_rows, needs.context_length)
    return MemoryPlan(
        weights=needs.weight_bytes,
        kv_budget=min(left, most),
        transients=transients,
        process=PROCESS_BYTES,
        reserve=reserve,
        limit=limit,
    )


def prefill_transients(needs: MemoryNeeds) -> int:
    """Bytes that one prefill chunk holds at its peak, on top of weights and caches."""
    shape = needs.activations
    # The residual stream, its norm, and queries to outputs: about four times the hidden size;
    # gate, up and their product: three times the intermediate one.
    row = 4 * shape.hidden + 3 * shape.intermediate
    if shape.scores:
        row += shape.attention_heads * needs.context_length
    return min(needs.chunk_tokens, needs.context_length) * row * needs.element_bytes


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB"
