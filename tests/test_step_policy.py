"""The step policy: decode keeps its share, short prompts pass, long ones get on."""

from hypothesis import given, settings
from hypothesis import strategies as st

from models.piece_size import padded
from scheduler.read_groups import WaitingPrompt
from scheduler.step_policy import (
    CHUNK_QUANTUM,
    COMPANY,
    MAXIMUM_CHUNK,
    MINIMUM_CHUNK,
    MOST_WAITING_PER_ROW,
    OLDEST_EVERY,
    PREFILL_PER_DECODE,
    LaneShare,
    PrefillPace,
    StepPolicy,
    Turn,
)


def policy(tokens_per_second: float = 1000.0) -> StepPolicy:
    return StepPolicy(0.1, PrefillPace(tokens_per_second))


def test_nothing_to_do_is_idle() -> None:
    assert policy().decide([], 0).turn is Turn.IDLE


def test_rows_alone_decode() -> None:
    assert policy().decide([], 3).turn is Turn.DECODE


def decided(subject: StepPolicy, prompts: list[WaitingPrompt], rows: int) -> int:
    """Tokens of the chunk after as many decode steps as it takes."""
    for _ in range(100):
        decision = subject.decide(prompts, rows)
        if decision.turn is Turn.PREFILL:
            return decision.tokens
        subject.observe_decode(0.05)
    raise AssertionError("no prompt was read")


def test_a_chunk_beside_decoding_rows_keeps_to_the_budget() -> None:
    assert decided(policy(1000.0), [WaitingPrompt(7, 1500)], 1) == 96


def test_a_prompt_is_not_cut_into_crumbs() -> None:
    assert decided(policy(100.0), [WaitingPrompt(7, 1500)], 1) == MINIMUM_CHUNK


def test_a_lone_prompt_is_read_in_larger_chunks() -> None:
    assert policy(1000.0).decide([WaitingPrompt(7, 1500)], 0).tokens == 400


def test_the_last_chunk_is_what_is_left() -> None:
    assert policy().decide([WaitingPrompt(7, 5)], 0).tokens == 5


def test_a_short_prompt_goes_before_a_long_one() -> None:
    decision = policy().decide([WaitingPrompt(1, 1500), WaitingPrompt(2, 19)], 0)
    assert (decision.request_ids, decision.tokens) == ((2,), 19)


def fresh(*lengths: int) -> list[WaitingPrompt]:
    """Prompts that may be read together."""
    return [WaitingPrompt(number, left, "serial") for number, left in enumerate(lengths)]


def test_short_prompts_are_read_together() -> None:
    decision = policy().decide(fresh(60, 30, 1500, 90), 0)
    assert (decision.request_ids, decision.tokens) == ((1, 0, 3), 180)


def test_a_long_prompt_gets_its_chunk_alone() -> None:
    subject = policy()
    decisions = [subject.decide(fresh(1500, 30, 40), 0) for _ in range(OLDEST_EVERY)]
    assert [one.request_ids for one in decisions] == [(1, 2)] * (OLDEST_EVERY - 1) + [(0,)]
    assert decisions[-1].tokens == 400


def test_company_beside_decoding_rows_takes_no_more_than_a_chunk() -> None:
    waiting = fresh(40, 40, 40, 40)
    subject = policy(1000.0)
    while (decision := subject.decide(waiting, 4)).turn is Turn.DECODE:
        subject.observe_decode(0.05)
    assert (decision.request_ids, decision.tokens) == ((0, 1), 80)


