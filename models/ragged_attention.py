"""Attention of a few queries a row over ragged caches, as one CUDA kernel.

Owns the kernel; runs on the engine's MLX thread, lazily. Verification asks a handful of queries of
rows whose lengths differ. MLX's CUDA backend has a fused attention for single queries of one row,
and for more only cuDNN's, which builds a plan of some 20 ms for every new length of keys; what is
left is a chain of products and masks, for each layer, whose shapes are new in every step. A small
target's step is the launching of kernels and little else. Here every layer's attention is one
launch, and what changes from step to step is a number that the kernel reads from the device: each
row's length. On an H200 eight tokens of SmolLM2-135M at 4 bits took 13.6 ms before and 7.1 with it.
Of large targets attention is a small part: Qwen3-8B's eight tokens take 22 ms either way, and heads
of 256 and 512 dimensions, as Gemma's, lost a little and are left alone.

Compiled by MLX when a combination of element type, dimensions and queries first runs; raises
whatever MLX raises when that fails. Elsewhere than on CUDA it is not available: Metal's own kernels
take up to eight queries with a mask.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import mlx.core as mx

from models.backend import DeviceKind, device_kind

DIMENSIONS = (64, 128)
MOST_QUERIES = 32
"""Of a row; longer chunks of a prompt are what matrix products are good at."""
MOST_PRODUCTS = 1 << 26
"""Of queries, keys and dimensions, when a row has several queries: beyond them matrix units gain
more than launches cost (Qwen3-8B's heads, eight queries: 4 rows behind 500 tokens 61 us against 70,
one behind 4,000 105 against 75)."""

_DTYPES = (mx.float32, mx.bfloat16, mx.float16)
_THREADS = 256
_QUERIES_AT_ONCE = 8
_PIECE = 64
"""Elements of a key that one thread reads."""
_TILES_ALONE = 4
"""Of keys, that one block goes over sooner than several and their sum."""
_MOST_BLOCKS = 256
"""About two for each multiprocessor of a large device: more would wait."""

_PROLOGUE = """
  RaggedRows rows;
  rows.heads = queries_shape[1];
  rows.key_heads = keys_shape[1];
  rows.width = queries_shape[2];
  rows.window = reach[0];
  rows.ring = reach[1];
  rows.scale = scale[0];
  const long long row = blockIdx.x / rows.heads;
  const int head = blockIdx.x % rows.heads;
  const int key_head = head / (rows.heads / rows.key_heads);
  const int first = blockIdx.z * QUERIES;
  rows.start = starts[row];
  const RaggedSpan span = ragged_span<DIM>(keys_shape[2], rows.start + rows.width);
  const T* own_queries = queries + row * queries_strides[0] + head * queries_strides[1]
      + first * queries_strides[2];
  const T* own_keys = keys + row * keys_strides[0] + key_head * keys_strides[1];
  const T* own_values = values + row * values_strides[0] + key_head * values_strides[1];
"""
_WHOLE = """
  ragged_attend<T, T, DIM, QUERIES, CAUSAL, false>(
      own_queries, queries_strides[2], own_keys, own_values, keys_strides[2], values_strides[2],
      rows, first, span,
      attended + ((row * rows.width + first) * rows.heads + head) * DIM, rows.heads * DIM, nullptr);
"""
_PART = """
  const long long at = ((row * rows.heads + head) * gridDim.y + blockIdx.y) * rows.width + first;
  ragged_attend<T, float, DIM, QUERIES, CAUSAL, true>(
      own_queries, queries_strides[2], own_keys, own_values, keys_strides[2], values_strides[2],
      rows, first, span, sums + at * DIM, DIM, bounds + at * 2);
"""
_COMBINE = """
  const int heads = sums_shape[1], parts = sums_shape[2], width = sums_shape[3];
  const int query = blockIdx.x % width, head = blockIdx.x / width % heads;
  const long long row = blockIdx.x / width / heads;
  const long long first = (row * heads + head) * parts * width + query;
  float greatest = RAGGED_LOWEST, weight = 0.f, sum = 0.f;
  for (int part = 0; part < parts; ++part)
    greatest = ::fmaxf(greatest, bounds[2 * (first + part * width)]);
  for (int part = 0; part < parts; ++part) {
    const long long at = first + part * width;
    const float share = ::exp2f(bounds[2 * at] - greatest);
    weight += share * bounds[2 * at + 1];
    sum += share * sums[at * DIM + threadIdx.x];
  }
  attended[((row * width + query) * heads + head) * DIM + threadIdx.x] =
      static_cast<T>(sum / weight);
