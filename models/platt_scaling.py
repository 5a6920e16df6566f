"""Platt scaling of confidences by draft position: a scale and a bias, fitted by log loss.

Owns the fit that a calibration record holds for one sampling temperature. Pure NumPy, free of
mlx; any thread. A confidence speaks of a draft whose predecessors were accepted, so position k
is fitted on the rounds that reached it: a logistic regression, which has one optimum. That the
product of the positions up to k then agrees with "the first k drafts were accepted" is not
built in but measured, by the errors that are stored with the fit.

A scale is never negative, so the order among confidences is kept. Raises `ValueError` for
arrays that do not go together.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

# The weight, in rounds, of an untouched confidence (scale 1, bias 0): nothing among hundreds of
# rounds, and enough to keep a position that was never accepted, or always, finite.
PRIOR_ROUNDS = 1.0
MOST_STEPS = 60

_Floats = NDArray[np.float64]


class PlattFit(msgspec.Struct, frozen=True, kw_only=True):
    """Scales and biases by draft position, for requests of one sampling temperature.

    `rounds` and `conversations` were fitted on. The errors, by position, are of rounds that the
    judged fit had not seen, conversations being left out in turn: of raw confidences, of
    temperatures alone (the paper's method), and of this fit. `noise_floor` is what a perfect
    prediction would show with as many rounds.
    """

    sampling_temperature: float
    scales: list[float]
    biases: list[float]
    rounds: int
    conversations: int
    error_before: list[float]
    error_temperatures_only: list[float]
    error_after: list[float]
    noise_floor: list[float]


def platt_survival(logits: ArrayLike, scales: ArrayLike, biases: ArrayLike) -> _Floats:
    """Chance that the first k drafts are accepted, from raw logits […, c]: […, c]."""
    z = np.asarray(logits, dtype=np.float64)
    count = z.shape[-1]
    scaled = z * np.asarray(scales)[:count] + np.asarray(biases)[:count]
    survival: _Floats = np.cumprod(sigmoid(scaled), axis=-1, dtype=np.float64)
    return survival


def fit_platt(logits: ArrayLike, accepted: ArrayLike) -> tuple[list[float], list[float]]:
    """Scales and biases from rounds whose whole block was verified.

    `logits` [N, block] are raw confidence logits, `accepted` [N] the drafts accepted.
    """
    z = np.asarray(logits, dtype=np.float64)
    lengths = np.asarray(accepted)
    if z.ndim != 2 or len(z) == 0 or lengths.shape != (len(z),):
        raise ValueError(f"logits of shape {z.shape} do not go with {lengths.shape} lengths")
    scales: list[float] = []
    biases: list[float] = []
    for position in range(z.shape[1]):
        reached = lengths >= position
        confidence = z[reached, position]
        outcome = (lengths[reached] > position).astype(np.float64)
        scale, bias = _most_likely(np.stack([confidence, np.ones(len(confidence))]), outcome)
        if scale < 0:
            # The confidence says nothing here, or the wrong thing by chance.
            scale, (bias,) = 0.0, _most_likely(np.ones((1, len(confidence))), outcome)
        scales.append(float(scale))
        biases.append(float(bias))
    return scales, biases


def sigmoid(value: _Floats) -> _Floats:
    """The logistic function; under -700, where the exponential overflows, as good as 0."""
    result: _Floats = 1.0 / (1.0 + np.exp(-np.maximum(value, -700.0)))
    return result


def _most_likely(features: _Floats, outcome: _Floats) -> _Floats:
    """Weights [f] of `features` [f, N], the last of them constant, by Newton's method."""
    start = np.zeros(len(features))
    start[:-1] = 1.0
    weights = start.copy()
    loss = _loss(features, outcome, weights, start)
    for _ in range(MOST_STEPS):
        chance = sigmoid(weights @ features)
        gradient = features @ (chance - outcome) + PRIOR_ROUNDS * (weights - start)
        curvature = (features * (chance * (1 - chance))) @ features.T
        curvature += PRIOR_ROUNDS * np.eye(len(weights))
        step = np.linalg.solve(curvature, gradient)
        # A whole step can overshoot where the curve is flat; some part of it always helps.
        trials = (weights - step * 0.5**halving for halving in range(30))
        better = ((trial, _loss(features, outcome, trial, start)) for trial in trials)
        found = next(((trial, value) for trial, value in better if value < loss), None)
        if found is None:
            break
        settled = loss - found[1] < 1e-10 * loss
        weights, loss = found
        if settled:
            break
    return weights


def _loss(features: _Floats, outcome: _Floats, weights: _Floats, prior: _Floats) -> float:
    """Negative log likelihood, and the prior's share."""
    logit = weights @ features
    surprise = np.logaddexp(0.0, logit) - outcome * logit
    return float(0.5 * PRIOR_ROUNDS * np.square(weights - prior).sum() + surprise.sum())
