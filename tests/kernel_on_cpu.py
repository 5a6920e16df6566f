"""The CUDA kernel of `models.ragged_attention`, compiled for the host: a thread for each of its own.

A stand-in for a GPU, which continuous integration lacks. It runs the kernel's very source, so it
finds wrong arithmetic, wrong indices and barriers that not all threads reach; it cannot find races
that real hardware would show, and says nothing of speed. Needs g++.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import numpy as np
import numpy.typing as npt

from models.ragged_attention import SOURCES, Reach

Floats = npt.NDArray[np.float32]

_HOST = """
#include <algorithm>
#include <barrier>
#include <cmath>
#include <thread>
#include <vector>
using std::min;
#define __device__
#define __shared__ static
#define __align__(bytes) __attribute__((aligned(bytes)))
struct uint4 { unsigned x, y, z, w; };
struct Place { int x, y, z; };
struct Shape { int at[8]; int operator[](int axis) const { return at[axis]; } };
struct Strides { long long at[8]; long long operator[](int axis) const { return at[axis]; } };
static Place gridDim;
static thread_local Place blockIdx, threadIdx;
static std::barrier<>* block_barrier;
static float exchanged[1024];
static void __syncthreads() { block_barrier->arrive_and_wait(); }
static float __shfl_xor_sync(unsigned, float value, int mask) {
  exchanged[threadIdx.x] = value;
  __syncthreads();
  const float other = exchanged[threadIdx.x ^ mask];
  __syncthreads();
  return other;
}
template <typename Kernel> void launch(Place grid, int threads, Kernel kernel) {
  gridDim = grid;
  for (int block = 0; block < grid.x * grid.y * grid.z; ++block) {
    std::barrier<> barrier(threads);
    block_barrier = &barrier;
    std::vector<std::thread> all;
    for (int thread = 0; thread < threads; ++thread)
      all.emplace_back([=] {
        threadIdx = {thread, 0, 0};
        blockIdx = {block % grid.x, block / grid.x % grid.y, block / grid.x / grid.y};
        kernel();
      });
    for (auto& one : all) one.join();
  }
}
"""

_ENTRY = """
using T = float;
constexpr int DIM = %(dim)d, QUERIES = %(queries)d;
constexpr bool CAUSAL = %(causal)s;
extern "C" void run(
    const float* queries, Shape queries_shape, Strides queries_strides,
    const float* keys, Shape keys_shape, Strides keys_strides,
    const float* values, Strides values_strides,
    const int* starts, const int* reach, const float* scale,
    float* attended, float* sums, float* bounds, int parts) {
  const int blocks = queries_shape[0] * queries_shape[1], width = queries_shape[2];
  const Place grid{blocks, parts, (width + QUERIES - 1) / QUERIES};
  if (parts == 1) {
    launch(grid, RAGGED_THREADS, [=] { %(whole)s });
    return;
  }
  launch(grid, RAGGED_THREADS, [=] { %(part)s });
  const Shape sums_shape{queries_shape[0], queries_shape[1], parts, width};
  launch({blocks * width, 1, 1}, DIM, [=] { %(combine)s });
}
"""


class _Shape(ctypes.Structure):
    _fields_ = [("at", ctypes.c_int * 8)]


class _Strides(ctypes.Structure):
    _fields_ = [("at", ctypes.c_longlong * 8)]


class KernelOnCpu:
    """The kernel for `dim` dimensions and up to `queries` queries a block, built in `folder`."""

    def __init__(self, folder: Path, *, dim: int, queries: int, causal: bool) -> None:
        header = resources.files("models").joinpath("ragged_attention.cuh").read_text()
        values = {"dim": dim, "queries": queries, "causal": str(causal).lower()}
        source, library = folder / "kernel.cpp", folder / "kernel.so"
        source.write_text(_HOST + header + _ENTRY % (values | SOURCES))
        # The kernel reads 16 bytes at a time as its elements, as CUDA programs do.
        options = ["-std=c++20", "-O1", "-fno-strict-aliasing", "-shared", "-fPIC", "-pthread"]
        subprocess.run(["g++", *options, "-o", str(library), str(source)], check=True)
        self._run = ctypes.CDLL(str(library)).run
        self._dim = dim

    def __call__(
        self,
        queries: Floats,
        keys: Floats,
        values: Floats,
        starts: Sequence[int],
        *,
        scale: float,
        reach: Reach,
        parts: int = 1,
    ) -> Floats:
        """As `ragged_attention`, of float32 arrays of any strides, by `parts` blocks each."""
        rows, heads, width, dim = queries.shape
        assert dim == self._dim
        attended = np.zeros((rows, width, heads, dim), np.float32)
        sums = np.zeros((rows, heads, parts, width, dim), np.float32)
        bounds = np.zeros((rows, heads, parts, width, 2), np.float32)
        integers = [np.array(starts, np.int32), np.array(reach, np.int32)]
        scales = np.array([scale], np.float32)
        self._run(
            *(_pointer(queries), _shape(queries), _strides(queries)),
            *(_pointer(keys), _shape(keys), _strides(keys)),
            *(_pointer(values), _strides(values)),
            *(_pointer(array) for array in [*integers, scales, attended, sums, bounds]),
            ctypes.c_int(parts),
        )
        return attended.swapaxes(1, 2)


def _pointer(array: npt.NDArray[np.generic]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _shape(array: Floats) -> _Shape:
    return _Shape((ctypes.c_int * 8)(*array.shape))


def _strides(array: Floats) -> _Strides:
    return _Strides((ctypes.c_longlong * 8)(*(stride // 4 for stride in array.strides)))
