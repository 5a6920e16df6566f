"""mlx-lm as a peer: its speculation with a draft model, and its plain decoding.

Own MLX on the calling thread. Its speculation takes any causal model with the target's
vocabulary as draft; without one that was made for the target, two drafts come from the target
itself: all of it, which is always right and as slow as the target, and the lower half of its
layers under its own head. Speculation there has no batches; plain decoding has.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, generate_step, speculative_generate_step
from mlx_lm.utils import load

from models.peers.messages import PeerSetting

DRAFT_TOKENS = (2, 4)


class DraftModelPeer:
    """`speculative_generate_step`, one request after the other."""

    batches = False

    def __init__(self, model: Path, draft_model: Path | None) -> None:
        self.name = f"mlx-lm {version('mlx-lm')} with a draft model"
        self._target: Any = load(str(model))[0]
        if draft_model is not None:
            self._drafts: dict[str, Any] = {draft_model.name: load(str(draft_model))[0]}
        else:
            self._drafts = {
                "the target itself": self._target,
                "half of its layers": lower_layers(self._target, len(self._target.layers) // 2),
            }
        self.settings = [
            PeerSetting(draft, count) for draft in self._drafts for count in DRAFT_TOKENS
        ]

    def decode(
        self,
        prompts: Sequence[list[int]],
        max_tokens: int,
        stop_tokens: Collection[int],
        setting: PeerSetting,
    ) -> list[list[int]]:
        """Greedy answers to all prompts."""
        draft = self._drafts[setting.draft]
        return [
            until_stop(
                speculative_generate_step(
                    mx.array(prompt),
                    self._target,
                    draft,
                    num_draft_tokens=setting.draft_tokens,
                    max_tokens=max_tokens,
                ),
                stop_tokens,
            )
            for prompt in prompts
        ]


class PlainPeer:
    """mlx-lm without drafts: its pipelined step for one row, its batch generator for several."""

    batches = True

    def __init__(self, model: Path) -> None:
        self.name = f"mlx-lm {version('mlx-lm')} without drafts"
        self._target: Any = load(str(model))[0]
        self.settings = [PeerSetting("no draft", 0)]

    def decode(
        self,
        prompts: Sequence[list[int]],
        max_tokens: int,
        stop_tokens: Collection[int],
        setting: PeerSetting,
    ) -> list[list[int]]:
        """Greedy answers to all prompts, together when there are several."""
        if len(prompts) == 1:
            steps = generate_step(mx.array(prompts[0]), self._target, max_tokens=max_tokens)
            return [until_stop(steps, stop_tokens)]
        stops = [[token] for token in stop_tokens]
        generator = BatchGenerator(self._target, stop_tokens=stops, max_tokens=max_tokens)
        found: dict[int, list[int]] = {
            number: [] for number in generator.insert(list(prompts), [max_tokens] * len(prompts))
        }
        while responses := generator.next_generated():
            for response in responses:
                found[response.uid].append(int(response.token))
        generator.close()
        return list(found.values())


def lower_layers(model: Any, count: int) -> Any:
    """A model of the first `count` layers of `model`, with its own norm and head. Weights are
    shared."""
    cut, inner = copy.copy(model), copy.copy(model.model)
    inner.layers = model.model.layers[:count]
    cut.model = inner
    return cut


def until_stop(steps: Iterable[Sequence[Any]], stop_tokens: Collection[int]) -> list[int]:
    """The tokens that a generator of mlx-lm's yields first in each of its tuples, up to and with
    the first stop token."""
    tokens: list[int] = []
    for token, *_ in steps:
        tokens.append(int(token))
        if tokens[-1] in stop_tokens:
            break
    return tokens
