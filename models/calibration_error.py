"""How far predicted acceptance is from what was accepted, and how much of that is chance.

Pure NumPy, free of mlx; any thread. The error is the expected calibration error over equal-width
bins, by draft position, of the probability that the first k drafts are accepted. It is never 0
on finitely many rounds: `noise_floor` says what a perfect prediction would show.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

BINS = 20
FLOOR_DRAWS = 40

_Floats = NDArray[np.float64]


def expected_calibration_error(predicted: _Floats, outcome: _Floats, bins: int = BINS) -> float:
    """Mean distance of prediction and frequency over equal-width bins, weighted by count."""
    clipped = np.clip(predicted, 1e-8, 1 - 1e-8)
    index = np.minimum((clipped * bins).astype(np.int64), bins - 1)
    gaps = np.bincount(index, weights=clipped - outcome, minlength=bins)
    return float(np.abs(gaps).sum() / len(clipped))


def errors_by_position(survival: ArrayLike, accepted: ArrayLike) -> list[float]:
    """The error at each draft position: `survival` [N, c] predicted, `accepted` [N] drafts."""
    predicted = np.asarray(survival, dtype=np.float64)
    lengths = np.asarray(accepted)
    return [
        expected_calibration_error(predicted[:, k], (lengths > k).astype(np.float64))
        for k in range(predicted.shape[1])
    ]


def noise_floor(survival: ArrayLike, draws: int = FLOOR_DRAWS, seed: int = 0) -> list[float]:
    """Mean error at each position if `survival` [N, c] were exactly right.

    Outcomes are drawn independently from the predictions themselves. Rounds of one conversation
    are not quite independent, so the true floor lies a little higher.
    """
    predicted = np.asarray(survival, dtype=np.float64)
    random = np.random.default_rng(seed)
    # One number a round: the first k drafts are accepted while it is under the k-th survival.
    drawn = [
        errors_by_position(predicted, (random.random((len(predicted), 1)) < predicted).sum(axis=1))
        for _ in range(draws)
    ]
    return [float(value) for value in np.mean(drawn, axis=0)]
