"""Admission: order, limits, exact give-back, waits. Tables, and a random walk over it all."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scheduler.admission import (
    MAXIMUM_PASSES,
    MAXIMUM_WAIT_SECONDS,
    UNKNOWN_WAIT_SECONDS,
    Acceptance,
    Admission,
    Denial,
    DenialReason,
    QueueLimits,
)
from scheduler.ledger import KvCost
from scheduler.service_rate import ServiceRate

COST = KvCost(bytes_per_token=10)


class Clock:
    """Time that moves only when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def admission(
    *,
    rows: int = 2,
    tokens: int = 8 * 1024,
    requests: int = 4,
    prompt_tokens: int = 1000,
    context: int = 2048,
    clock: Clock | None = None,
) -> Admission:
    """An open admission with room for a rectangle of `tokens` slots."""
    made = Admission(
        limits=QueueLimits(requests=requests, prompt_tokens=prompt_tokens),
        maximum_rows=rows,
        budget=tokens * 10,
        cost=COST,
        context_length=context,
        clock=clock or Clock(),
    )
    made.open = True
    return made


def test_rows_fill_then_requests_wait_then_they_are_refused() -> None:
    policy = admission(rows=2, requests=2)
    answers = [policy.enter(key, 10, 10) for key in range(5)]
    assert answers[:2] == [Acceptance(10, running=True)] * 2
    assert answers[2:4] == [Acceptance(10, running=False)] * 2
    denial = answers[4]
    assert isinstance(denial, Denial)
    assert denial.reason is DenialReason.QUEUED_REQUESTS
    assert denial.retry_after == UNKNOWN_WAIT_SECONDS
    assert "2 requests wait, the limit is 2" in denial.message
    assert policy.leave(0)
    assert policy.admit() == [2]


def test_prompt_tokens_in_the_queue_are_limited_too() -> None:
    policy = admission(rows=1, requests=100, prompt_tokens=100)
    policy.enter(0, 500, 1)
    assert policy.enter(1, 60, 1) == Acceptance(1, running=False)
    denial = policy.enter(2, 60, 1)
    assert isinstance(denial, Denial)
    assert denial.reason is DenialReason.QUEUED_PROMPT_TOKENS
    assert policy.waiting_prompt_tokens == 60
    assert policy.enter(3, 40, 1) == Acceptance(1, running=False)


def test_a_prompt_longer_than_the_queue_may_wait_alone() -> None:
    policy = admission(rows=1, prompt_tokens=100)
    policy.enter(0, 10, 1)
    assert policy.enter(1, 500, 1) == Acceptance(1, running=False)
    assert isinstance(policy.enter(2, 1, 1), Denial)


def test_a_queue_of_nothing_still_serves_what_can_run() -> None:
    policy = admission(rows=1, requests=0)
    assert policy.enter(0, 10, 1) == Acceptance(1, running=True)
    assert isinstance(policy.enter(1, 10, 1), Denial)


@pytest.mark.parametrize(
    ("prompt", "asked", "granted"),
    [(100, 50, 50), (100, 10**9, 1948), (2047, 10, 1)],
)
def test_max_tokens_is_clamped_to_the_context(prompt: int, asked: int, granted: int) -> None:
    assert admission().enter(0, prompt, asked) == Acceptance(granted, running=True)


@pytest.mark.parametrize("prompt", [2048, 5000])
def test_only_a_prompt_that_can_never_fit_is_refused(prompt: int) -> None:
    denial = admission().enter(0, prompt, 1)
    assert isinstance(denial, Denial)
    assert denial.reason is DenialReason.CONTEXT_LENGTH
    assert denial.retry_after is None
    assert "maximum context length of 2048" in denial.message
    assert str(prompt) in denial.message


def test_memory_can_be_shorter_than_the_context() -> None:
    policy = admission(tokens=1024, context=100_000)
    assert policy.context_length == 1024
    denial = policy.enter(0, 1024, 1)
    assert isinstance(denial, Denial)
    assert "memory has room for 1024" in denial.message
    assert policy.enter(1, 1000, 500) == Acceptance(24, running=True)


def test_one_long_request_makes_every_row_dear() -> None:
    policy = admission(rows=8, tokens=4096)
    policy.enter(0, 100, 100)
    policy.enter(1, 100, 100)
    # Three rows of 1536 would fit by their sums, but not as a rectangle.
    assert policy.enter(2, 1400, 100) == Acceptance(100, running=False)
    assert policy.leave(0)
    assert policy.admit() == [2]


