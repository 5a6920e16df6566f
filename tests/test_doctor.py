"""What the doctor finds on this machine and in folders made to be wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from daemon import doctor
from daemon.catalog import DEFAULT_MODEL, EMBEDDED_DRAFTERS
from daemon.configuration import MemorySection, load
from daemon.doctor import Finding, State, examine, worst
from daemon.exit_codes import SparklaneError
from daemon.machine_memory import MachineMemory, read_machine_memory
from daemon.memory_budget import PlannedModel, plan_models
from models.checkpoint import inspect


def by_check(findings: list[Finding]) -> dict[str, Finding]:
    rows = {finding.check: finding for finding in findings}
    assert len(rows) == len(findings)
    return rows


def test_a_machine_with_the_default_model_is_well(smollm2: Path, cache: Path) -> None:
    rows = by_check(examine(cache))
    assert rows["backend"].detail.split()[0] in ("CPU", "CUDA", "Metal")
    assert rows["default model"] == Finding(
        "default model", State.OK, f"{DEFAULT_MODEL}, 4-bit, 98 MB"
    )
    assert rows["default drafter"].detail.startswith(f"{DEFAULT_MODEL}-drafter, ")
    assert rows["room for it"].detail.startswith("needs ")
    for name in ("mlx", "mlx-lm", "aiohttp"):
        assert rows[name].state is State.OK
    assert State.FAIL not in {row.state for row in rows.values()}


def test_an_empty_cache_asks_for_a_pull_and_stays_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARKLANE_BLAS", "reference")
    rows = by_check(examine(tmp_path / "new"))
    assert rows["default model"].state is State.WARN
    assert rows["default model"].remedy == "run: sparklane pull smollm2-135m"
    assert "room for it" not in rows
    if "BLAS" in rows and rows["BLAS"].detail != "Accelerate":
        assert rows["BLAS"].state is State.WARN
    assert list(tmp_path.iterdir()) == []


def test_a_broken_default_model_and_cache_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARKLANE_BLAS", "reference")
    broken = tmp_path / "checkpoints" / DEFAULT_MODEL
    broken.mkdir(parents=True)
    found = by_check(examine(tmp_path))["default model"]
    assert found.state is State.FAIL
    assert "config.json: not found" in found.detail and str(broken) in found.remedy
    blocked = tmp_path / "file"
    blocked.write_text("")
    findings = examine(blocked / "cache")
    assert by_check(findings)["cache folder"].state is State.FAIL
    assert worst(findings) is State.FAIL


def test_an_mlx_that_does_not_run_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "mlx"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "core.py").write_text("raise ImportError('libcuda.so.1: no such file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("SPARKLANE_BLAS", "reference")
    found = by_check(examine(tmp_path / "cache"))["backend"]
    assert found.state is State.FAIL
    assert found.detail == "mlx does not run: ImportError: libcuda.so.1: no such file"


def test_the_worst_state_counts() -> None:
    rows = {state: Finding("a check", state, "") for state in State}
    assert worst([]) is State.OK
    assert worst([rows[State.WARN], rows[State.OK]]) is State.WARN
    assert worst([rows[State.OK], rows[State.FAIL], rows[State.WARN]]) is State.FAIL


@pytest.mark.parametrize("gpu", [False, True])
def test_room_is_what_serve_plans(
    smollm2: Path, gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every amount of memory: with the drafter, without it, or not at all, as `serve` is."""
    for module in ("daemon.doctor", "daemon.memory_budget"):
        monkeypatch.setattr(f"{module}.has_gpu", lambda: gpu)
    defaults, cache = load(None), smollm2.parent.parent
    facts, section = inspect(smollm2), defaults.models[0]
    drafter = EMBEDDED_DRAFTERS[f"{DEFAULT_MODEL}-drafter"]
    both, alone = PlannedModel(section, facts, drafter), PlannedModel(section, facts)

    def serves(model: PlannedModel, memory: MemorySection) -> bool:
        try:
            plan_models([model], memory)
        except SparklaneError:
            return False
        return True

    seen = set()
    for megabytes in range(400, 2600, 20):
        memory = MemorySection(limit_bytes=megabytes * 10**6)
        configuration = msgspec.structs.replace(defaults, memory=memory)
        rows = by_check(doctor._default_model(cache, configuration))
        expected = (serves(alone, memory), serves(both, memory))
        seen.add(expected)
        room, draft = rows["room for it"], rows.get("default drafter")
        assert (room.state is State.OK) == expected[0]
        assert (draft is not None and draft.state is State.OK) == expected[1]
        if draft is None:
            assert "memory.limit_bytes leaves" in room.detail
            continue
        assert ("served without it: not enough memory" in draft.detail) == (not expected[1])
        ((plan, _),) = plan_models([both if expected[1] else alone], memory)
        assert f"needs {doctor._size(plan.total - plan.kv_budget)} " in room.detail
        # 3 heads of 64 in 3 layers, in the precision of the target's cache.
        assert f"{2 * 3 * 3 * 64 * (2 if gpu else 4)} bytes a token" in draft.detail
    assert seen == {(False, False), (True, False), (True, True)}


GIGABYTE = 10**9


def machine(root: Path, files: dict[str, str]) -> MachineMemory:
    """A tree of /proc and /sys files on a machine of 8 GB of which 6 are available."""
    meminfo = "MemTotal: 8000000 kB\nMemAvailable: 6000000 kB\nHugePages_Total: 0\n"
    for name, content in {"proc/meminfo": meminfo, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return read_machine_memory(root)


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")
@pytest.mark.parametrize(
    ("files", "total", "available"),
    [
        ({}, 8192 * 10**6, 6144 * 10**6),
        (
            {
                "proc/self/cgroup": "0::/box\n",
                "sys/fs/cgroup/box/memory.max": "2000000000\n",
                "sys/fs/cgroup/box/memory.current": "1500000000\n",
                "sys/fs/cgroup/box/memory.stat": "anon 1\ninactive_file 700000000\n",
            },
            2 * GIGABYTE,
            1_200_000_000,
        ),
        (  # a parent's limit counts too
            {
                "proc/self/cgroup": "0::/slice/box\n",
                "sys/fs/cgroup/slice/box/memory.max": "max\n",
                "sys/fs/cgroup/slice/memory.max": "3000000000\n",
                "sys/fs/cgroup/slice/memory.current": "0\n",
            },
            3 * GIGABYTE,
            3 * GIGABYTE,
        ),
        (  # version 1, seen from inside a container
            {
                "proc/self/cgroup": "9:name=systemd:/\n4:memory:/docker/abc\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "1000000000\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "400000000\n",
            },
            GIGABYTE,
            600_000_000,
        ),
        (  # version 1's way to say "no limit"
            {
                "proc/self/cgroup": "4:memory:/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            8192 * 10**6,
            6144 * 10**6,
        ),
    ],
)
def test_a_control_group_limits_memory(
    tmp_path: Path, files: dict[str, str], total: int, available: int
) -> None:
    memory = machine(tmp_path, files)
    assert (memory.total, memory.available) == (total, available)
