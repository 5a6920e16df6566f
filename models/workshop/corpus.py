"""The corpus: conversations as token ids in safetensors shards, and the batches made of them.

Pure NumPy; any thread. A shard holds `tokens` [n] in the smallest unsigned type that fits,
`starts` int64 [conversations + 1] into it, and `answers` int32 [conversations], where each
answer begins. `manifest.json` says what wrote them: seeds, versions, hashes of target and
tokenizer. Batches are a pure function of (seed, epoch), so a resumed run sees the same ones.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from models.workshop.run_folder import RunError, write_json

MANIFEST = "manifest.json"
FORMAT = 1
_STEP = 64


class Conversation(NamedTuple):
    """`tokens` of a rendered prompt and its answer, which begins at index `answer`."""

    tokens: Sequence[int]
    answer: int


class Packed(NamedTuple):
    """A batch of conversations, [S, L]: `tokens` int32, padded with 0, and which of them are
    the answer's."""

    tokens: NDArray[np.int32]
    supervised: NDArray[np.bool_]


class Corpus:
    """All conversations of a folder, and of any further ones behind them, in memory.

    Conversation i is tokens `starts[i]` to `starts[i + 1]`; shard s, of the name `shards[s]`,
    holds the conversations `shard_starts[s]` to `shard_starts[s + 1]`. All are int64.
    """

    def __init__(self, folder: Path, *further: Path) -> None:
        """Raises `RunError` when a folder holds no corpus, or a torn one."""
        self._manifests: list[dict[str, Any]] = []
        self._files: list[Path] = []
        shards = []
        for one in (folder, *further):
            try:
                manifest = json.loads((one / MANIFEST).read_text())
                files = [one / name for name in manifest["shards"]]
                read = [load_file(file) for file in files]
                whole = [_is_whole(shard) for shard in read]
            except (OSError, ValueError, KeyError) as error:
                raise RunError(f"{one} holds no corpus: {error}. Run regen first") from error
            if not files:
                raise RunError(f"{one} holds an empty corpus: run regen again")
            if not all(whole):
                raise RunError(f"{files[whole.index(False)]} is torn: run regen again")
            shards += read
            self._manifests.append(manifest)
            self._files += files
        self.shards = [file.name for file in self._files]
        self._tokens = np.concatenate([shard["tokens"] for shard in shards])
        sizes = np.concatenate([np.diff(shard["starts"]) for shard in shards])
        self.starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        counts = [len(shard["answers"]) for shard in shards]
        self.shard_starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self._answers = np.concatenate([shard["answers"] for shard in shards])
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self._answers)

    def __getitem__(self, index: int) -> Conversation:
        tokens = self._tokens[self.starts[index] : self.starts[index + 1]]
        return Conversation(tokens.astype(np.int32).tolist(), int(self._answers[index]))

    @property
    def answer_tokens(self) -> int:
        """Tokens that can be learned from."""
        return int((self.sizes - self._answers).sum())

    def answer_counts(self, indices: NDArray[np.int64], vocabulary_size: int) -> NDArray[np.int64]:
        """How often each token id is in the answers of `indices`: int64 [V].

        Raises `RunError` for an id outside the vocabulary.
        """
        marks = np.zeros(len(self._tokens) + 1, dtype=np.int64)
        np.add.at(marks, self.starts[:-1][indices] + self._answers[indices], 1)
        np.add.at(marks, self.starts[1:][indices], -1)
        answers = self._tokens[np.cumsum(marks[:-1]) > 0]
        if len(answers) and int(answers.max()) >= vocabulary_size:
            raise RunError(
                f"the corpus has token {answers.max()}, outside the vocabulary of "
                f"{vocabulary_size}: take the corpus of this drafter's target"
            )
        return np.bincount(answers, minlength=vocabulary_size).astype(np.int64)

    def check(self, fingerprint: Mapping[str, str]) -> None:
        """Raise `RunError` unless a target of this fingerprint wrote all of it."""
        for manifest, (part, mark) in itertools.product(self._manifests, fingerprint.items()):
            wrote = manifest.get("fingerprint", {}).get(part)
            if wrote != mark:
                raise RunError(
                    f"the corpus was written with {part} {str(wrote)[:12]}, this is {mark[:12]}: "
                    "run regen with this target"
                )

    @property
    def origins(self) -> list[dict[str, Any]]:
        """Seed, tokens and shards of every folder."""
        return [
            {key: manifest.get(key) for key in ("seed", "tokens", "shards")}
            for manifest in self._manifests
        ]

    def shard_marks(self) -> list[str]:
        """What each shard is known by: the sha256 of its file. Reads all of them."""
        return [hashlib.sha256(file.read_bytes()).hexdigest() for file in self._files]

    def split(self, held_out: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Indices to train on and the last `held_out`, never trained on."""
        everything = np.arange(len(self), dtype=np.int64)
        held_out = min(held_out, len(self) // 2)
        cut = len(self) - held_out
        return everything[:cut], everything[cut:]

    def batches(
        self, indices: NDArray[np.int64], tokens: int, longest: int, seed: int, epoch: int
    ) -> Iterator[NDArray[np.int64]]:
        """The batches of one epoch as conversation indices, each of like lengths.

        A batch has about `tokens` tokens, padding included; conversations are cut to `longest`.
        What does not fill a batch waits for the next epoch's other order.
        """
        random = np.random.default_rng([seed, epoch])
        widths = width_of(self.sizes[indices], longest)
        plan: list[NDArray[np.int64]] = []
        for width in np.unique(widths):
            own = random.permutation(indices[widths == width])
            rows = max(1, tokens // int(width))
            if len(own) < rows:
                own = np.resize(own, rows)
            plan += [own[at : at + rows] for at in range(0, len(own) - rows + 1, rows)]
        for place in random.permutation(len(plan)):
            yield plan[place]

    def pack(self, indices: NDArray[np.int64], longest: int) -> Packed:
        """Conversations side by side, padded to the width of the longest of them."""
        width = int(width_of(self.sizes[indices], longest).max())
        tokens = np.zeros((len(indices), width), dtype=np.int32)
        places = np.arange(width)
        ends = np.minimum(self.sizes[indices], width)
        for row, index in enumerate(indices):
            start = self.starts[index]
            tokens[row, : ends[row]] = self._tokens[start : start + ends[row]]
        answered = places >= self._answers[indices][:, None]
        return Packed(tokens, answered & (places < ends[:, None]))


class CorpusWriter:
    """Writes shards; the manifest is rewritten after each, so a stopped run is a whole corpus."""

    def __init__(self, folder: Path, facts: Mapping[str, Any], vocabulary_size: int) -> None:
        self._folder = folder
        self._dtype = np.uint16 if vocabulary_size <= 1 << 16 else np.uint32
        folder.mkdir(parents=True, exist_ok=True)
        self._manifest: dict[str, Any] = {
            **facts,
            "format": FORMAT,
            "shards": [],
            "conversations": 0,
            "tokens": 0,
            "answer_tokens": 0,
        }

    @classmethod
    def resuming(
        cls,
        folder: Path,
        facts: Mapping[str, Any],
        vocabulary_size: int,
        must_agree: Sequence[str],
    ) -> CorpusWriter:
        """Go on with the corpus in `folder`, whose manifest must say what `facts` says in the
        fields named. Raises `RunError` when it does not, or cannot be read."""
        try:
            stored = json.loads((folder / MANIFEST).read_text())
        except (OSError, ValueError) as error:
            raise RunError(f"{folder} holds no corpus to go on with: {error}") from error
        for field in must_agree:
            # As the file would say it: tuples are lists there.
            given = json.loads(json.dumps(facts[field]))
            if stored.get(field) != given:
                raise RunError(
                    f"{folder / MANIFEST}: the corpus has {field} {stored.get(field)!r}, now it is "
                    f"{given!r}: go on as it was begun, or write to another folder"
                )
        writer = cls(folder, facts, vocabulary_size)
        writer._manifest = stored
        return writer

    @property
    def manifest(self) -> Mapping[str, Any]:
        """What the manifest says, or will when something is written."""
        return self._manifest

    def write(self, conversations: Sequence[Conversation], **facts: Any) -> None:
        """Add a shard, unless there are no conversations, and `facts` to the manifest."""
        if conversations:
            self._add_shard(conversations)
        self._manifest.update(facts)
        if conversations or facts:
            write_json(self._folder / MANIFEST, self._manifest)

    def _add_shard(self, conversations: Sequence[Conversation]) -> None:
        name = f"shard-{len(self._manifest['shards']):05d}.safetensors"
        sizes = [len(conversation.tokens) for conversation in conversations]
        arrays = {
            "tokens": np.concatenate([np.asarray(c.tokens, self._dtype) for c in conversations]),
            "starts": np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
            "answers": np.array([c.answer for c in conversations], dtype=np.int32),
        }
        temporary = self._folder / f".{name}"
        save_file(arrays, temporary)
        temporary.replace(self._folder / name)
        self._manifest["shards"].append(name)
        self._manifest["conversations"] += len(conversations)
        self._manifest["tokens"] += sum(sizes)
        self._manifest["answer_tokens"] += sum(sizes) - int(arrays["answers"].sum())


def width_of(sizes: NDArray[Any], longest: int) -> NDArray[np.int64]:
    """Padded widths: few distinct ones, because a step is compiled for each."""
    rounded = -(-sizes // _STEP) * _STEP
    widths: NDArray[np.int64] = np.minimum(rounded, longest).astype(np.int64)
    return widths


def _is_whole(shard: Mapping[str, NDArray[Any]]) -> bool:
    """Whether the arrays of a shard go together."""
    starts = shard["starts"]
    return len(starts) == len(shard["answers"]) + 1 and starts[-1] == len(shard["tokens"])
