"""How far a calibration carries to conversations that it was not fitted on.

Pure NumPy; any thread. Conversations, not rounds, are left out in turn: rounds of one text are
alike, and a fit that has seen some of them knows the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.calibration import Calibration, CalibrationError, fit
from models.calibration_error import errors_by_position, noise_floor
from models.platt_scaling import PlattFit, fit_platt, platt_survival, sigmoid

FOLDS = 5

_Floats = NDArray[np.float64]
Predictor = Callable[[_Floats], _Floats]


class Sample(NamedTuple):
    """Rounds whose whole block was verified: `logits` [N, block] of the confidences, `accepted`
    [N] drafts, and the number of the `conversations` [N] that they are from."""

    logits: _Floats
    accepted: NDArray[np.int64]
    conversations: NDArray[np.int64]

    def where(self, chosen: NDArray[np.bool_]) -> Sample:
        """Some of the rounds."""
        return Sample(self.logits[chosen], self.accepted[chosen], self.conversations[chosen])


def fit_and_judge(sample: Sample, sampling_temperature: float, folds: int = FOLDS) -> PlattFit:
    """A Platt fit on all rounds, with the errors that such fits leave on other conversations.

    Raises `CalibrationError` for rounds of a single conversation, which cannot be judged.
    """
    scales, biases = fit_platt(sample.logits, sample.accepted)
    carried = carried_survival(sample, _platt, folds)
    return PlattFit(
        sampling_temperature=sampling_temperature,
        scales=scales,
        biases=biases,
        rounds=len(sample.accepted),
        conversations=len(np.unique(sample.conversations)),
        error_before=errors_by_position(
            np.cumprod(sigmoid(sample.logits), axis=1), sample.accepted
        ),
        error_temperatures_only=errors_by_position(
            carried_survival(sample, _temperatures, folds), sample.accepted
        ),
        error_after=errors_by_position(carried, sample.accepted),
        noise_floor=noise_floor(carried),
    )


def carried_survival(
    sample: Sample, learn: Callable[[Sample], Predictor], folds: int = FOLDS
) -> _Floats:
    """Survival [N, block] of every round, predicted from other conversations than its own."""
    names, place = np.unique(sample.conversations, return_inverse=True)
    if len(names) < 2:
        raise CalibrationError(
            "rounds of a single conversation cannot judge a calibration: give more prompts"
        )
    fold = np.random.default_rng(0).permutation(len(names)) % min(folds, len(names))
    survival = np.empty(sample.logits.shape)
    for number in range(min(folds, len(names))):
        left_out = fold[place] == number
        survival[left_out] = learn(sample.where(~left_out))(sample.logits[left_out])
    return survival


def _platt(sample: Sample) -> Predictor:
    scales, biases = fit_platt(sample.logits, sample.accepted)
    return lambda logits: platt_survival(logits, scales, biases)


def _temperatures(sample: Sample) -> Predictor:
    record: Calibration = fit(sample.logits, sample.accepted.tolist())
    return record.survival
