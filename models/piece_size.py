"""The pieces that prompts are cut into to be read together: how long, and what that adds.

Pure and free of mlx, so that the step policy counts with what the forward will do.
"""

from __future__ import annotations

PIECE_TOKENS = 8
"""Tokens of a piece. Only a prompt's last piece is filled up, so small ones waste little; what a
forward costs on the CPU follows its tokens, filled up, with pieces of 8 as well as of 30."""


def padded(tokens: int) -> int:
    """Tokens that a prompt of `tokens` takes in pieces."""
    return -(-tokens // PIECE_TOKENS) * PIECE_TOKENS
