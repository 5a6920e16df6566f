"""Framing: every message survives the socket, and every broken stream is told apart."""

import asyncio
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.sampling_settings import Sampling
from scheduler.frames import MAXIMUM_FRAME_BYTES, AsyncFrameReader, SocketFrameReader, encode
from scheduler.messages import (
    Cancel,
    Configure,
    FinishReason,
    Output,
    Shutdown,
    Step,
    StepKind,
    Submit,
    ToEngine,
    TokenLogprobs,
)

MESSAGES = [
    Configure(checkpoint="/models/a"),
    Submit(
        request_id=3,
        prompt=[1, 2],
        produced=[5],
        sampling=Sampling(temperature=0.7, logit_bias={4: -2.5}, seed=2**63 + 11),
        max_tokens=9,
        stop_tokens=[2],
        logprobs=1,
    ),
    Cancel(7),
    Shutdown(),
]


def read_all(data: bytes) -> list[object]:
    async def run() -> list[object]:
        stream = asyncio.StreamReader()
        stream.feed_data(data)
        stream.feed_eof()
        reader = AsyncFrameReader[object](stream, ToEngine)
        found = []
        while (message := await reader.read()) is not None:
            found.append(message)
        return found

    return asyncio.run(run())


def test_messages_survive_asyncio_and_blocking_readers() -> None:
    data = b"".join(encode(message) for message in MESSAGES)
    assert read_all(data) == MESSAGES
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        reader = SocketFrameReader[object](ours, ToEngine)
        assert [reader.read() for _ in MESSAGES] == MESSAGES
        assert reader.read() is None


@given(st.integers(1, len(encode(MESSAGES[1])) - 1))
def test_a_stream_cut_inside_a_frame_is_an_error(length: int) -> None:
    with pytest.raises(EOFError):
        read_all(encode(MESSAGES[1])[:length])


def test_an_oversized_frame_is_refused_before_it_is_read() -> None:
    with pytest.raises(ValueError, match="is over"):
        read_all((MAXIMUM_FRAME_BYTES + 1).to_bytes(4, "big"))


def test_outputs_carry_tokens_finish_and_logprobs() -> None:
    step = Step(
        kind=StepKind.SERIAL,
        seconds=0.01,
        rows=1,
        tokens=1,
        outputs=[Output(4, [9], FinishReason.STOP, [TokenLogprobs(-0.5, [9, 8], [-0.5, -1.0])])],
    )

    async def run() -> object:
        stream = asyncio.StreamReader()
        stream.feed_data(encode(step))
        stream.feed_eof()
        return await AsyncFrameReader[object](stream, Step).read()

    assert asyncio.run(run()) == step
