"""Which tokens a training step drafts behind, and what each draft position is judged by.

Pure NumPy; any thread. An anchor is a supervised token whose successor is supervised too. Its
block predicts the next `block_size` tokens; a position counts only while all before it do.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int32]
Booleans = NDArray[np.bool_]


class Blocks(NamedTuple):
    """The blocks behind `anchors` [S, N] of S sequences.

    `labels` [S, N, B] are the tokens to predict, `previous` [S, N, B] those before each of
    them, `places` [S, N, B] the indices of the latter, from whose target row a position's
    distribution comes. `counted` [S, N, B] says which positions enter the loss; those beyond
    the sequence have harmless values elsewhere.
    """

    anchors: Integers
    labels: Integers
    previous: Integers
    places: Integers
    counted: Booleans


def valid_anchors(supervised: Booleans) -> Booleans:
    """[S, L] to [S, L]: supervised, and followed by a supervised token."""
    valid = np.zeros_like(supervised)
    valid[:, :-1] = supervised[:, :-1] & supervised[:, 1:]
    return valid


def choose_anchors(
    supervised: Booleans, count: int, random: np.random.Generator
) -> tuple[Integers, Booleans]:
    """Up to `count` anchors of every sequence, uniform without replacement, in order.

    Returns anchors [S, count] and which of them are real; the others are 0.
    """
    valid = valid_anchors(supervised)
    # The `count` smallest of random keys; what is not valid comes last.
    keys = np.where(valid, random.random(valid.shape), 2.0)
    length = valid.shape[1]
    if count < length:
        chosen = np.argpartition(keys, count - 1, axis=1)[:, :count]
    else:
        chosen = np.broadcast_to(np.arange(count) % length, (len(valid), count)).copy()
    kept = np.take_along_axis(valid, chosen, axis=1) & (np.arange(count) < length)
    order = np.argsort(np.where(kept, chosen, length), axis=1, kind="stable")
    chosen = np.take_along_axis(chosen, order, axis=1)
    kept = np.take_along_axis(kept, order, axis=1)
    return np.where(kept, chosen, 0).astype(np.int32), kept


def make_blocks(
    tokens: Integers, supervised: Booleans, anchors: Integers, kept: Booleans, block_size: int
) -> Blocks:
    """Labels and masks of the blocks behind `anchors` [S, N] in `tokens` [S, L]."""
    length = tokens.shape[1]
    before = anchors[:, :, None] + np.arange(block_size, dtype=np.int32)
    after = before + 1
    rows = np.arange(len(tokens))[:, None, None]
    inside = after < length
    at = np.minimum(after, length - 1)
    places = np.minimum(before, length - 1)
    counted = np.logical_and.accumulate(inside & supervised[rows, at], axis=-1)
    return Blocks(
        anchors=anchors,
        labels=tokens[rows, at],
        previous=tokens[rows, places],
        places=places.astype(np.int32),
        counted=counted & kept[:, :, None],
    )