@settings(deadline=None)
@given(
    left=st.lists(st.integers(1, 600), min_size=1, max_size=10),
    rows=st.integers(0, 4),
    speed=st.floats(100.0, 1e5),
)
def test_company_is_bounded_and_a_lone_prompt_has_none(
    left: list[int], rows: int, speed: float
) -> None:
    subject, single = policy(speed), policy(speed)
    waiting = fresh(*left)
    apart = [WaitingPrompt(one.request_id, one.tokens_left) for one in waiting]
    decision, lone = subject.decide(waiting, rows), single.decide(apart, rows)
    while decision.turn is Turn.DECODE:
        assert lone.turn is Turn.DECODE
        subject.observe_decode(0.05)
        single.observe_decode(0.05)
        decision, lone = subject.decide(waiting, rows), single.decide(apart, rows)
    members = [left[number] for number in decision.request_ids]
    most = 0.1 * MOST_WAITING_PER_ROW
    if len(members) > 1:
        assert sum(members) == decision.tokens
        limit = subject.pace.chunk(most if rows else most * COMPANY)
        assert sum(map(padded, members)) <= limit
    # The company does not change whose turn it is.
    assert lone.request_ids == decision.request_ids[:1]
    if len(members) == 1:
        assert lone.tokens == decision.tokens


@settings(deadline=None)
@given(
    left=st.lists(st.integers(1, 5000), min_size=1, max_size=8),
    rows=st.integers(1, 8),
    speed=st.floats(100.0, 1e5),
    step=st.floats(0.001, 0.2),
    kind=st.sampled_from(["serial", None]),
)
def test_every_prompt_is_read_and_decode_gets_its_share(
    left: list[int], rows: int, speed: float, step: float, kind: str | None
) -> None:
    subject = policy(speed)
    remaining = dict(enumerate(left))
    turns_of_others = 0
    decoded = read = 0.0
    while remaining:
        waiting = [WaitingPrompt(key, tokens, kind) for key, tokens in remaining.items()]
        decision = subject.decide(waiting, rows)
        if decision.turn is Turn.DECODE:
            subject.observe_decode(step)
            decoded += step
            continue
        assert decision.turn is Turn.PREFILL
        members = decision.request_ids
        together = sum(remaining[member] for member in members)
        assert 0 < decision.tokens <= min(together, MAXIMUM_CHUNK)
        assert len(members) == 1 or decision.tokens == together
        is_oldest = waiting[0].request_id in members
        turns_of_others = 0 if is_oldest else turns_of_others + 1
        assert turns_of_others < OLDEST_EVERY
        seconds = decision.tokens / speed
        subject.observe_prefill(decision.tokens, seconds)
        read += seconds
        most = min(max(len(left) / rows, 1.0), MOST_WAITING_PER_ROW)
        # Reading never runs ahead of what decode has earned by more than one chunk.
        chunk = max(MINIMUM_CHUNK / speed, 0.1 * most)
        assert read <= decoded * PREFILL_PER_DECODE * most + chunk + 1e-6
        if len(members) == 1:
            remaining[members[0]] -= decision.tokens
        remaining = {
            key: tokens
            for key, tokens in remaining.items()
            if tokens and not (len(members) > 1 and key in members)
        }


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=8))
def test_prompts_alone_are_read_without_a_pause(left: list[int]) -> None:
    subject = policy()
    remaining = dict(enumerate(left))
    while remaining:
        waiting = [WaitingPrompt(key, tokens) for key, tokens in remaining.items()]
        decision = subject.decide(waiting, 0)
        assert decision.turn is Turn.PREFILL
        subject.observe_prefill(decision.tokens, decision.tokens / 1000.0)
        (read,) = decision.request_ids
        remaining[read] -= decision.tokens
        if not remaining[read]:
            del remaining[read]


def test_more_is_read_when_more_wait_than_decode() -> None:
    waiting = [WaitingPrompt(key, 1000) for key in range(4)]
    assert decided(policy(1000.0), waiting, 1) == 400
    assert decided(policy(1000.0), waiting, 2) == 192
    assert decided(policy(1000.0), waiting, 8) == 96


@given(st.lists(st.tuples(st.integers(1, 4096), st.floats(1e-4, 10.0)), max_size=30))
def test_chunks_stay_between_the_minimum_and_the_maximum(chunks: list[tuple[int, float]]) -> None:
    pace = PrefillPace()
    for tokens, seconds in chunks:
        pace.observe(tokens, seconds)
        assert MINIMUM_CHUNK <= pace.chunk(0.1) <= MAXIMUM_CHUNK
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
