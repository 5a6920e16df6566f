"""How a lane speculates. Data only; read on the engine's MLX thread."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SpeculationSettings:
    """How the lane speculates.

    `always` never parks and never verifies a lone anchor while drafts are there: coupled
    acceptance takes the best width over 1, `rejection` whole blocks, because a fixed length
    leaves its distribution alone, and the best width would not. `cap` is the most drafts a row
    is given. `threshold` over 0 is DeepSpec's rule instead of the costs: drafts from the first
    confidence under it on are not verified.
    """

    always: bool = False
    cap: int | None = None
    threshold: float = 0.0
    rejection: bool = False

    @property
    def forced(self) -> bool:
        """Whether a fixed rule decides what is verified, and costs have no say."""
        return self.always or self.threshold > 0

    @property
    def fixed_lengths(self) -> bool:
        """Whether every draft that the forecast leaves over is verified."""
        return self.threshold > 0 or (self.always and self.rejection)
