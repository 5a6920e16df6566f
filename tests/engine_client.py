"""A blocking client that starts a real engine process and speaks its socket, for tests."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from models.sampling_settings import Sampling
from scheduler.frames import SocketFrameReader, encode
from scheduler.messages import (
    Configure,
    Fault,
    FinishReason,
    FromEngine,
    Heartbeat,
    LaneChoice,
    Loading,
    Output,
    Ready,
    Rejected,
    Step,
    StepKind,
    Submit,
    ToEngine,
)

Message = Loading | Ready | Step | Heartbeat | Rejected | Fault


class EngineClient:
    """One engine process and the connection to it."""

    def __init__(self, process: subprocess.Popen[bytes], connection: socket.socket) -> None:
        self.process = process
        self.connection = connection
        self.most_read_together = 0
        """Prompts of the largest group that was read in one step."""
        self._reader = SocketFrameReader[Message](connection, FromEngine)

    def send(self, message: ToEngine) -> None:
        self.connection.sendall(encode(message))

    def send_at_once(self, *messages: ToEngine) -> None:
        """In one write, so that the engine has all of them before its next step."""
        self.connection.sendall(b"".join(map(encode, messages)))

    def receive(self) -> Message | None:
        return self._reader.read()

    def until_ready(self) -> Ready:
        while True:
            message = self.receive()
            if isinstance(message, Ready):
                return message
            assert isinstance(message, Loading), message

    def steps(self) -> Iterator[Step]:
        """Steps as they come; heartbeats are passed over."""
        while (message := self.receive()) is not None:
            if isinstance(message, Step):
                if message.kind is StepKind.PREFILL:
                    self.most_read_together = max(self.most_read_together, message.rows)
                yield message
            else:
                assert isinstance(message, Heartbeat), message

    def outputs(self) -> Iterator[Output]:
        for step in self.steps():
            yield from step.outputs

    def run(self, *submits: Submit) -> dict[int, tuple[list[int], FinishReason]]:
        """Submit and read until all have finished: tokens and finish reason by request."""
        self.send_at_once(*submits)
        tokens: dict[int, list[int]] = {submit.request_id: [] for submit in submits}
        finished: dict[int, tuple[list[int], FinishReason]] = {}
        for output in self.outputs():
            tokens[output.request_id] += output.tokens
            if output.finish is not None:
                finished[output.request_id] = tokens[output.request_id], output.finish
            if len(finished) == len(submits):
                return finished
        raise AssertionError("the engine went away")


def submit(
    request_id: int,
    prompt: list[int],
    *,
    produced: list[int] | None = None,
    max_tokens: int = 16,
    stop_tokens: list[int] | None = None,
    logprobs: int | None = None,
    lane: LaneChoice = LaneChoice.AUTO,
    **sampling: object,
) -> Submit:
    """A greedy request unless sampling parameters say otherwise."""
    return Submit(
        request_id=request_id,
        prompt=prompt,
        produced=produced or [],
        sampling=Sampling(**({"temperature": 0.0} | sampling)),  # type: ignore[arg-type]
        max_tokens=max_tokens,
        stop_tokens=stop_tokens or [],
        logprobs=logprobs,
        lane=lane,
    )


@contextlib.contextmanager
def running_engine(folder: Path, configure: Configure) -> Iterator[EngineClient]:
    """Start `scheduler.engine` on a socket in `folder`; killed at the end if still there."""
    path = str(folder / "engine.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen(1)
        process = subprocess.Popen(
            [sys.executable, "-m", "scheduler.engine", "--socket", path],
            env=os.environ | {"SPARKLANE_BLAS": "reference", "OPENBLAS_NUM_THREADS": "1"},
        )
        try:
            listener.settimeout(60)
            connection, _ = listener.accept()
            with connection:
                client = EngineClient(process, connection)
                client.send(configure)
                yield client
        finally:
            process.kill()
            process.wait()
            os.unlink(path)
