"""Reading prompts: requests that have been submitted and do not decode yet.

Owns the one-row caches of each prompt under way; runs on the engine's MLX thread. All
tokens of the prefix but the last are read here, chunk by chunk; the last one is the row's
first input in its lane, so no logits are ever computed for a prompt. Prompts that are read in
one forward keep rows of their own, so that one may go at any time. A forward that fails for
several raises `GroupFailed`, and they are read one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from models.decode_rows import DecodeRows
from scheduler.read_groups import WaitingPrompt
from scheduler.row import Row


class GroupFailed(Exception):
    """Prompts could not be read together. None of them has been read."""


@dataclass(eq=False)
class Prompt:
    """A prefix being read: `read` of its `tokens` are in `rows`, in one forward with others unless
    it is to be read `apart`."""

    row: Row
    tokens: list[int]
    new_rows: Callable[[], DecodeRows]
    rows: DecodeRows
    read: int = 0
    apart: bool = False

    @property
    def waiting(self) -> WaitingPrompt:
        """What the policy needs to know."""
        kind = None if self.apart or self.read else type(self.rows)
        return WaitingPrompt(self.row.request_id, self.tokens_left, kind)

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

    def add(self, row: Row, tokens: list[int], new_rows: Callable[[], DecodeRows]) -> Prompt:
        """Take in the prefix `tokens` of `row`, to be read into what `new_rows` gives."""
        prompt = Prompt(row, tokens, new_rows, _opened(new_rows))
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
        return [prompt.waiting for prompt in self._prompts.values()]

    def read(self, request_id: int, tokens: int) -> Prompt:
        """Read the next `tokens` of a prompt and wait for the device."""
        prompt = self._prompts[request_id]
        chunk = prompt.tokens[prompt.read : prompt.read + tokens]
        prompt.rows.prefill(mx.array([chunk], dtype=mx.int32))
        prompt.read += tokens
        return prompt

    def read_together(self, request_ids: Sequence[int]) -> list[Prompt]:
        """Read prompts of one kind, of which nothing has been read, in one forward and wait.

        Raises:
            GroupFailed: they cannot be read so; each will be read apart.
        """
        prompts = [self._prompts[request_id] for request_id in request_ids]
        first, *others = (prompt.rows for prompt in prompts)
        try:
            first.prefill_with(others, [prompt.tokens[:-1] for prompt in prompts])
        except (ValueError, TypeError) as error:
            for prompt in prompts:
                # What the forward left in the old rows is not known.
                prompt.rows = _opened(prompt.new_rows)
                prompt.apart = True
            raise GroupFailed(f"{len(prompts)} prompts cannot be read together: {error}") from error
        for prompt in prompts:
            prompt.read = len(prompt.tokens) - 1
        return prompts


def _opened(new_rows: Callable[[], DecodeRows]) -> DecodeRows:
    rows = new_rows()
    rows.open_row()
    return rows
