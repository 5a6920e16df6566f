"""What the HTTP side asks of the rest of the daemon, and what it gets back.

Owns nothing: records, one exception and one protocol, used on the daemon's event loop. The
HTTP side turns requests into a `Generation`, enters `Dispatcher.generate` and reads `Delta`s;
it knows neither engines nor queues.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

import msgspec

from models.sampling_settings import Sampling
from scheduler.messages import (
    FinishReason,
    LaneChoice,
    MeasuringProgress,
    Speculation,
    TokenLogprobs,
)

__all__ = [
    "Delta",
    "Dispatcher",
    "FinishReason",
    "Generation",
    "LaneChoice",
    "MeasuringProgress",
    "ModelState",
    "Refusal",
    "RefusalKind",
    "Sampling",
    "ServedModel",
    "Speculation",
    "TokenLogprobs",
]


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to be generated, in tokens.

    `max_tokens` is what the client asked for, however large; it is clamped to the room there
    is. `logprobs` is the number of alternatives beside each chosen token, None = no logprobs.
    """

    model: str
    prompt: list[int]
    sampling: Sampling
    max_tokens: int
    stop_tokens: list[int]
    logprobs: int | None = None
    tenant: str = "default"
    lane: LaneChoice = LaneChoice.AUTO


class Delta(msgspec.Struct, frozen=True):
    """Tokens that came since the last delta. The last one of a sequence has a `finish`.

    A stop token is included in `tokens`. `logprobs` has one entry for each token, if asked.
    `lane` is where they were decoded; `speculation` comes with the last delta of a sequence
    that was in the speculative lane.
    """

    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish: FinishReason | None = None
    lane: str = "serial"
    speculation: Speculation | None = None


class RefusalKind(enum.StrEnum):
    """Why a generation is not, or no longer, served."""

    QUEUE_FULL = "queue_full"
    TENANT_QUEUE_FULL = "tenant_queue_full"
    MODEL_DOWN = "model_down"
    CONTEXT_LENGTH = "context_length"
    DRAINING = "draining"
    UNKNOWN_MODEL = "unknown_model"
    INVALID = "invalid"
    """The engine found something in the request that it cannot serve."""

    @property
    def status(self) -> int:
        """The HTTP status that says this."""
        return _STATUS[self]


_STATUS = {
    RefusalKind.QUEUE_FULL: 503,
    RefusalKind.TENANT_QUEUE_FULL: 429,
    RefusalKind.MODEL_DOWN: 503,
    RefusalKind.CONTEXT_LENGTH: 400,
    RefusalKind.DRAINING: 503,
    RefusalKind.UNKNOWN_MODEL: 404,
    RefusalKind.INVALID: 400,
}


class Refusal(Exception):
    """A generation is refused. The message names the limit, its value, the need, the remedy.

    `retry_after` is the expected wait in seconds, None where waiting does not help.
    """

    def __init__(self, kind: RefusalKind, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.retry_after = retry_after


class ModelState(enum.StrEnum):
    """Whether a model can answer. Requests that come while it loads wait for it."""

    LOADING = "loading"
    READY = "ready"
    DOWN = "down"


class ServedModel(Protocol):
    """A model that this daemon serves; a live view, not a snapshot."""

    @property
    def name(self) -> str:
        """The name that requests use."""

    @property
    def folder(self) -> Path | None:
        """The checkpoint's folder, with tokenizer.json; None until it has been found."""

    @property
    def state(self) -> ModelState:
        """Whether it can answer now."""

    @property
    def problem(self) -> str | None:
        """Why it is down; None otherwise."""

    @property
    def measuring(self) -> MeasuringProgress | None:
        """How far it is in measuring what rounds cost; None while nothing is measured."""

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and answer together; 0 until the checkpoint has been read."""

    @property
    def created(self) -> int:
        """Unix seconds since which it has been served."""


class Dispatcher(Protocol):
    """Takes generations and gives their tokens."""

    @property
    def models(self) -> Mapping[str, ServedModel]:
        """What is served, by name."""

    @property
    def draining(self) -> bool:
        """Whether the daemon is stopping: nothing new is taken, /readyz is false."""

    @property
    def wedged(self) -> bool:
        """Whether work is pending and no step has run for too long: /livez fails."""

    def generate(self, generation: Generation) -> AbstractAsyncContextManager[AsyncIterator[Delta]]:
        """Enter to be admitted or queued, iterate to get tokens, leave to end it.

        Entering never waits: it raises `Refusal` at once, or the generation is accepted and
        counted. Iterating waits, in the queue, through prefill and through engine restarts;
        it raises `Refusal` when the generation cannot be finished. Leaving before the last
        delta cancels it wherever it is.
        """
