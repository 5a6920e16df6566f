"""What a request may set about the choice of its tokens. Data only, free of mlx."""

from __future__ import annotations

import msgspec


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is drawn. The noise at a position is a function of `seed` alone.

    `temperature` 0 is argmax. `top_p` 1, `top_k` 0 and `min_p` 0 switch a filter off.
    Penalties count generated tokens only. `logit_bias` maps token ids to an addend.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
