"""Messages on a stream socket: a 4-byte big-endian length, then msgpack.

Pure functions plus two readers, one for asyncio (the daemon) and one for a blocking socket
(the engine's reader thread). A peer that closes between frames is an orderly end (None);
inside a frame it is `EOFError`; a frame over `MAXIMUM_FRAME_BYTES` is `ValueError`.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any, Generic, TypeVar

import msgspec

MAXIMUM_FRAME_BYTES = 64 * 1024 * 1024

T = TypeVar("T")

_LENGTH = struct.Struct(">I")
_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """One frame, ready to be written."""
    body = _encoder.encode(message)
    if len(body) > MAXIMUM_FRAME_BYTES:
        raise ValueError(f"frame of {len(body)} bytes is over {MAXIMUM_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


def _body_length(header: bytes) -> int:
    (length,) = _LENGTH.unpack(header)
    if length > MAXIMUM_FRAME_BYTES:
        raise ValueError(f"frame of {length} bytes is over {MAXIMUM_FRAME_BYTES}")
    return int(length)


class AsyncFrameReader(Generic[T]):
    """Decodes frames from an asyncio stream."""

    def __init__(self, stream: asyncio.StreamReader, message_type: Any) -> None:
        self._stream = stream
        self._decoder = msgspec.msgpack.Decoder(message_type)

    async def read(self) -> T | None:
        """The next message, or None when the peer closed between frames."""
        try:
            header = await self._stream.readexactly(_LENGTH.size)
        except asyncio.IncompleteReadError as error:
            if not error.partial:
                return None
            raise EOFError("the peer closed inside a frame header") from error
        try:
            body = await self._stream.readexactly(_body_length(header))
        except asyncio.IncompleteReadError as error:
            raise EOFError("the peer closed inside a frame") from error
        message: T = self._decoder.decode(body)
        return message


class SocketFrameReader(Generic[T]):
    """Decodes frames from a blocking socket."""

    def __init__(self, connection: socket.socket, message_type: Any) -> None:
        self._file = connection.makefile("rb")
        self._decoder = msgspec.msgpack.Decoder(message_type)

    def read(self) -> T | None:
        """The next message, or None when the peer closed between frames."""
        header = self._file.read(_LENGTH.size)
        if not header:
            return None
        if len(header) < _LENGTH.size:
            raise EOFError("the peer closed inside a frame header")
        length = _body_length(header)
        body = self._file.read(length)
        if len(body) < length:
            raise EOFError("the peer closed inside a frame")
        message: T = self._decoder.decode(body)
        return message
