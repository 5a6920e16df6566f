"""What MLX's CUDA backend has to be told before it first computes.

Owns nothing but environment variables that are not set yet, so an operator's choice stands; no
effect on the CPU and on Metal. Call it before anything is evaluated: MLX reads each of them
once. Both concern caches that MLX keeps by exact shape, in a process whose shapes never end.
"""

from __future__ import annotations

import os

# MLX counts the misses of such a cache over the whole life of the process, and ends it with
# "Cache thrashing is happening" after twice the cache's size: 800 graphs, 512 attention plans.
LONG_LIVED = {"MLX_ENABLE_CACHE_THRASHING_CHECK": "0"}

# cuDNN's attention takes over wherever several tokens meet keys of 128 dimensions or fewer. It
# builds a plan of some 20 ms for every new length of keys, which in verification is every round
# of every kind of layer: Qwen3-8B's rounds took 65 to 80 ms on an H200, and 10 where by chance
# the plan was there. Without it MLX's own operations do the same.
GROWING_KEYS = {"MLX_CUDA_USE_CUDNN_SDPA": "0"}


def prepare(*, growing_keys: bool) -> None:
    """Set what is not set. `growing_keys` is for decoding; training has few, fixed shapes, and
    cuDNN halves the time of the target's forward there."""
    for name, value in {**LONG_LIVED, **(GROWING_KEYS if growing_keys else {})}.items():
        os.environ.setdefault(name, value)
