"""Reads and checks the header of a safetensors file, without reading its tensors.

MLX reads tensors lazily and trusts the header, so a download that was cut short shows up
as garbage or a crash long after loading. Here every tensor's place is compared with the
file's length first. Pure apart from reading the header; free of mlx; any thread. Whatever
the bytes are, the only exception is `HeaderError`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import msgspec

# The reference implementation refuses longer headers too.
MAXIMUM_HEADER_BYTES = 100_000_000

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip

Natural = Annotated[int, msgspec.Meta(ge=0)]


class HeaderError(Exception):
    """The file is not a complete safetensors file; the message says what is wrong."""


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor of a file: its type, its shape and its bytes, counted from the data."""

    dtype: str
    shape: tuple[Natural, ...]
    data_offsets: tuple[Natural, Natural]

    @property
    def nbytes(self) -> int:
        return self.data_offsets[1] - self.data_offsets[0]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of a safetensors file by name, after checking that all are wholly there.

    Raises:
        HeaderError: unreadable, not safetensors, or shorter than its header says.
    """
    try:
        length = path.stat().st_size
        with path.open("rb") as file:
            first = file.read(8)
            if len(first) < 8:
                raise HeaderError(f"truncated: {length} bytes, less than a header")
            header_length = int.from_bytes(first, "little")
            if header_length > MAXIMUM_HEADER_BYTES:
                raise HeaderError("not a safetensors file (its first 8 bytes are no length)")
            if header_length > length - 8:
                raise HeaderError(f"truncated: {length} bytes, inside the header")
            raw = file.read(header_length)
    except OSError as error:
        raise HeaderError(f"cannot be read: {error.strerror}") from error
    entries = _decode(raw)
    _check_places(entries, length - 8 - header_length)
    return entries


def _decode(raw: bytes) -> dict[str, TensorEntry]:
    try:
        parts = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        parts.pop("__metadata__", None)
        return {name: msgspec.json.decode(part, type=TensorEntry) for name, part in parts.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise HeaderError(f"not a safetensors file ({error})") from error


def _check_places(entries: dict[str, TensorEntry], available: int) -> None:
    """Tensors must lie back to back, be as long as their shapes, and fill the data."""
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        bits = DTYPE_BITS.get(entry.dtype)
        if bits is None:
            raise HeaderError(f"tensor {name!r} has the unknown dtype {entry.dtype!r}")
        begin, end = entry.data_offsets
        if begin != position or end - begin != entry.size * bits // 8:
            raise HeaderError(f"tensor {name!r} is not where its shape says it should be")
        position = end
    if position > available:
        raise HeaderError(f"truncated: {megabytes(available)} of {megabytes(position)} MB")
    if position < available:
        raise HeaderError(f"{available - position} bytes follow the last tensor")


def megabytes(count: int) -> str:
    """Bytes as decimal megabytes, with decimals only where they tell something."""
    return f"{count / 1e6:.0f}" if count >= 10e6 else f"{count / 1e6:.3g}"
