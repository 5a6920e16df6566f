"""What a serial step and a speculative round cost, and a round's draft and verification apart.

Runs on the calling thread and waits for the device: apart from the decoding whose wall clock is
compared, since waiting between draft and verification makes a round longer. The steps are those
of `speculation.Decoder`, on caches that hold real text.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import mlx.core as mx

from models.sampling_settings import Sampling
from models.workshop.speculation import Decoder

_UNTIMED = 2
"""Repetitions before the first that counts: kernels are built and caches grown."""


def round_costs(
    decoder: Decoder,
    contexts: Sequence[list[int]],
    settings: Sequence[Sampling],
    *,
    repetitions: int,
    width: int | None = None,
    rejection: bool = False,
) -> dict[str, Any]:
    """Medians of `repetitions`, in seconds, for rows that hold `contexts`, a row each.

    `serial_step_seconds` is a token for every row; `draft_seconds` a draft, with the taps of the
    last verification taken in; `verify_seconds` the verification of `width` drafts, the whole
    block when None; `round_seconds` both with a single wait, as rounds are decoded.
    `cost_rows` and `cost_depth`, the mean tokens of a row, say where that holds, and
    `break_even_tau` is the tokens a round from which rounds are faster than serial steps.
    """
    own = decoder.samplings(settings)
    serial, rows = decoder.serial_rows(contexts), decoder.speculative_rows(contexts)
    last: list[int] = [context[-1] for context in contexts]
    tokens, anchors = last, mx.array(last, dtype=mx.int32)
    spent: dict[str, list[float]] = {"serial_step": [], "draft": [], "verify": [], "round": []}

    def lap(name: str, begun: float) -> float:
        now = time.perf_counter()
        spent[name].append(now - begun)
        return now

    mx.synchronize()
    for _ in range(_UNTIMED + repetitions):
        begun = time.perf_counter()
        chosen, margins = decoder.step(serial, tokens, own)
        mx.eval(chosen, margins)
        values: Any = chosen[:, 0].tolist()
        tokens = values
        lap("serial_step", begun)
        for apart in (True, False):
            begun = time.perf_counter()
            draft = decoder.draft(rows, anchors, own, width=width, rejection=rejection)
            drafted = [part for part in draft[:2] if part is not None]
            if apart:
                mx.eval(drafted)
                begun = lap("draft", begun)
            verified = decoder.verify(rows, anchors, own, draft, rejection=rejection)
            mx.eval(drafted, verified.tokens, verified.accepted)
            lap("verify" if apart else "round", begun)
            # One token whatever was accepted, so that the depth stays what is told.
            anchors = verified.tokens[:, 0]
            rows.commit([1] * len(contexts))
    costs = {name: median(values[_UNTIMED:]) for name, values in spent.items()}
    return {
        **{f"{name}_seconds": round(value, 7) for name, value in costs.items()},
        "break_even_tau": round(costs["round"] / max(costs["serial_step"], 1e-9), 4),
        "cost_rows": len(contexts),
        "cost_depth": round(sum(map(len, contexts)) / len(contexts)),
    }


def describe(costs: dict[str, Any]) -> str:
    """The costs as a sentence."""
    parts = {
        name: f"{1e3 * costs[f'{name}_seconds']:.2f} ms"
        for name in ("serial_step", "draft", "verify", "round")
    }
    rows = "1 row" if costs["cost_rows"] == 1 else f"{costs['cost_rows']} rows"
    return (
        f"{rows} of {costs['cost_depth']} tokens: a serial step takes "
        f"{parts['serial_step']}, a round {parts['round']} (apart, its draft {parts['draft']} and "
        f"its verification {parts['verify']}), which pays from {costs['break_even_tau']:.2f} "
        "tokens a round"
    )
