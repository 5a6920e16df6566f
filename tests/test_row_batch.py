"""Rows of different lengths under mlx-lm's models: exactness, rollback, growth, memory.

MLX here runs on its reference BLAS, where a row's results do not depend on the rows beside it
beyond the last bits of a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, RotatingKVCache, make_prompt_cache

from models.cache_capacity import row_capacity, slot_capacity
from models.row_batch import RowBatch
from tests.tiny_models import CONFIGURATIONS, WINDOW, build_tiny_model

PROMPTS = [[5, 9, 2, 7, 31], [(7 * i) % 90 + 1 for i in range(41)], [11, 64] * 10]
MODELS = {name: build_tiny_model(name) for name in CONFIGURATIONS}
NARROW = build_tiny_model("gemma4_text", sliding_window=5)


def alone(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy text with mlx-lm's own caches."""
    cache = make_prompt_cache(model)
    logits = model(mx.array([prompt]), cache=cache)
    tokens: list[int] = []
    while len(tokens) < count:
        tokens.append(int(mx.argmax(logits[0, -1]).item()))
        logits = model(mx.array([tokens[-1:]]), cache=cache)
    return tokens


def read(model: Any, tokens: Sequence[int], *, block: int = 8, chunk: int = 7) -> RowBatch:
    """A one-row batch that has read `tokens` chunk by chunk."""
    batch = RowBatch(model, block=block)
    batch.open_row()
    for start in range(0, len(tokens), chunk):
        piece = list(tokens[start : start + chunk])
        model(mx.array([piece]), cache=batch.caches)
        batch.advance([len(piece)])
    return batch


@pytest.mark.parametrize("name", sorted(MODELS))
def test_one_row_gives_the_bits_of_mlx_lm(name: str) -> None:
    model: Any = MODELS[name]
    cache = make_prompt_cache(model)
    batch = RowBatch(model)
    batch.open_row()
    rotates = any(isinstance(layer, RotatingKVCache) for layer in cache)
    # Past its window mlx-lm's rotating cache adds in another order than a ring does.
    steps = [3, 1, 1, 4, 1] if rotates else [3, 1, 1, 300, 1, 5, 1]
    for width in steps:
        tokens = mx.array([[(3 * i) % 90 + 1 for i in range(width)]])
        expected = model(tokens, cache=cache)
        assert mx.array_equal(model(tokens, cache=batch.caches), expected).item()
        batch.advance([width])
    assert batch.lengths == [sum(steps)]


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_rows_that_join_and_leave_say_what_each_says_alone(name: str, chunk: int) -> None:
    model: Any = MODELS[name]
    expected = [alone(model, prompt, 30) for prompt in PROMPTS]
    batch = RowBatch(model)
    order: list[int] = []
    said: list[list[int]] = [[] for _ in PROMPTS]
    joins, leaves = {0: 1, 4: 0, 9: 2}, {12: 1, 20: 0}
    for step in range(28):
        if (row := joins.get(step)) is not None:
            batch.join(read(model, PROMPTS[row][:-1], chunk=chunk))
            order.append(row)
        if (row := leaves.get(step)) is not None:
            place = order.index(row)
            moved = batch.leave(place)
            assert moved == (len(order) - 1 if place != len(order) - 1 else None)
            order[place] = order[-1]
            order.pop()
        anchors = [[(said[row] or PROMPTS[row])[-1]] for row in order]
        logits = model(mx.array(anchors), cache=batch.caches)
        batch.advance([1] * len(order))
        for row, token in zip(order, mx.argmax(logits[:, -1], axis=-1).tolist(), strict=True):
            said[row].append(token)
    assert [len(text) for text in said] == [16, 12, 19]
    for text, whole in zip(said, expected, strict=True):
        assert text == whole[: len(text)]


