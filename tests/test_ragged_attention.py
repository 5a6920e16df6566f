"""Attention over ragged caches: the kernel's arithmetic, and where it stands in for a mask."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from models import attention_hook
from models.attention_hook import attend_ragged, attention_of, set_attention
from models.ragged_attention import (
    EVERYTHING,
    Reach,
    available,
    fits,
    ragged_attention,
    share_of_blocks,
)
from models.row_batch import RowBatch
from tests.kernel_on_cpu import Floats, KernelOnCpu
from tests.tiny_models import CONFIGURATIONS, WINDOW, build_tiny_model


def plainly(
    queries: Floats,
    keys: Floats,
    values: Floats,
    starts: Sequence[int],
    *,
    scale: float,
    causal: bool = True,
    reach: Reach = EVERYTHING,
) -> Floats:
    """The definition, in float64, one query at a time."""
    _, heads, width, _ = queries.shape
    shared = heads // keys.shape[1]
    slots = np.arange(keys.shape[2])
    attended = np.zeros(queries.shape)
    for row, start in enumerate(starts):
        last = start + width - 1
        positions = last - (last - slots) % reach.ring if reach.ring else slots
        for query in range(width):
            own = start + query if causal else last
            seen = (positions >= 0) & (positions <= own)
            if reach.window:
                seen &= positions > own - reach.window
            for head in range(heads):
                scores = scale * (keys[row, head // shared][seen] @ queries[row, head, query])
                weights = np.exp(scores - scores.max(), dtype=np.float64)
                mixed = weights @ values[row, head // shared][seen]
                attended[row, head, query] = mixed / weights.sum()
    return attended.astype(np.float32)


def noise(*shape: int, seed: int) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


# Rows' lengths, width, whether causal, reach, blocks that share the keys.
CASES: dict[str, tuple[list[int], int, bool, Reach, int]] = {
    "one row": ([300], 8, True, EVERYTHING, 1),
    "ragged, one of them empty": ([0, 517, 70], 5, True, EVERYTHING, 1),
    "more queries than a block takes": ([259], 11, True, EVERYTHING, 1),
    "a block that sees itself": ([300, 17], 7, False, EVERYTHING, 1),
    "a window": ([600, 90], 6, True, Reach(100), 1),
    "a ring, before and behind its first turn": ([37, 250, 71], 8, True, Reach(64, 71), 1),
    "several blocks, some without a key": ([600, 17], 8, True, EVERYTHING, 4),
}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, bool], KernelOnCpu]:
    folder = tmp_path_factory.mktemp
    return {
        (dim, causal): KernelOnCpu(folder("kernel"), dim=dim, queries=8, causal=causal)
        for dim, causal in [(64, True), (64, False), (128, True)]
    }


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiles the kernel for the host")
class TestKernel:
    @pytest.mark.parametrize("dim", [64, 128])
    @pytest.mark.parametrize("case", CASES)
    def test_is_the_definition(
        self, kernels: dict[tuple[int, bool], KernelOnCpu], case: str, dim: int
    ) -> None:
        starts, width, causal, reach, parts = CASES[case]
        if (dim, causal) not in kernels:
            pytest.skip("the same source as with 64 dimensions")
        # A thread of the host for each of the kernel's: few blocks.
        rows, heads, key_heads = len(starts), 4 if len(starts) == 1 else 2, 2
        filled = max(starts) + width
        held = reach.ring or filled + 3
        queries = noise(rows, width, heads, dim, seed=1).swapaxes(1, 2)
        # A spare row and slots that nobody filled: what is there must not matter.
        buffers = [noise(rows + 1, key_heads, held, dim, seed=seed) for seed in (2, 3)]
        for buffer in buffers:
            for row, start in enumerate(starts):
                buffer[row, :, start + width :] = np.nan
        keys, values = (buffer[:rows, :, : min(filled, held)] for buffer in buffers)
        found = kernels[dim, causal](
            queries, keys, values, starts, scale=0.3, reach=reach, parts=parts
        )
        expected = plainly(queries, keys, values, starts, scale=0.3, causal=causal, reach=reach)
        # Sums of up to 1,000 float32 products in another order.
        np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.skipif(not available(), reason="needs MLX on CUDA")
@pytest.mark.parametrize(("dtype", "tolerance"), [(mx.float32, 2e-5), (mx.bfloat16, 2e-2)])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("case", CASES)
def test_on_the_device(case: str, dim: int, dtype: mx.Dtype, tolerance: float) -> None:
    starts, width, causal, reach, _ = CASES[case]
    rows, held = len(starts), reach.ring or max(starts) + width
    slots = min(max(starts) + width, held)
    arrays = [
        mx.array(noise(rows, count, length, dim, seed=seed)).astype(dtype)
        for seed, (count, length) in enumerate([(4, width), (2, slots), (2, slots)])
    ]
    found = ragged_attention(
        *arrays, mx.array(starts, dtype=mx.int32), scale=0.3, causal=causal, reach=reach
    )
    host = [np.array(array.astype(mx.float32)) for array in arrays]
    expected = plainly(*host, starts, scale=0.3, causal=causal, reach=reach)
    np.testing.assert_allclose(np.array(found.astype(mx.float32)), expected, atol=tolerance)


class TestInModels:
    """The hook, with the definition in the kernel's place: what a cache says of its mask must
    hide what the mask hides."""

    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int, Reach]]]:
        calls: list[tuple[int, int, Reach]] = []

        def attend(
            queries: mx.array,
            keys: mx.array,
            values: mx.array,
            starts: mx.array,
            *,
            scale: float,
            reach: Reach,
        ) -> mx.array:
            calls.append((queries.shape[0], queries.shape[2], reach))
            host = [np.array(array) for array in (queries, keys, values)]
            begin: Any = starts.tolist()
            return mx.array(plainly(*host, begin, scale=scale, reach=reach))

        monkeypatch.setattr(attention_hook, "ragged_attention", attend)
        monkeypatch.setattr(attention_hook, "fits", lambda *arrays: True)
        yield calls

    @pytest.mark.parametrize("width", [1, 4])
    @pytest.mark.parametrize("lengths", [[9], [40], [5, 23, 40], [6, 3]])
    @pytest.mark.parametrize("name", CONFIGURATIONS)
    def test_the_logits_stay(
        self, asked: list[tuple[int, int, Reach]], name: str, lengths: list[int], width: int
    ) -> None:
        model: Any = build_tiny_model(name)
        batch = RowBatch(model)
        for length in lengths:
            row = RowBatch(model)
            row.open_row()
            model(mx.arange(length)[None] % 90, cache=row.caches)
            row.advance([length])
            batch.join(row)
        tokens = mx.arange(len(lengths) * width).reshape(len(lengths), width) + 3
        expected = model(tokens, cache=batch.caches)
        mx.eval(expected)
        before = attention_of(model)
        set_attention(dict.fromkeys(before, attend_ragged))
        try:
            found = model(tokens, cache=batch.caches)
            mx.eval(found)
        finally:
            set_attention(before)
        assert mx.allclose(found, expected, atol=1e-4).item()
        assert {call[:2] for call in asked} == {(len(lengths), width)}
        past_window = max(lengths) + width > WINDOW or len(lengths) > 1
        rings = {reach for *_, reach in asked} - {EVERYTHING}
        expected_ring = {Reach(WINDOW, WINDOW + batch.block)}
        assert rings == (expected_ring if name == "gemma4_text" and past_window else set())

    def test_a_chunk_held_aside_keeps_its_mask(self, asked: list[tuple[int, int, Reach]]) -> None:
        model: Any = build_tiny_model("gemma4_text")
        batch = RowBatch(model)
        batch.open_row()
        before = attention_of(model)
        set_attention(dict.fromkeys(before, attend_ragged))
        try:
            mx.eval(model(mx.arange(60)[None], cache=batch.caches))
        finally:
            set_attention(before)
        # The full layer alone: those of the window hold the chunk aside.
        assert [reach for *_, reach in asked] == [EVERYTHING]


@pytest.mark.parametrize(
    ("slots", "dim", "blocks", "expected"),
    [
        (500, 64, 9, 1),  # two tiles: one block is there sooner
        (4000, 64, 9, 16),
        (4000, 64, 256, 1),  # the device is full
        (4000, 128, 32, 8),
        (1280, 64, 1, 8),  # no more blocks than tiles ask for
    ],
)
def test_the_keys_are_shared(slots: int, dim: int, blocks: int, expected: int) -> None:
    assert share_of_blocks(slots, dim, blocks) == expected


def test_elsewhere_than_on_cuda_it_fits_nothing() -> None:
    if available():
        pytest.skip("this is CUDA")
    array = mx.zeros((2, 4, 8, 64))
    assert not fits(array, array, array)
