"""How much room caches are given: what the engine allots, and what a memory plan foretells.

Pure and free of mlx, so that the daemon's ledger prices a batch with the very functions that
allot it. Room depends on what is needed now and on nothing else.
"""

from __future__ import annotations

SLOT_STEP = 256


def row_capacity(rows: int) -> int:
    """Rows that are allotted for `rows`: 1, 2, 3, 4, 6, 8, 12, 16, ..."""
    power = 1
    while power < rows:
        if rows <= power + power // 2:
            return power + power // 2
        power *= 2
    return power


def slot_capacity(slots: int) -> int:
    """Slots that are allotted for `slots`: steps of 256, from 2048 on of an eighth."""
    step = max(SLOT_STEP, (1 << max(slots - 1, 0).bit_length()) // 16)
    return -(-slots // step) * step
