"""The commands themselves, run on tiny real models: options, documents, errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner, Result

from daemon.bench.cli import bench
from daemon.bench.daemon_process import configuration_text
from daemon.bench.paired_prompts import PairedPrompts
from daemon.bench.prompts import fitted, plain_words
from daemon.configuration import decode
from daemon.exit_codes import ExitCode, SparklaneError

ROOT = Path(__file__).parent.parent
PAIR = Path(__file__).parent / "fixtures" / "dspark" / "qwen3"
TARGET, DRAFTER = str(PAIR / "target"), str(PAIR / "drafter")
TRACE = str(PAIR / "trace_float32_thr0.json")
try:
    DSPARK = {f"mlx-dspark {version('mlx-dspark')}"}
except PackageNotFoundError:
    DSPARK = {"mlx-dspark"}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(bench, arguments)


def document(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    parsed: dict[str, Any] = json.loads(result.stdout)
    return parsed


@pytest.fixture(autouse=True)
def reference_blas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARKLANE_BLAS", "reference")


def test_every_command_explains_itself() -> None:
    assert set(bench.commands) == {
        "engine",
        "fanout",
        "footprint",
        "http",
        "overhead",
        "peer",
        "speculation",
        "widths",
    }
    for name in bench.commands:
        result = run(name, "--help")
        assert result.exit_code == 0 and "--json" in result.output


def test_engine_prints_one_document() -> None:
    options = ("--requests", "3", "--concurrency", "2", "--max-tokens", "5")
    found = document("engine", "--model", TARGET, *options, "--prompt-tokens", "30")
    assert found["load"]["errors"] == 0
    assert (found["load"]["requests"], found["load"]["tokens"]) == (3, 15)
    assert found["load"]["prompt_tokens"] > 0
    assert found["blas"] and found["machine"]["cores"] >= 1
    assert found["scaling"] is None


def test_widths_prints_both_measurements_and_their_figures() -> None:
    options = ("--width", "4", "--depth", "16", "--repeats", "1")
    found = document("widths", "--model", TARGET, "--draft-model", DRAFTER, *options)
    for record in (found["chosen_by"], found["judged_by"]):
        assert {(c["rows"], c["width"]) for c in record["verify"]} == {
            (rows, width) for rows in (1, 2, 4, 8) for width in (1, 4)
        }
    (depth,) = found["depths"]
    assert depth["depth"] == 16
    assert len(depth["figures"]) == 12
    assert all(figure["chosen"] in (1, 4) for figure in depth["figures"])


def test_speculation_compares_with_every_peer_that_is_there() -> None:
    options = ("--trace", TRACE, "--max-tokens", "12", "--rounds", "1")
    found = document("speculation", "--model", TARGET, "--draft-model", DRAFTER, *options)
    peers = {(figure["peer"], figure["rows"]): figure for figure in found["figures"]}
    drafting, plain = (
        f"mlx-lm {version('mlx-lm')} {how}" for how in ("with a draft model", "without drafts")
    )
    assert {rows for _, rows in peers} == {1, 4}
    assert {name for name, _ in peers} - {drafting, plain} in (set(), DSPARK)
    assert bool(found["left_out"]) is not DSPARK.issubset({name for name, _ in peers})
    assert peers[plain, 4]["together"] and not peers[drafting, 4]["together"]
    assert peers[drafting, 1]["setting"].startswith(("the target itself, ", "half of its layers, "))
    for figure in peers.values():
        for ratio in (figure["ratio"], figure["processor_ratio"]):
            assert ratio["value"] > 0 and len(ratio["rounds"]) == 1
    # Twelve tokens for each of four prompts, none of which ends sooner.
    assert (found["prompts"], found["tokens"], found["partings"]) == (4, 48, [])


def test_speculation_takes_whole_groups_of_prompts() -> None:
    result = run("speculation", "--model", TARGET, "--draft-model", DRAFTER, "--prompts", "5")
    assert result.exit_code == ExitCode.USAGE and "multiple" in result.output


def test_a_pair_that_does_not_fit_is_refused_in_one_line() -> None:
    result = run("widths", "--model", TARGET, "--draft-model", TARGET)
    assert isinstance(result.exception, SparklaneError)
    assert result.exception.exit_code == ExitCode.CHECKPOINT
    assert "\n" not in str(result.exception)


def test_a_server_that_is_not_there() -> None:
    result = run("http", "--url", "http://127.0.0.1:9")
    assert isinstance(result.exception, SparklaneError)
    assert result.exception.exit_code == ExitCode.NETWORK
    assert "http://127.0.0.1:9" in str(result.exception)


def test_the_daemon_understands_the_configuration_that_it_is_given() -> None:
    text = configuration_text(Path('/a "quoted" folder'), 1234, name="bench", rows=3)
    found = decode(text, "the benchmark")
    assert (found.server.host, found.server.port) == ("127.0.0.1", 1234)
    (model,) = found.models
    assert (model.name, model.source, model.maximum_rows) == ("bench", '/a "quoted" folder', 3)


def test_prompts_have_their_length_and_differ_from_the_start() -> None:
    def words(text: str) -> int:
        return len(text.split())

    assert [words(fitted(count, 1, words)) for count in (1, 2, 17, 400)] == [1, 2, 17, 400]
    assert fitted(50, 1, words) != fitted(50, 2, words)
    assert words(fitted(3, 1, lambda text: words(text) + 10)) == 1
    assert plain_words(5, 1) == plain_words(5, 1)


def test_paired_prompts_are_as_long_as_asked_with_the_template() -> None:
    prompts = PairedPrompts(PAIR / "target")
    found = prompts.some(3, 200)
    assert all(180 <= len(prompt.tokens) <= 200 for prompt in found)
    assert len({prompt.text for prompt in found}) == 3


def test_a_benchmark_that_is_told_to_stop_takes_its_servers_with_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "daemon", "bench", "fanout", "--model", TARGET]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [*command, "--streams", "2", "--max-tokens", "100000"],
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as bench_process:
        assert bench_process.stderr is not None
        for line in bench_process.stderr:
            if line.startswith("2 streams"):
                break
        servers = psutil.Process(bench_process.pid).children(recursive=True)
        assert len(servers) == 2
        bench_process.terminate()
        assert bench_process.wait() == 128 + signal.SIGTERM
    assert psutil.wait_procs(servers, timeout=30)[1] == []
    assert list(tmp_path.iterdir()) == []
