"""What a benchmark and the process of a peer say to each other, as lines of JSON.

Owns nothing and runs nowhere; both processes import this module, so it must stay free of mlx.
The peer speaks first, with `PeerReady`; then every `PeerAsk` gets one `PeerAnswer`.
"""

from __future__ import annotations

import msgspec


class PeerSetting(msgspec.Struct, frozen=True):
    """How a peer drafts: what with, in words, and how many tokens in a round (0 = not at all)."""

    draft: str
    draft_tokens: int

    def __str__(self) -> str:
        return f"{self.draft}, {self.draft_tokens} at a time" if self.draft_tokens else self.draft


class PeerReady(msgspec.Struct, frozen=True, kw_only=True):
    """The peer has loaded. `batches` tells whether it decodes rows together; else its requests
    run one after the other. `settings` are those worth trying."""

    name: str
    batches: bool
    settings: list[PeerSetting]


class PeerAsk(msgspec.Struct, frozen=True, kw_only=True):
    """Greedy answers to `prompts`, `rows` at a time where the peer can; each ends after
    `max_tokens` tokens or behind the first of `stop_tokens`."""

    prompts: list[list[int]]
    rows: int
    max_tokens: int
    stop_tokens: list[int]
    setting: PeerSetting


class PeerAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of every answer, and the time that all took, prompts read included: by the wall
    clock, and of all processors together."""

    tokens: list[list[int]]
    seconds: float
    processor_seconds: float
