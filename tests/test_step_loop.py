"""The step loop in this process, on a scripted link: what happens while prompts are being read.

A real tiny target; only the socket is not there, so that a message can come at an exact moment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from models.decode_rows import TargetRows
from models.target import Target
from scheduler.messages import Cancel, FinishReason, Rejected, Shutdown, Step, StepKind
from scheduler.step_loop import StepLoop
from scheduler.step_policy import PrefillPace, StepPolicy
from tests.engine_client import submit
from tests.tiny_models import save_tiny_checkpoint

PROMPTS = [[5, 9, 2, 7], list(range(3, 60)), [11] * 19, [40, 41]]


class ScriptedLink:
    """Hands out what is in `inbox`, then a shutdown once the loop has nothing to do."""

    def __init__(self, *messages: object) -> None:
        self.inbox = deque(messages)
        self.sent: list[Any] = []

    def receive(self, *, wait: bool, seconds: float | None = None) -> object | None:
        if self.inbox:
            return self.inbox.popleft()
        return Shutdown() if wait else None

    def send(self, message: object) -> None:
        self.sent.append(message)

    def steps(self, kind: StepKind) -> list[Step]:
        return [one for one in self.sent if isinstance(one, Step) and one.kind is kind]

    def texts(self) -> dict[int, list[int]]:
        """Tokens of the requests that ended."""
        outputs = [o for one in self.sent if isinstance(one, Step) for o in one.outputs]
        texts: dict[int, list[int]] = {}
        for output in outputs:
            texts.setdefault(output.request_id, []).extend(output.tokens)
        ended = {o.request_id for o in outputs if o.finish is FinishReason.LENGTH}
        return {number: text for number, text in texts.items() if number in ended}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target.load(save_tiny_checkpoint("llama", tmp_path_factory.mktemp("llama")))


def run(target: Target, *messages: object) -> ScriptedLink:
    link = ScriptedLink(*messages)
    # Fast enough that all the prompts fit into one step.
    StepLoop(target, None, link, StepPolicy(0.1, PrefillPace(1e4))).run()  # type: ignore[arg-type]
    return link


def requests(numbers: Sequence[int]) -> list[object]:
    return [submit(number, PROMPTS[number], max_tokens=12) for number in numbers]


@pytest.fixture(scope="module")
def alone(target: Target) -> dict[int, list[int]]:
    texts: dict[int, list[int]] = {}
    for number in range(len(PROMPTS)):
        texts |= run(target, *requests([number])).texts()
    return texts


def test_a_burst_is_read_in_one_step_and_joins_at_once(
    target: Target, alone: dict[int, list[int]]
) -> None:
    link = run(target, *requests(range(4)))
    (read,) = link.steps(StepKind.PREFILL)
    assert (read.rows, read.tokens) == (4, sum(len(prompt) - 1 for prompt in PROMPTS))
    assert sorted(read.started) == [0, 1, 2, 3]
    assert next(one.rows for one in link.steps(StepKind.SERIAL)) == 4
    assert link.texts() == alone


@pytest.mark.parametrize("gone", range(4))
def test_who_leaves_before_the_group_is_read_is_not_read(
    target: Target, alone: dict[int, list[int]], gone: int
) -> None:
    link = run(target, *requests(range(4)), Cancel(gone))
    (read,) = link.steps(StepKind.PREFILL)
    assert sorted(read.started) == [number for number in range(4) if number != gone]
    assert link.texts() == {n: text for n, text in alone.items() if n != gone}


def while_reading(monkeypatch: pytest.MonkeyPatch, event: Callable[[], None]) -> Callable[[], int]:
    """Let `event` happen inside every forward of a group; returns how often that was."""
    original, calls = TargetRows.prefill_with, 0

    def prefill_with(self: TargetRows, others: Any, prompts: Any) -> None:
        nonlocal calls
        calls += 1
        original(self, others, prompts)
        event()

    monkeypatch.setattr(TargetRows, "prefill_with", prefill_with)
    return lambda: calls


@pytest.mark.parametrize("gone", range(4))
def test_who_leaves_while_the_group_is_read_is_dropped_alone(
    target: Target, alone: dict[int, list[int]], gone: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = ScriptedLink(*requests(range(4)))
    while_reading(monkeypatch, lambda: link.inbox.append(Cancel(gone)))
    StepLoop(target, None, link, StepPolicy(0.1, PrefillPace(1e4))).run()  # type: ignore[arg-type]
    assert link.texts() == {n: text for n, text in alone.items() if n != gone}
    # Not one step is made with it.
    assert {one.rows for one in link.steps(StepKind.SERIAL) if one.rows} == {3}


def test_a_group_that_cannot_be_read_is_read_one_by_one(
    target: Target, alone: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ValueError("the forward is refused")

    calls = while_reading(monkeypatch, fail)
    link = run(target, *requests(range(4)))
    assert calls() == 1
    assert [one.rows for one in link.steps(StepKind.PREFILL)] == [1] * 4
    assert not any(isinstance(one, Rejected) for one in link.sent)
    assert link.texts() == alone


def test_a_replayed_prefix_is_read_with_others(target: Target, alone: dict[int, list[int]]) -> None:
    produced = alone[1][:5]
    again = submit(1, PROMPTS[1], produced=produced, max_tokens=12)
    link = run(target, *requests([0]), again, *requests([2]))
    (read,) = link.steps(StepKind.PREFILL)
    assert read.rows == 3
    texts = link.texts()
    assert produced + texts.pop(1) == alone[1]
    assert texts == {0: alone[0], 2: alone[2]}
