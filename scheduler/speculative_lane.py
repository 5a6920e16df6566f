"""The speculative lane: draft, verify, commit, for rows of any length at once.

Owns the lane's rows and their pending drafts; runs on the engine's MLX thread. The next draft is
chained behind the verification on the device, from an anchor and a position that the host has
not seen, so a round has one read: tokens, accepted counts and the next drafts' confidences
together. From those the width of the next verification is chosen. When rounds do not pay on average
the rows park: they go on in plain decode, a step ahead of the host like any serial row and at
its price, and probe again later. They do the same until it is known what rounds cost. Acceptance
is coupled unless rejection is asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from models.dspark.drafter import Draft
from models.dspark.rows import SpeculativeRows, chooser
from models.sampling import RowSampling, choose, distribution
from scheduler.draft_forecast import DraftForecast
from scheduler.draft_trials import DraftTrials
from scheduler.messages import Output, RoundRecord, Speculation
from scheduler.round_costs import RoundCosts
from scheduler.row import Row, StepLogprobs
from scheduler.serial_lane import SerialLane
from scheduler.speculation_settings import SpeculationSettings
from scheduler.width_policy import WidthChoice, cheapest_width, early_stop_lengths


@dataclass(eq=False)
class Tally:
    """What speculation did for one row."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0


