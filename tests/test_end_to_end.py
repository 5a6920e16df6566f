"""The command line's daemon with the real default model, and the official client."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import openai
import psutil
import pytest

from daemon.child_process import python_command, python_environment
from daemon.exit_codes import ExitCode
from models import blas

PATIENCE = 120.0
"""Seconds after which something that is waited for has failed."""

MODEL = "smollm2-135m"
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
STORY = [{"role": "user", "content": "Write a long story about a lighthouse keeper."}]


@dataclass(frozen=True)
class Running:
    """A daemon that listens, and a client of it."""

    process: subprocess.Popen[str]
    url: str
    client: openai.OpenAI
    cache: Path

    def engines(self) -> list[psutil.Process]:
        return [
            child
            for child in psutil.Process(self.process.pid).children()
            if "scheduler.engine" in child.cmdline()
        ]

    def engine(self) -> psutil.Process:
        (engine,) = self.engines()
        return engine

    def text(self, messages: list[dict[str, str]], **options: object) -> str:
        answer = self.client.chat.completions.create(
            model=MODEL,
            messages=messages,  # type: ignore[arg-type]
            temperature=0,
            **options,  # type: ignore[call-overload]
        )
        content = answer.choices[0].message.content
        assert isinstance(content, str)
        return content

    def pieces(self, messages: list[dict[str, str]], **options: object) -> Iterator[str]:
        """The text of a stream as it comes; the stream must end with a finish reason."""
        finish = None
        for chunk in self.client.chat.completions.create(
            model=MODEL,
            messages=messages,  # type: ignore[arg-type]
            temperature=0,
            stream=True,
            **options,  # type: ignore[call-overload]
        ):
            assert finish is None
            finish = chunk.choices[0].finish_reason
            if chunk.choices[0].delta.content:
                yield chunk.choices[0].delta.content
        assert finish is not None


def until_ready(url: str) -> None:
    """Wait until the daemon would answer a request at once."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            urlopen(f"{url}/readyz").close()
            return
        except HTTPError as error:
            assert error.code == 503
        assert time.monotonic() < deadline, "the model is not ready"
        time.sleep(0.05)


@contextlib.contextmanager
def running(folder: Path, cache: Path, *arguments: str) -> Iterator[Running]:
    """`sparklane serve` on a free port, with a cache folder of its own; killed at the end.

    It runs in `folder`, whose sparklane.toml it reads if there is one.
    """
    own = folder / "cache"
    environment = python_environment(SPARKLANE_CACHE=str(own))
    # The prepared library of the real cache, so that each daemon need not build its own.
    if (library := blas.prepare(cache)) is not None:
        environment["SPARKLANE_BLAS"] = str(library)
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(
            python_command("-m", "daemon", "serve", "--port", "0", *arguments),
            env=environment,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            words = process.stdout.readline().split()
            assert words, (folder / "log").read_text()
            until_ready(words[-1])
            with openai.OpenAI(
                base_url=f"{words[-1]}/v1", api_key="none", timeout=PATIENCE, max_retries=0
            ) as client:
                yield Running(process, words[-1], client, own)
        finally:
            process.kill()


def ended(cache: Path, folder: Path, *arguments: str) -> tuple[int, list[str]]:
    """The exit code of a daemon that cannot serve from this cache, and what it says of it."""
    done = subprocess.run(
        python_command("-m", "daemon", "serve", *arguments),
        env=python_environment(SPARKLANE_CACHE=str(cache)),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    return done.returncode, done.stderr.splitlines()


@pytest.fixture(scope="module")
def daemon(
    tmp_path_factory: pytest.TempPathFactory, smollm2: Path, cache: Path
) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("daemon"), cache, "--model", str(smollm2)) as found:
        yield found


def test_a_chat_says_what_the_model_knows(daemon: Running) -> None:
    answer = daemon.client.chat.completions.create(
        model=MODEL,
        messages=CAPITAL,  # type: ignore[arg-type]
        temperature=0,
    )
    choice = answer.choices[0]
    assert "Paris" in (choice.message.content or "")
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_says_the_same(daemon: Running) -> None:
    pieces = list(daemon.pieces(CAPITAL))
    assert "".join(pieces) == daemon.text(CAPITAL)
    assert len(pieces) > 3


def test_streams_that_run_together_stay_apart(daemon: Running) -> None:
    capitals = {
        "Austria": "Vienna",
        "China": "Beijing",
        "Germany": "Berlin",
        "Greece": "Athens",
        "Japan": "Tokyo",
        "Poland": "Warsaw",
        "Russia": "Moscow",
        "Sweden": "Stockholm",
    }

    def ask(country: str) -> str:
        content = f"What is the capital of {country}?"
        return "".join(daemon.pieces([{"role": "user", "content": content}], max_tokens=24))

    with ThreadPoolExecutor(len(capitals)) as threads:
        answers = dict(zip(capitals, threads.map(ask, capitals), strict=True))
    for country, answer in answers.items():
        named = {capital for capital in capitals.values() if capital in answer}
        assert named == {capitals[country]}, answers


def test_the_same_seed_gives_the_same_text(daemon: Running) -> None:
    def sample(seed: int) -> str | None:
        answer = daemon.client.chat.completions.create(
            model=MODEL,
            messages=STORY,  # type: ignore[arg-type]
            temperature=1.0,
            seed=seed,
            max_tokens=24,
        )
        return answer.choices[0].message.content

    assert sample(1) == sample(1) != sample(2)


def test_a_killed_engine_is_a_pause(daemon: Running) -> None:
    """The stream goes on with the text that would have come."""
    expected = daemon.text(CAPITAL)
    stream = daemon.pieces(CAPITAL)
    text = next(stream) + next(stream)
    assert text != expected
    engine = daemon.engine()
    engine.kill()
    text += "".join(stream)
    assert text == expected
    assert daemon.engine().pid != engine.pid


def test_a_second_daemon_on_the_same_cache_is_refused(daemon: Running, tmp_path: Path) -> None:
    code, errors = ended(daemon.cache, tmp_path, "--port", "0")
    assert code == ExitCode.CACHE_LOCKED
    assert len(errors) == 1
    assert errors[0].startswith("sparklane: ")
    assert str(daemon.process.pid) in errors[0]


def test_a_port_in_use_is_refused(daemon: Running, tmp_path: Path) -> None:
    port = daemon.url.rpartition(":")[2]
    code, errors = ended(tmp_path / "cache", tmp_path, "--port", port)
    assert code == ExitCode.PORT_IN_USE
    assert len(errors) == 1
    assert errors[0].startswith("sparklane: ")
    assert port in errors[0]


def test_sigterm_finishes_what_runs_and_ends_well(
    tmp_path: Path, smollm2: Path, cache: Path
) -> None:
    with running(tmp_path, cache, "--model", str(smollm2)) as daemon:
        stream = daemon.pieces(STORY, max_tokens=40, extra_body={"ignore_eos": True})
        pieces = [next(stream)]
        engine = daemon.engine()
        daemon.process.send_signal(signal.SIGTERM)
        pieces += stream
        assert daemon.process.wait(PATIENCE) == ExitCode.OK
        # 40 tokens: a stream that was cut off would have raised, or be shorter.
        assert len("".join(pieces).split()) > 20
        assert not engine.is_running()
