"""Running acceptance by draft position, for drafters whose confidences are not calibrated.

Owns decayed counts; runs on the engine's step loop, without mlx or models. Raw confidences can
be far off, counts cannot: so until a drafter is calibrated, what it will be granted follows
from what it was. A row starts from the counts of all rows, and soon from its own.
"""

from __future__ import annotations

from collections.abc import Sequence

# A round counts half after this many rounds: long enough to be smooth, short enough to
# follow a text that turns from prose to code.
HALF_LIFE_ROUNDS = 32.0
# The weight, in rounds, of what is known before a position was ever tried.
PRIOR_ROUNDS = 4.0
PRIOR_ACCEPTANCE = 0.7


class AcceptanceRecord:
    """The chance that the draft at a position is accepted when all before it were."""

    def __init__(
        self,
        block_size: int,
        *,
        prior: AcceptanceRecord | None = None,
        half_life_rounds: float = HALF_LIFE_ROUNDS,
    ) -> None:
        """`prior` gives the acceptance to start from, as it stands now; a fixed guess if None."""
        self._decay = 0.5 ** (1.0 / half_life_rounds)
        self._prior = [PRIOR_ACCEPTANCE] * block_size if prior is None else prior.conditional()
        self._tried = [0.0] * block_size
        self._passed = [0.0] * block_size

    def observe(self, drafted: int, accepted: int) -> None:
        """One row's round: `drafted` drafts verified, the first `accepted` of them accepted.

        Positions behind the first refusal were not tried in the sense that counts here.
        """
        if not 0 <= accepted <= drafted <= len(self._tried):
            raise ValueError(
                f"{accepted} of {drafted} drafts accepted, with a block of {len(self._tried)}"
            )
        for position in range(min(accepted + 1, drafted)):
            self._tried[position] = self._tried[position] * self._decay + 1.0
            self._passed[position] = self._passed[position] * self._decay + (position < accepted)

    def conditional(self) -> list[float]:
        """Acceptance at each position, given that all before it were accepted."""
        return [
            (passed + PRIOR_ROUNDS * prior) / (tried + PRIOR_ROUNDS)
            for passed, tried, prior in zip(self._passed, self._tried, self._prior, strict=True)
        ]

    def survival(self) -> list[float]:
        """Chance that the first k drafts are all accepted, for k from 1."""
        return survival_of(self.conditional())


def survival_of(conditional: Sequence[float]) -> list[float]:
    """Running products."""
    products, product = [], 1.0
    for value in conditional:
        product *= value
        products.append(product)
    return products