def test_a_large_request_is_passed_by_a_bounded_number_of_small_ones() -> None:
    policy = admission(rows=4, tokens=2048, requests=100, prompt_tokens=10**6)
    policy.enter(0, 100, 100)
    policy.enter(1, 1500, 400)
    running, passes = [0], 0
    for key in range(2, 40):
        policy.enter(key, 100, 100)
        admitted = policy.admit()
        passes += len(admitted)
        assert 1 not in admitted
        running += admitted
        if len(running) > 2:
            policy.leave(running.pop(0))
    assert passes == MAXIMUM_PASSES
    for key in running:
        policy.leave(key)
    assert policy.admit() == [1]


def test_nothing_is_admitted_while_the_engine_is_away() -> None:
    policy = admission()
    policy.open = False
    assert policy.enter(0, 10, 10) == Acceptance(10, running=False)
    assert policy.admit() == []
    policy.open = True
    assert policy.admit() == [0]


def test_the_expected_wait_follows_queue_and_speed() -> None:
    clock = Clock()
    policy = admission(rows=1, requests=2, clock=clock)
    policy.enter(0, 100, 100)
    clock.now += 2.0
    policy.rate.served(200)
    policy.rate.answered(100)
    policy.enter(1, 600, 100)
    policy.enter(2, 300, 100)
    denial = policy.enter(3, 1, 1)
    assert isinstance(denial, Denial)
    # 900 prompt tokens, two answers of 100, half an answer until a row is free: 1150 / 100.
    assert denial.retry_after == 12.0


def test_the_expected_wait_is_one_that_clients_obey() -> None:
    clock = Clock()
    policy = admission(rows=1, requests=50, clock=clock, prompt_tokens=10**6)
    policy.enter(0, 100, 100)
    clock.now += 100.0
    policy.rate.served(1)
    for key in range(1, 20):
        policy.enter(key, 1000, 1000)
    assert policy.expected_wait() == MAXIMUM_WAIT_SECONDS


def test_idle_time_does_not_slow_the_rate() -> None:
    clock = Clock()
    rate = ServiceRate(clock)
    rate.busy(True)
    clock.now += 10.0
    rate.served(500)
    rate.busy(False)
    clock.now += 100_000.0
    assert rate.tokens_per_second == pytest.approx(50.0)
    rate.busy(True)
    clock.now += 30.0
    rate.served(3000)
    assert 50.0 < (rate.tokens_per_second or 0.0) <= 100.0


class AdmissionWalk(RuleBasedStateMachine):
    """Any order of arrivals, admissions, departures and engine restarts."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = admission(rows=3, tokens=3 * 1024, requests=5, prompt_tokens=3000)
        self.accepted: set[int] = set()
        self.next_key = 0

    @rule(prompt=st.integers(1, 3000), maximum=st.integers(1, 3000))
    def arrive(self, prompt: int, maximum: int) -> None:
        key, self.next_key = self.next_key, self.next_key + 1
        answer = self.policy.enter(key, prompt, maximum)
        if isinstance(answer, Acceptance):
            assert 1 <= answer.max_tokens <= maximum
            assert prompt + answer.max_tokens <= self.policy.context_length
            self.accepted.add(key)
        else:
            assert not self.policy.leave(key)

    @rule()
    def admit(self) -> None:
        for key in self.policy.admit():
            assert key in self.accepted

    @precondition(lambda self: self.accepted)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.accepted)))
        before = self.policy.running + self.policy.waiting
        assert self.policy.leave(key)
        assert not self.policy.leave(key)
        self.accepted.remove(key)
        assert self.policy.running + self.policy.waiting == before - 1

    @rule(is_open=st.booleans())
    def engine(self, is_open: bool) -> None:
        self.policy.open = is_open

    @invariant()
    def the_books_are_right(self) -> None:
        policy = self.policy
        assert policy.running + policy.waiting == len(self.accepted)
        assert 0 <= policy.running <= 3
        assert 0 <= policy.ledger.reserved_bytes <= policy.ledger.budget
        assert policy.waiting <= 5
        assert policy.waiting_prompt_tokens <= 3000 or policy.waiting == 1
        assert bool(policy.ledger.reserved_bytes) == bool(policy.running)

    @invariant()
    def an_idle_open_engine_leaves_nobody_waiting(self) -> None:
        if self.policy.open and not self.policy.running and self.policy.waiting:
            assert self.policy.admit()

    def teardown(self) -> None:
        for key in self.accepted:
            assert self.policy.leave(key)
        assert self.policy.running == self.policy.waiting == 0
        assert self.policy.ledger.reserved_bytes == 0


TestAdmissionWalk = AdmissionWalk.TestCase
