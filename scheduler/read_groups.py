"""Which waiting prompts are read in one forward.

Pure; used on the engine's MLX thread. A forward reads all weights however few tokens it has, so
several short prompts cost less together: on the CPU a forward of the default model takes the time
of 20 tokens beyond its own, and packing wastes at most 7 for each prompt. Long
prompts fill a forward by themselves and are read alone, in chunks.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from models.piece_size import padded

LONGEST_MEMBER = 128
"""No longer prompt is read with others. A piece gets a copy of its whole prompt's keys and values:
with this and `MOST_GROUP_TOKENS` those take less than the memory plan keeps for a chunk."""

MOST_GROUP_TOKENS = 384
"""Tokens of a group, padding included."""


@dataclass(frozen=True)
class WaitingPrompt:
    """A prompt being read: how many tokens are left. Listed in order of arrival.

    Prompts of which nothing has been read are read together with those of the same `kind`; with
    None a prompt is read alone.
    """

    request_id: int
    tokens_left: int
    kind: Hashable = None


def group_of(first: WaitingPrompt, prompts: Sequence[WaitingPrompt], tokens: int) -> list[int]:
    """Requests to read in one forward, whole, beginning with `first`, which is one of `prompts`.

    `tokens` is the most that they may have together, padding included. The shortest come first,
    so the group is the largest that fits. Just `first` when it has no company.
    """
    members = [first.request_id]
    if not _may_join(first):
        return members
    room = min(tokens, MOST_GROUP_TOKENS) - padded(first.tokens_left)
    for prompt in sorted(prompts, key=lambda waiting: waiting.tokens_left):
        if prompt.request_id == first.request_id or prompt.kind != first.kind:
            continue
        room -= padded(prompt.tokens_left)
        if room < 0 or not _may_join(prompt):
            break
        members.append(prompt.request_id)
    return members


def _may_join(prompt: WaitingPrompt) -> bool:
    return prompt.kind is not None and prompt.tokens_left <= LONGEST_MEMBER