"""


SOURCES = {"whole": _PROLOGUE + _WHOLE, "part": _PROLOGUE + _PART, "combine": _COMBINE}
"""Bodies of the kernels, of which `ragged_attention.cuh` is the header."""


class Reach(NamedTuple):
    """Which earlier positions a query sees: all, or the newest `window`, its own included. In a
    `ring` of that many slots, which has a window, position p lies in slot p mod ring; without one
    in slot p. 0 is none."""

    window: int = 0
    ring: int = 0


EVERYTHING = Reach()


@cache
def available() -> bool:
    """Whether MLX computes on CUDA."""
    return device_kind() is DeviceKind.CUDA


def fits(queries: mx.array, keys: mx.array, values: mx.array) -> bool:
    """Whether the kernel takes [R, H, W, D] over [R, h, S, D], of this type, here, and is the
    fastest way. For single queries of one row MLX has a faster one."""
    rows, _, width, dim = queries.shape
    return (
        available()
        and width <= MOST_QUERIES
        and rows * width > 1
        and (width == 1 or queries.size * keys.shape[2] <= MOST_PRODUCTS)
        and dim in DIMENSIONS
        and dim == keys.shape[3] == values.shape[3]
        and queries.dtype in _DTYPES
        and queries.dtype == keys.dtype == values.dtype
    )


def ragged_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    starts: mx.array,
    *,
    scale: float,
    causal: bool = True,
    reach: Reach = EVERYTHING,
) -> mx.array:
    """Attend from [R, H, W, D] to keys and values [R, h, S, D], of which row r has filled the
    first `starts[r]` + W, int32 [R]: [R, H, W, D], of the queries' type. `fits` says for which.

    Query w is at position starts[r] + w and sees what `reach` says up to that or, when not
    `causal`, everything there is.
    """
    rows, heads, width, dim = queries.shape
    at_once = 1
    while at_once < min(width, _QUERIES_AT_ONCE):
        at_once *= 2
    chunks = -(-width // at_once)
    parts = share_of_blocks(keys.shape[2], dim, rows * heads * chunks)
    template: list[tuple[str, Any]] = [
        ("T", queries.dtype),
        ("DIM", dim),
        ("QUERIES", at_once),
        ("CAUSAL", causal),
    ]
    call: dict[str, Any] = {
        "inputs": [queries, keys, values, starts, _reach_array(reach), _scale_array(scale)],
        "template": template,
        "grid": (rows * heads * _THREADS, parts, chunks),
        "threadgroup": (_THREADS, 1, 1),
    }
    # As the next projection reads it: the heads of a token side by side.
    shape = (rows, width, heads, dim)
    attended: mx.array
    if parts == 1:
        (attended,) = _kernel("whole")(output_shapes=[shape], output_dtypes=[queries.dtype], **call)
        return attended.swapaxes(1, 2)
    partial = (rows, heads, parts, width)
    sums, bounds = _kernel("part")(
        output_shapes=[(*partial, dim), (*partial, 2)],
        output_dtypes=[mx.float32, mx.float32],
        **call,
    )
    (attended,) = _kernel("combine")(
        inputs=[sums, bounds],
        template=template[:2],
        grid=(rows * heads * width * dim, 1, 1),
        threadgroup=(dim, 1, 1),
        output_shapes=[shape],
        output_dtypes=[queries.dtype],
    )
    return attended.swapaxes(1, 2)


def share_of_blocks(slots: int, dim: int, blocks: int) -> int:
    """Blocks that share the keys of a row and head, when there are `blocks` otherwise: a power of
    two, so that it seldom changes."""
    tiles = -(-slots * dim // (_THREADS * _PIECE))
    parts = 1
    if tiles > _TILES_ALONE:
        while parts < tiles and 2 * parts * blocks <= _MOST_BLOCKS:
            parts *= 2
    return parts


@cache
def _reach_array(reach: Reach) -> mx.array:
    return mx.array(reach, dtype=mx.int32)


@cache
def _scale_array(scale: float) -> mx.array:
    return mx.array([scale], dtype=mx.float32)


@cache
def _kernel(name: str) -> Any:
    header = resources.files("models").joinpath("ragged_attention.cuh").read_text()
    source = SOURCES[name]
    attending = ["queries", "keys", "values", "starts", "reach", "scale"]
    # MLX keeps compiled kernels by name, also on disk, whatever became of their source.
    digest = hashlib.sha256((header + source).encode()).hexdigest()[:12]
    return mx.fast.cuda_kernel(
        name=f"ragged_{name}_{digest}",
        input_names=["sums", "bounds"] if name == "combine" else attending,
        output_names=["sums", "bounds"] if name == "part" else ["attended"],
        source=source,
        header=header,
        ensure_row_contiguous=False,
    )
