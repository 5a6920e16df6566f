"""How likely each row's drafts are to be accepted.

Owns the running acceptance of every row in the speculative lane; runs on the engine's MLX
thread and touches no array. A calibrated drafter is believed at first: its confidences, scaled
as the request's sampling temperature asks, are probabilities. It was calibrated on other text,
so they are taken times what they prove to be worth on this one. An uncalibrated drafter is not
believed: what its drafts are granted follows from how many of them were accepted, by position.
Both are learned first of all rows and soon of the row itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from models.calibration import Calibration
from scheduler.acceptance_record import AcceptanceRecord
from scheduler.forecast_correction import ForecastCorrection

DOUBTED_RATIO = 0.7
"""From which ratio of passed to predicted drafts down a calibrated forecast is doubted: too far
from 1 for chance."""


class DraftForecast:
    """Survival of drafts by row. `threshold` over 0 is DeepSpec's rule: drafts before the first
    confidence under it are taken for certain, the others for hopeless."""

    def __init__(
        self, block_size: int, calibration: Calibration | None, threshold: float = 0.0
    ) -> None:
        self._block_size = block_size
        self._calibration = calibration
        self._threshold = threshold
        self._everyone = AcceptanceRecord(block_size)
        self._rows: dict[int, AcceptanceRecord] = {}
        self._correction = ForecastCorrection()
        self._corrections: dict[int, ForecastCorrection] = {}
        # What the calibration says of each row's latest draft.
        self._predicted: dict[int, list[float]] = {}

    @property
    def learns(self) -> bool:
        """Whether the forecast comes from what was accepted, so that only trying can change it:
        that of an uncalibrated drafter, and one that has proved much too good."""
        if self._threshold > 0:
            return False
        return self._calibration is None or self._correction.ratio < DOUBTED_RATIO

    def survival(
        self,
        request_id: int,
        confidence_logits: Sequence[float] | None,
        sampling_temperature: float,
    ) -> list[float]:
        """Chance that the row accepts its first k drafts, for k from 1. The temperature is 0
        for a row that takes the best token, whatever the request says."""
        if confidence_logits is not None and self._threshold > 0:
            bound = math.log(self._threshold) - math.log1p(-self._threshold)
            sure = 0
            while sure < len(confidence_logits) and confidence_logits[sure] >= bound:
                sure += 1
            return [1.0] * sure
        if confidence_logits is not None and self._calibration is not None:
            values: list[float] = self._calibration.survival(
                list(confidence_logits), sampling_temperature
            ).tolist()
            self._predicted[request_id] = values
            return self._correction_of(request_id).corrected(values)
        return self._record(request_id).survival()

    def observe(self, request_id: int, drafted: int, accepted: int) -> None:
        """Learn from one row's round: `accepted` of its latest draft's first `drafted` passed."""
        if (predicted := self._predicted.get(request_id)) is not None:
            self._correction.observe(predicted[:drafted], accepted)
            self._correction_of(request_id).observe(predicted[:drafted], accepted)
        self._everyone.observe(drafted, accepted)
        self._record(request_id).observe(drafted, accepted)

    def another_text(self) -> None:
        """All rows have left, and what comes is another text: begin with the fixed guess again.

        A guess that is too good costs a few rounds, one that is too poor is never corrected.
        """
        self._everyone = AcceptanceRecord(self._block_size)
        self._correction = ForecastCorrection()

    def forget(self, request_id: int) -> None:
        """The row has left."""
        self._rows.pop(request_id, None)
        self._corrections.pop(request_id, None)
        self._predicted.pop(request_id, None)

    def _correction_of(self, request_id: int) -> ForecastCorrection:
        correction = self._corrections.get(request_id)
        if correction is None:
            correction = ForecastCorrection(prior=self._correction)
            self._corrections[request_id] = correction
        return correction

    def _record(self, request_id: int) -> AcceptanceRecord:
        record = self._rows.get(request_id)
        if record is None:
            record = AcceptanceRecord(self._block_size, prior=self._everyone)
            self._rows[request_id] = record
        return record
