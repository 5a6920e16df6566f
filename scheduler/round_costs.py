"""What rounds cost on this machine: measured once for a pair, kept on disk, looked up by depth.

Owns the tables of one pair; used on the engine's MLX thread, free of mlx. A table belongs to a
machine, a backend, the versions of the libraries, a target and a drafter as they are loaded:
the key names them all, and a file whose key differs is measured again. A file may hold a part,
of the fewest rows, when an engine ended while it measured: the next one goes on. An unreadable
or unwritable file costs a measurement, never an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from scheduler.width_policy import CostTable


class CostKey(msgspec.Struct, frozen=True, kw_only=True):
    """All that a measured table depends on; `method` is how it was measured."""

    machine: str
    backend: str
    blas: str
    mlx: str
    target: str
    drafter: str
    maximum_rows: int
    method: str = "whole rounds"

    @property
    def file_name(self) -> str:
        """A name that differs when any part does."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:20] + ".json"


class MeasuredCost(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a verification of `rows` rows, `width` wide, behind `depth` tokens: what it
    adds to a round beside the draft behind it, or, of width 1, a serial step."""

    depth: int
    rows: int
    width: int
    seconds: float


class CostRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is stored. `draft` maps rows to the seconds of drafting a whole block."""

    key: CostKey
    verify: list[MeasuredCost]
    draft: dict[int, float]

    def save(self, folder: Path) -> None:
        """Write the record, whole or not at all."""
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            temporary = folder / f".{self.key.file_name}.{os.getpid()}"
            temporary.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1))
            temporary.replace(folder / self.key.file_name)

    @classmethod
    def load(cls, folder: Path, key: CostKey) -> CostRecord | None:
        """The record of `key`, None when there is none that can be read."""
        try:
            record = msgspec.json.decode((folder / key.file_name).read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError):
            return None
        return record if record.key == key else None


class RoundCosts:
    """Cost tables by context depth, as far as they are known.

    They grow while an engine measures (`add`). `complete` says that no more will come: costs of
    more rows than were measured are then extrapolated.
    """

    def __init__(self, record: CostRecord, *, complete: bool = True) -> None:
        self.complete = complete
        self.record = record
        self._tables: Mapping[int, CostTable] = {}
        self._tabulate()

    def covers(self, rows: int) -> bool:
        """Whether what a round of `rows` rows costs is known."""
        measured = max(self.record.draft, default=0)
        return measured > 0 and (rows <= measured or self.complete)

    def add(self, verify: list[MeasuredCost], *, rows: int, draft_seconds: float) -> None:
        """Take in all that was measured with `rows` rows behind one depth."""
        self.record = CostRecord(
            key=self.record.key,
            verify=[*self.record.verify, *verify],
            draft=self.record.draft | {rows: draft_seconds},
        )
        self._tabulate()

    def _tabulate(self) -> None:
        record = self.record
        self._tables = {
            depth: CostTable(
                verify={(c.rows, c.width): c.seconds for c in record.verify if c.depth == depth},
                draft=record.draft,
            )
            for depth in sorted({cost.depth for cost in record.verify})
        }

    def table(self, depth: int) -> CostTable:
        """The table measured nearest to `depth` tokens of context."""
        return self._tables[min(self._tables, key=lambda known: abs(known - depth))]

    def draft_seconds(self, rows: int) -> float:
        """A draft of `rows` rows."""
        table = next(iter(self._tables.values()))
        return table.draft_seconds(rows)

    def rounds_per_second(self, depth: int, rows: int) -> Callable[[int], float]:
        """Speed by tokens to verify over all rows, as Algorithm 1 wants it."""
        table = self.table(depth)
        widths = table.widths()

        def speed(tokens: int) -> float:
            needed = -(-tokens // rows)
            width = min((w for w in widths if w >= needed), default=widths[-1])
            return 1.0 / table.round_seconds(rows, width)

        return speed
