"""How many drafts each row gets verified: the choice of width by measured cost.

Pure; runs on the engine's step loop, without mlx or models. Two choices live here.

`cheapest_width` is for coupled acceptance, where the output cannot depend on how much is
verified: it searches the whole table, because measured costs are jagged (on one GPU a width of
8 is cheaper than one of 3). A verify forward is a rectangle of rows and width, so a row that is
given fewer drafts than its neighbours saves nothing: all rows get the width, cut only by what
each may still produce. Width 1 competes as a round of the lane, which drafts whatever its width;
whether the lane pays against plain decode is another question (`scheduler.draft_trials`).

`early_stop_lengths` is Algorithm 1 of the DSpark paper, for rejection sampling, where whether a
draft is verified must not depend on that draft or on later ones: it admits drafts in order of
survival and stops at the first that does not pay.

Survival a[r][j] is the chance that row r accepts its first j + 1 drafts.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

Survival = Sequence[float]


class CostTable(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds, measured on this machine, of the parts of a round at one context depth.

    `verify` maps (rows, width) to the seconds of a target forward, the anchor included in the
    width: (rows, 1) is a serial step. `draft` maps rows to the seconds of a draft.
    """

    verify: Mapping[tuple[int, int], float]
    draft: Mapping[int, float]

    def widths(self) -> list[int]:
        """Every width that was measured, ascending."""
        return sorted({width for _, width in self.verify})

    def serial_seconds(self, rows: int) -> float:
        """A serial step of `rows` rows."""
        return self.verify_seconds(rows, 1)

    def round_seconds(self, rows: int, width: int) -> float:
        """A whole round: draft and verify. A round of width 1 drafts, too: its successor's draft
        is made before anybody can tell what it is worth."""
        return self.draft_seconds(rows) + self.verify_seconds(rows, width)

    def draft_seconds(self, rows: int) -> float:
        """A draft of `rows` rows."""
        return _at(self.draft, rows)

    def verify_seconds(self, rows: int, width: int) -> float:
        """Of a measured `width`; between measured rows by straight line, beyond them in
        proportion."""
        column = {r: seconds for (r, w), seconds in self.verify.items() if w == width}
        if not column:
            raise ValueError(f"width {width} was not measured; measured are {self.widths()}")
        return _at(column, rows)


class WidthChoice(msgspec.Struct, frozen=True, kw_only=True):
    """`width` tokens verified for every row, anchor included; `lengths[r]` drafts of row r.

    `expected_tokens` is what the round commits on average over all rows. Width 1 means that these
    drafts are not worth verifying.
    """

    width: int
    lengths: list[int]
    expected_tokens: float

    @classmethod
    def of(
        cls, survival: Sequence[Survival], lengths: list[int], *, width: int | None = None
    ) -> WidthChoice:
        """The choice of `lengths`, in a rectangle as wide as they need unless `width` is given."""
        gains = (sum(row[:length]) for row, length in zip(survival, lengths, strict=True))
        return cls(
            width=1 + max(lengths) if width is None else width,
            lengths=lengths,
            expected_tokens=len(lengths) + sum(gains),
        )


def cheapest_width(
    survival: Sequence[Survival],
    costs: CostTable,
    *,
    limits: Sequence[int] | None = None,
    widths: Iterable[int] | None = None,
    must_draft: bool = False,
) -> WidthChoice:
    """The width with the most expected tokens per second, 1 included; where none is faster than
    plain decode, the one that loses the least against it, because other blocks may do better.

    `limits[r]` is the most drafts that row r can use: what is left of its budget, less the
    token it gets anyway. `widths` restricts the search; `must_draft` leaves width 1 out as long as
    some row has drafts that it can use. Of equals the narrowest wins.
    """
    if not survival:
        raise ValueError("a width needs at least one row")
    rows = len(survival)
    bounds = [len(row) for row in survival] if limits is None else [max(n, 0) for n in limits]
    choices = []
    for width in sorted({1, *(costs.widths() if widths is None else widths)}):
        if width - 1 > max(len(row) for row in survival):
            break
        # A wide rectangle can be cheaper than a narrow one, so the width may exceed the limits.
        lengths = [
            min(width - 1, len(row), bound) for row, bound in zip(survival, bounds, strict=True)
        ]
        choices.append(WidthChoice.of(survival, lengths, width=width))
    drafting = [choice for choice in choices if any(choice.lengths)]
    allowed = drafting if must_draft and drafting else choices
    seconds = {choice.width: costs.round_seconds(rows, choice.width) for choice in allowed}
    fastest = max(allowed, key=lambda choice: choice.expected_tokens / seconds[choice.width])
    serial = rows / costs.serial_seconds(rows)
    if fastest.expected_tokens >= serial * seconds[fastest.width]:
        return fastest
    return max(allowed, key=lambda choice: choice.expected_tokens - serial * seconds[choice.width])


def early_stop_lengths(
    survival: Sequence[Survival], rounds_per_second: Callable[[int], float]
) -> tuple[list[int], float]:
    """Algorithm 1: drafts of each row, and the expected tokens per second.

    `rounds_per_second(tokens)` is the engine's speed with that many tokens to verify, anchors
    included. Equal survivals are admitted by row and position, so that a row's drafts are
    always a prefix.
    """
    candidates = sorted(
        (-value, row, position + 1)
        for row, values in enumerate(survival)
        for position, value in enumerate(values)
        if value > 0
    )
    lengths, tokens, expected = [0] * len(survival), len(survival), float(len(survival))
    best = expected * rounds_per_second(tokens)
    for negated, row, length in candidates:
        tokens, expected = tokens + 1, expected - negated
        speed = expected * rounds_per_second(tokens)
        if speed <= best:
            break
        lengths[row], best = length, speed
    return lengths, best


def _at(points: Mapping[int, float], rows: int) -> float:
    """The value at `rows`, by straight line between the nearest measured row counts."""
    known = sorted(points)
    place = bisect.bisect_left(known, rows)
    if place < len(known) and known[place] == rows:
        return points[rows]
    if place == 0:
        return points[known[0]]
    if place == len(known):
        return points[known[-1]] * rows / known[-1]
    low, high = known[place - 1], known[place]
    share = (rows - low) / (high - low)
    return points[low] + share * (points[high] - points[low])
