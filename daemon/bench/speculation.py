"""The speculative lane side by side with others' speculation: same weights, BLAS and prompts.

Owns an engine with a drafter, the processes of the peers, and the copies that they load: the
target in float32, and the drafter as DeepSpec's readers want it. All decode greedily and until the
target ends, so all must say the same: texts are compared with those of the serial lane, and where
one parts, the target's two best tokens must be nearly equal. One side is busy at a time, in an
order that turns from round to round. Each peer runs with whichever of its settings was fastest in
a first turn. Beside the wall clock, processor seconds are counted: on a CPU that has other work to
do as well, they tell the sides apart better. Runs on the benchmark's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.table import Table

from daemon.bench import report
from daemon.bench.drafted_prompts import Prompts
from daemon.bench.engine_load import EngineLoad, engine
from daemon.bench.peer import write_float32_copy
from daemon.bench.peer_process import PeerProcess, PeerUnusable, peer
from daemon.bench.report import Machine, this_machine
from daemon.bench.timings import Ratio, ratio
from daemon.child_process import python_command, python_environment
from daemon.exit_codes import ExitCode, SparklaneError
from models.peers.messages import PeerAsk, PeerReady, PeerSetting
from scheduler.messages import Configure, DraftConfigure, LaneChoice

TARGETS = {1: 1.0, 4: 1.2}
"""By rows: how many times a peer's speed ours should be."""
_TICK = 0.01
MARGIN = 0.01
"""Most by which the target may prefer one of two tokens where texts part: logits in float32 differ
by far less between programs."""


class Parting(msgspec.Struct, frozen=True, kw_only=True):
    """Where a text left the serial lane's: `margin` is between the target's two best logits."""

    side: str
    rows: int
    prompt: int
    place: int
    margin: float


class PeerFigure(msgspec.Struct, frozen=True, kw_only=True):
    """A peer at a number of rows: how it ran, and the ratio of ours to it. `processor_ratio` is of
    tokens per second of processor time, of the engine's process and of the peer's."""

    peer: str
    rows: int
    setting: str
    together: bool
    ratio: Ratio
    processor_ratio: Ratio


