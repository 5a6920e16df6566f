"""Taps on disk: a manifest, and a safetensors shard of taps for every shard of a corpus.

Owns the format and the reading; any thread. A shard holds `taps` [n, m * H], tap layers side
by side, and `states` [n, H], the target's final, normed states, of the n tokens of the corpus'
shard in their order; its metadata says what it was made from. Shards are mapped, not read, so
a batch costs the bytes of its own conversations, however large the folder is. Taps that belong
to something else, or are not whole, raise `RunError`: their values would look like any others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx
import msgspec
import numpy as np
from numpy.typing import NDArray

from models.safetensors_header import HeaderError, read_header
from models.workshop.corpus import Corpus
from models.workshop.run_folder import RunError

FOLDER = "taps"
MANIFEST = "taps.json"
FORMAT = 1
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
_STORED = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_REMEDY = "Run `sparklane drafter taps` again"

Bytes = NDArray[np.uint8]


class TapSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What taps are a function of, beside the conversations.

    `precision` is what the target computes in and the taps are stored in; `fingerprint` is of
    the target and its tokenizer; `hidden_size` is the width H of a layer.
    """

    tap_layers: tuple[int, ...]
    precision: str
    fingerprint: dict[str, str]
    hidden_size: int

    @property
    def tap_bytes(self) -> int:
        """Bytes of one token's taps."""
        return len(self.tap_layers) * self.state_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of one token's final state."""
        return self.hidden_size * DTYPES[self.precision].size

    def header(self, tokens: int, corpus_shard: str) -> bytes:
        """What a shard of `tokens` tokens begins with, `corpus_shard` being the mark of the
        corpus' shard that they are from."""
        taps = tokens * self.tap_bytes
        width = len(self.tap_layers) * self.hidden_size
        kind = _STORED[self.precision]
        content = {
            "__metadata__": {"made_from": self.mark(corpus_shard)},
            "taps": {"dtype": kind, "shape": [tokens, width], "data_offsets": [0, taps]},
            "states": {
                "dtype": kind,
                "shape": [tokens, self.hidden_size],
                "data_offsets": [taps, taps + tokens * self.state_bytes],
            },
        }
        encoded = msgspec.json.encode(content)
        encoded += b" " * (-len(encoded) % 8)  # tensors are aligned, as the reference writes them
        return len(encoded).to_bytes(8, "little") + encoded

    def mark(self, corpus_shard: str) -> str:
        """What the taps of one corpus shard are known by."""
        facts = [FORMAT, self.tap_layers, self.precision, self.fingerprint, corpus_shard]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


class TapManifest(msgspec.Struct, frozen=True, kw_only=True):
    """`taps.json`: `shards` are those written so far, `bytes` their sizes together, `corpus`
    the mark of all the corpus' shards, `tokens` and `versions` for the reader's information."""

    format: int
    settings: TapSettings
    corpus: str
    shards: tuple[str, ...]
    tokens: int
    bytes: int
    versions: dict[str, str]

    @classmethod
    def load(cls, folder: Path) -> TapManifest | None:
        """The manifest of a folder, None where there is none. Raises `RunError`."""
        path = folder / MANIFEST
        if not path.exists():
            return None
        try:
            manifest = msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.MsgspecError) as error:
            raise RunError(
                f"{path} cannot be read: {error}. {_REMEDY}, into a new folder"
            ) from error
        if manifest.format != FORMAT:
            raise RunError(
                f"{path} has format {manifest.format}, this version reads {FORMAT}. "
                f"{_REMEDY}, into a new folder"
            )
        return manifest

    def check(self, folder: Path, settings: TapSettings, corpus: str) -> None:
        """Raise `RunError` unless the taps in `folder` are what `settings` make of the corpus."""
        own = self.settings
        pairs: list[tuple[str, object, object, str]] = [
            ("layers", list(own.tap_layers), list(settings.tap_layers), "choose its --tap-layers"),
            ("precision", own.precision, settings.precision, f"give --precision {own.precision}"),
            ("hidden size", own.hidden_size, settings.hidden_size, "choose its target"),
            ("corpus", self.corpus[:12], corpus[:12], "choose its --corpus"),
        ]
        pairs += [
            (part, str(own.fingerprint.get(part))[:12], mark[:12], "choose its --target")
            for part, mark in settings.fingerprint.items()
        ]
        for name, stored, wanted, remedy in pairs:
            if stored != wanted:
                raise RunError(
                    f"{folder} holds taps of {name} {stored}, this run has {wanted}: {remedy}, "
                    "or write these taps with `sparklane drafter taps --out` into another folder"
                )


