"""The step policy: decode keeps its share, short prompts pass, long ones get on."""

from hypothesis import given
from hypothesis import strategies as st

from scheduler.step_policy import (
    CHUNK_QUANTUM,
    LONGEST_BUDGET_FACTOR,
    MAXIMUM_CHUNK,
    OLDEST_EVERY,
    LaneShare,
    PrefillPace,
    StepPolicy,
    Turn,
    WaitingPrompt,
)


def policy(tokens_per_second: float = 1000.0) -> StepPolicy:
    return StepPolicy(0.1, PrefillPace(tokens_per_second))


def test_nothing_to_do_is_idle() -> None:
    assert policy().decide([], 0).turn is Turn.IDLE


def test_rows_alone_decode() -> None:
    assert policy().decide([], 3).turn is Turn.DECODE


def test_a_chunk_beside_decoding_rows_keeps_to_the_budget() -> None:
    decision = policy(1000.0).decide([WaitingPrompt(7, 1500)], 1)
    assert (decision.turn, decision.request_id, decision.tokens) == (Turn.PREFILL, 7, 96)


def test_a_lone_prompt_is_read_in_larger_chunks() -> None:
    assert policy(1000.0).decide([WaitingPrompt(7, 1500)], 0).tokens == 400


def test_the_last_chunk_is_what_is_left() -> None:
    assert policy().decide([WaitingPrompt(7, 5)], 0).tokens == 5


def test_a_short_prompt_goes_before_a_long_one() -> None:
    decision = policy().decide([WaitingPrompt(1, 1500), WaitingPrompt(2, 19)], 0)
    assert (decision.request_id, decision.tokens) == (2, 19)


@given(
    left=st.lists(st.integers(1, 5000), min_size=1, max_size=8),
    rows=st.integers(0, 8),
    speed=st.floats(100.0, 1e6),
)
def test_every_prompt_is_read_and_decode_waits_for_a_budget_at_most(
    left: list[int], rows: int, speed: float
) -> None:
    subject = policy(speed)
    remaining = dict(enumerate(left))
    turns_of_others = 0
    since_decode = 0.0
    while remaining:
        waiting = [WaitingPrompt(key, tokens) for key, tokens in remaining.items()]
        decision = subject.decide(waiting, rows)
        if decision.turn is not Turn.PREFILL:
            assert decision.turn is Turn.DECODE
            since_decode = 0.0
            continue
        assert 0 < decision.tokens <= min(remaining[decision.request_id], MAXIMUM_CHUNK)
        is_oldest = decision.request_id == waiting[0].request_id
        turns_of_others = 0 if is_oldest else turns_of_others + 1
        assert turns_of_others < OLDEST_EVERY
        seconds = decision.tokens / speed
        subject.observe_prefill(decision.tokens, seconds)
        since_decode += seconds
        if rows:
            budget = 0.1 * min(max(len(waiting) / rows, 1.0), LONGEST_BUDGET_FACTOR)
            # The last chunk may be a quantum too long; the budget may have shrunk meanwhile.
            most = 0.1 * LONGEST_BUDGET_FACTOR if len(left) > rows else budget
            assert since_decode <= most + CHUNK_QUANTUM / speed + 1e-9
        remaining[decision.request_id] -= decision.tokens
        if not remaining[decision.request_id]:
            del remaining[decision.request_id]


def test_short_prompts_are_read_together_between_two_decode_steps() -> None:
    subject = policy(1000.0)
    read = []
    for _ in range(3):
        decision = subject.decide([WaitingPrompt(key, 30) for key in range(3 - len(read))], 3)
        assert decision.turn is Turn.PREFILL
        read.append(decision.tokens)
        subject.observe_prefill(decision.tokens, decision.tokens / 1000.0)
    assert read == [30, 30, 30]


def test_more_is_read_when_more_wait_than_decode() -> None:
    waiting = [WaitingPrompt(key, 1000) for key in range(4)]
    assert policy(1000.0).decide(waiting, 1).tokens == 400
    assert policy(1000.0).decide(waiting, 2).tokens == 192
    assert policy(1000.0).decide(waiting, 8).tokens == 96


@given(st.lists(st.tuples(st.integers(1, 4096), st.floats(1e-4, 10.0)), max_size=30))
def test_chunks_stay_between_the_quantum_and_the_maximum(chunks: list[tuple[int, float]]) -> None:
    pace = PrefillPace()
    for tokens, seconds in chunks:
        pace.observe(tokens, seconds)
        assert CHUNK_QUANTUM <= pace.chunk(0.1) <= MAXIMUM_CHUNK
        assert pace.chunk(0.1) % CHUNK_QUANTUM == 0


def test_the_pace_follows_what_is_measured() -> None:
    pace = PrefillPace(100.0)
    for _ in range(40):
        pace.observe(512, 0.5)
    assert abs(pace.tokens_per_second - 1024.0) < 1.0


def test_a_lane_alone_is_stepped() -> None:
    share = LaneShare()
    assert [share.choose([0, 3]), share.choose([2, 0])] == [1, 0]


@given(
    costs=st.tuples(st.floats(0.001, 0.1), st.floats(0.001, 0.1)),
    rows=st.tuples(st.integers(1, 16), st.integers(1, 16)),
)
def test_both_lanes_get_time_in_proportion_to_their_rows(
    costs: tuple[float, float], rows: tuple[int, int]
) -> None:
    share = LaneShare()
    seconds = [0.0, 0.0]
    for _ in range(4000):
        lane = share.choose(rows)
        seconds[lane] += costs[lane]
        share.observe(lane, costs[lane], rows[lane])
    per_row = [seconds[lane] / rows[lane] for lane in (0, 1)]
    step = max(costs[lane] / rows[lane] for lane in (0, 1))
    assert abs(per_row[0] - per_row[1]) <= step + 1e-9
