"""A request while it decodes, and what its tokens look like on the way out.

Owned by one lane at a time; used on the engine's MLX thread. Cannot fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from models.sampling import RowSampling, token_logprobs
from scheduler.messages import FinishReason, Output, Submit, TokenLogprobs


@dataclass(eq=False)
class Row:
    """One request in a lane.

    `position` is the index, in prompt + generated, of the next token to be chosen;
    `launched` counts generated tokens including those still on the device.
    """

    request_id: int
    sampling: RowSampling
    position: int
    produced: int
    maximum: int
    stop_tokens: frozenset[int]
    logprobs: int | None
    launched: int = 0
    live: bool = True

    @property
    def need(self) -> int:
        """Tokens that the row may come to hold: its prompt and its budget."""
        return self.position - self.produced + self.maximum

    @classmethod
    def of(cls, submit: Submit, vocabulary_size: int) -> Row:
        """The row of a request whose prompt and produced tokens have been read."""
        produced = len(submit.produced)
        return cls(
            request_id=submit.request_id,
            sampling=RowSampling(submit.sampling, vocabulary_size, submit.produced),
            position=len(submit.prompt) + produced,
            produced=produced,
            launched=produced,
            maximum=submit.max_tokens,
            stop_tokens=frozenset(submit.stop_tokens),
            logprobs=submit.logprobs,
        )

    def take(self, tokens: Sequence[int], details: Sequence[TokenLogprobs] | None = None) -> Output:
        """Count `tokens` as produced, up to a stop token or the budget, and say so."""
        finish = None
        kept = 0
        for token in tokens:
            kept += 1
            self.produced += 1
            if token in self.stop_tokens:
                finish = FinishReason.STOP
            elif self.produced >= self.maximum:
                finish = FinishReason.LENGTH
            if finish is not None:
                break
        wanted = list(details[:kept]) if details is not None else None
        return Output(self.request_id, list(tokens[:kept]), finish, wanted)


class StepLogprobs:
    """The logprobs of one step, on the device until `read`; for rows that asked only."""

    def __init__(self, rows: Sequence[Row], logits: mx.array, tokens: mx.array) -> None:
        """`logits` [R, W, V], `tokens` [R, W] as chosen or accepted."""
        self._rows = rows
        self._width = tokens.shape[1]
        wanted = [row.logprobs for row in rows if row.logprobs is not None]
        self.arrays: tuple[mx.array, ...] = ()
        if wanted:
            flat = logits.reshape(-1, logits.shape[-1])
            self.arrays = token_logprobs(flat, tokens.reshape(-1), max(wanted))

    def read(self) -> list[list[TokenLogprobs] | None]:
        """One list, of W entries, for each row that asked; None for the others."""
        if not self.arrays:
            return [None] * len(self._rows)
        # mlx types a list of any depth by one recursive union.
        read: list[Any] = [array.tolist() for array in self.arrays]
        chosen, alternatives, values = read
        found: list[list[TokenLogprobs] | None] = []
        for index, row in enumerate(self._rows):
            places = range(index * self._width, (index + 1) * self._width)
            found.append(
                None
                if row.logprobs is None
                else [
                    TokenLogprobs(
                        chosen[place],
                        alternatives[place][: row.logprobs],
                        values[place][: row.logprobs],
                    )
                    for place in places
                ]
            )
        return found
