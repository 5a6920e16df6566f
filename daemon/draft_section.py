"""What the configuration says of a drafter, and which one a model has when it says nothing.

Pure. Whatever is wrong raises `SparklaneError` with the code for configurations.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from daemon.exit_codes import ExitCode, SparklaneError

EMBEDDED_DRAFTER_OF = {"smollm2-135m": "smollm2-135m-drafter"}
"""Models that come with a drafter, by the names that both are found by."""


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
        Annotated[str, Meta(min_length=1)] | None,
        Meta(description="Drafter to pull by name, or its folder; `smollm2-135m` has its own."),
    ] = None
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
        Meta(
            description="`auto` drafts where it pays, `always` whatever it costs (whole blocks "
            "under `rejection`), `off` never."
        ),
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


def is_given(source: str, draft: DraftSection | None) -> bool:
    """Whether the model found by `source` has the drafter that it comes with, to be used where
    it pays: one that may be left out."""
    embedded = EMBEDDED_DRAFTER_OF.get(source)
    return (
        draft is not None
        and embedded is not None
        and draft.checkpoint == embedded
        and draft.speculation is SpeculationMode.AUTO
    )


def settled_draft(
    source: str, said: DraftSection | None, flags: Mapping[str, Any]
) -> DraftSection | None:
    """How the model found by `source` drafts: what the file says, under what the flags say.

    Where neither names a drafter, a model that comes with one has that. None = it has none.
    """
    embedded = EMBEDDED_DRAFTER_OF.get(source)
    off = {"speculation": SpeculationMode.OFF}
    if said is None and embedded is None and flags in ({}, off):
        # Without a drafter there is nothing to turn off.
        return None
    fields = (msgspec.structs.asdict(said) if said is not None else {}) | dict(flags)
    if fields.get("checkpoint") is None:
        fields["checkpoint"] = embedded
    try:
        draft = msgspec.convert(msgspec.to_builtins(fields), DraftSection)
    except msgspec.ValidationError as error:
        raise SparklaneError(
            f"the flags of drafting do not make a drafter: {error}", ExitCode.CONFIGURATION
        ) from error
    if draft.checkpoint is None and draft.speculation is not SpeculationMode.OFF:
        raise SparklaneError(
            f"the model {source} is to draft and no drafter is named; name its checkpoint "
            "(models.draft.checkpoint, --draft-model), or set speculation to off",
            ExitCode.CONFIGURATION,
        )
    return draft
