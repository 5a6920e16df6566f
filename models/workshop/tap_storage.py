"""Store the taps of a corpus, so that training need not run the target.

Run as `python -m models.workshop.tap_storage --target DIR --corpus DIR`, in a process of its
own. Writes a shard of taps for every shard of the corpus, each whole or not at all; what is
there and whole is not written again, so a run that was stopped goes on. Taps take thousands of
bytes a token: what they will take is said first, and refused when the disk has less. Exits
with 2 when it cannot begin, or when the precision is too narrow for the target.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import msgspec
import numpy as np
from numpy.typing import NDArray

from models.checkpoint import CheckpointError
from models.dspark.configuration import DrafterError, TargetShape, check_taps
from models.workshop.corpus import Corpus
from models.workshop.frozen_target import FrozenTarget, training_precision
from models.workshop.network import spread_taps
from models.workshop.progress import refuse, say
from models.workshop.run_folder import RunError, fingerprint, versions, write_json
from models.workshop.stored_taps import (
    DTYPES,
    FOLDER,
    FORMAT,
    MANIFEST,
    TapManifest,
    TapSettings,
    check_shard,
    corpus_mark,
    shard_name,
)

_PROGRESS_SECONDS = 1.0


class PlannedShard(NamedTuple):
    """A shard to write: the taps of `indices`, conversations of the corpus, whose tokens begin
    at `start` among all; `bytes` of the file."""

    name: str
    indices: NDArray[np.int64]
    start: int
    tokens: int
    header: bytes
    bytes: int
    written: bool


def plan(
    corpus: Corpus, settings: TapSettings, marks: Sequence[str], out: Path
) -> list[PlannedShard]:
    """All shards of a corpus, and which of them are in `out` already, whole."""
    planned = []
    for shard, mark in enumerate(marks):
        first, last = corpus.shard_starts[shard : shard + 2].tolist()
        start, end = int(corpus.starts[first]), int(corpus.starts[last])
        header = settings.header(end - start, mark)
        data = (end - start) * (settings.tap_bytes + settings.state_bytes)
        name = shard_name(shard)
        try:
            check_shard(out / name, settings, end - start, mark)
            written = True
        except RunError:
            written = False
        indices = np.arange(first, last, dtype=np.int64)
        planned.append(
            PlannedShard(name, indices, start, end - start, header, len(header) + data, written)
        )
    return planned


def like_lengths(
    corpus: Corpus, indices: NDArray[np.int64], tokens: int
) -> Iterator[NDArray[np.int64]]:
    """All of `indices`, in batches of about `tokens` tokens, those of like length together."""
    order = indices[np.argsort(corpus.sizes[indices], kind="stable")][::-1]
    order = order[corpus.sizes[order] > 0]
    at = 0
    while at < len(order):
        rows = max(1, tokens // int(corpus.sizes[order[at]]))
        yield order[at : at + rows]
        at += rows


def write_shard(
    path: Path,
    shard: PlannedShard,
    corpus: Corpus,
    frozen: FrozenTarget,
    settings: TapSettings,
    batch_tokens: int,
    tell: Callable[[int], None],
) -> None:
    """Write one shard; `tell` is given the tokens of every batch that is stored.

    Conversations go to their places as they come, so that memory holds two batches and never
    a shard. Raises `RunError` where a value does not fit the precision, `OSError` when the
    disk is full; the file is then not there.
    """
    temporary = path.with_name(f".{path.name}")
    longest = int(corpus.sizes[shard.indices].max())
    dtype = DTYPES[settings.precision]
    try:
        with temporary.open("wb", buffering=0) as file:
            _write_at(file.fileno(), shard.header, 0)
            pending: tuple[NDArray[np.int64], tuple[mx.array, ...]] | None = None
            for indices in (*like_lengths(corpus, shard.indices, batch_tokens), None):
                # The device computes a batch while the one before it is stored.
                computed = None
                if indices is not None:
                    packed = corpus.pack(indices, longest)
                    both = [part.astype(dtype) for part in frozen.read(mx.array(packed.tokens))]
                    ends = mx.array(corpus.sizes[indices])[:, None]
                    real = (mx.arange(packed.tokens.shape[1]) < ends)[..., None]
                    finite = mx.stack([(mx.isfinite(one) | ~real).all() for one in both]).all()
                    computed = indices, (*both, finite)
                    mx.async_eval(computed[1])
                if pending is not None:
                    tell(_store(file.fileno(), shard, corpus, settings, *pending))
                pending = computed
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _store(
    file: int,
    shard: PlannedShard,
    corpus: Corpus,
    settings: TapSettings,
    indices: NDArray[np.int64],
    computed: tuple[mx.array, ...],
) -> int:
    taps, states, finite = computed
    if not finite.item():
        raise RunError(
            f"a hidden state of the target does not fit {settings.precision}: give "
            "--precision bfloat16 or float32"
        )
    begin = len(shard.header)
    parts = (
        (np.array(taps.view(mx.uint8)), begin, settings.tap_bytes),
        (
            np.array(states.view(mx.uint8)),
            begin + shard.tokens * settings.tap_bytes,
            settings.state_bytes,
        ),
    )
    for row, index in enumerate(indices.tolist()):
        size = int(corpus.sizes[index])
        place = int(corpus.starts[index]) - shard.start
        for values, offset, width in parts:
            _write_at(file, values[row, :size].data, offset + place * width)
    return int(corpus.sizes[indices].sum())


def _write_at(file: int, content: bytes | memoryview, offset: int) -> None:
    view = memoryview(content).cast("B")
    while len(view):
        count = os.pwrite(file, view, offset)
        view, offset = view[count:], offset + count


def main(arguments: Sequence[str] | None = None) -> int:
    """The step; returns its exit code."""
    options = _parse(arguments)
    try:
        result = _run(options)
    except (CheckpointError, DrafterError, RunError, OSError, ValueError) as error:
        return refuse(f"cannot store taps: {error}")
    say("result", command="taps", **result)
    return 0


def _run(options: argparse.Namespace) -> dict[str, object]:
    if options.batch_tokens < 1:
        raise RunError(f"--batch-tokens is {options.batch_tokens}; it must be at least 1")
    out: Path = options.out or options.corpus / FOLDER
    corpus = Corpus(options.corpus)
    shape = TargetShape.read(options.target)
    marks = corpus.shard_marks()
    settings = TapSettings(
        tap_layers=tuple(options.tap_layers or spread_taps(shape.layer_count)),
        precision=options.precision or training_precision(),
        fingerprint=fingerprint(options.target),
        hidden_size=shape.hidden_size,
    )
    check_taps(settings.tap_layers, shape.layer_count)
    corpus.check(settings.fingerprint)
    stored = TapManifest.load(out)
    if stored is not None:
        stored.check(out, settings, corpus_mark(marks))
    shards = plan(corpus, settings, marks, out)
    missing = [shard for shard in shards if not shard.written]
    needed = sum(shard.bytes for shard in missing)
    out.mkdir(parents=True, exist_ok=True)
    for leftover in out.glob(".taps-*.safetensors"):
        leftover.unlink()
    free = shutil.disk_usage(out).free
    if needed > free:
        raise RunError(
            f"the taps take {needed:,} bytes, {out} has room for {free:,}: name another disk "
            "with --out, fewer --tap-layers, or train without stored taps"
        )
    say(
        "start",
        command="taps",
        tap_layers=list(settings.tap_layers),
        precision=settings.precision,
        bytes=needed,
        free=free,
        shards=len(missing),
        written_before=len(shards) - len(missing),
    )
    say(
        "note",
        message=f"{len(missing)} of {len(shards)} shards are to be written: {needed:,} bytes, "
        f"{free:,} are free",
    )
    written = [shard for shard in shards if shard.written]
    tokens = sum(shard.tokens for shard in shards)
    done, told, started = sum(s.tokens for s in written), 0.0, time.monotonic()

    def tell(count: int) -> None:
        nonlocal done, told
        done += count
        now = time.monotonic()
        if done == tokens or now - told >= _PROGRESS_SECONDS:
            told = now
            say("progress", done=done, total=tokens, seconds=round(now - started, 1))

    if missing:
        frozen = FrozenTarget.load(options.target, settings.tap_layers, settings.precision)
        for shard in missing:
            write_shard(
                out / shard.name, shard, corpus, frozen, settings, options.batch_tokens, tell
            )
            written.append(shard)
            _write_manifest(out, settings, corpus_mark(marks), written)
    _write_manifest(out, settings, corpus_mark(marks), shards)
    return {
        "taps": str(out),
        "tap_layers": list(settings.tap_layers),
        "precision": settings.precision,
        "tokens": tokens,
        "bytes": sum(shard.bytes for shard in shards),
        "written": len(missing),
        "seconds": round(time.monotonic() - started, 1),
    }


def _write_manifest(
    out: Path, settings: TapSettings, corpus: str, shards: Sequence[PlannedShard]
) -> None:
    manifest = TapManifest(
        format=FORMAT,
        settings=settings,
        corpus=corpus,
        shards=tuple(sorted(shard.name for shard in shards)),
        tokens=sum(shard.tokens for shard in shards),
        bytes=sum(shard.bytes for shard in shards),
        versions=versions(),
    )
    write_json(out / MANIFEST, msgspec.to_builtins(manifest))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m models.workshop.tap_storage", description="Store a corpus' taps."
    )
    add = parser.add_argument
    add("--target", type=Path, required=True, help="folder of the target")
    add("--corpus", type=Path, required=True, help="folder that regen wrote")
    add("--out", type=Path, help="folder for the taps; `taps` in the corpus' when left out")
    add("--tap-layers", type=int, nargs="+", help="target layers from 0; train's spread by default")
    add("--precision", choices=tuple(DTYPES), help="float32 on the CPU, bfloat16 on a GPU")
    add("--batch-tokens", type=int, default=12288, help="tokens of a forward, padding included")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