def corpus_mark(marks: list[str]) -> str:
    """What a corpus is known by, from the marks of its shards."""
    return hashlib.sha256(" ".join(marks).encode()).hexdigest()


def shard_name(index: int) -> str:
    """The file of the taps of corpus shard `index`."""
    return f"taps-{index:05d}.safetensors"


def check_shard(path: Path, settings: TapSettings, tokens: int, corpus_shard: str) -> int:
    """Where the data of a whole shard of these taps begin, in bytes. Raises `RunError`."""
    expected = settings.header(tokens, corpus_shard)
    try:
        entries = read_header(path)
        with path.open("rb") as file:
            found = file.read(len(expected))
    except (HeaderError, OSError) as error:
        raise RunError(f"{path}: {error}. {_REMEDY}") from error
    if found != expected:
        shapes = {name: (entry.dtype, list(entry.shape)) for name, entry in entries.items()}
        raise RunError(
            f"{path} was not made by this target from this corpus' shard: it holds {shapes}, "
            f"{tokens} tokens of {len(settings.tap_layers)} layers were expected. {_REMEDY}"
        )
    return len(expected)


class StoredTaps:
    """The taps of a whole corpus, mapped into memory."""

    def __init__(
        self, folder: Path, corpus: Corpus, settings: TapSettings, marks: list[str]
    ) -> None:
        """`marks` are `corpus.shard_marks()`. Raises `RunError` for taps that are not there,
        not whole, or not those of `settings` and `corpus`."""
        manifest = TapManifest.load(folder)
        if manifest is None:
            raise RunError(f"{folder} holds no taps: run `sparklane drafter taps` first")
        manifest.check(folder, settings, corpus_mark(marks))
        names = [shard_name(index) for index in range(len(corpus.shards))]
        if missing := [name for name in names if name not in manifest.shards]:
            raise RunError(
                f"{folder} lacks the taps of {len(missing)} of {len(names)} shards: run "
                "`sparklane drafter taps` again, which goes on where it stopped"
            )
        self._corpus = corpus
        self._dtype = DTYPES[settings.precision]
        self._starts = corpus.starts[corpus.shard_starts]
        self._maps: list[Mapping[str, Bytes]] = []
        for name, mark, tokens in zip(names, marks, np.diff(self._starts).tolist(), strict=True):
            begin = check_shard(folder / name, settings, tokens, mark)
            taps = tokens * settings.tap_bytes
            self._maps.append(
                {
                    "taps": _mapped(folder / name, begin, tokens, settings.tap_bytes),
                    "states": _mapped(folder / name, begin + taps, tokens, settings.state_bytes),
                }
            )

    def read(self, indices: NDArray[np.int64], width: int) -> tuple[mx.array, mx.array]:
        """Taps [S, width, m * H] and states [S, width, H] of conversations, as
        `FrozenTarget.read` gives them; cut to `width`, and 0 behind a conversation's end."""
        taps, states = (
            np.zeros((len(indices), width, self._maps[0][name].shape[1]), dtype=np.uint8)
            for name in ("taps", "states")
        )
        for row, index in enumerate(indices.tolist()):
            shard = int(np.searchsorted(self._corpus.shard_starts, index, side="right")) - 1
            first = int(self._corpus.starts[index] - self._starts[shard])
            count = min(int(self._corpus.sizes[index]), width)
            taps[row, :count] = self._maps[shard]["taps"][first : first + count]
            states[row, :count] = self._maps[shard]["states"][first : first + count]
        return mx.array(taps).view(self._dtype), mx.array(states).view(self._dtype)


def _mapped(path: Path, begin: int, tokens: int, width: int) -> Bytes:
    return np.memmap(path, dtype=np.uint8, mode="r", offset=begin, shape=(tokens, width))
