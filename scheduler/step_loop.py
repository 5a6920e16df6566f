"""The engine's step loop: take messages, choose the next step, run it, send tokens.

Owns the prefill queue, the lanes and the measuring of costs; runs on the process's main thread,
which is the only one that touches MLX. An exception that one request causes is answered with
`Rejected` and the others go on; anything else ends the engine, and the daemon replays its
requests elsewhere.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Sequence

from models.backend import memory_counters
from models.target import Target
from scheduler.engine_link import EngineLink
from scheduler.lanes import Lanes, LaneStep
from scheduler.measuring import QUIET_SECONDS
from scheduler.messages import (
    Cancel,
    Configure,
    Heartbeat,
    Memory,
    Rejected,
    Shutdown,
    Step,
    StepKind,
    Submit,
)
from scheduler.prefill import GroupFailed, PrefillQueue, Prompt
from scheduler.row import Row
from scheduler.speculation import Pair
from scheduler.step_policy import Decision, StepPolicy, Turn

log = logging.getLogger("sparklane.engine")


class StepLoop:
    """Runs until a `Shutdown` arrives."""

    def __init__(
        self, target: Target, pair: Pair | None, link: EngineLink, policy: StepPolicy
    ) -> None:
        self._target = target
        self._link = link
        self._policy = policy
        self._prefill = PrefillQueue()
        self._lanes = Lanes(target, pair)
        self._measuring = pair.measuring if pair else None
        self._steps = 0
        self._memory = Memory(*memory_counters())
        self._last_step_end = time.perf_counter()
        self._stopping = False

    def heartbeat(self) -> Heartbeat:
        """A snapshot; called from the heartbeat thread, so it only reads plain attributes."""
        pending = len(self._prefill) + len(self._lanes)
        measuring = self._measuring
        return Heartbeat(
            steps=self._steps,
            pending=pending,
            memory=self._memory,
            measuring=measuring.progress if measuring else None,
        )

    def run(self) -> None:
        """Step until told to stop; the step in flight is finished."""
        while not self._stopping:
            self._take_messages()
            self._step()
            self._measure_between_steps()
        self._lanes.finish_flights()

    def _take_messages(self) -> None:
        idle = not self._prefill and not self._lanes.busy
        if idle:
            message = self._wait()
            self._last_step_end = time.perf_counter()
        else:
            message = self._link.receive(wait=False)
        while message is not None:
            self._handle(message)
            message = self._link.receive(wait=False)

    def _wait(self) -> Configure | Submit | Cancel | Shutdown | None:
        """The next message to an engine that has nothing to do.

        Costs that are not known are measured meanwhile; with nothing to measure it blocks, and
        costs no processor time.
        """
        measuring = self._measuring
        if measuring is None:
            return self._link.receive(wait=True)
        message = self._link.receive(wait=True, seconds=QUIET_SECONDS)
        while message is None and measuring.wanted:
            measuring.run_slice()
            self._memory = Memory(*memory_counters())
            message = self._link.receive(wait=False)
        self._drop_finished_measuring()
        return message if message is not None else self._link.receive(wait=True)

    def _measure_between_steps(self) -> None:
        """A slice for an engine that is never idle, when it is time for one."""
        measuring = self._measuring
        if measuring is None or not (needs := self._needs()) or not measuring.due(needs):
            return
        if self._lanes.busy:
            # A step in flight would be timed with the slice, and its tokens would wait for it.
            self._report_decode(self._lanes.finish_flights())
        measuring.run_slice()
        self._last_step_end = time.perf_counter()
        self._drop_finished_measuring()

    def _drop_finished_measuring(self) -> None:
        if self._measuring is not None and not self._measuring.wanted:
            self._measuring = None

    def _needs(self) -> list[int]:
        """Tokens that each request here may come to hold."""
        return self._prefill.needs() + self._lanes.needs()

    def _handle(self, message: Configure | Submit | Cancel | Shutdown) -> None:
        match message:
            case Submit():
                self._submit(message)
            case Cancel(request_id):
                if self._prefill.remove(request_id) is None:
                    self._lanes.cancel(request_id)
            case Shutdown() | Configure():
                self._stopping = True

    def _submit(self, submit: Submit) -> None:
        try:
            self._check(submit)
            row = Row.of(submit, self._target.vocabulary_size)
        except ValueError as error:
            self._link.send(Rejected(submit.request_id, str(error)))
            return
        if self._measuring is not None:
            self._measuring.make_way([*self._needs(), row.need])
        tokens = submit.prompt + submit.produced
        new_rows = functools.partial(self._lanes.rows_for, row, submit.lane)
        prompt = self._prefill.add(row, tokens, new_rows)
        if prompt.tokens_left == 0:
            self._join([prompt])

    def _check(self, submit: Submit) -> None:
        """Refuse what would break the step for everybody."""
        limit, vocabulary = self._target.facts.context_length, self._target.vocabulary_size
        if not submit.prompt:
            raise ValueError("the prompt has no tokens; send at least one")
        if len(submit.prompt) + submit.max_tokens > limit:
            raise ValueError(
                f"a prompt of {len(submit.prompt)} tokens with max_tokens {submit.max_tokens} "
                f"does not fit the context of {limit} tokens; shorten either"
            )
        for token in (min(submit.prompt), max(submit.prompt)):
            if not 0 <= token < vocabulary:
                raise ValueError(
                    f"prompt token {token} is outside the vocabulary of {vocabulary} tokens"
                )

    def _join(self, prompts: Sequence[Prompt]) -> None:
        for prompt in prompts:
            self._prefill.remove(prompt.row.request_id)
        outputs = self._lanes.join(prompts)
        if outputs:
            self._report_decode(LaneStep(StepKind.SERIAL, 0, 0, outputs))

    def _step(self) -> None:
        decision = self._policy.decide(self._prefill.waiting(), len(self._lanes))
        match decision.turn:
            case Turn.DECODE:
                self._decode()
            case Turn.PREFILL:
                self._read_prompts(decision)
            case Turn.IDLE if self._lanes.busy:
                self._report_decode(self._lanes.finish_flights())

    def _decode(self) -> None:
        step = self._lanes.step()
        seconds = self._report_decode(step)
        self._lanes.observe(step, seconds)
        self._policy.observe_decode(seconds)

    def _report_decode(self, step: LaneStep) -> float:
        seconds = self._lap()
        self._report(
            Step(
                kind=step.kind,
                seconds=seconds,
                rows=step.rows,
                tokens=step.tokens,
                outputs=step.outputs,
                round=step.round,
                parked_rows=self._lanes.parked_rows,
                probe_paid=step.probe_paid,
            )
        )
        return seconds

    def _read_prompts(self, decision: Decision) -> None:
        if self._lanes.busy:
            # Tokens that are ready must not wait for the chunk.
            self._report_decode(self._lanes.finish_flights())
        prompts = self._read(decision)
        if not prompts:
            return
        seconds = self._lap()
        self._policy.observe_prefill(decision.tokens, seconds)
        first = len(prompts) > 1 or prompts[0].read == decision.tokens
        if prompts[0].tokens_left == 0:
            # Several have been read whole.
            self._join(prompts)
        self._report(
            Step(
                kind=StepKind.PREFILL,
                seconds=seconds,
                rows=len(prompts),
                tokens=decision.tokens,
                started=list(decision.request_ids) if first else [],
            )
        )

    def _read(self, decision: Decision) -> list[Prompt]:
        """The prompts that have got on; none when that failed."""
        request_id, *others = decision.request_ids
        try:
            if others:
                return self._prefill.read_together(decision.request_ids)
            return [self._prefill.read(request_id, decision.tokens)]
        except GroupFailed as error:
            log.warning("%s", error)
        except (ValueError, TypeError) as error:
            self._prefill.remove(request_id)
            self._link.send(Rejected(request_id, f"the prompt cannot be read: {error}"))
        return []

    def _lap(self) -> float:
        """Seconds since the last step ended: steps overlap, laps do not."""
        now = time.perf_counter()
        seconds = now - self._last_step_end
        self._last_step_end = now
        if self._measuring is not None:
            self._measuring.served(seconds)
        return seconds

    def _report(self, step: Step) -> None:
        self._steps += 1
        self._memory = Memory(*memory_counters())
        self._link.send(step)
