"""A fake engine: a real process that speaks the real messages, without a model.

    python -m daemon.bench.fake_engine --socket PATH [options]

Its tokens are a function of prompt, seed, position and the token before, so whoever reads
them can tell whether a stream that was replayed went on exactly. It decodes all requests at a
set speed, which measures what the daemon can fan out, and on demand it falls ill: it wedges,
dies, goes silent, refuses. It runs on asyncio and ends when its daemon goes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import struct
import sys
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scheduler.frames import AsyncFrameReader, encode
from scheduler.messages import (
    Cancel,
    Configure,
    Fault,
    FinishReason,
    FromEngine,
    Heartbeat,
    Loading,
    MeasuringProgress,
    Memory,
    Output,
    Ready,
    Rejected,
    Shutdown,
    Step,
    StepKind,
    Submit,
    ToEngine,
    TokenLogprobs,
)

FIRST_TOKEN, TOKENS = 1000, 1000
"""Tokens are drawn from this range, which holds plain words in most vocabularies."""


def fake_tokens(
    prompt: Sequence[int], seed: int, count: int, produced: Sequence[int] = ()
) -> list[int]:
    """The `count` tokens that follow `produced`. The whole stream depends on prompt and seed."""
    base = zlib.crc32(struct.pack(f"<{len(prompt)}I", *prompt), seed & 0xFFFFFFFF)
    last = produced[-1] if produced else prompt[-1]
    tokens: list[int] = []
    for position in range(len(produced), len(produced) + count):
        last = FIRST_TOKEN + zlib.crc32(struct.pack("<II", position, last), base) % TOKENS
        tokens.append(last)
    return tokens


@dataclass(eq=False)
class _Row:
    submit: Submit
    produced: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class _Illness:
    """After how many tokens of this process something happens; 0 = before the first."""

    die_after: int | None
    wedge_after: int | None
    silent_after: int | None
    fault: str | None
    fault_lasting: str | None
    reject_token: int | None


class FakeEngine:
    """One connection's worth of requests."""

    def __init__(
        self, writer: asyncio.StreamWriter, illness: _Illness, step_seconds: float
    ) -> None:
        self._writer = writer
        self._illness = illness
        self._step_seconds = step_seconds
        self._rows: dict[int, _Row] = {}
        self._work = asyncio.Event()
        self._steps = 0
        self._tokens = 0

    def send(self, message: FromEngine) -> None:
        """Write one message."""
        self._writer.write(encode(message))

    def take(self, message: ToEngine) -> None:
        """Act on one message."""
        match message:
            case Submit():
                token = self._illness.reject_token
                if token is not None and token in message.prompt:
                    self.send(Rejected(message.request_id, f"prompt token {token} is not liked"))
                    return
                self._rows[message.request_id] = _Row(message, list(message.produced))
                self._work.set()
                self._report(StepKind.PREFILL, 1, len(message.prompt), started=[message.request_id])
            case Cancel(request_id):
                self._rows.pop(request_id, None)

    async def beat(self, seconds: float, measuring: MeasuringProgress | None) -> None:
        """Send heartbeats until silent, each of which says `measuring`."""
        while not self._has_come(self._illness.silent_after):
            memory = Memory(active=1 << 20, cache=1 << 19, peak=1 << 21)
            self.send(
                Heartbeat(
                    steps=self._steps,
                    pending=len(self._rows),
                    memory=memory,
                    measuring=measuring,
                )
            )
            await asyncio.sleep(seconds)

    async def decode(self) -> None:
        """Decode one token of every row, at the set speed, for ever."""
        due = time.perf_counter()
        while True:
            if not self._rows:
                self._work.clear()
                await self._work.wait()
                due = time.perf_counter()
            if self._has_come(self._illness.wedge_after):
                await asyncio.Event().wait()
            due += self._step_seconds
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            outputs = [self._next(row) for row in list(self._rows.values())]
            self._report(StepKind.SERIAL, len(outputs), len(outputs), outputs)
            await self._writer.drain()
            if self._has_come(self._illness.die_after):
                os.kill(os.getpid(), signal.SIGKILL)

    def _has_come(self, after: int | None) -> bool:
        return after is not None and self._tokens >= after

    def _next(self, row: _Row) -> Output:
        submit = row.submit
        (token,) = fake_tokens(submit.prompt, submit.sampling.seed, 1, row.produced)
        row.produced.append(token)
        self._tokens += 1
        finish = None
        if token in submit.stop_tokens:
            finish = FinishReason.STOP
        elif len(row.produced) >= submit.max_tokens:
            finish = FinishReason.LENGTH
        if finish is not None:
            del self._rows[submit.request_id]
        logprobs = None
        if (wanted := submit.logprobs) is not None:
            others = [token + other for other in range(wanted)]
            values = [-0.5 - other for other in range(wanted)]
            logprobs = [TokenLogprobs(-0.5, others, values)]
        return Output(submit.request_id, [token], finish, logprobs)

    def _report(
        self,
        kind: StepKind,
        rows: int,
        tokens: int,
        outputs: list[Output] | None = None,
        started: list[int] | None = None,
    ) -> None:
        self._steps += 1
        self.send(
            Step(
                kind=kind,
                seconds=self._step_seconds,
                rows=rows,
                tokens=tokens,
                outputs=outputs or [],
                started=started or [],
            )
        )


