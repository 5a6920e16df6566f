"""Calibration of a drafter's confidences: the paper's fit, and the record of all fits.

Owns the record that is stored beside a drafter as `calibration.json`. Pure NumPy, free of mlx;
any thread. Sequential temperature scaling, the paper's method, fits one temperature per draft
position in order: with the earlier ones fixed, T_k is the value of a fixed grid that makes the
product of the calibrated confidences up to k agree best with "the first k drafts were
accepted". Order among confidences is preserved.

The grid (97 values, log-spaced from 0.2 to 5, with 1 among them), the 20 equal-width bins of
the error, and ties going to the temperature nearest 1 are our choices: the method leaves them
open.

A temperature leaves a confidence of one half at one half, and at equal confidence fewer drafts
are accepted when tokens are drawn at a higher sampling temperature. So a record may also hold
Platt fits, a bias beside each scale, one fit for each of several sampling temperatures; between
two of them scales and biases are interpolated. Raises `CalibrationError` for a record that
cannot be read or does not fit.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from models.calibration_error import expected_calibration_error
from models.platt_scaling import PlattFit, platt_survival, sigmoid

FILE_NAME = "calibration.json"
GRID: tuple[float, ...] = tuple(
    np.round(np.exp(np.linspace(np.log(0.2), np.log(5.0), 97)), 6).tolist()
)

_Floats = NDArray[np.float64]


class CalibrationError(Exception):
    """A stored calibration is unreadable, or belongs to a drafter of another block size."""


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """Temperatures by draft position, what they were fitted on, and the Platt fits, if any.

    `rounds` counts the verified rounds; the errors are expected calibration errors of the
    probability that the first k drafts are accepted, before and after, on those same rounds.
    `fits` are in the order of their sampling temperatures; without any, the temperatures count.
    """

    temperatures: list[float]
    rounds: int
    error_before: list[float]
    error_after: list[float]
    fits: list[PlattFit] = []

    def survival(self, logits: ArrayLike, sampling_temperature: float = 0.0) -> _Floats:
        """Chance that the first k drafts are accepted, from raw logits […, c]: […, c].

        `sampling_temperature` is the one that drafts and tokens are drawn at, 0 for argmax.
        """
        if self.fits:
            return platt_survival(logits, *self._between(sampling_temperature))
        z = np.asarray(logits, dtype=np.float64)
        temperatures = np.asarray(self.temperatures[: z.shape[-1]], dtype=np.float64)
        survival: _Floats = np.cumprod(sigmoid(z / temperatures), axis=-1, dtype=np.float64)
        return survival

    def _between(self, sampling_temperature: float) -> tuple[_Floats, _Floats]:
        """Scales and biases at a sampling temperature; beyond the outermost fits, theirs."""
        at = [fit.sampling_temperature for fit in self.fits]
        place = float(np.interp(sampling_temperature, at, np.arange(len(at), dtype=np.float64)))
        low = int(place)
        high, share = min(low + 1, len(at) - 1), place - low
        lower, upper = self.fits[low], self.fits[high]
        scales = (1 - share) * np.array(lower.scales) + share * np.array(upper.scales)
        biases = (1 - share) * np.array(lower.biases) + share * np.array(upper.biases)
        return scales, biases

    def save(self, folder: Path) -> None:
        """Store the record beside the drafter in `folder`, replacing an older one whole."""
        temporary = folder / f".{FILE_NAME}.{os.getpid()}"
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(self)) + b"\n")
        temporary.replace(folder / FILE_NAME)

    @classmethod
    def load(cls, folder: Path, block_size: int) -> Calibration | None:
        """The record beside the drafter in `folder`, or None where there is none."""
        path = folder / FILE_NAME
        try:
            record = msgspec.json.decode(path.read_bytes(), type=cls)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            raise CalibrationError(f"{path}: {error}. Calibrate the drafter again") from error
        temperatures = record.temperatures
        if len(temperatures) != block_size or any(not value > 0 for value in temperatures):
            raise CalibrationError(
                f"{path}: temperatures {temperatures} are not {block_size} positive numbers, one "
                "for each draft position. Calibrate the drafter again"
            )
        for one in record.fits:
            if (
                len(one.scales) != block_size
                or len(one.biases) != block_size
                or any(value < 0 for value in one.scales)
            ):
                raise CalibrationError(
                    f"{path}: scales {one.scales} and biases {one.biases} are not {block_size} "
                    "numbers each, the scales 0 or more. Calibrate the drafter again"
                )
        order = [one.sampling_temperature for one in record.fits]
        if any(not a < b for a, b in itertools.pairwise(order)):
            raise CalibrationError(
                f"{path}: fits at the sampling temperatures {order} do not rise. Calibrate the "
                "drafter again"
            )
        return record


def fit(logits: ArrayLike, accepted: Sequence[int], grid: Sequence[float] = GRID) -> Calibration:
    """Fit temperatures on rounds whose whole block was verified.

    `logits` [N, block] are raw confidence logits, `accepted` [N] the drafts accepted. Leave out
    rounds that a stop token or the budget ended: they say nothing of the later positions.
    """
    z = np.asarray(logits, dtype=np.float64)
    lengths = np.asarray(accepted)
    if z.ndim != 2 or len(z) == 0 or lengths.shape != (len(z),):
        raise ValueError(f"logits of shape {z.shape} do not go with {lengths.shape} lengths")
    # Tried from 1 outward, so that the first of equals is the one that changes least.
    candidates = sorted(grid, key=lambda value: abs(np.log(value)))
    calibrated, raw = np.ones(len(z)), np.ones(len(z))
    temperatures: list[float] = []
    before: list[float] = []
    after: list[float] = []
    for position in range(z.shape[1]):
        outcome = (lengths > position).astype(np.float64)
        raw = raw * sigmoid(z[:, position])
        before.append(expected_calibration_error(raw, outcome))
        trials = [calibrated * sigmoid(z[:, position] / value) for value in candidates]
        errors = [expected_calibration_error(trial, outcome) for trial in trials]
        best = int(np.argmin(errors))
        temperatures.append(float(candidates[best]))
        calibrated = trials[best]
        after.append(errors[best])
    return Calibration(
        temperatures=temperatures, rounds=len(z), error_before=before, error_after=after
    )
