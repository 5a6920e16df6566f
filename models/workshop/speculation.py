"""Decoding prompts with and without a drafter, as plainly as it can be measured.

Runs on the calling thread, which reads every round. Rows are decoded a group at a time: all of
a group begin together, and a row that ends leaves. Serial and speculative decode choose tokens
with the same settings and noise, so that their texts can be compared.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from models.decode_rows import TargetRows
from models.dspark.drafter import Draft, Drafter
from models.dspark.rows import SpeculativeRows, Verification, chooser
from models.sampling import RowSampling, choose, distribution
from models.sampling_settings import Sampling
from models.taps import Taps
from models.target import Target

PREFILL_CHUNK = 512


class Round(NamedTuple):
    """Drafts of one row and how many were accepted; `produced` tokens before it. `stopped` when
    a stop token was among the accepted ones: those behind it then tell nothing."""

    produced: int
    drafted: int
    accepted: int
    confidences: list[float]
    stopped: bool


class Answer(NamedTuple):
    """`tokens` up to the budget or the stop token; `margins` are the target's top-2 margins
    where tokens were chosen, empty when not asked for."""

    tokens: list[int]
    rounds: list[Round]
    margins: list[float]


class Timed(NamedTuple):
    """The answers of a group, and the seconds from the end of its prefill."""

    answers: list[Answer]
    seconds: float


class Decoder:
    """A pair, ready to decode both ways. Removes its taps on `close`."""

    def __init__(self, target: Target, drafter: Drafter) -> None:
        self._target, self._drafter = target, drafter
        self._taps = Taps(target.model, drafter.configuration.tap_layers)
        self._stops = frozenset(target.facts.stop_tokens)

    def close(self) -> None:
        """Give the target its own layers back."""
        self._taps.remove()

    def serial(
        self, prompts: Sequence[list[int]], settings: Sequence[Sampling], count: int
    ) -> Timed:
        """One token a step and row."""
        rows = self.serial_rows(prompts)
        samplings = self.samplings(settings)
        group = _Group(prompts, count, self._stops)
        mx.synchronize()
        begun = time.perf_counter()
        while group.live:
            own = [samplings[index] for index in group.live]
            tokens, margins = self.step(rows, group.anchors(), own)
            mx.eval(tokens, margins)
            values: Any = margins.tolist()
            chosen: Any = tokens.tolist()
            for row in reversed(group.add(chosen, [None] * len(own), values)):
                rows.leave(row)
        return Timed(group.answers(), time.perf_counter() - begun)

    def speculative(
        self,
        prompts: Sequence[list[int]],
        settings: Sequence[Sampling],
        count: int,
        *,
        width: int | None = None,
        rejection: bool = False,
    ) -> Timed:
        """A block a round and row; `width` drafts of it are verified, all when None."""
        rows = self.speculative_rows(prompts)
        samplings = self.samplings(settings)
        group = _Group(prompts, count, self._stops)
        mx.synchronize()
        begun = time.perf_counter()
        first = True
        while group.live:
            own = [samplings[index] for index in group.live]
            anchors = mx.array(group.anchors(), dtype=mx.int32)
            if first:
                # Drafters are trained on anchors inside answers: the first token is decoded.
                drafted, confidences = 0, None
                verified = rows.verify(anchors, None, choose=chooser(own, list(rows.lengths)))
            else:
                draft = self.draft(rows, anchors, own, width=width, rejection=rejection)
                drafted, confidences = draft.tokens.shape[1], draft.confidence_logits
                verified = self.verify(rows, anchors, own, draft, rejection=rejection)
            wanted = [verified.tokens, verified.accepted]
            mx.eval(*wanted, *([] if confidences is None else [confidences]))
            accepted: Any = verified.accepted.tolist()
            tokens: Any = verified.tokens.tolist()
            logits: Any = [[]] * len(own) if confidences is None else confidences.tolist()
            rows.commit([each + 1 for each in accepted])
            committed = [row[: n + 1] for row, n in zip(tokens, accepted, strict=True)]
            details: list[tuple[int, int, list[float]] | None] = [
                None if first else (drafted, n, own_logits)
                for n, own_logits in zip(accepted, logits, strict=True)
            ]
            for row in reversed(group.add(committed, details, None)):
                rows.leave(row)
            first = False
        return Timed(group.answers(), time.perf_counter() - begun)

    def samplings(self, settings: Sequence[Sampling]) -> list[RowSampling]:
        """Rows' settings, as `step`, `draft` and `verify` want them."""
        return [RowSampling(one, self._target.vocabulary_size, []) for one in settings]

    def serial_rows(self, prompts: Sequence[list[int]]) -> TargetRows:
        """Rows that have read all but the last token of their prompts."""
        rows = TargetRows(self._target)
        for prompt in prompts:
            one = TargetRows(self._target)
            one.open_row()
            for part in _chunks(prompt):
                one.prefill(part)
                self._taps.discard()
            rows.join(one)
        return rows

    def speculative_rows(self, prompts: Sequence[list[int]]) -> SpeculativeRows:
        """The same, ready to draft."""
        rows = SpeculativeRows(self._target, self._drafter, self._taps)
        for prompt in prompts:
            one = SpeculativeRows(self._target, self._drafter, self._taps)
            one.open_row()
            for part in _chunks(prompt):
                one.prefill(part)
            rows.join(one)
        return rows

    def step(
        self, rows: TargetRows, anchors: Sequence[int], own: list[RowSampling]
    ) -> tuple[mx.array, mx.array]:
        """A serial step behind `anchors` [R]: tokens [R, 1] and the target's top-2 margins [R]
        float32. Lazy."""
        logits = rows.decode(mx.array([[token] for token in anchors]))
        self._taps.discard()
        tokens = choose(logits, own, list(rows.lengths))
        ordered = mx.topk(logits[:, 0].astype(mx.float32), 2, axis=-1)
        return tokens, mx.abs(ordered[:, 1] - ordered[:, 0])

    def draft(
        self,
        rows: SpeculativeRows,
        anchors: mx.array,
        own: list[RowSampling],
        *,
        width: int | None,
        rejection: bool,
    ) -> Draft:
        """`width` drafts behind `anchors` [R], the whole block when None. Lazy."""
        pick = chooser(own, list(rows.lengths))
        return rows.draft(anchors, cap=width, choose=pick, keep_logits=rejection)

    def verify(
        self,
        rows: SpeculativeRows,
        anchors: mx.array,
        own: list[RowSampling],
        draft: Draft,
        *,
        rejection: bool,
    ) -> Verification:
        """The target's decision on a draft behind `anchors` [R]. Lazy."""
        if not rejection:
            pick = chooser(own, list(rows.lengths))
            return rows.verify(anchors, draft.tokens, choose=pick)
        return rows.verify_rejecting(
            anchors, draft, distribution=_distribution(own), seeds=[row.seed for row in own]
        )


