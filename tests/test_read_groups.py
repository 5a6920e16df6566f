"""Which prompts are read in one forward: short ones of a kind, as many as fit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.piece_size import PIECE_TOKENS, padded
from scheduler.ledger import KvCost
from scheduler.memory_plan import ActivationShape, MemoryNeeds, prefill_transients
from scheduler.read_groups import LONGEST_MEMBER, MOST_GROUP_TOKENS, WaitingPrompt, group_of
from scheduler.step_policy import MAXIMUM_CHUNK

A, B = "serial", "speculative"


@pytest.mark.parametrize(
    ("waiting", "tokens", "expected"),
    [
        ([(30, A)], 500, [0]),
        ([(30, A), (40, A)], 500, [0, 1]),
        # Counted in pieces of 8: 32 and 40 are 72.
        ([(30, A), (40, A)], 72, [0, 1]),
        ([(30, A), (40, A)], 71, [0]),
        ([(30, A), (40, A), (8, A)], 60, [0, 2]),
        ([(30, A), (20, B), (40, A)], 500, [0, 2]),
        ([(30, A), (20, None), (40, A)], 500, [0, 2]),
        ([(30, None), (20, None)], 500, [0]),
        ([(30, A), (LONGEST_MEMBER + 1, A)], 500, [0]),
        ([(LONGEST_MEMBER + 1, A), (30, A)], 500, [0]),
        ([(LONGEST_MEMBER, A), (30, A)], 500, [0, 1]),
        # The first is read whatever the room.
        ([(30, A), (1, A)], 8, [0]),
        ([(100, A)] * 8, 10_000, [0, 1, 2]),
    ],
)
def test_groups(waiting: list[tuple[int, str | None]], tokens: int, expected: list[int]) -> None:
    prompts = [WaitingPrompt(number, left, kind) for number, (left, kind) in enumerate(waiting)]
    assert group_of(prompts[0], prompts, tokens) == expected


@pytest.mark.parametrize(
    ("hidden", "intermediate", "key_width"),
    [(576, 1536, 192), (4096, 14336, 1024), (3840, 15360, 2048), (4096, 11008, 4096)],
)
def test_a_group_needs_no_more_memory_than_a_chunk_is_planned_with(
    hidden: int, intermediate: int, key_width: int
) -> None:
    needs = MemoryNeeds(
        model="",
        weight_bytes=0,
        kv_cost=KvCost(bytes_per_token=0),
        activations=ActivationShape(
            hidden=hidden, intermediate=intermediate, attention_heads=1, scores=False
        ),
        element_bytes=1,
        chunk_tokens=MAXIMUM_CHUNK,
        maximum_rows=8,
        context_length=MAXIMUM_CHUNK,
        minimum_tokens=1,
    )
    # Keys and values of each piece's whole prompt, and one of them once more in another order.
    pieces = MOST_GROUP_TOKENS // PIECE_TOKENS
    copies = 3 * pieces * padded(LONGEST_MEMBER) * key_width
    chunk = prefill_transients(needs)
    assert copies + chunk * MOST_GROUP_TOKENS / MAXIMUM_CHUNK <= chunk


@given(
    waiting=st.lists(
        st.tuples(st.integers(1, 300), st.sampled_from([A, B, None])), min_size=1, max_size=10
    ),
    first=st.integers(0, 9),
    tokens=st.integers(1, 1000),
)
def test_every_group_keeps_to_its_bounds_and_leaves_nobody_out_that_fits(
    waiting: list[tuple[int, str | None]], first: int, tokens: int
) -> None:
    prompts = [WaitingPrompt(number, left, kind) for number, (left, kind) in enumerate(waiting)]
    chosen = prompts[first % len(prompts)]
    members = group_of(chosen, prompts, tokens)
    assert members[0] == chosen.request_id
    assert len(set(members)) == len(members)
    if len(members) == 1:
        return
    found = [prompts[member] for member in members]
    assert {one.kind for one in found} == {chosen.kind} != {None}
    assert max(one.tokens_left for one in found) <= LONGEST_MEMBER
    room = min(tokens, MOST_GROUP_TOKENS) - sum(padded(one.tokens_left) for one in found)
    assert room >= 0
    left_out = [one for one in prompts if one.kind == chosen.kind and one.request_id not in members]
    for one in left_out:
        assert padded(one.tokens_left) > room or one.tokens_left > LONGEST_MEMBER
        assert one.tokens_left >= max(other.tokens_left for other in found[1:])
