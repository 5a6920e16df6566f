"""Sampling: exact distributions, noise keyed by position, filters, penalties, logprobs."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import mlx.core as mx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from models.sampling import RowSampling, _filtered, choose, gumbel, observe, token_logprobs
from models.sampling_settings import Sampling

VOCABULARY = 40


def row(produced: list[int] | None = None, **fields: Any) -> RowSampling:
    return RowSampling(Sampling(**fields), VOCABULARY, produced or [])


def random_logits(*shape: int, seed: int = 0) -> mx.array:
    return mx.random.normal((*shape, VOCABULARY), key=mx.random.key(seed)) * 2


def kept(logits: mx.array, **fields: Any) -> set[int]:
    scores = _filtered(logits[None, None], [row(**fields)])[0, 0].tolist()
    return {token for token, score in enumerate(scores) if score > -math.inf}


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.6}, {"top_k": 4, "temperature": 1.3}])
def test_many_seeds_draw_the_softmax(fields: dict[str, Any]) -> None:
    probabilities = [0.4, 0.25, 0.15, 0.1, 0.06, 0.04]
    logits = mx.log(mx.array(probabilities))
    temperature, top_k = fields.get("temperature", 1.0), fields.get("top_k", 6)
    weights = [p ** (1 / temperature) if i < top_k else 0.0 for i, p in enumerate(probabilities)]
    draws = 4000
    rows = [RowSampling(Sampling(seed=seed, **fields), 6, []) for seed in range(draws)]
    tokens = choose(mx.broadcast_to(logits, (draws, 1, 6)), rows, [17] * draws)
    seen = Counter(tokens[:, 0].tolist())
    statistic = 0.0
    for token, weight in enumerate(weights):
        expected = draws * weight / sum(weights)
        if weight == 0.0:
            assert seen[token] == 0
        else:
            statistic += (seen[token] - expected) ** 2 / expected
    # The 0.999 quantile of chi-square with 5 degrees of freedom; the draws are fixed.
    assert statistic < 20.5


def test_positions_of_one_seed_draw_the_softmax_too() -> None:
    probabilities = [0.5, 0.3, 0.2]
    count = 4000
    logits = mx.broadcast_to(mx.log(mx.array(probabilities)), (1, count, 3))
    tokens = choose(logits, [RowSampling(Sampling(seed=5), 3, [])], [0])[0].tolist()
    seen = Counter(tokens)
    statistic = sum(
        (seen[token] - count * p) ** 2 / (count * p) for token, p in enumerate(probabilities)
    )
    assert statistic < 13.8
    pairs = Counter(itertools.pairwise(tokens))
    for (a, b), number in pairs.items():
        expected = (count - 1) * probabilities[a] * probabilities[b]
        assert abs(number - expected) < 5 * math.sqrt(expected)


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "seed": 2, "top_p": 0.8},
    {"temperature": 1.4, "seed": 3, "top_k": 5},
    {"temperature": 1.1, "seed": 4, "min_p": 0.1},
    {"temperature": 0.9, "seed": 5, "min_p": 0.02, "top_k": 9, "top_p": 0.5},
    {"temperature": 1.0, "seed": 6, "logit_bias": {3: 5.0}},
    {"temperature": 0.0, "logit_bias": {4: 100.0}},
]


@settings(max_examples=40, deadline=None)
@given(
    picks=st.lists(st.integers(0, len(SETTINGS) - 1), min_size=1, max_size=6),
    width=st.integers(1, 4),
    start=st.integers(0, 100_000),
)
def test_a_token_depends_on_its_own_row_and_position_only(
    picks: list[int], width: int, start: int
) -> None:
    rows = [row(**SETTINGS[pick]) for pick in picks]
    logits = random_logits(len(picks), width, seed=start)
    positions = [start + 3 * index for index in range(len(picks))]
    together = choose(logits, rows, positions).tolist()
    for index in range(len(picks)):
        for column in range(width):
            single = logits[index : index + 1, column : column + 1]
            alone = choose(single, [rows[index]], [positions[index] + column])
            assert alone.item() == together[index][column]


def test_noise_of_a_pair_does_not_depend_on_the_others() -> None:
    many = gumbel([1, 1, 2**63, 2**32 + 1], [0, 1, 0, 0], 50)
    for index, (seed, position) in enumerate([(1, 0), (1, 1), (2**63, 0), (2**32 + 1, 0)]):
        assert mx.array_equal(many[index], gumbel([seed], [position], 50)[0]).item()
    lines = {tuple(line) for line in many.tolist()}
    assert len(lines) == 4


def test_noise_never_changes_between_versions() -> None:
    """A replayed request goes on with the same noise after an upgrade."""
    tokens = choose(mx.zeros((1, 8, 1000)), [RowSampling(Sampling(seed=42), 1000, [])], [0])
    assert tokens.tolist() == [[996, 142, 152, 97, 910, 151, 55, 646]]


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {"temperature": 2.0, "top_k": 1}])
def test_greedy_is_argmax(fields: dict[str, Any]) -> None:
    logits = random_logits(3, 4)
    tokens = choose(logits, [row(seed=index, **fields) for index in range(3)], [0, 5, 9])
    assert tokens.dtype == mx.int32
    assert mx.array_equal(tokens, mx.argmax(logits, axis=-1)).item()


LADDER = mx.log(mx.array([0.4, 0.3, 0.2, 0.1]))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {0, 1, 2, 3}),
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 4}, {0, 1, 2, 3}),
        ({"top_k": 99}, {0, 1, 2, 3}),
        ({"top_p": 0.39}, {0}),
        ({"top_p": 0.41}, {0, 1}),
        ({"top_p": 0.95}, {0, 1, 2, 3}),
        ({"top_p": 0.0}, {0}),
        ({"min_p": 0.51}, {0, 1}),
        ({"min_p": 0.49}, {0, 1, 2}),
        ({"min_p": 1.0}, {0}),
        # 0.4 / 0.9 = 0.44 and 0.7 / 0.9 = 0.78: top_p acts on what top_k has left.
        ({"top_k": 3, "top_p": 0.5}, {0, 1}),
        ({"top_k": 3, "top_p": 0.43}, {0}),
        ({"min_p": 0.7, "top_p": 0.56}, {0}),
        # Temperature comes first: at 0.1 the best token has 95 % of the mass.
        ({"temperature": 0.1, "top_p": 0.9}, {0}),
        ({"temperature": 50.0, "min_p": 0.9}, {0, 1, 2, 3}),
    ],
)
def test_filters(fields: dict[str, Any], expected: set[int]) -> None:
    scores = _filtered(LADDER[None, None], [RowSampling(Sampling(**fields), 4, [])])[0, 0]
    assert {i for i, score in enumerate(scores.tolist()) if score > -math.inf} == expected


def test_filters_keep_what_those_of_mlx_lm_keep() -> None:
    def survivors(logits: mx.array) -> set[int]:
        return {i for i, score in enumerate(logits.tolist()) if score > -math.inf}

    for seed in range(5):
        logits = random_logits(seed=seed)
        logprobs = logits - mx.logsumexp(logits)
        assert kept(logits, top_k=7) == survivors(apply_top_k(logprobs, 7))
        assert kept(logits, top_p=0.9) == survivors(apply_top_p(logprobs, 0.9))
        assert kept(logits, min_p=0.1) == survivors(apply_min_p(logprobs, 0.1))


def test_a_very_low_temperature_does_not_overflow() -> None:
    logits = mx.array([[[1000.0, 999.0, -1000.0]]])
    sampling = RowSampling(Sampling(temperature=1e-4, top_p=0.9), 3, [])
    assert choose(logits, [sampling], [3]).item() == 0


def test_penalties_count_what_was_generated() -> None:
    logits = mx.array([[[3.0, 2.5, 1.0, 0.0]]])
    fields = {"temperature": 0.0, "presence_penalty": 0.4, "frequency_penalty": 0.3}
    sampling = RowSampling(Sampling(**fields), 4, [])
    said = []
    for position in range(4):
        tokens = choose(logits, [sampling], [position])
        observe([sampling], tokens)
        said.append(tokens.item())
    # 3.0, then 2.3 against 2.5, then 2.3 against 1.8, then 2.0 against 1.8.
    assert said == [0, 1, 0, 0]
    again = RowSampling(Sampling(**fields), 4, said)
    assert mx.allclose(again.adjust(logits[0]), sampling.adjust(logits[0])).item()
    assert mx.allclose(again.adjust(logits[0])[0], mx.array([1.7, 1.8, 1.0, 0.0])).item()


def test_penalties_do_not_touch_a_neighbour() -> None:
    logits = mx.zeros((2, 1, VOCABULARY))
    rows = [row(temperature=0.0, presence_penalty=2.0, produced=[0]), row(temperature=0.0)]
    assert choose(logits, rows, [1, 1]).tolist() == [[1], [0]]


def test_penalties_refuse_a_verify_block() -> None:
    with pytest.raises(ValueError, match="one column"):
        choose(random_logits(1, 2), [row(presence_penalty=1.0)], [0])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"logit_bias": {VOCABULARY: 1.0}}, f"token {VOCABULARY}"),
        ({"logit_bias": {-1: 1.0}}, "token -1"),
        ({"temperature": -1.0}, "temperature is -1"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_k": -1}, "top_k is -1"),
        ({"min_p": 2.0}, "min_p is 2"),
    ],
)
def test_a_setting_out_of_range_is_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        row(**fields)


def test_rows_and_positions_must_match_the_logits() -> None:
    with pytest.raises(ValueError, match="1 rows and 2 positions for 2 logits"):
        choose(random_logits(2, 1), [row()], [0, 1])


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_logprobs_are_of_the_raw_distribution(dtype: mx.Dtype) -> None:
    logits = random_logits(2).astype(dtype)
    tokens = mx.array([3, 11], dtype=mx.int32)
    chosen, ids, values = token_logprobs(logits, tokens, 5)
    for index, line in enumerate(logits.astype(mx.float32).tolist()):
        total = math.log(sum(math.exp(x) for x in line))
        best = sorted(range(VOCABULARY), key=lambda token: -line[token])[:5]
        assert ids[index].tolist() == best or dtype == mx.bfloat16
        assert values[index].tolist() == pytest.approx([line[t] - total for t in best], abs=1e-5)
        assert chosen[index].item() == pytest.approx(line[tokens[index].item()] - total, abs=1e-5)


def test_no_alternatives_and_too_many() -> None:
    logits, tokens = random_logits(2), mx.array([1, 2])
    assert [array.shape for array in token_logprobs(logits, tokens, 0)] == [(2,), (2, 0), (2, 0)]
    assert token_logprobs(logits, tokens, 999)[1].shape == (2, VOCABULARY)


def test_any_record_with_the_fields_will_do() -> None:
    class Other(msgspec.Struct):
        temperature: float = 0.0
        top_p: float = 1.0
        top_k: int = 0
        min_p: float = 0.0
        seed: int = 0
        presence_penalty: float = 0.0
        frequency_penalty: float = 0.0
        logit_bias: dict[int, float] = {}

    assert RowSampling(Other(), VOCABULARY, []).greedy


def test_a_filter_does_not_touch_a_row_without_it() -> None:
    """Tokens so rare that they vanish in the sum of the others survive a neighbour's filter."""
    logits = mx.broadcast_to(mx.array([0.0, -1.0, -30.0, -40.0]), (2, 1, 4))
    for fields in ({"top_p": 0.5}, {"top_k": 1}, {"min_p": 0.9}):
        rows = [RowSampling(Sampling(**more), 4, []) for more in (fields, {})]
        scores = _filtered(logits, rows)[:, 0].tolist()
        assert [score > -math.inf for score in scores[0]] == [True, False, False, False]
        assert scores[1] == [0.0, -1.0, -30.0, -40.0]
