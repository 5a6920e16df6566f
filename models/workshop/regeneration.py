"""Let a target write its drafter's training data.

Run as `python -m models.workshop.regeneration --target DIR --out DIR`, in a process of its
own. User turns come from `--prompts`, or are the target's own, from nothing but the header of
a turn or a few words behind it. Waves of conversations are written until there are
`--answer-tokens` of them, or `--seconds` are over; after every wave a shard is on disk. The
same seed and rows give the same corpus on the same device. With `--resume` it goes on behind the
last wave on disk, and the corpus is the one that a run without a break writes; `--seconds` are
those of one run, the other two count from the beginning. Exits with 2 when it cannot begin, as in
a folder that holds a corpus already.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx

from models.checkpoint import CheckpointError
from models.target import Target
from models.workshop.chat_text import ChatText
from models.workshop.corpus import MANIFEST, Conversation, Corpus, CorpusWriter
from models.workshop.frozen_target import training_precision
from models.workshop.generation import Generator, WaveSettings, Written
from models.workshop.progress import refuse, say
from models.workshop.prompts import Prefix, PromptDraw
from models.workshop.run_folder import RunError, fingerprint, versions
from models.workshop.screening import Screen, Verdict, without_loop

_MUST_AGREE = ("fingerprint", "seed", "rows", "settings", "material", "versions")
"""What a wave depends on besides its number, and how it is screened."""


def read_prompts(files: Iterable[Path]) -> list[str]:
    """The `prompt` of every line. Raises `RunError`."""
    prompts = []
    for file in files:
        try:
            prompts += [json.loads(line)["prompt"] for line in file.read_text().splitlines()]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(f"{file}: JSON lines with a `prompt` are needed: {error}") from error
    return prompts


def main(arguments: Sequence[str] | None = None) -> int:
    """The step; returns its exit code."""
    options = _parse(arguments)
    try:
        _refuse_to_overwrite(options)
        excluded = read_prompts(options.exclude)
        given = read_prompts([options.prompts]) if options.prompts else []
        text = ChatText(options.target)
        target = Target.load(options.target, training_precision())
        result = _write(options, target, text, excluded, given)
    except (CheckpointError, RunError, OSError, ValueError) as error:
        return refuse(f"cannot write training data: {error}")
    say("result", command="regen", corpus=str(options.out), **result)
    return 0


def _refuse_to_overwrite(options: argparse.Namespace) -> None:
    if (options.out / MANIFEST).exists() and not options.resume:
        raise RunError(
            f"{options.out} holds a corpus already: go on with it by --resume, or name another "
            "folder with --out"
        )


def _write(
    options: argparse.Namespace,
    target: Target,
    text: ChatText,
    excluded: list[str],
    given: list[str],
) -> dict[str, object]:
    settings = WaveSettings(
        longest=options.longest,
        user_tokens=options.user_tokens,
        answer_tokens=options.answer_length,
        answer_temperatures=tuple(options.temperatures),
    )
    draw = PromptDraw(text, options.seed, given=given)
    stops = frozenset(target.facts.stop_tokens) or frozenset({text.frame.after[0]})
    generator = Generator(target.model, text.frame, stops, settings)
    screen = Screen(excluded)
    facts = {
        "fingerprint": fingerprint(options.target),
        "seed": options.seed,
        "rows": options.rows,
        "settings": settings._asdict(),
        "prompts": str(options.prompts) if options.prompts else None,
        "excluded": [file.name for file in options.exclude],
        # Files may change, or be the same under other names.
        "material": hashlib.sha256(json.dumps([given, excluded]).encode()).hexdigest(),
        "versions": versions(),
    }
    writer, done, unseen = _begin(options.out, facts, target.vocabulary_size, screen)
    say("start", command="regen", rows=options.rows, seed=options.seed, wave=done)
    counts: Counter[str] = Counter(writer.manifest.get("screened", {}))
    started, answered = time.monotonic(), writer.manifest["answer_tokens"] - unseen
    waves: list[float] = []

    def prefixes_of(wave: int) -> list[Prefix]:
        first = wave * options.rows
        return [draw.draw(index) for index in range(first, first + options.rows)]

    # While the device writes a wave, the one before is screened and stored, and the prefixes of
    # the one behind it are drawn.
    with ThreadPoolExecutor(1) as pool:
        storing: Future[int] = Future()
        storing.set_result(unseen)
        drawing = pool.submit(prefixes_of, done)
        for wave in itertools.count(done):
            begun = time.monotonic()
            # A wave that would not be finished in time is not begun.
            late = begun - started + (max(waves) if waves else 0.0) > options.seconds > 0
            enough = answered >= options.answer_tokens > 0
            if (waves and late) or enough or 0 < options.waves <= wave:
                break
            prefixes = drawing.result()
            drawing = pool.submit(prefixes_of, wave + 1)
            written = list(generator.write(prefixes, options.seed, wave))
            answered += storing.result()
            waves.append(time.monotonic() - begun)
            storing = pool.submit(_store, wave, written, screen, text, writer, counts)
            elapsed = time.monotonic() - started
            say(
                "progress",
                done=answered,
                total=options.answer_tokens or None,
                wave=wave,
                seconds=round(elapsed, 1),
                wave_seconds=round(waves[-1], 2),
                answer_tokens_per_second=round(
                    sum(len(one.tokens) - one.answer for one in written) / waves[-1]
                ),
                peak_memory=mx.get_peak_memory(),
                screened=dict(counts),
            )
        answered += storing.result()
    return {
        "answer_tokens": answered,
        "seconds": round(time.monotonic() - started, 1),
        "screened": dict(counts),
    }


def _begin(
    folder: Path, facts: dict[str, object], vocabulary_size: int, screen: Screen
) -> tuple[CorpusWriter, int, int]:
    """Where to write, how many waves are there already, and the answer tokens of the last one.

    Whether there are enough is asked before the last wave is stored: a run that goes on must ask
    the same.
    """
    if not (folder / MANIFEST).exists():
        return CorpusWriter(folder, facts, vocabulary_size), 0, 0
    writer = CorpusWriter.resuming(folder, facts, vocabulary_size, _MUST_AGREE)
    if writer.manifest["shards"]:
        corpus = Corpus(folder)
        for index in range(len(corpus)):
            screen.remember(*corpus[index])
    return writer, writer.manifest["waves"], writer.manifest["last_wave_answer_tokens"]


def _store(
    wave: int,
    written: list[Written],
    screen: Screen,
    text: ChatText,
    writer: CorpusWriter,
    counts: Counter[str],
) -> int:
    """Cut loops short, screen a wave, and write what is left as a shard; returns its answer
    tokens."""
    texts = [""] * len(written)
    if screen.excludes:
        texts = text.decode_all([one.tokens.tolist() for one in written])
    kept = []
    for one, words in zip(written, texts, strict=True):
        tokens = without_loop(one.tokens.tolist(), one.answer)
        verdict = screen.judge(tokens, one.answer, words)
        counts[verdict] += 1
        counts["cut"] += verdict is Verdict.KEPT and len(tokens) < len(one.tokens)
        if verdict is Verdict.KEPT:
            kept.append(Conversation(tokens, one.answer))
    answered = sum(len(conversation.tokens) - conversation.answer for conversation in kept)
    writer.write(kept, screened=dict(counts), waves=wave + 1, last_wave_answer_tokens=answered)
    return answered


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m models.workshop.regeneration", description="Write training data."
    )
    add = parser.add_argument
    add("--target", type=Path, required=True, help="folder of the target")
    add("--out", type=Path, required=True, help="folder for the corpus")
    add("--prompts", type=Path, help="JSON lines with `prompt`; the target's own when left out")
    add("--exclude", type=Path, nargs="*", default=[], help="prompts that must not be in it")
    add("--answer-tokens", type=int, default=0, help="end when there are so many")
    add("--seconds", type=float, default=0.0, help="end after so much wall clock")
    add("--waves", type=int, default=0, help="end after so many waves")
    add("--rows", type=int, default=8192, help="conversations side by side")
    add("--longest", type=int, default=352, help="tokens of a conversation")
    add("--user-tokens", type=int, default=72, help="tokens of a user turn that it writes")
    add("--answer-length", type=int, default=256, help="tokens of an answer")
    add("--temperatures", type=float, nargs="+", default=[0.0, 0.7], help="of the answers")
    add("--seed", type=int, default=0)
    add("--resume", action="store_true", help="go on with the corpus that --out holds, if any")
    options = parser.parse_args(arguments)
    if not (options.answer_tokens or options.seconds or options.waves):
        parser.error("give --answer-tokens, --seconds or --waves")
    return options


if __name__ == "__main__":
    sys.exit(main())
