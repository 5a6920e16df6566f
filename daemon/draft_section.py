"""What the configuration says of a drafter. Data only."""

from __future__ import annotations

import enum
from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class SpeculationMode(enum.StrEnum):
    """Who decides whether drafts are verified."""

    OFF = "off"
    AUTO = "auto"
    ALWAYS = "always"


class AcceptanceRule(enum.StrEnum):
    """How drafts are accepted."""

    COUPLED = "coupled"
    REJECTION = "rejection"


class DraftSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model's drafter, `[models.draft]`."""

    checkpoint: Annotated[
        str, Meta(description="Drafter to pull by name, or path of its folder.", min_length=1)
    ]
    bits: Annotated[
        Literal[4, 8, 16] | None,
        Meta(description="Bits of the drafter's weights; 16 on the CPU and 4 on a GPU by default."),
    ] = None
    group_size: Annotated[
        Literal[32, 64, 128], Meta(description="Weights that share a scale when quantized.")
    ] = 64
    own_head: Annotated[bool, Meta(description="Keep the drafter's own embedding and head.")] = (
        False
    )
    shortlist: Annotated[
        bool, Meta(description="Draft from the shortlist beside the drafter, where one is stored.")
    ] = True
    speculation: Annotated[
        SpeculationMode,
        Meta(description="`auto` drafts where it pays, `always` whatever it costs, `off` never."),
    ] = SpeculationMode.AUTO
    maximum_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Most draft tokens of a row and round; the drafter's block by default."),
    ] = None
    confidence_threshold: Annotated[
        Annotated[float, Meta(ge=0.0, lt=1.0)],
        Meta(description="Over 0: verify drafts up to the first less confident one."),
    ] = 0.0
    acceptance: Annotated[
        AcceptanceRule,
        Meta(description="`coupled` gives the serial lane's own text, `rejection` its odds."),
    ] = AcceptanceRule.COUPLED