class SpeculationResult(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of every peer that took part; `left_out` says why others did not."""

    machine: Machine
    target: str
    drafter: str
    prompts: int
    max_tokens: int
    tokens: int
    figures: list[PeerFigure]
    partings: list[Parting]
    left_out: list[str]


class _Speed(NamedTuple):
    """Tokens per second by either clock."""

    wall: float
    processor: float


class SerialTexts:
    """The serial lane's tokens, and the margin at each of them."""

    def __init__(self, tokens: list[list[int]], margins: list[list[float]]) -> None:
        self.tokens = tokens
        self.partings: list[Parting] = []
        self._margins = margins

    def compare(self, side: str, rows: int, found: Sequence[Sequence[int]]) -> None:
        """Note where texts part.

        Raises:
            SparklaneError: one parts where the target had no doubt, or ends early.
        """
        for number, (expected, tokens) in enumerate(zip(self.tokens, found, strict=True)):
            if list(tokens) == expected:
                continue
            pairs = enumerate(zip(expected, tokens, strict=False))
            place = next((i for i, (a, b) in pairs if a != b), None)
            margin = float("inf") if place is None else self._margins[number][place]
            if place is None or margin > MARGIN:
                where = "its length" if place is None else f"token {place}"
                raise SparklaneError(
                    f"{side} at {rows} rows: prompt {number} differs from the serial lane in "
                    f"{where}, where the two best logits are {margin:.4f} apart, over {MARGIN}: "
                    "speeds of different texts cannot be compared",
                    ExitCode.ENGINE,
                )
            parting = Parting(side=side, rows=rows, prompt=number, place=place, margin=margin)
            if parting not in self.partings:
                self.partings.append(parting)


async def measure(
    target: Path,
    drafter: Path,
    prompts: Prompts,
    *,
    peer_draft_model: Path | None,
    rounds: int,
    max_tokens: int,
    progress: Callable[[str], None],
) -> SpeculationResult:
    """Compare in `rounds` rounds at each number of rows of `TARGETS`."""
    machine = this_machine()
    left_out: list[str] = []
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sparklane-bench-")))
        progress("writing float32 copies of the pair")
        model, drafts = folder / "target", folder / "drafter"
        await write_float32_copy(target, model, endless=False)
        await _export_drafter(target, drafter, drafts)
        progress("starting an engine")
        configure = Configure(
            checkpoint=str(target),
            precision="float32",
            maximum_rows=max(TARGETS),
            draft=DraftConfigure(drafter=str(drafter)),
        )
        ours = await stack.enter_async_context(engine(configure, folder))
        # It would measure while the peers run, and go on without drafts until it has.
        await ours.until_costs_are_known(progress)
        peers: list[PeerProcess] = []
        chosen = [] if peer_draft_model is None else [f"--draft-model={peer_draft_model}"]
        for arguments in (
            ["mlx-lm-drafts", *chosen],
            ["mlx-lm-plain"],
            ["mlx-dspark", f"--draft-model={drafts}"],
        ):
            progress(f"starting {arguments[0]}")
            try:
                peers.append(
                    await stack.enter_async_context(peer([*arguments, f"--model={model}"]))
                )
            except PeerUnusable as error:
                left_out.append(str(error))
        progress("reading the serial lane's texts")
        texts = await _serial_texts(ours, prompts, max_tokens)
        comparison = _Comparison(ours, peers, prompts, texts, max_tokens)
        figures = []
        for rows in TARGETS:
            figures += await comparison.figures(rows, rounds, progress)
    return SpeculationResult(
        machine=machine,
        target=target.name,
        drafter=drafter.name,
        prompts=len(prompts.tokens),
        max_tokens=max_tokens,
        tokens=sum(map(len, texts.tokens)),
        figures=figures,
        partings=texts.partings,
        left_out=left_out,
    )


def tables(result: SpeculationResult) -> list[Table]:
    """The ratios, how the peers ran, and what there is to know of the texts."""
    ratios = report.ratio_table(
        f"{result.target} with {result.drafter} in float32, {result.prompts} prompts, "
        f"{result.tokens} tokens",
        "peer",
        [figure.ratio for figure in result.figures],
    )
    runs = Table(title="How the peers ran, each at its fastest", title_justify="left")
    for name in ("peer", "rows", "drafts with", "requests", "ratio by processor time"):
        runs.add_column(name)
    for figure in result.figures:
        together = "together" if figure.together else "one after the other"
        runs.add_row(
            figure.peer,
            str(figure.rows),
            figure.setting,
            together,
            f"{figure.processor_ratio.value:.3f}",
        )
    notes = [f"left out: {words}" for words in result.left_out]
    notes += [
        f"{found.side} at {found.rows} rows parts from the serial lane at token {found.place} of "
        f"prompt {found.prompt}, where the two best logits are {found.margin:.5f} apart"
        for found in result.partings
    ]
    runs.caption = "\n".join(notes or ["every text is the serial lane's"])
    return [ratios, runs]


class _Comparison:
    """All sides, and each peer's fastest setting so far as it is known."""

    def __init__(
        self,
        ours: EngineLoad,
        peers: Sequence[PeerProcess],
        prompts: Prompts,
        texts: SerialTexts,
        max_tokens: int,
    ) -> None:
        self._ours = ours
        self._peers = peers
        self._prompts = prompts
        self._texts = texts
        self._max_tokens = max_tokens
        self._settings: dict[str, PeerSetting] = {}

    async def figures(
        self, rows: int, rounds: int, progress: Callable[[str], None]
    ) -> list[PeerFigure]:
        """Every side in every round; the first turn warms ours and finds the peers' settings."""
        progress(f"{rows} rows: warming, and trying the peers' settings")
        await self._run_ours(rows)
        for process in self._peers:
            # One that takes requests one by one does at four rows what it did at one.
            if process.ready.batches or process.ready.name not in self._settings:
                await self._choose_setting(process, rows)
        sides: list[PeerProcess | None] = [None, *self._peers]
        speeds: dict[str, list[_Speed]] = {}
        for turn in range(rounds):
            progress(f"{rows} rows: round {turn + 1} of {rounds}")
            first = turn % len(sides)
            for side in sides[first:] + sides[:first]:
                if side is None:
                    speeds.setdefault("sparklane", []).append(await self._run_ours(rows))
                else:
                    name = side.ready.name
                    speed = await self._run_peer(side, rows, self._settings[name])
                    speeds.setdefault(name, []).append(speed)
        return [self._figure(process.ready, rows, speeds) for process in self._peers]

    def _figure(
        self, ready: PeerReady, rows: int, speeds: Mapping[str, list[_Speed]]
    ) -> PeerFigure:
        name = f"{rows} row{'s' if rows > 1 else ''}, {ready.name}"
        ours, theirs = speeds["sparklane"], speeds[ready.name]
        target = TARGETS[rows]
        return PeerFigure(
            peer=ready.name,
            rows=rows,
            setting=str(self._settings[ready.name]),
            together=rows > 1 and ready.batches,
            ratio=ratio(
                name, "tokens/s", [one.wall for one in ours], [one.wall for one in theirs], target
            ),
            processor_ratio=ratio(
                name,
                "tokens/s of processor time",
                [one.processor for one in ours],
                [one.processor for one in theirs],
                target,
            ),
        )

    async def _choose_setting(self, process: PeerProcess, rows: int) -> None:
        settings = process.ready.settings
        tried = {setting: await self._run_peer(process, rows, setting) for setting in settings}
        self._settings[process.ready.name] = max(tried, key=lambda setting: tried[setting].wall)

    async def _run_ours(self, rows: int) -> _Speed:
        before = self._ours.processor_seconds()
        tokens, seconds = await _ours(self._ours, self._prompts, rows, self._max_tokens)
        processor_seconds = self._ours.processor_seconds() - before
        self._texts.compare("sparklane", rows, tokens)
        return _speed(tokens, seconds, processor_seconds)

    async def _run_peer(self, process: PeerProcess, rows: int, setting: PeerSetting) -> _Speed:
        answer = await process.ask(
            PeerAsk(
                prompts=self._prompts.tokens,
                rows=rows,
                max_tokens=self._max_tokens,
                stop_tokens=self._prompts.stop_tokens,
                setting=setting,
            )
        )
        self._texts.compare(process.ready.name, rows, answer.tokens)
        return _speed(answer.tokens, answer.seconds, answer.processor_seconds)


def _speed(tokens: Sequence[Sequence[int]], seconds: float, processor_seconds: float) -> _Speed:
    count = sum(map(len, tokens))
    # The system counts the engine's in ticks, of which a short run may take none.
    return _Speed(count / seconds, count / max(processor_seconds, _TICK))


async def _ours(
    ours: EngineLoad, prompts: Prompts, rows: int, max_tokens: int
) -> tuple[list[list[int]], float]:
    """Tokens of all answers, and the seconds from each group's first request to its last end."""
    found: list[list[int]] = []
    seconds = 0.0
    for first in range(0, len(prompts.tokens), rows):
        answers = await asyncio.gather(
            *(
                ours.answer(prompt, max_tokens, stop_tokens=prompts.stop_tokens)
                for prompt in prompts.tokens[first : first + rows]
            )
        )
        timings = [timing for timing, _ in answers]
        for timing in timings:
            if timing.error is not None:
                raise SparklaneError(f"the engine lost a stream: {timing.error}", ExitCode.ENGINE)
        seconds += max(t.ended for t in timings) - min(t.sent for t in timings)
        found += [
            [token for output in outputs for token in output.tokens] for _, outputs in answers
        ]
    return found, seconds


async def _serial_texts(ours: EngineLoad, prompts: Prompts, max_tokens: int) -> SerialTexts:
    tokens: list[list[int]] = []
    margins: list[list[float]] = []
    for prompt in prompts.tokens:
        timing, outputs = await ours.answer(
            prompt,
            max_tokens,
            stop_tokens=prompts.stop_tokens,
            lane=LaneChoice.SERIAL,
            logprobs=2,
        )
        if timing.error is not None:
            raise SparklaneError(f"the engine lost a stream: {timing.error}", ExitCode.ENGINE)
        details = [detail for output in outputs for detail in output.logprobs or ()]
        tokens.append([token for output in outputs for token in output.tokens])
        margins.append([detail.top_logprobs[0] - detail.top_logprobs[1] for detail in details])
    return SerialTexts(tokens, margins)


async def _export_drafter(target: Path, drafter: Path, out: Path) -> None:
    """The drafter in DeepSpec's own form, unquantized and with the target's matrices."""
    process = await asyncio.create_subprocess_exec(
        *python_command("-m", "models.workshop.export", f"--target={target}"),
        *(f"--drafter={drafter}", f"--out={out}", "--with-embeddings"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=python_environment(),
    )
    said, complaints = await process.communicate()
    if process.returncode:
        lines = (complaints or said).decode(errors="replace").strip().splitlines()
        raise SparklaneError(
            lines[-1] if lines else f"the export ended with code {process.returncode}",
            ExitCode.CHECKPOINT,
        )
