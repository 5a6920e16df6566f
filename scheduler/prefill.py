"""Reading prompts: requests that have been submitted and do not decode yet.

Owns one one-row `RowBatch` for each prompt under way; runs on the engine's MLX thread. All
tokens of the prefix but the last are read here, chunk by chunk; the last one is the row's
first input in its lane, so no logits are ever computed for a prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from models.row_batch import RowBatch
from models.target import Target
from scheduler.messages import Submit
from scheduler.step_policy import WaitingPrompt


@dataclass(eq=False)
class Prompt:
    """A prefix being read: `read` of its `tokens` are in `batch`."""

    submit: Submit
    tokens: list[int]
    batch: RowBatch
    read: int = 0

    @property
    def tokens_left(self) -> int:
        """Tokens to read before the row can decode."""
        return len(self.tokens) - 1 - self.read


class PrefillQueue:
    """Prompts by order of arrival."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._prompts: dict[int, Prompt] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, submit: Submit) -> Prompt:
        """Take a request in. What it has produced already is read like its prompt."""
        batch = self._target.new_batch()
        batch.open_row()
        prompt = Prompt(submit, submit.prompt + submit.produced, batch)
        self._prompts[submit.request_id] = prompt
        return prompt

    def remove(self, request_id: int) -> Prompt | None:
        """Take a prompt out; None when it is not here."""
        return self._prompts.pop(request_id, None)

    def waiting(self) -> list[WaitingPrompt]:
        """What is left to read, by order of arrival."""
        return [WaitingPrompt(key, prompt.tokens_left) for key, prompt in self._prompts.items()]

    def read(self, request_id: int, tokens: int) -> Prompt:
        """Read the next `tokens` of a prompt and wait for the device."""
        prompt = self._prompts[request_id]
        chunk = prompt.tokens[prompt.read : prompt.read + tokens]
        self._target.prefill(mx.array([chunk], dtype=mx.int32), prompt.batch)
        prompt.read += tokens
        return prompt
