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
from scheduler.draft_trials import DraftTrials
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
    """Tokens per second of `rows` equal rows that always verify `width` tokens; 1 is the serial
    lane, which does not draft."""
    seconds = costs.serial_seconds(rows) if width == 1 else costs.round_seconds(rows, width)
    return rows * (1.0 + sum(survival[: width - 1])) / seconds


def figure(
    profile: str, rows: int, known: CostTable, actual: CostTable, *, tokens: int = LEARNED_TOKENS
) -> WidthFigure:
    """Choose by `known` and judge by `actual`; a learning run of `tokens` tokens for each row."""
    block = max(known.widths()) - 1
    conditional = conditional_acceptance(PROFILES[profile], block)
    survival = survival_of(conditional)
    drafting = cheapest_width([survival] * rows, known).width
    chosen = max((1, drafting), key=lambda width: expected_speed(survival, rows, width, known))
    speeds = {
        width: expected_speed(survival, rows, width, actual)
        for width in actual.widths()
        if width <= block + 1
    }
    best = max(speeds, key=lambda width: speeds[width])
    return WidthFigure(
        profile=profile,
        rows=rows,
        chosen=chosen,
        tau=1.0 + sum(survival[: chosen - 1]),
        speed=speeds[chosen],
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
    trials = DraftTrials(lambda: now)
    everyone = AcceptanceRecord(len(conditional))
    records = [AcceptanceRecord(len(conditional), prior=everyone) for _ in range(rows)]
    produced, wanted = 0, tokens * rows
    drafted = False
    while produced < wanted:
        if trials.waiting:
            produced += rows
            now += actual.serial_seconds(rows)
            drafted = False
            continue
        if not drafted:
            # Out of plain decode there is no draft yet: it is made on its own, then chosen from.
            now += actual.draft_seconds(rows)
        survival = [record.survival() for record in records]
        choice = cheapest_width(survival, known, must_draft=trials.parked)
        committed = rows
        for record, length in zip(records, choice.lengths, strict=True):
            accepted = 0
            while accepted < length and source.random() < conditional[accepted]:
                accepted += 1
            record.observe(length, accepted)
            everyone.observe(length, accepted)
            committed += accepted
        produced += committed
        # The lane drafts behind every round, used or not.
        now += actual.round_seconds(rows, choice.width)
        drafted = True
        trials.verified(choice, committed, known, believed=False)
    return produced / now