class _Group:
    """The answers of prompts that began together; `live` are the indices of those that go on,
    in the order of the rows that decode them."""

    def __init__(self, prompts: Sequence[list[int]], count: int, stops: frozenset[int]) -> None:
        self.live = list(range(len(prompts)))
        self._count, self._stops = count, stops
        self._last = [prompt[-1] for prompt in prompts]
        self._tokens: list[list[int]] = [[] for _ in prompts]
        self._rounds: list[list[Round]] = [[] for _ in prompts]
        self._margins: list[list[float]] = [[] for _ in prompts]

    def anchors(self) -> list[int]:
        """The last token of every live row."""
        return [self._last[index] for index in self.live]

    def add(
        self,
        committed: list[list[int]],
        details: Sequence[tuple[int, int, list[float]] | None],
        margins: list[float] | None,
    ) -> list[int]:
        """Take in a step; returns the rows that ended, in order."""
        ended = []
        for row, index in enumerate(self.live):
            answer, new = self._tokens[index], committed[row]
            stop = next((at for at, token in enumerate(new) if token in self._stops), None)
            detail = details[row]
            if detail is not None:
                drafted, accepted, confidences = detail
                self._rounds[index].append(
                    Round(
                        len(answer),
                        drafted,
                        accepted,
                        confidences,
                        stopped=stop is not None and stop < accepted,
                    )
                )
            if margins is not None:
                self._margins[index].append(margins[row])
            answer += new if stop is None else new[: stop + 1]
            self._last[index] = new[-1]
            if stop is not None or len(answer) >= self._count:
                del answer[self._count :]
                ended.append(row)
        for row in reversed(ended):
            # As rows do: the last one takes the place of the one that leaves.
            last = self.live.pop()
            if row < len(self.live):
                self.live[row] = last
        return ended

    def answers(self) -> list[Answer]:
        return [
            Answer(*parts) for parts in zip(self._tokens, self._rounds, self._margins, strict=True)
        ]


def _distribution(rows: list[RowSampling]) -> Any:
    return lambda logits, _column: distribution(logits, rows)


def _chunks(prompt: list[int]) -> list[mx.array]:
    """All but the last token, which is the first anchor."""
    body = prompt[:-1]
    return [
        mx.array([body[at : at + PREFILL_CHUNK]], dtype=mx.int32)
        for at in range(0, len(body), PREFILL_CHUNK)
    ]
