"""How much memory this process may use: the machine's, or its control group's if less.

Reads /proc and /sys on Linux, asks psutil elsewhere. Any thread; a file that cannot be read
counts as no limit.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import psutil


class MachineMemory(msgspec.Struct, frozen=True):
    """Bytes. `available` is what can be taken without swapping; `limited_by` says by what."""

    total: int
    available: int
    limited_by: str


def read_machine_memory(root: Path = Path("/")) -> MachineMemory:
    """The memory there is now. `root` is where /proc and /sys are found."""
    if sys.platform != "linux":
        memory = psutil.virtual_memory()
        return MachineMemory(memory.total, memory.available, "the machine")
    fields = _fields(root / "proc/meminfo", scale=1024)
    total = fields.get("MemTotal", 0)
    result = MachineMemory(total, fields.get("MemAvailable", total), "the machine")
    for group, limit_name, usage_name in _groups(root):
        limit = _number(group / limit_name)
        if limit is None or limit >= result.total:
            continue
        # Pages of files are given back under pressure, so they do not count as used.
        statistics = _fields(group / "memory.stat", scale=1)
        cached = statistics.get("inactive_file", statistics.get("total_inactive_file", 0))
        used = max((_number(group / usage_name) or 0) - cached, 0)
        available = min(result.available, max(limit - used, 0))
        result = MachineMemory(limit, available, f"the control group {group}")
    return result


def _groups(root: Path) -> list[tuple[Path, str, str]]:
    """This process's control groups and their parents: (folder, limit file, usage file)."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        # Inside a container the path may name a folder that only the host sees.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for count in range(len(parts), -1, -1):
            found.append((base.joinpath(*parts[:count]), *names))
    return found


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # ValueError: "max", no limit
        return None


def _fields(path: Path, scale: int) -> dict[str, int]:
    try:
        rows = [line.replace(":", " ").split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {row[0]: int(row[1]) * scale for row in rows if len(row) > 1 and row[1].isdigit()}
