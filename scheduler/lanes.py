"""The lanes of one engine, and which of them a request is read for.

Owns the serial lane and, with a drafter, the speculative one; runs on the engine's MLX thread.
Requests with penalties cannot speculate (their logits depend on tokens not yet verified), nor
can those that ask for the serial lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from models.decode_rows import DecodeRows, TargetRows
from models.dspark.rows import SpeculativeRows
from models.target import Target
from scheduler.messages import LaneChoice, Output, RoundRecord, StepKind
from scheduler.prefill import Prompt
from scheduler.row import Row
from scheduler.serial_lane import SerialLane
from scheduler.speculation import Pair
from scheduler.speculative_lane import SpeculativeLane
from scheduler.step_policy import LaneShare


@dataclass(frozen=True)
class LaneStep:
    """What one decode step did."""

    kind: StepKind
    rows: int
    tokens: int
    outputs: list[Output]
    round: RoundRecord | None = None
    probe_paid: bool | None = None


class Lanes:
    """All rows that decode."""

    def __init__(self, target: Target, pair: Pair | None) -> None:
        self._target = target
        self._pair = pair
        self._serial_rows = TargetRows(target)
        self._serial = SerialLane(self._serial_rows)
        self._speculative_rows = pair.new_rows() if pair else None
        self._speculative: SpeculativeLane | None = None
        if pair and self._speculative_rows is not None:
            self._speculative = pair.new_lane(self._speculative_rows)
        self._share = LaneShare()
        self._stepped = 0

    def __len__(self) -> int:
        return len(self._serial) + self._drafting

    @property
    def busy(self) -> bool:
        """Whether there is a step to run or to collect."""
        return self._serial.busy or (self._speculative is not None and self._speculative.busy)

    @property
    def parked_rows(self) -> int:
        """Rows that could draft and do not."""
        lane = self._speculative
        return len(lane) if lane is not None and lane.parked else 0

    def needs(self) -> list[int]:
        """Tokens that each row may come to hold."""
        rows = [*self._serial.rows, *(self._speculative.rows if self._speculative else [])]
        return [row.need for row in rows]

    @property
    def _drafting(self) -> int:
        return 0 if self._speculative is None else len(self._speculative)

    def rows_for(self, row: Row, lane: LaneChoice) -> DecodeRows:
        """Empty rows to read the prompt of `row` into."""
        if self._pair is None or lane is LaneChoice.SERIAL or row.sampling.penalised:
            return TargetRows(self._target)
        return self._pair.new_rows()

    def join(self, prompts: Sequence[Prompt]) -> list[Output]:
        """Take in rows whose prompts have been read, all for one lane. Returns what steps in
        flight still said."""
        rows = [prompt.row for prompt in prompts]
        anchors = [prompt.tokens[-1] for prompt in prompts]
        drafting = [one.rows for one in prompts if isinstance(one.rows, SpeculativeRows)]
        if drafting:
            assert self._speculative is not None and len(drafting) == len(prompts)
            return self._speculative.join(rows, drafting, anchors)
        plain = [prompt.rows for prompt in prompts if isinstance(prompt.rows, TargetRows)]
        self._serial_rows.join(*plain)
        self._serial.add(rows, mx.array(anchors, dtype=mx.int32)[:, None])
        return []

    def cancel(self, request_id: int) -> bool:
        """Drop a row at once. False when no lane holds it."""
        if self._serial.cancel(request_id):
            return True
        return self._speculative is not None and self._speculative.cancel(request_id)

    def step(self) -> LaneStep:
        """One decode step, of the lane whose turn it is."""
        if leftover := self._leftover():
            return LaneStep(StepKind.SERIAL, 0, 0, leftover)
        self._stepped = self._share.choose([len(self._serial), self._drafting])
        if self._stepped == 0:
            rows = self._serial.launch()
            return LaneStep(StepKind.SERIAL, rows, rows, self._serial.collect(keep=1))
        assert self._speculative is not None
        rows = self._drafting
        outputs, record = self._speculative.step()
        if record is None:
            return LaneStep(
                StepKind.SERIAL, rows, rows, outputs, probe_paid=self._speculative.probe_paid
            )
        return LaneStep(
            StepKind.SPECULATIVE,
            rows,
            rows * record.width,
            outputs,
            record,
            self._speculative.probe_paid,
        )

    def _leftover(self) -> list[Output]:
        """The last tokens of a lane that has no rows any more, while the other has some."""
        outputs = [] if len(self._serial) else self._serial.collect()
        if self._speculative is not None and not len(self._speculative):
            outputs += self._speculative.finish_flights()
        return outputs

    def observe(self, step: LaneStep, seconds: float) -> None:
        """What the step took, for sharing time between the lanes."""
        self._share.observe(self._stepped, seconds, step.rows)

    def finish_flights(self) -> LaneStep:
        """Collect all that has been launched."""
        outputs = self._serial.collect()
        if self._speculative is not None:
            outputs += self._speculative.finish_flights()
        return LaneStep(StepKind.SERIAL, 0, 0, outputs)
