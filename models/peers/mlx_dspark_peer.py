"""mlx-dspark as a peer: another program for the same drafters.

Owns MLX on the calling thread. Importing this module fails with `ImportError` where mlx-dspark
is not installed. It knows no shortlists, so it drafts over the whole vocabulary. Its drafter is
loaded unquantized and computes in the target's float32, which is what suits the CPU; its lookup
drafts stay on, as they are by default. Several rows go through its batch engine, where its target
allows that.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_dspark
from mlx_dspark.batch_engine import batch_spec_generate, batch_spec_supported

from models.peers.messages import PeerSetting

DRAFT_TOKENS = (2, 4, 7)


class DsparkPeer:
    """Its single-row loop for one request, its batch engine for several."""

    def __init__(self, model: Path, drafter: Path) -> None:
        self.name = f"mlx-dspark {version('mlx-dspark')}"
        self._target, self._tokenizer = mlx_dspark.load_target(str(model), require_tap=True)
        loaded: Any = mlx_dspark.load_drafter(str(drafter), quantize=False)
        self._drafter, configuration = loaded
        self._drafter.set_dtype(mx.float32)
        mx.eval(self._drafter.parameters())
        self.batches = bool(batch_spec_supported(self._target))
        block = int(configuration.block_size)
        counts = sorted({min(count, block) for count in DRAFT_TOKENS})
        self.settings = [PeerSetting("the same drafter", count) for count in counts]

    def decode(
        self,
        prompts: Sequence[list[int]],
        max_tokens: int,
        stop_tokens: Collection[int],
        setting: PeerSetting,
    ) -> list[list[int]]:
        """Greedy answers to all prompts. It knows the stop tokens from its tokenizer; its last
        round may go over the budget, and what is over is cut off."""
        options: dict[str, Any] = {
            "max_new_tokens": max_tokens,
            "max_draft_tokens": setting.draft_tokens,
        }
        pair = (self._target, self._tokenizer, self._drafter)
        if len(prompts) > 1 and self.batches:
            found = batch_spec_generate(*pair, list(prompts), **options)
        else:
            found = [
                mlx_dspark.speculative_generate(*pair, prompt_ids=prompt, **options)
                for prompt in prompts
            ]
        return [list(result.token_ids[:max_tokens]) for result in found]