@pytest.mark.parametrize("block", [3, 8])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_rejected_drafts_leave_no_trace(name: str, block: int) -> None:
    model: Any = MODELS[name]
    length = 40
    expected = [alone(model, prompt, length + 4) for prompt in PROMPTS]
    batch = RowBatch(model, block=block)
    for prompt in PROMPTS:
        batch.join(read(model, prompt[:-1], block=block))
    said: list[list[int]] = [[] for _ in PROMPTS]
    accepted_counts = set()
    for round_index in range(100):
        if all(len(text) >= length for text in said):
            break
        inputs = []
        for row, text in enumerate(said):
            drafts = expected[row][len(text) : len(text) + 3]
            drafts += [0] * (3 - len(drafts))
            wrong = (round_index * 3 + row) % 4
            if wrong < 3:
                drafts[wrong] = (drafts[wrong] + 1) % 96
            inputs.append([(text or PROMPTS[row])[-1], *drafts])
        logits = model(mx.array(inputs), cache=batch.caches)
        choices = mx.argmax(logits, axis=-1).tolist()
        counts = []
        for row, text in enumerate(said):
            count = 1
            while count < 4 and inputs[row][count] == choices[row][count - 1]:
                count += 1
            counts.append(count)
            text += choices[row][:count]
        accepted_counts.add(tuple(counts))
        batch.advance(counts)
    assert any(len(set(counts)) == 3 for counts in accepted_counts)
    for row, text in enumerate(said):
        assert text[:length] == expected[row][:length]
        assert batch.lengths[row] == len(PROMPTS[row]) - 1 + len(text)


PROMPT = st.integers(0, 30)
OPERATION = st.one_of(
    st.tuples(st.just("join"), PROMPT),
    st.tuples(st.just("leave"), st.integers(0, 7)),
    st.tuples(
        st.just("step"), st.integers(1, 9), st.lists(st.integers(0, 9), min_size=6, max_size=6)
    ),
    st.tuples(st.just("step"), st.just(3), st.lists(st.integers(0, 3), min_size=6, max_size=6)),
)


@pytest.mark.parametrize("model", [MODELS["llama"], NARROW], ids=["full", "sliding"])
@settings(max_examples=25, deadline=None)
@given(operations=st.lists(OPERATION, min_size=3, max_size=14), data=st.data())
def test_any_history_equals_computing_afresh(
    model: Any, operations: list[tuple[Any, ...]], data: st.DataObject
) -> None:
    """Logits of every step equal those of the rows' whole texts without a cache."""
    batch = RowBatch(model, block=2)
    texts: list[list[int]] = []
    seed = data.draw(st.integers(0, 1000))
    draws = iter(range(seed, seed + 10_000))

    def some(count: int) -> list[int]:
        return [(next(draws) * 37 + 11) % 95 for _ in range(count)]

    for operation in [("join", 9), *operations]:
        match operation:
            case ("join", length) if len(batch) < 6:
                texts.append(some(length))
                batch.join(read(model, texts[-1], block=2, chunk=1 + length % 8))
            case ("leave", row) if row < len(batch):
                batch.leave(row)
                texts[row] = texts[-1]
                texts.pop()
            case ("step", width, counts) if len(batch):
                inputs = [some(width) for _ in texts]
                logits = model(mx.array(inputs), cache=batch.caches)
                for row, text in enumerate(texts):
                    afresh = model(mx.array([text + inputs[row]]))[0, len(text) :]
                    assert mx.allclose(logits[row], afresh, rtol=1e-3, atol=2e-3).item()
                kept = [min(count, width) for count in counts[: len(texts)]]
                batch.advance(kept)
                for text, new, count in zip(texts, inputs, kept, strict=True):
                    text += new[:count]
        assert batch.lengths == [len(text) for text in texts]


@pytest.mark.parametrize("rows", [1, 3, 5])
@pytest.mark.parametrize("name", ["llama", "gemma4_text"])
def test_bytes_are_foretold(name: str, rows: int) -> None:
    model: Any = MODELS[name]
    batch = RowBatch(model)
    with pytest.raises(RuntimeError, match="before the first forward"):
        batch.bytes_for(1, 1)
    for row in range(rows):
        batch.join(read(model, [3] * (10 + row * 70), chunk=64))
    assert batch.nbytes == batch.bytes_for(rows, max(batch.lengths))
    for _ in range(rows):
        batch.leave(0)
    assert (len(batch), batch.nbytes) == (0, 0)


def test_a_token_costs_what_full_layers_keep() -> None:
    batch = read(MODELS["gemma4_text"], [1, 2, 3])
    # One full layer of 2 heads by 32 with a cache of its own, keys and values, float32.
    assert batch.bytes_per_token() == 2 * 32 * 2 * 4


def test_capacities_grow_in_steps_that_waste_little() -> None:
    assert [row_capacity(n) for n in (1, 2, 3, 4, 5, 7, 9, 13)] == [1, 2, 3, 4, 6, 8, 12, 16]
    assert [slot_capacity(n) for n in (1, 256, 257, 4096, 4097)] == [256, 256, 512, 4096, 4608]
    for slots in range(2048, 60_000, 331):
        assert slots <= slot_capacity(slots) < slots * 1.13


