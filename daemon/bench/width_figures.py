"""How good the choice of width is: against brute force, and against not drafting at all.

Pure and free of mlx: it works on measured cost tables with the engine's own policy. Two
questions are asked for each profile of acceptance and each number of rows.

"Known": the policy knows the acceptance and chooses by one measurement; another measurement,
which it has not seen, tells the expected speed of its choice and of every fixed width.

"Learned": a run from nothing, in which acceptance is drawn token by token, the policy sees
only what was accepted, and rows park and probe as in the engine. Time passes as the second
measurement says.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import msgspec

from scheduler.acceptance_record import AcceptanceRecord, survival_of
from scheduler.parking import Parking
from scheduler.width_policy import CostTable, cheapest_width

BEST_FIXED_TARGET = 0.97
SERIAL_TARGET = 0.98
ROWS = (1, 4, 8)
LEARNED_TOKENS = 4096

# Acceptance of the first and of the last draft of a block, given that all before were accepted:
# what published DSpark drafters reach on these kinds of text. Zero is a drafter that never fits.
PROFILES: Mapping[str, tuple[float, float]] = {
    "chat": (0.735, 0.76),
    "code": (0.885, 0.85),
    "math": (0.905, 0.88),
    "zero": (0.0, 0.0),
}


class WidthFigure(msgspec.Struct, frozen=True, kw_only=True):
    """Of one profile and one number of rows. Speeds are tokens per second over all rows;
    `tau` is the tokens that a round of the chosen width commits for a row."""

    profile: str
    rows: int
    chosen: int
    tau: float
    speed: float
    best_width: int
    best_speed: float
    serial_speed: float
    learned_speed: float

    @property
    def over_best(self) -> float:
        """The chosen width's expected speed over the best fixed width's."""
        return self.speed / self.best_speed

    @property
    def over_serial(self) -> float:
        """The chosen width's expected speed over the serial lane's."""
        return self.speed / self.serial_speed

    @property
    def learned_over_serial(self) -> float:
        """The speed of a run that has to learn the acceptance over the serial lane's."""
        return self.learned_speed / self.serial_speed

    @property
    def learned_over_best(self) -> float:
        """The speed of a run that has to learn the acceptance over the best fixed width's."""
        return self.learned_speed / self.best_speed

    @property
    def reached(self) -> bool:
        """Whether every target is met."""
        return (
            self.over_best >= BEST_FIXED_TARGET
            and min(self.over_serial, self.learned_over_serial) >= SERIAL_TARGET
        )


def conditional_acceptance(profile: tuple[float, float], block: int) -> list[float]:
    """By position of a block, by straight line from the first to the last draft."""
    first, last = profile
    if block == 1:
        return [first]
    return [first + (last - first) * place / (block - 1) for place in range(block)]


def expected_speed(survival: Sequence[float], rows: int, width: int, costs: CostTable) -> float:
    """Tokens per second of `rows` equal rows that always verify `width` tokens."""
    return rows * (1.0 + sum(survival[: width - 1])) / costs.round_seconds(rows, width)


def figure(
    profile: str, rows: int, known: CostTable, actual: CostTable, *, tokens: int = LEARNED_TOKENS
) -> WidthFigure:
    """Choose by `known` and judge by `actual`; a learning run of `tokens` tokens for each row."""
    block = max(known.widths()) - 1
    conditional = conditional_acceptance(PROFILES[profile], block)
    survival = survival_of(conditional)
    choice = cheapest_width([survival] * rows, known)
    speeds = {
        width: expected_speed(survival, rows, width, actual)
        for width in actual.widths()
        if width <= block + 1
    }
    best = max(speeds, key=lambda width: speeds[width])
    return WidthFigure(
        profile=profile,
        rows=rows,
        chosen=choice.width,
        tau=1.0 + sum(survival[: choice.width - 1]),
        speed=speeds[choice.width],
        best_width=best,
        best_speed=speeds[best],
        serial_speed=speeds[1],
        learned_speed=learned_speed(conditional, rows, known, actual, tokens),
    )


def learned_speed(
    conditional: Sequence[float], rows: int, known: CostTable, actual: CostTable, tokens: int
) -> float:
    """Tokens per second of a run in which the policy has to find out what is accepted."""
    source = random.Random(f"{list(conditional)} {rows}")
    now = 0.0
    parking = Parking(lambda: now)
    everyone = AcceptanceRecord(len(conditional))
    records = [AcceptanceRecord(len(conditional), prior=everyone) for _ in range(rows)]
    produced, wanted = 0, tokens * rows
    expected_loss, draft_seconds = _draft_seconds(known, rows), _draft_seconds(actual, rows)
    while produced < wanted:
        if parking.parked and not parking.probing:
            produced += rows
            now += actual.serial_seconds(rows)
            continue
        if parking.parked:
            # Out of plain decode there is no draft yet: it is made on its own, then chosen from.
            now += draft_seconds
        width = cheapest_width([record.survival() for record in records], known).width
        parking.observe(width > 1, expected_loss)
        if parking.parked:
            produced += rows
            now += actual.serial_seconds(rows)
            continue
        for record in records:
            accepted = 0
            while accepted < width - 1 and source.random() < conditional[accepted]:
                accepted += 1
            record.observe(width - 1, accepted)
            everyone.observe(width - 1, accepted)
            produced += accepted + 1
        now += actual.verify_seconds(rows, width)
        # The lane drafts behind every round that it does not park after, used or not.
        now += draft_seconds
    return produced / now


def _draft_seconds(costs: CostTable, rows: int) -> float:
    """What a round takes beyond its verification, whatever its width."""
    widest = costs.widths()[-1]
    return costs.round_seconds(rows, widest) - costs.verify_seconds(rows, widest)
