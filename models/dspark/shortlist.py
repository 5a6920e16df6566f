"""Which tokens a drafter may propose: a fixed part of the vocabulary, stored beside it.

Owns the record `shortlist.safetensors`: `tokens` int32 [n], ascending, and as metadata what
they were counted on. Pure and free of mlx and NumPy, so that a daemon can plan memory with it;
any thread. A drafter's heads cost by the token they tell apart, and the target verifies over
its whole vocabulary, so a shortlist moves acceptance and never a text. A file that is torn or
does not fit the drafter raises `DrafterError`.
"""

from __future__ import annotations

import os
import sys
from array import array
from pathlib import Path

import msgspec

from models.dspark.configuration import DrafterError
from models.safetensors_header import HeaderError, read_header

FILE_NAME = "shortlist.safetensors"
_REMEDY = "Make the shortlist again, or serve without it"


class _Metadata(msgspec.Struct, frozen=True):
    """What `__metadata__` of the file says; safetensors has strings there only."""

    coverage: float
    counted: int
    corpus: str


class _Header(msgspec.Struct, frozen=True):
    metadata: _Metadata = msgspec.field(name="__metadata__")


class Shortlist(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens, and where they are from.

    `counted` answer tokens were looked at, of which the share `coverage` (0 to 1) is in
    `tokens`; `corpus` is the fingerprint of what held them.
    """

    tokens: tuple[int, ...]
    coverage: float
    counted: int
    corpus: str

    def check(self, vocabulary_size: int) -> None:
        """Raise `DrafterError` unless `tokens` are ids below `vocabulary_size`, ascending."""
        if not self.tokens:
            raise DrafterError(f"the shortlist has no tokens. {_REMEDY}")
        for before, after in zip(self.tokens, self.tokens[1:], strict=False):
            if before >= after:
                raise DrafterError(
                    f"the shortlist has token {after} behind {before}; tokens must ascend, each "
                    f"once. {_REMEDY}"
                )
        for token in (self.tokens[0], self.tokens[-1]):
            if not 0 <= token < vocabulary_size:
                raise DrafterError(
                    f"the shortlist has token {token}, outside the drafter's vocabulary of "
                    f"{vocabulary_size}. {_REMEDY}"
                )

    def save(self, folder: Path) -> None:
        """Store the record beside the drafter in `folder`, replacing an older one whole."""
        data = _little_endian(array("i", self.tokens)).tobytes()
        entry = {"dtype": "I32", "shape": [len(self.tokens)], "data_offsets": [0, len(data)]}
        facts = {
            "coverage": repr(self.coverage),
            "counted": str(self.counted),
            "corpus": self.corpus,
        }
        header = msgspec.json.encode({"__metadata__": facts, "tokens": entry})
        header += b" " * (-len(header) % 8)  # tensors are aligned, as the reference writes them
        temporary = folder / f".{FILE_NAME}.{os.getpid()}"
        temporary.write_bytes(len(header).to_bytes(8, "little") + header + data)
        temporary.replace(folder / FILE_NAME)

    @classmethod
    def load(cls, folder: Path, vocabulary_size: int) -> Shortlist | None:
        """The record beside the drafter in `folder`, or None where there is none."""
        if stored_size(folder) is None:
            return None
        path = folder / FILE_NAME
        raw = path.read_bytes()
        begin = 8 + int.from_bytes(raw[:8], "little")
        try:
            header = msgspec.json.decode(raw[8:begin], type=_Header, strict=False)
        except msgspec.MsgspecError as error:
            raise DrafterError(f"{path}: {error}. {_REMEDY}") from error
        tokens = array("i")
        tokens.frombytes(raw[begin:])
        record = cls(
            tokens=tuple(_little_endian(tokens)),
            coverage=header.metadata.coverage,
            counted=header.metadata.counted,
            corpus=header.metadata.corpus,
        )
        record.check(vocabulary_size)
        return record


def stored_size(folder: Path) -> int | None:
    """How many tokens the shortlist beside the drafter in `folder` has, from its header alone;
    None where there is none."""
    path = folder / FILE_NAME
    if not path.exists():
        return None
    try:
        entries = read_header(path)
    except HeaderError as error:
        raise DrafterError(f"{path}: {error}. {_REMEDY}") from error
    found = {name: (entry.dtype, len(entry.shape)) for name, entry in entries.items()}
    if found != {"tokens": ("I32", 1)}:
        raise DrafterError(f"{path} holds {found}, not one list `tokens` of int32. {_REMEDY}")
    return entries["tokens"].size


def _little_endian(values: array[int]) -> array[int]:
    if sys.byteorder == "big":
        values.byteswap()
    return values