def test_room_is_given_back_when_a_long_row_leaves() -> None:
    model = MODELS["llama"]
    batch = read(model, [3] * 2000, chunk=2000)
    batch.join(read(model, [4] * 20))
    batch.leave(0)
    assert batch.nbytes == batch.bytes_for(1, 20)


def long_rows(rows: int, length: int) -> RowBatch:
    """Rows of `length` tokens whose keys and values are ones."""
    batch = RowBatch(MODELS["llama"])
    for _ in range(rows):
        own = RowBatch(MODELS["llama"])
        own.open_row()
        for cache in own.caches:
            cache.update_and_fetch(mx.ones((1, 2, length, 8)), mx.ones((1, 2, length, 8)))
        own.advance([length])
        batch.join(own)
    mx.eval(batch.state())
    return batch


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_a_step_writes_in_place(rows: int) -> None:
    model: Any = MODELS["llama"]
    batch = long_rows(rows, 9000)
    tokens = mx.full((rows, 1), 5)
    mx.eval(model(tokens, cache=batch.caches))
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(model(tokens, cache=batch.caches))
    one_buffer = batch.nbytes // len(batch.state())
    assert mx.get_peak_memory() - before < one_buffer / 2


def test_what_is_not_finite_stays_in_its_row() -> None:
    model: Any = MODELS["llama"]
    batch = read(model, [1, 2, 3])
    batch.join(read(model, [4, 5]))
    poison = mx.full((2, 2, 4, 8), mx.nan)
    for cache in batch.caches:
        cache.update_and_fetch(poison, poison)
    batch.advance([4, 4])
    batch.leave(1)
    batch.leave(0)
    batch.join(read(model, PROMPTS[0][:-1]))
    batch.join(read(model, PROMPTS[1][:-1]))
    for _ in range(2):
        poison = mx.where(
            mx.array([False, True])[:, None, None, None], mx.nan, mx.zeros((2, 2, 4, 8))
        )
        for cache in batch.caches:
            cache.update_and_fetch(poison, poison)
        batch.advance([0, 4])
        batch.leave(1)
        batch.join(read(model, PROMPTS[2][:2]))
    logits = model(mx.array([[PROMPTS[0][-1]], [7]]), cache=batch.caches)
    assert mx.isfinite(logits).all().item()
    assert mx.argmax(logits[0, -1]).item() == alone(model, PROMPTS[0], 1)[0]


def test_a_commit_must_fit_the_forward() -> None:
    model: Any = MODELS["llama"]
    batch = read(model, [1, 2, 3])
    for counts in ([1], [], [0, 0], [-1]):
        with pytest.raises(ValueError, match="counts"):
            batch.advance(counts)
    model(mx.array([[1, 2]]), cache=batch.caches)
    with pytest.raises(ValueError, match="counts"):
        batch.advance([3])
    batch.advance([2])
    assert batch.lengths == [5]


def test_misuse_is_refused() -> None:
    model: Any = MODELS["llama"]
    batch = read(model, [1, 2])
    with pytest.raises(ValueError, match="opened in an empty batch"):
        batch.open_row()
    with pytest.raises(ValueError, match="row 1 does not exist"):
        batch.leave(1)
    with pytest.raises(ValueError, match="same model"):
        batch.join(batch)
    with pytest.raises(ValueError, match="same model"):
        batch.join(RowBatch(model, block=3))
    with pytest.raises(ValueError, match="tokens for 2 rows"):
        model(mx.array([[1], [2]]), cache=batch.caches)


def test_a_model_with_other_state_is_refused() -> None:
    class Recurrent(nn.Module):
        def make_cache(self) -> list[ArraysCache]:
            return [ArraysCache(2)]

    with pytest.raises(ValueError, match="ArraysCache"):
        RowBatch(Recurrent())


def test_rows_are_read_past_the_window_in_any_chunks() -> None:
    assert len(PROMPTS[1]) > WINDOW + 8
    model: Any = MODELS["gemma4_text"]
    whole = read(model, PROMPTS[1], chunk=len(PROMPTS[1]))
    pieces = read(model, PROMPTS[1], chunk=10)
    for a, b in zip(whole.state(), pieces.state(), strict=True):
        assert a.shape == b.shape
    first = model(mx.array([[9]]), cache=whole.caches)
    second = model(mx.array([[9]]), cache=pieces.caches)
    assert mx.allclose(first, second, atol=1e-4).item()