async def _serve(arguments: argparse.Namespace) -> int:
    stream, writer = await asyncio.open_unix_connection(arguments.socket)
    reader = AsyncFrameReader[Configure | Submit | Cancel | Shutdown](stream, ToEngine)
    configure = await reader.read()
    if not isinstance(configure, Configure):
        return os.EX_OK
    illness = _illness(arguments)
    rate = arguments.tokens_per_second
    engine = FakeEngine(writer, illness, 1.0 / rate if rate else 0.0)
    engine.send(Loading("load"))
    if (message := illness.fault or illness.fault_lasting) is not None:
        engine.send(Fault(message, restartable=illness.fault is not None))
        await writer.drain()
        return os.EX_SOFTWARE
    await asyncio.sleep(arguments.load_seconds)
    engine.send(
        Ready(
            backend="fake",
            device="none",
            precision=configure.precision,
            blas="none",
            vocabulary_size=FIRST_TOKEN + TOKENS,
            context_length=arguments.context_length,
            maximum_rows=configure.maximum_rows,
            kv_bytes_per_token=0,
            weight_bytes=0,
            load_seconds=arguments.load_seconds,
        )
    )
    tasks = [
        asyncio.create_task(
            engine.beat(
                arguments.heartbeat_seconds,
                MeasuringProgress(1, 2) if arguments.always_measuring else None,
            )
        ),
        asyncio.create_task(engine.decode()),
    ]
    try:
        while (received := await reader.read()) is not None:
            if isinstance(received, Shutdown):
                break
            engine.take(received)
    finally:
        for task in tasks:
            task.cancel()
    return os.EX_OK


def _illness(arguments: argparse.Namespace) -> _Illness:
    """What the options ask for; with `--once`, only in the first process that finds no file."""
    if arguments.once is not None:
        try:
            arguments.once.open("x").close()
        except FileExistsError:
            return _Illness(None, None, None, None, None, arguments.reject_token)
    return _Illness(
        die_after=arguments.die_after,
        wedge_after=arguments.wedge_after,
        silent_after=arguments.silent_after,
        fault=arguments.fault,
        fault_lasting=arguments.fault_lasting,
        reject_token=arguments.reject_token,
    )


def main() -> int:
    """Run until the daemon goes or says so."""
    parser = argparse.ArgumentParser(prog="daemon.bench.fake_engine", description=__doc__)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--tokens-per-second", type=float, default=0.0, help="of a row; 0 = most")
    parser.add_argument("--load-seconds", type=float, default=0.0)
    parser.add_argument("--heartbeat-seconds", type=float, default=1.0)
    parser.add_argument("--context-length", type=int, default=8192)
    parser.add_argument("--always-measuring", action="store_true", help="and never done")
    parser.add_argument("--die-after", type=int, help="kill itself after so many tokens")
    parser.add_argument("--wedge-after", type=int, help="stop stepping after so many tokens")
    parser.add_argument("--silent-after", type=int, help="stop beating after so many tokens")
    parser.add_argument("--fault", help="report a fault that a restart mends, and exit")
    parser.add_argument("--fault-lasting", help="report a fault that none mends, and exit")
    parser.add_argument("--reject-token", type=int, help="reject prompts with this token")
    parser.add_argument("--once", type=Path, help="be ill only if this file is absent; make it")
    with contextlib.suppress(KeyboardInterrupt, ConnectionError, EOFError):
        return asyncio.run(_serve(parser.parse_args()))
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(main())
