"""What calibrated confidences are worth on the text at hand: passed drafts over predicted ones.

Owns decayed sums; runs on the engine's step loop, without mlx or models. Confidences are
calibrated on some text, and on another all of them may be too high. So drafts that passed are
counted against the chances that the forecast gave them, and where fewer passed than chance
explains, every chance is taken times what remains of the ratio. A forecast that is right is left
alone: to follow the noise of single blocks would cost what drafting saves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

# Predicted drafts after which a trial counts half: a few rounds, because a forecast that is
# wrong costs time in each.
HALF_LIFE_DRAFTS = 32.0
# The weight, in drafts, of what is known before any was tried.
PRIOR_DRAFTS = 4.0
# Standard deviations of what passed that count as chance.
CHANCE_DEVIATIONS = 2.0


class ForecastCorrection:
    """The ratio of drafts that passed to those that were predicted to. `prior` is what to start
    from, as it stands now; nothing but belief if None."""

    def __init__(self, prior: ForecastCorrection | None = None) -> None:
        self._tried = self._predicted = self._passed = PRIOR_DRAFTS
        if prior is not None:
            self._tried, self._predicted = prior._tried, prior._predicted
            self._passed = prior._passed

    @property
    def ratio(self) -> float:
        """What a predicted chance is to be multiplied by, 1 at most."""
        variance = self._passed * max(1.0 - self._passed / self._tried, 0.0)
        likely = self._passed + CHANCE_DEVIATIONS * math.sqrt(variance)
        return min(likely / self._predicted, 1.0)

    def observe(self, survival: Sequence[float], accepted: int) -> None:
        """One row's round: of drafts with the predicted `survival`, the first `accepted` passed.

        Drafts behind the first refusal were not tried.
        """
        if not 0 <= accepted <= len(survival):
            raise ValueError(f"{accepted} drafts accepted of {len(survival)}")
        for place, chance in enumerate(_conditional(survival[: accepted + 1])):
            # By what was predicted, not by trials: drafts that were given no chance to begin
            # with say nothing of the others, and must not make them forgotten.
            decay = 0.5 ** (chance / HALF_LIFE_DRAFTS)
            self._tried = self._tried * decay + 1.0
            self._predicted = self._predicted * decay + chance
            self._passed = self._passed * decay + (place < accepted)

    def corrected(self, survival: Sequence[float]) -> list[float]:
        """The chance that the first k drafts are all accepted, for k from 1, as it is here."""
        ratio, products, product = self.ratio, [], 1.0
        for chance in _conditional(survival):
            product *= chance * ratio
            products.append(product)
        return products


def _conditional(survival: Sequence[float]) -> list[float]:
    """The chance of each draft when all before it were accepted."""
    before = [1.0, *survival]
    return [now / past if past > 0 else 0.0 for past, now in zip(before, survival, strict=False)]
