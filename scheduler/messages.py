"""The words that the daemon and an engine say to each other.

Owns nothing and runs nowhere: frozen records, encoded as msgpack frames by
`scheduler.frames`. Both processes import this module, so it must stay free of mlx.
Decoding fails with `msgspec.ValidationError` when the two ends are of different versions.
"""

from __future__ import annotations

import enum

import msgspec

from models.sampling_settings import Sampling
from scheduler.ledger import CacheRoom

PROTOCOL_VERSION = 1


class FinishReason(enum.StrEnum):
    """Why a request ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


class StepKind(enum.StrEnum):
    """What one turn of the step loop did."""

    PREFILL = "prefill"
    SERIAL = "serial"
    SPECULATIVE = "speculative"


class LaneChoice(enum.StrEnum):
    """Which lane a request may use: `auto` lets the engine decide."""

    AUTO = "auto"
    SERIAL = "serial"


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    """A request as a replayable prefix: `prompt` + `produced`, and how to go on.

    `max_tokens` counts all generated tokens, `produced` included. `logprobs` is the number
    of alternatives wanted beside each chosen token (0 = the chosen one only), None = none.
    """

    request_id: int
    prompt: list[int]
    produced: list[int]
    sampling: Sampling
    max_tokens: int
    stop_tokens: list[int]
    logprobs: int | None = None
    lane: LaneChoice = LaneChoice.AUTO


class DraftConfigure(msgspec.Struct, frozen=True, kw_only=True):
    """How to speculate. `drafter` is a folder.

    `bits` is 4, 8 or 16; None suits the machine: 16 on the CPU, 4 on a GPU. `own_head` keeps the
    drafter's own embedding and head; `shortlist` uses the one stored beside it, where there is
    one. `always` never parks; `maximum_draft_tokens` caps a row's drafts; `confidence_threshold`
    over 0 replaces the choice by cost; `rejection` is the other acceptance rule. Measured costs
    are kept in `costs_folder`; where they are unknown, an engine that chooses by them measures
    them between requests.
    """

    drafter: str
    bits: int | None = None
    group_size: int = 64
    own_head: bool = False
    shortlist: bool = True
    always: bool = False
    maximum_draft_tokens: int | None = None
    confidence_threshold: float = 0.0
    rejection: bool = False
    costs_folder: str | None = None


class Configure(msgspec.Struct, frozen=True, kw_only=True, tag="configure"):
    """The first frame to an engine: what to load and the room it has.

    `checkpoint` is a folder. `precision` is auto, float32, bfloat16, float16, 8-bit or 4-bit.
    `prefill_milliseconds` is the time budget of one prefill chunk while rows are decoding.
    `room` is what the caches may take; None = no bound is known.
    """

    protocol: int = PROTOCOL_VERSION
    checkpoint: str
    precision: str = "auto"
    maximum_rows: int = 8
    prefill_milliseconds: float = 100.0
    draft: DraftConfigure | None = None
    room: CacheRoom | None = None


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Forget a request. An id that the engine does not know is not an error."""

    request_id: int


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Stop after the step in flight and exit with code 0."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probabilities under the target's unmodified distribution."""

    logprob: float
    top_tokens: list[int]
    top_logprobs: list[float]


class Speculation(msgspec.Struct, frozen=True, array_like=True):
    """What speculation did for one request: rounds, tokens drafted for it and accepted."""

    rounds: int
    drafted: int
    accepted: int


class RoundRecord(msgspec.Struct, frozen=True, array_like=True):
    """One speculative round over all its rows. `width` counts the anchor.

    `accepted_by_position` counts rows whose draft at that place was accepted; `draft_seconds`
    is the draft's share of the step, by its measured cost.
    """

    width: int
    drafted: int
    accepted: int
    accepted_by_position: list[int]
    draft_seconds: float


class Output(msgspec.Struct, frozen=True, array_like=True):
    """What one step produced for one request. A stop token is included in `tokens`.

    `speculation` comes with the last output of a request that was in the speculative lane.
    """

    request_id: int
    tokens: list[int]
    finish: FinishReason | None = None
    logprobs: list[TokenLogprobs] | None = None
    speculation: Speculation | None = None


class Memory(msgspec.Struct, frozen=True, array_like=True):
    """Bytes, as the engine's allocator counts them."""

    active: int
    cache: int
    peak: int


class MeasuringProgress(msgspec.Struct, frozen=True, array_like=True):
    """How far an engine is in measuring its costs: forwards timed, of how many."""

    timed: int
    total: int


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """The engine is alive and has got this far: `stage` is load, compile or warm."""

    stage: str
    protocol: int = PROTOCOL_VERSION


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The engine can take requests. Sizes in bytes, lengths in tokens."""

    protocol: int = PROTOCOL_VERSION
    backend: str
    device: str
    precision: str
    blas: str
    vocabulary_size: int
    context_length: int
    maximum_rows: int
    kv_bytes_per_token: int
    weight_bytes: int
    load_seconds: float
    drafter_bytes: int = 0
    draft_context_bytes_per_token: int = 0


class Step(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """The record of one step. `tokens` counts input tokens; `started` lists the requests
    whose prefill began with it; `parked_rows` could draft and do not, because it does not
    pay, and `probe_paid` tells how a probe ended that was part of the step."""

    kind: StepKind
    seconds: float
    rows: int
    tokens: int
    outputs: list[Output] = []
    started: list[int] = []
    round: RoundRecord | None = None
    parked_rows: int = 0
    probe_paid: bool | None = None


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="heartbeat"):
    """Sent once a second. `pending` requests with an unchanging `steps` mean a wedge.

    `measuring` is there while the engine measures what rounds cost.
    """

    steps: int
    pending: int
    memory: Memory
    measuring: MeasuringProgress | None = None


class Rejected(msgspec.Struct, frozen=True, tag="rejected"):
    """One request cannot be served by this engine; the others go on."""

    request_id: int
    message: str


class Fault(msgspec.Struct, frozen=True, tag="fault"):
    """The engine is about to exit. `restartable` is false for what a restart cannot mend."""

    message: str
    restartable: bool


ToEngine = Configure | Submit | Cancel | Shutdown
FromEngine = Loading | Ready | Step | Heartbeat | Rejected | Fault
