"""Reading prompts: requests that have been submitted and do not decode yet.

Owns the one-row caches of each prompt under way; runs on the engine's MLX thread. All
tokens of the prefix but the last are read here, chunk by chunk; the last one is the row's
first input in its lane, so no logits are ever computed for a prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from models.decode_rows import DecodeRows
from scheduler.row import Row
from scheduler.step_policy import WaitingPrompt


@dataclass(eq=False)
class Prompt:
    """A prefix being read: `read` of its `tokens` are in `rows`."""

    row: Row
    tokens: list[int]
    rows: DecodeRows
    read: int = 0

    @property
    def tokens_left(self) -> int:
        """Tokens to read before the row can decode."""
        return len(self.tokens) - 1 - self.read


class PrefillQueue:
    """Prompts by order of arrival."""

    def __init__(self) -> None:
        self._prompts: dict[int, Prompt] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, row: Row, tokens: list[int], rows: DecodeRows) -> Prompt:
        """Take in the prefix `tokens` of `row`, to be read into `rows`, which has none yet."""
        rows.open_row()
        prompt = Prompt(row, tokens, rows)
        self._prompts[row.request_id] = prompt
        return prompt

    def remove(self, request_id: int) -> Prompt | None:
        """Take a prompt out; None when it is not here."""
        return self._prompts.pop(request_id, None)

    def needs(self) -> list[int]:
        """Tokens that each may come to hold."""
        return [prompt.row.need for prompt in self._prompts.values()]

    def waiting(self) -> list[WaitingPrompt]:
        """What is left to read, by order of arrival."""
        return [WaitingPrompt(key, prompt.tokens_left) for key, prompt in self._prompts.items()]

    def read(self, request_id: int, tokens: int) -> Prompt:
        """Read the next `tokens` of a prompt and wait for the device."""
        prompt = self._prompts[request_id]
        chunk = prompt.tokens[prompt.read : prompt.read + tokens]
        prompt.rows.prefill(mx.array([chunk], dtype=mx.int32))
        prompt.read += tokens
        return prompt
