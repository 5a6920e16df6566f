"""One served model: its live requests, its admission, and its engine's words.

Owns every request of the model from acceptance to end; runs on the daemon's event loop. A
request ends exactly once (finished, stopped, cancelled, refused), and that is where its
reservation goes back. When an engine is lost, the requests that ran on it keep their
reservations and are sent to the next one, with what they have produced.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from daemon.engine_health import Loss
from daemon.generation import (
    Delta,
    FinishReason,
    Generation,
    ModelState,
    Refusal,
    RefusalKind,
)
from daemon.live_request import LiveRequest, Phase
from daemon.metrics import LANE_OF_STEP, Metrics
from daemon.supervisor import Supervisor
from scheduler.admission import Admission, Denial, DenialReason, QueueLimits
from scheduler.ledger import KvCost
from scheduler.messages import Cancel, MeasuringProgress, Memory, Ready, Rejected, Step

log = logging.getLogger("sparklane.model")

FETCHING_RETRY_SECONDS = 5.0

_KIND_OF_DENIAL = {
    DenialReason.CONTEXT_LENGTH: RefusalKind.CONTEXT_LENGTH,
    DenialReason.QUEUED_REQUESTS: RefusalKind.QUEUE_FULL,
    DenialReason.QUEUED_PROMPT_TOKENS: RefusalKind.QUEUE_FULL,
}


class ModelRoom(msgspec.Struct, frozen=True, kw_only=True):
    """What there is room for. `kv_budget` in bytes, lengths in tokens."""

    maximum_rows: int
    kv_budget: int
    kv_cost: KvCost
    context_length: int


class ModelService:
    """A model as it is served. It is `ServedModel`, `EngineListener` and `EngineReading`."""

    def __init__(
        self,
        name: str,
        metrics: Metrics,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.name = name
        self.folder: Path | None = None
        self.problem: str | None = None
        self.created = int(wall_clock())
        self.supervisor: Supervisor | None = None
        self._admission: Admission | None = None
        self._live: dict[int, LiveRequest] = {}
        self._running: dict[int, LiveRequest] = {}
        self._ids = itertools.count(1)
        self._clock = clock
        self._metrics = metrics.model(name)
        self._idle = asyncio.Event()
        self._idle.set()
        metrics.watch(name, self)

    # What others see of the model.

    @property
    def state(self) -> ModelState:
        """Whether it can answer now."""
        if self.problem is not None:
            return ModelState.DOWN
        return ModelState.READY if self.is_ready else ModelState.LOADING

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and answer together; 0 until the checkpoint has been read."""
        return self._admission.context_length if self._admission else 0

    @property
    def requests_running(self) -> int:
        """Requests that hold a row."""
        return len(self._running)

    @property
    def requests_waiting(self) -> int:
        """Requests in the queue."""
        return self._admission.waiting if self._admission else 0

    @property
    def waiting_prompt_tokens(self) -> int:
        """Prompt tokens in the queue."""
        return self._admission.waiting_prompt_tokens if self._admission else 0

    @property
    def kv_reserved_bytes(self) -> int:
        """What running requests may need for keys and values."""
        return self._admission.ledger.reserved_bytes if self._admission else 0

    @property
    def kv_budget_bytes(self) -> int:
        """What there is for keys and values."""
        return self._admission.ledger.budget if self._admission else 0

    @property
    def engine_pid(self) -> int | None:
        """The engine's process id, if there is one."""
        return self.supervisor.pid if self.supervisor else None

    @property
    def is_ready(self) -> bool:
        """Whether an engine takes requests."""
        return self.supervisor is not None and self.supervisor.ready

    @property
    def heartbeat_age(self) -> float | None:
        """Seconds since the engine's last heartbeat."""
        return self.supervisor.heartbeat_age if self.supervisor else None

    @property
    def engine_memory(self) -> Memory | None:
        """What the engine's allocator counted last."""
        return self.supervisor.memory if self.supervisor else None

    @property
    def measuring(self) -> MeasuringProgress | None:
        """How far the engine is in measuring its costs; None while it measures nothing."""
        return self.supervisor.measuring if self.supervisor else None

    @property
    def live_requests(self) -> int:
        """Requests that have been accepted and have not ended."""
        return len(self._live)

    # What the daemon does with the model.

    def open(self, folder: Path, room: ModelRoom, limits: QueueLimits) -> None:
        """The checkpoint has been found and planned for: requests can be accepted."""
        self.folder = folder
        self._admission = Admission(
            limits=limits,
            maximum_rows=room.maximum_rows,
            budget=room.kv_budget,
            cost=room.kv_cost,
            context_length=room.context_length,
            clock=self._clock,
        )

    def set_queue_limits(self, limits: QueueLimits) -> None:
        """Change what may wait; whoever waits already stays."""
        if self._admission is not None:
            self._admission.limits = limits

    async def until_idle(self) -> None:
        """Wait until no request is live."""
        await self._idle.wait()

    def refuse_all(self, kind: RefusalKind, message: str, retry_after: float | None) -> None:
        """End every live request with a refusal."""
        for request in list(self._live.values()):
            self._refuse(request, Refusal(kind, message, retry_after))

    # What clients do.

    def refused(self, kind: RefusalKind, message: str, retry_after: float | None) -> Refusal:
        """A refusal, counted."""
        self._metrics.refused(kind)
        return Refusal(kind, message, retry_after)

    @asynccontextmanager
    async def generate(self, generation: Generation) -> AsyncIterator[AsyncIterator[Delta]]:
        """See `daemon.generation.Dispatcher.generate`."""
        request = self._accept(generation)
        try:
            yield request
        except BaseException:
            self._abandon(request)
            raise
        self._stop(request)

    def _accept(self, generation: Generation) -> LiveRequest:
        if self.problem is not None:
            message = f"the model {self.name} is down: {self.problem}"
            raise self.refused(RefusalKind.MODEL_DOWN, message, None)
        if self._admission is None:
            message = f"the checkpoint of {self.name} is still being fetched; try again later"
            raise self.refused(RefusalKind.MODEL_DOWN, message, FETCHING_RETRY_SECONDS)
        request_id = next(self._ids)
        answer = self._admission.enter(request_id, len(generation.prompt), generation.max_tokens)
        if isinstance(answer, Denial):
            raise self.refused(_KIND_OF_DENIAL[answer.reason], answer.message, answer.retry_after)
        request = LiveRequest(request_id, generation, answer.max_tokens, self._clock())
        self._live[request_id] = request
        self._idle.clear()
        if answer.running:
            self._run(request)
        else:
            # It may fit where the first in the queue does not.
            self._admit()
        return request

    def _stop(self, request: LiveRequest) -> None:
        """The consumer has what it wants: all, or enough (a stop string)."""
        if request.phase is Phase.ENDED:
            return
        if request.produced:
            self._finished(request, FinishReason.STOP)
        else:
            self._metrics.cancelled(request.phase)
        self._end(request, cancel=True)
        self._admit()

    def _abandon(self, request: LiveRequest) -> None:
        """The consumer has gone."""
        if request.phase is Phase.ENDED:
            return
        self._metrics.cancelled(request.phase)
        self._end(request, cancel=True)
        self._admit()

    # What the engine does.

    def engine_ready(self, ready: Ready) -> None:
        """Send everything that ran on the engine before, then let new requests in."""
        assert self._admission is not None
        planned = self._admission.ledger.cost.bytes_per_token
        if ready.kv_bytes_per_token > planned:
            log.warning(
                "%s: a token takes %d bytes of cache, %d were planned for; memory may run short",
                self.name, ready.kv_bytes_per_token, planned,
            )  # fmt: skip
        self._admission.open = True
        if self._running:
            log.info("%s: replaying %d requests", self.name, len(self._running))
            self._metrics.replayed(len(self._running))
        for request in self._running.values():
            self._send(request)
        self._admit()

    def engine_stepped(self, step: Step) -> None:
        """Hand out what a step has produced. Outputs of requests that have ended are dropped."""
        assert self._admission is not None
        now = self._clock()
        self._metrics.step(step)
        self._admission.rate.served(step.tokens)
        for request_id in step.started:
            if (request := self._running.get(request_id)) is not None:
                request.begin(now)
        lane = LANE_OF_STEP.get(step.kind)
        room = False
        for output in step.outputs:
            request = self._running.get(output.request_id)
            if request is None or lane is None:
                continue
            request.lane = lane
            gap = request.take(output, now)
            if gap is None:
                prompt = len(request.generation.prompt)
                self._metrics.first_token(lane, prompt, request.arrived, now)
            else:
                self._metrics.next_token(lane, gap)
            if output.finish is not None:
                self._finished(request, output.finish)
                self._end(request)
                room = True
        if room:
            self._admit()

    def engine_rejected(self, rejected: Rejected) -> None:
        """One request ends with what the engine has against it."""
        if (request := self._running.get(rejected.request_id)) is not None:
            self._refuse(request, Refusal(RefusalKind.INVALID, rejected.message))
            self._admit()

    def engine_lost(self, loss: Loss) -> None:
        """Nothing is admitted until there is another engine."""
        assert self._admission is not None
        self._admission.open = False
        self._metrics.restarted(loss.value)

    def engine_down(self, problem: str) -> None:
        """Everything that is live ends, and nothing is accepted any more."""
        assert self._admission is not None
        self._admission.open = False
        self.problem = problem
        message = f"the model {self.name} is down: {problem}"
        self.refuse_all(RefusalKind.MODEL_DOWN, message, None)

    def outstanding(self) -> int:
        """Requests that the engine has been sent and has not finished."""
        return len(self._running)

    # A request's steps.

    def _admit(self) -> None:
        assert self._admission is not None
        for request_id in self._admission.admit():
            self._run(self._live[request_id])

    def _run(self, request: LiveRequest) -> None:
        request.phase = Phase.PREFILL
        self._running[request.request_id] = request
        self._send(request)

    def _send(self, request: LiveRequest) -> None:
        # Without an engine the message is lost, but then the next engine gets all that runs.
        if self.supervisor is not None:
            self.supervisor.send(request.submit())

    def _refuse(self, request: LiveRequest, refusal: Refusal) -> None:
        self._metrics.refused(refusal.kind)
        self._end(request, cancel=True)
        request.refuse(refusal)

    def _finished(self, request: LiveRequest, reason: FinishReason) -> None:
        assert self._admission is not None
        produced = len(request.produced)
        self._admission.rate.answered(produced)
        self._metrics.finished(reason, request.lane, produced, request.times)

    def _end(self, request: LiveRequest, *, cancel: bool = False) -> None:
        """The one place where a request ends and its reservation goes back."""
        assert self._admission is not None
        request.phase = Phase.ENDED
        del self._live[request.request_id]
        was_running = self._running.pop(request.request_id, None) is not None
        self._admission.leave(request.request_id)
        if cancel and was_running and self.supervisor is not None:
            self.supervisor.send(Cancel(request.request_id))
        if not self._live:
            self._idle.set()
