"""A real daemon with two models that speculate, some traffic, and a real Prometheus beside it.

The default model always drafts. The other, a tiny one, has a drafter that is always wrong, so
its lane parks and its probes fail.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import openai
import pytest

from tests.test_end_to_end import Running, running

DEPLOY = Path(__file__).parents[2] / "deploy"
PATIENCE = 60.0
"""Seconds after which something that is waited for has failed."""

MODEL = "smollm2-135m"
TINY = "tiny"
PAIR = Path(__file__).parents[1] / "fixtures" / "dspark" / "qwen3"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.system)


@dataclass(frozen=True)
class Prometheus:
    """A running Prometheus."""

    url: str

    def get(self, path: str, **parameters: str) -> Any:
        """The data of an answer of its API; an error of a query fails the test."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            pytest.fail(f"{parameters or path}: {error.read().decode()}")

    def values(self, query: str) -> list[float]:
        """The values of an instant query, of all series."""
        result = self.get("query", query=query)["result"]
        return [float(series["value"][1]) for series in result]

    def wait_for(self, query: str, holds: Callable[[list[float]], bool]) -> None:
        """Ask until the answer is as it should be; Prometheus tells nobody when it has scraped."""
        deadline = time.monotonic() + PATIENCE
        while not holds(values := self.values(query)):
            assert time.monotonic() < deadline, f"{query} stayed {values}"
            time.sleep(0.1)


@pytest.fixture(scope="session")
def daemon(
    tmp_path_factory: pytest.TempPathFactory, smollm2: Path, cache: Path
) -> Iterator[Running]:
    """A daemon that is ready."""
    folder = tmp_path_factory.mktemp("daemon")
    models = [
        (MODEL, smollm2, "smollm2-135m-drafter", "always"),
        (TINY, PAIR / "target", _wrong_drafter(folder / "drafter"), "auto"),
    ]
    (folder / "sparklane.toml").write_text(
        "".join(
            f"[[models]]\nname = {json.dumps(name)}\ncheckpoint = {json.dumps(str(target))}\n"
            f"maximum_rows = 2\n"
            f"[models.draft]\ncheckpoint = {json.dumps(str(drafter))}\n"
            f"speculation = {json.dumps(speculation)}\n"
            for name, target, drafter, speculation in models
        )
    )
    with running(folder, cache) as found:
        yield found


def _wrong_drafter(folder: Path) -> Path:
    """The tiny pair's drafter with its logits negated: it drafts what is least likely."""
    shutil.copytree(PAIR / "drafter", folder)
    weights = mx.load(str(PAIR / "drafter" / "model.safetensors"))
    assert isinstance(weights, dict)
    for name in ("norm.weight", "markov_head.markov_w2.weight"):
        weights[name] = -weights[name]
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


@pytest.fixture(scope="session")
def prometheus(tmp_path_factory: pytest.TempPathFactory, daemon: Running) -> Iterator[Prometheus]:
    """A Prometheus on our configuration, which has seen the daemon idle and then at work."""
    folder = tmp_path_factory.mktemp("prometheus")
    with _prometheus(folder, daemon.url.removeprefix("http://")) as found:
        found.wait_for("sparklane_engine_ready", lambda values: values == [1.0, 1.0])
        _work(daemon)
        found.wait_for(
            "sum(sparklane_cancellations_total) > 0 and sum(sparklane_requests_running) == 0",
            lambda values: bool(values),
        )
        yield found


@contextlib.contextmanager
def _prometheus(folder: Path, target: str) -> Iterator[Prometheus]:
    """Scrapes `target` by deploy/prometheus.yml, but every half second; killed at the end."""
    text = (DEPLOY / "prometheus.yml").read_text()
    assert text.count("127.0.0.1:8090") == text.count("scrape_interval: 5s") == 1
    text = text.replace("127.0.0.1:8090", target).replace("interval: 5s", "interval: 500ms")
    text = text.replace("evaluation_interval: 15s", "evaluation_interval: 1s")
    (folder / "prometheus.yml").write_text(text)
    (folder / "alerts.yml").write_text((DEPLOY / "alerts.yml").read_text())
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = ["prometheus", f"--config.file={folder}/prometheus.yml"]
    command += [f"--storage.tsdb.path={folder}/data", f"--web.listen-address={address}"]
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log) as process,
    ):
        try:
            _wait_until_ready(f"http://{address}/-/ready", process, folder / "log")
            yield Prometheus(f"http://{address}")
        finally:
            process.kill()


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        with contextlib.suppress(urllib.error.URLError), urllib.request.urlopen(url):
            return
        time.sleep(0.1)


def _work(daemon: Running) -> None:
    """Some of everything that leaves a trace: chats in both lanes, rows that park and probe, a
    refusal, a cancellation, lost engines."""
    question = [{"role": "user", "content": "What is the capital of France?"}]
    daemon.text(question, max_tokens=16)
    daemon.text(question, max_tokens=16, extra_body={"lane": "serial"})
    _park_and_probe(daemon)
    with pytest.raises(openai.NotFoundError):
        daemon.client.models.retrieve("unknown")
    stream = daemon.pieces(question, max_tokens=24)
    next(stream)
    for engine in daemon.engines():
        engine.kill()
    assert "".join(stream)
    unread = daemon.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Write a long story."}],
        stream=True,
        max_tokens=4000,
    )
    next(unread)
    unread.close()


def _park_and_probe(daemon: Running) -> None:
    """Decode with the wrong drafter until its lane has parked and a probe has failed."""
    failed = re.compile(rf'^sparklane_probes_total{{model="{TINY}",result="failed"}} [1-9]', re.M)
    deadline = time.monotonic() + PATIENCE
    while True:
        daemon.client.completions.create(
            model=TINY, prompt="a", max_tokens=200, extra_body={"ignore_eos": True}
        )
        with urllib.request.urlopen(f"{daemon.url}/metrics") as answer:
            exposed = answer.read().decode()
        if failed.search(exposed):
            return
        assert time.monotonic() < deadline, exposed
