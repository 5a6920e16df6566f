"""The first steps of a new engine, made before it says that it is ready.

Runs on the MLX thread. It touches every kernel that serving uses, so that the first request
does not pay for compiling them, and measures how fast prompts are read.
"""

from __future__ import annotations

import time

import mlx.core as mx

from models.sampling import RowSampling, choose
from models.sampling_settings import Sampling
from models.target import Target
from scheduler.step_policy import PrefillPace

PROMPT_TOKENS = 64


def warm(target: Target, pace: PrefillPace) -> None:
    """Read a prompt twice (the second time measured) and decode a few tokens."""
    length = min(PROMPT_TOKENS, target.facts.context_length // 2)
    for _ in range(2):
        batch = target.new_batch()
        batch.open_row()
        started = time.perf_counter()
        target.prefill(mx.zeros((1, length), dtype=mx.int32), batch)
        pace.observe(length, time.perf_counter() - started)
    for temperature in (0.0, 1.0):
        rows = [RowSampling(Sampling(temperature=temperature), target.vocabulary_size, [])]
        logits = target.forward(mx.zeros((1, 1), dtype=mx.int32), batch)
        mx.eval(choose(logits, rows, [batch.lengths[0]]))
        batch.advance([1])
    mx.clear_cache()
