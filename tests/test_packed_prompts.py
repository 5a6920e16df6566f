"""Prompts read in one forward are what each is when it is read alone.

MLX here runs on its reference BLAS, where a row's results do not depend on the rows beside it
beyond the last bits of a sum.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.decode_rows import TargetRows
from models.packed_prompts import PackedPrompts, read_packed
from models.piece_size import PIECE_TOKENS, padded
from models.target import Target
from tests.tiny_models import CONFIGURATIONS, VOCABULARY, WINDOW, save_tiny_checkpoint

LENGTHS = [
    [1, 1],
    [3, 41, 8],
    # At, behind and far behind the sliding window and the ring that keeps it.
    [WINDOW, WINDOW + 1, WINDOW + 8, WINDOW + 9, 60, 2, 17, 16],
]


@pytest.fixture(scope="module", params=sorted(CONFIGURATIONS))
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder: Path = tmp_path_factory.mktemp(request.param)
    return Target.load(save_tiny_checkpoint(request.param, folder))


@functools.cache
def tiny_llama() -> Target:
    with tempfile.TemporaryDirectory() as folder:
        return Target.load(save_tiny_checkpoint("llama", Path(folder)))


def prompt(length: int, salt: int) -> list[int]:
    return [(7 * i * i + 11 * salt + i) % VOCABULARY for i in range(length)]


def opened(target: Target) -> TargetRows:
    rows = TargetRows(target)
    rows.open_row()
    return rows


def alone(target: Target, tokens: list[int]) -> TargetRows:
    rows = opened(target)
    rows.prefill(mx.array([tokens], dtype=mx.int32))
    return rows


def together(target: Target, prompts: list[list[int]]) -> list[TargetRows]:
    rows = [opened(target) for _ in prompts]
    rows[0].prefill_with(rows[1:], prompts)
    return rows


def next_logits(rows: TargetRows) -> mx.array:
    """Logits of three more tokens, which see all that was read."""
    tokens = mx.array([[5], [9], [2]], dtype=mx.int32)
    return mx.concatenate([rows.decode(mx.tile(t[None], (len(rows), 1))) for t in tokens], axis=1)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_each_is_as_if_read_alone(target: Target, lengths: list[int]) -> None:
    prompts = [prompt(length, salt) for salt, length in enumerate(lengths)]
    for rows, tokens in zip(together(target, prompts), prompts, strict=True):
        expected = alone(target, tokens)
        assert rows.lengths == expected.lengths == [len(tokens)]
        assert rows.batch.nbytes == expected.batch.nbytes
        assert mx.allclose(next_logits(rows), next_logits(expected), atol=1e-4).item()


@settings(max_examples=12, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=2, max_size=6))
def test_no_length_disturbs_another(lengths: list[int]) -> None:
    target = tiny_llama()
    prompts = [prompt(length, salt) for salt, length in enumerate(lengths)]
    for rows, tokens in zip(together(target, prompts), prompts, strict=True):
        found, expected = next_logits(rows), next_logits(alone(target, tokens))
        assert mx.allclose(found, expected, atol=1e-4).item()


def test_rows_that_join_together_are_those_that_join_one_by_one(target: Target) -> None:
    prompts = [prompt(length, salt) for salt, length in enumerate([20, 3, 30, 9])]
    at_once, in_turn = TargetRows(target), TargetRows(target)
    at_once.join(*together(target, prompts[:1]))
    at_once.join(*together(target, prompts[1:]))
    for tokens in prompts:
        in_turn.join(alone(target, tokens))
    assert at_once.lengths == in_turn.lengths == [20, 3, 30, 9]
    assert at_once.batch.nbytes == target.cache_bytes(4, 30)
    assert mx.allclose(next_logits(at_once), next_logits(in_turn), atol=1e-4).item()


def test_little_is_padding() -> None:
    prompts = [prompt(length, 0) for length in (1, 8, 9, 100)]
    layout = PackedPrompts(prompts)
    assert layout.tokens.size == sum(padded(len(tokens)) for tokens in prompts)
    assert layout.tokens.size < sum(map(len, prompts)) + PIECE_TOKENS * len(prompts)


def test_what_cannot_be_packed_is_refused(target: Target) -> None:
    with pytest.raises(ValueError, match="needs a token"):
        PackedPrompts([[3], []])
    used, fresh = alone(target, [3, 4]), opened(target)
    with pytest.raises(ValueError, match=r"rows of length 0, not \[\[0\], \[2\]\]"):
        read_packed(target, [[5], [6]], [fresh.batch, used.batch])
    with pytest.raises(ValueError, match="rows of length 0"):
        read_packed(target, [[5], [6]], [fresh.batch])
