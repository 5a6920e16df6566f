"""When slices of a measurement run: the policy, on a measurement that is only counted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.ledger import CacheRoom, KvCost
from scheduler.measuring import BUSY_SHARE, PATIENCE_SECONDS, Measuring
from scheduler.messages import MeasuringProgress

NOISE = 320


class Clock:
    """Time that stands still unless a test moves it."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Counted:
    """A measurement of `total` slices, each of which takes `seconds`."""

    def __init__(self, clock: Clock, total: int = 100, seconds: float = 0.2) -> None:
        self.clock, self.seconds = clock, seconds
        self.timed, self.total = 0, total
        self.rows, self.holds_noise = 2, False
        self.broken = False

    @property
    def complete(self) -> bool:
        return self.timed == self.total

    def run_slice(self) -> bool:
        self.holds_noise = True
        self.clock.now += self.seconds
        if self.broken:
            raise RuntimeError("no memory")
        self.timed += 1
        return self.complete

    def release(self) -> None:
        self.holds_noise = False


def made(room: CacheRoom | None = None, **options: float) -> tuple[Measuring, Counted]:
    clock = Clock()
    slices = Counted(clock, **options)  # type: ignore[arg-type]
    return Measuring(slices, room, NOISE, clock), slices


def test_progress_counts_until_nothing_is_wanted() -> None:
    measuring, _ = made(total=2)
    assert measuring.progress == MeasuringProgress(0, 2)
    measuring.run_slice()
    assert measuring.progress == MeasuringProgress(1, 2) and measuring.wanted
    measuring.run_slice()
    assert not measuring.wanted


def test_a_request_frees_the_noise_of_an_idle_engine() -> None:
    measuring, slices = made()
    measuring.run_slice()
    assert slices.holds_noise
    measuring.make_way([100])
    assert not slices.holds_noise


def test_a_busy_engine_is_left_alone_at_first() -> None:
    measuring, _ = made()
    measuring.served(PATIENCE_SECONDS - 0.1)
    assert not measuring.due([100])
    measuring.served(0.2)
    assert measuring.due([100])
    measuring.run_slice()
    assert not measuring.due([100])


@given(
    st.lists(st.floats(0.001, 2.0), min_size=50, max_size=400),
    st.floats(0.01, 1.0),
)
def test_a_busy_engine_loses_its_share_and_one_slice_at_most(
    steps: list[float], seconds: float
) -> None:
    measuring, slices = made(total=10_000, seconds=seconds)
    served = 0.0
    for step in steps:
        measuring.served(step)
        served += step
        while measuring.due([100]):
            measuring.run_slice()
        assert slices.timed * seconds <= BUSY_SHARE * served + seconds + 1e-6
    if served > 2 * PATIENCE_SECONDS + 3 * seconds / BUSY_SHARE:
        assert slices.timed >= 1


def test_noise_stays_between_steps_only_where_requests_leave_room() -> None:
    cost = KvCost(bytes_per_token=10)
    room = CacheRoom(budget=cost.rectangle(2, 512) + cost.rectangle(2, NOISE), cost=cost)
    measuring, slices = made(room)
    measuring.served(PATIENCE_SECONDS + 10.0)
    assert measuring.due([512, 100])
    measuring.run_slice()
    measuring.make_way([512, 512])
    assert slices.holds_noise
    measuring.make_way([512, 513])
    assert not slices.holds_noise
    measuring.served(100.0)
    assert measuring.due([512, 512]) and not measuring.due([512, 513])


def test_a_measurement_that_fails_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    measuring, slices = made()
    slices.broken = True
    measuring.run_slice()
    assert not measuring.wanted and not slices.holds_noise
    assert "no memory" in caplog.text
