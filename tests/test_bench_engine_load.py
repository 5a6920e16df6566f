"""The load on a real engine process with a tiny model, and on fake engines that fall ill."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from daemon.bench.engine_load import engine
from daemon.bench.timings import StreamTiming, summarise
from daemon.child_process import python_command
from daemon.exit_codes import ExitCode, SparklaneError
from scheduler.messages import Configure, DraftConfigure
from scheduler.round_costs import CostRecord
from tests.tiny_models import save_tiny_checkpoint

FAKE = python_command("-m", "daemon.bench.fake_engine")
PAIR = Path(__file__).parent / "fixtures" / "dspark" / "qwen3"
PROMPTS = [[number, 5, 9] for number in range(1, 7)]


def load(
    folder: Path,
    configure: Configure,
    prompts: Sequence[Sequence[int]],
    *,
    command: Sequence[str] | None = None,
) -> list[StreamTiming]:
    async def run() -> list[StreamTiming]:
        async with engine(configure, folder, command=command) as running:
            return await running.run_load(prompts, concurrency=3, max_tokens=6)

    return asyncio.run(run())


def test_a_real_engine_answers_to_the_full_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARKLANE_BLAS", "reference")
    folder = save_tiny_checkpoint("llama", tmp_path / "tiny")
    timings = load(tmp_path, Configure(checkpoint=str(folder), maximum_rows=3), PROMPTS)
    summary = summarise(timings)
    assert (summary.requests, summary.errors) == (6, 0)
    assert [timing.tokens for timing in timings] == [6] * 6
    assert summary.prompt_tokens == 18
    assert all(timing.sent < timing.arrivals[0] <= timing.ended for timing in timings)


def test_what_the_engine_rejects_is_an_error_of_its_request(tmp_path: Path) -> None:
    timings = load(
        tmp_path,
        Configure(checkpoint="none"),
        PROMPTS,
        command=[*FAKE, "--reject-token", "4"],
    )
    errors = [timing.error for timing in timings if timing.error is not None]
    assert len(timings) == 6
    assert len(errors) == 1 and "token 4" in errors[0]


def test_an_engine_that_dies_leaves_no_request_waiting(tmp_path: Path) -> None:
    timings = load(
        tmp_path, Configure(checkpoint="none"), PROMPTS, command=[*FAKE, "--die-after", "4"]
    )
    assert len(timings) == 6
    assert {timing.error for timing in timings} == {"the engine went away"}


def test_an_engine_that_cannot_load_says_why(tmp_path: Path) -> None:
    command = [*FAKE, "--fault-lasting", "the weights are torn"]
    with pytest.raises(SparklaneError, match="the weights are torn") as raised:
        load(tmp_path, Configure(checkpoint="none"), PROMPTS, command=command)
    assert raised.value.exit_code == ExitCode.ENGINE


def test_costs_are_known_when_they_have_been_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARKLANE_BLAS", "reference")
    draft = DraftConfigure(drafter=str(PAIR / "drafter"), costs_folder=str(tmp_path / "costs"))
    configure = Configure(checkpoint=str(PAIR / "target"), maximum_rows=2, draft=draft)

    async def run() -> None:
        async with engine(configure, tmp_path) as running:
            await running.until_costs_are_known(lambda words: None)
            (stored,) = (tmp_path / "costs").iterdir()
            record = msgspec.json.decode(stored.read_bytes(), type=CostRecord)
            assert {cost.rows for cost in record.verify} == {1, 2}
            # Nothing is left to wait for.
            await running.until_costs_are_known(pytest.fail)

    asyncio.run(run())


def test_an_engine_that_goes_while_it_is_waited_for_is_an_error(tmp_path: Path) -> None:
    async def run() -> None:
        command = [*FAKE, "--always-measuring", "--heartbeat-seconds", "0.01"]
        async with engine(Configure(checkpoint="none"), tmp_path, command=command) as running:

            def kill(words: str) -> None:
                assert words.endswith("1 of 2")
                with contextlib.suppress(ProcessLookupError):  # a beat was still on its way
                    os.kill(running.pid, signal.SIGKILL)

            await running.until_costs_are_known(kill)

    with pytest.raises(SparklaneError, match="while it was measuring") as caught:
        asyncio.run(run())
    assert caught.value.exit_code == ExitCode.ENGINE