class SpeculativeLane:
    """Rows that draft. `state` holds their caches and is the lane's alone."""

    def __init__(
        self,
        state: SpeculativeRows,
        forecast: DraftForecast,
        costs: RoundCosts,
        settings: SpeculationSettings,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._state = state
        self._forecast = forecast
        self._costs = costs
        self._settings = settings
        self._clock = clock
        # Costs have no say then, so nothing parks.
        self._forced = settings.forced
        self._cap = min(settings.cap or state.block_size, state.block_size)
        self._rows: list[Row] = []
        self._tallies: dict[int, Tally] = {}
        self._anchors: mx.array | None = None
        self._draft: Draft | None = None
        self._survival: list[list[float]] = []
        self._plain = SerialLane(state)
        self._trials = DraftTrials(clock)

    def __len__(self) -> int:
        return len(self._rows) + len(self._plain)

    @property
    def busy(self) -> bool:
        """Whether there is something to run or to collect."""
        return bool(self._rows) or self._plain.busy

    @property
    def rows(self) -> list[Row]:
        """All rows, whether they draft now or not."""
        return [*self._rows, *self._plain.rows]

    @property
    def parked(self) -> bool:
        """Whether the rows decode plainly for now, or are trying whether to go on so."""
        return self._trials.parked

    @property
    def probe_paid(self) -> bool | None:
        """Whether the probe that the last step ended, if it did, showed that drafting pays again."""
        return self._trials.probe_paid

    def join(
        self, rows: Sequence[Row], states: Sequence[SpeculativeRows], anchors: Sequence[int]
    ) -> list[Output]:
        """Take over prefilled `states` of one row each, whose next inputs are `anchors`.

        Returns what a step in flight had still to say.
        """
        outputs = self._unpark()
        if alone := not self._rows:
            self._forecast.another_text()
        self._trials.another_text(alone=alone)
        self._state.join(*states)
        added = mx.array(list(anchors), dtype=mx.int32)
        self._anchors = added if self._anchors is None else mx.concatenate([self._anchors, added])
        if self._draft is not None:
            self._draft = _with_empty_rows(self._draft, len(rows))
        for row in rows:
            # It has no drafts yet: its first round gives it its first token.
            self._survival.append([])
            self._rows.append(row)
            self._tallies[row.request_id] = Tally()
        return outputs

    def cancel(self, request_id: int) -> bool:
        """Drop a row at once. False when the lane does not hold it."""
        if self._plain.cancel(request_id):
            return True
        for index, row in enumerate(self._rows):
            if row.request_id == request_id:
                self._leave([index])
                return True
        return False

    def step(self) -> tuple[list[Output], RoundRecord | None]:
        """Run a round, or a plain step while parked. The record is of a round only."""
        self._trials.probe_paid = None
        if self._decodes_plainly():
            if self._rows:
                self._park()
            self._plain.launch()
            return self._with_tallies(self._plain.collect(keep=1)), None
        outputs = self._unpark()
        if not self._rows:
            return outputs, None
        if self._draft is None and any(row.produced for row in self._rows):
            self._draft_now()
        found, record = self._round(self._choose())
        return outputs + found, record

    def _decodes_plainly(self) -> bool:
        """Whether the next step is a plain one: the rows are parked and not due to probe, or
        what a round of so many rows costs is not known yet."""
        if self._forced or not len(self):
            return False
        return self._trials.waiting or not self._costs.covers(len(self))

    def finish_flights(self) -> list[Output]:
        """What plain steps in flight have to say, before the device does something else."""
        return self._with_tallies(self._plain.collect())

    # Rounds

    def _choose(self) -> WidthChoice:
        """The width of the next verification and each row's drafts in it; no more of them than
        the row may still produce."""
        survival, settings = self._survival, self._settings
        limits = [max(row.maximum - row.produced - 1, 0) for row in self._rows]
        depth = max(self._state.lengths)
        # A draft that is not verified cannot change a forecast that learns.
        must_draft = self._trials.parked and self._forecast.learns
        # By the threshold the forecast is cut already; without drafts there is no choice. A
        # trial with rejection takes all: an early stop would weigh the first draft against the
        # price of the whole block, and verify nothing.
        if settings.fixed_lengths or (settings.rejection and must_draft) or not any(survival):
            lengths = [len(row) for row in survival]
        elif settings.rejection:
            speed = self._costs.rounds_per_second(depth, len(survival))
            lengths, _ = early_stop_lengths(survival, speed)
        else:
            costs = self._costs.table(depth)
            return cheapest_width(
                survival,
                costs,
                limits=limits,
                widths=[width for width in costs.widths() if width <= 1 + self._cap],
                must_draft=must_draft or settings.always,
            )
        lengths = [min(length, limit) for length, limit in zip(lengths, limits, strict=True)]
        return WidthChoice.of(survival, lengths)

    def _round(self, choice: WidthChoice) -> tuple[list[Output], RoundRecord]:
        assert self._anchors is not None
        started = self._clock()
        rows, state = self._rows, self._state
        samplings = [row.sampling for row in rows]
        positions = [row.position for row in rows]
        drafts = None
        if choice.width > 1 and self._draft is not None:
            drafts = self._draft.tokens[:, : choice.width - 1]
        if self._settings.rejection and drafts is not None:
            assert self._draft is not None and self._draft.logits is not None
            verification = state.verify_rejecting(
                self._anchors,
                Draft(drafts, None, self._draft.logits[:, : choice.width - 1]),
                distribution=lambda logits, _: distribution(logits, samplings),
                seeds=[row.sampling.seed for row in rows],
                lengths=choice.lengths,
            )
        else:
            verification = state.verify(
                self._anchors,
                drafts,
                lengths=choice.lengths if drafts is not None else None,
                choose=lambda logits, column: choose(
                    logits, samplings, [position + column for position in positions]
                ),
            )
        accepted = verification.accepted
        anchors = mx.take_along_axis(verification.tokens, accepted[:, None], axis=1)[:, 0]
        starts = mx.array(positions, dtype=mx.int32) + accepted
        draft = self._chain(samplings, anchors, starts, choice.width)
        logprobs = StepLogprobs(rows, verification.logits, verification.tokens)
        confidences = draft.confidence_logits
        mx.eval(
            verification.tokens,
            accepted,
            draft.tokens,
            *([] if confidences is None else [confidences]),
            *logprobs.arrays,
        )
        tokens: list[list[int]] = verification.tokens.tolist()  # type: ignore[assignment]
        counts: list[int] = accepted.tolist()  # type: ignore[assignment]
        if not self._forced and any(self._survival):
            costs = self._costs.table(max(state.lengths))
            believed = not self._forecast.learns
            self._trials.verified(choice, len(rows) + sum(counts), costs, believed=believed)
        state.commit([count + 1 for count in counts])
        self._anchors, self._draft = anchors, draft
        seconds = self._clock() - started
        lengths = choice.lengths if drafts is not None else [0] * len(rows)
        outputs = self._take(tokens, counts, lengths, logprobs)
        record = RoundRecord(
            width=choice.width,
            drafted=sum(lengths),
            accepted=sum(counts),
            accepted_by_position=[
                sum(count > place for count in counts) for place in range(max(lengths))
            ],
            draft_seconds=min(seconds, self._costs.draft_seconds(len(rows))),
        )
        self._read_forecast(confidences)
        self._leave([i for i, output in enumerate(outputs) if output.finish is not None])
        return self._with_tallies(outputs), record

    def _take(
        self,
        tokens: list[list[int]],
        counts: list[int],
        lengths: Sequence[int],
        logprobs: StepLogprobs,
    ) -> list[Output]:
        outputs = []
        details = logprobs.read()
        for index, row in enumerate(self._rows):
            committed = counts[index] + 1
            row.position += committed
            output = row.take(tokens[index][:committed], details[index])
            row.launched = row.produced
            tally = self._tallies[row.request_id]
            tally.rounds += 1
            tally.drafted += lengths[index]
            tally.accepted += counts[index]
            self._forecast.observe(row.request_id, lengths[index], counts[index])
            outputs.append(output)
        return outputs

    def _chain(
        self,
        samplings: list[RowSampling],
        anchors: mx.array,
        starts: mx.array,
        reach: int,
    ) -> Draft:
        """The draft behind `anchors`, whose values and places nobody has read."""
        return self._state.draft(
            anchors,
            cap=self._cap,
            choose=chooser(samplings, starts),
            keep_logits=self._settings.rejection,
            starts=starts,
            reach=reach,
        )

    def _draft_now(self) -> None:
        """A draft behind anchors that are committed, for rows that come out of parking."""
        assert self._anchors is not None
        starts = mx.array([row.position - 1 for row in self._rows], dtype=mx.int32)
        self._draft = self._chain([row.sampling for row in self._rows], self._anchors, starts, 0)
        confidences = self._draft.confidence_logits
        mx.eval(self._draft.tokens, *([] if confidences is None else [confidences]))
        self._read_forecast(confidences)

    def _read_forecast(self, confidences: mx.array | None) -> None:
        values = None if confidences is None else confidences.tolist()
        self._survival = [
            self._forecast.survival(
                row.request_id,
                None if values is None else values[index],  # type: ignore[index,arg-type]
                0.0 if row.sampling.greedy else row.sampling.temperature,
            )[: self._cap]
            for index, row in enumerate(self._rows)
        ]

    # Rows that come, go and park

    def _leave(self, indices: Sequence[int]) -> None:
        for index in sorted(indices, reverse=True):
            last = len(self._rows) - 1
            self._state.leave(index)
            order = list(range(last))
            if index != last:
                order[index] = last
            self._forecast.forget(self._rows[index].request_id)
            self._rows[index].live = False
            self._rows = [self._rows[place] for place in order]
            self._survival = [self._survival[place] for place in order]
            if not order:
                self._anchors, self._draft = None, None
                continue
            assert self._anchors is not None
            kept = mx.array(order)
            self._anchors = self._anchors[kept]
            if self._draft is not None:
                parts: list[Any] = [None if a is None else a[kept] for a in self._draft]
                self._draft = Draft(*parts)

    def _park(self) -> None:
        assert self._anchors is not None
        rows, anchors = self._rows, self._anchors
        self._rows, self._anchors, self._draft, self._survival = [], None, None, []
        self._plain.add(rows, anchors[:, None])

    def _unpark(self) -> list[Output]:
        """Bring the rows back from plain decode; what they had in flight is returned."""
        outputs = self._with_tallies(self._plain.collect())
        if self._plain.rows:
            self._rows, anchors = self._plain.release()
            self._anchors = anchors[:, 0]
            self._survival = [[] for _ in self._rows]
        return outputs

    def _with_tallies(self, outputs: list[Output]) -> list[Output]:
        """Finished outputs with what speculation did for their rows."""
        return [output if output.finish is None else self._with_tally(output) for output in outputs]

    def _with_tally(self, output: Output) -> Output:
        tally = self._tallies.pop(output.request_id, None)
        if tally is None:
            return output
        speculation = Speculation(tally.rounds, tally.drafted, tally.accepted)
        return Output(output.request_id, output.tokens, output.finish, output.logprobs, speculation)


def _with_empty_rows(draft: Draft, count: int) -> Draft:
    """The draft with `count` more rows, of tokens that will not be verified."""

    def grow(array: mx.array | None) -> mx.array | None:
        if array is None:
            return None
        return mx.pad(array, [(0, count)] + [(0, 0)] * (array.ndim - 1))

    tokens = grow(draft.tokens)
    assert tokens is not None
    return Draft(tokens, grow(draft.confidence_logits), grow(draft.logits))
