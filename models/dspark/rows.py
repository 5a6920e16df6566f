"""Rows under speculation: the target's caches and the drafter's context, kept in step.

Owns both sides of a batch of rows; used on the engine's MLX thread. One round is `draft`,
`verify`, a single read by the caller of what they returned, and `commit`. Draft and
verification get the same `Choose`, so that under coupled acceptance a draft is accepted exactly
when it is what the target itself would have said. A row that does not draft for a while is
verified with no drafts: its context follows, and it can draft again at any time. Rows that
decode plainly keep their taps aside and pay for the context in one go when it is needed, so
plain decode costs what it costs without a drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import mlx.core as mx

from models.acceptance import (
    Stream,
    count_matches,
    draw,
    keyed_gumbel,
    keyed_uniforms,
    reject,
)
from models.dspark.context import DraftContext
from models.dspark.drafter import Choose, Draft, Drafter, greedy
from models.packed_prompts import read_packed
from models.row_batch import RowBatch
from models.sampling import RowSampling, choose
from models.taps import Taps
from models.target import Target

Distribution = Callable[[mx.array, int], mx.array]
"""Logits [R, n, V] of columns `column`.. (0 is the token after the anchor) to probabilities,
after temperature and filters."""


DEFERRED_TOKENS = 64
"""Plain steps whose taps are kept aside before they go into the context, to bound memory."""


class Verification(NamedTuple):
    """What a round has decided.

    `tokens` [R, c + 1] int32: the target's own choices or, with rejection, the drafts and in
    place `accepted` the token drawn. `accepted` [R] int32 drafts: row r commits
    `tokens[r, : accepted[r] + 1]`. `logits` [R, c + 1, V] are the target's, lazy: they cost
    nothing unless something reads them.
    """

    tokens: mx.array
    accepted: mx.array
    logits: mx.array


class SpeculativeRows:
    """A batch of rows. `taps` record `target`'s layers for all batches of one pair."""

    def __init__(self, target: Target, drafter: Drafter, taps: Taps) -> None:
        self._target = target
        self._drafter = drafter
        self._taps = taps
        self.batch: RowBatch = target.new_batch()
        self.context: DraftContext = drafter.new_context()
        self._deferred: list[mx.array] = []

    def __len__(self) -> int:
        return len(self.batch)

    @property
    def block_size(self) -> int:
        """The most drafts of a row and round."""
        return self._drafter.block_size

    @property
    def lengths(self) -> list[int]:
        """Committed tokens of each row; the anchor is the next one."""
        return self.batch.lengths

    def open_row(self) -> None:
        """Begin a row to read a prompt into, in a batch that has none."""
        self.batch.open_row()
        self.context.open_row()

    def fill_with_noise(self, rows: int, length: int) -> None:
        """Make `rows` rows of `length` random tokens, among none, for measuring costs."""
        self.batch = self._target.noise_batch(rows, length)
        self.context = self._drafter.new_context()
        self.context.lengths = [0] * rows
        width = self._drafter.configuration.tap_width
        self._drafter.extend(self.context, mx.random.normal((rows, length, width)))
        self.context.advance([length] * rows)
        mx.eval(self.batch.state(), self.context.state())

    def prefill(self, tokens: mx.array) -> None:
        """Read a chunk of a prompt, int32 [1, W], into a batch of one row, and wait.

        The prompt's last token is not read here: it is the first anchor. Only caches are
        evaluated, so no logits are computed. Drafters are trained on anchors inside answers:
        behind a prompt's last token their drafts are poor (of one reference pair, none of eight
        prompts had any accepted), so the first round is best one without drafts.
        """
        self._target.forward(tokens, self.batch)
        self._drafter.extend(self.context, self._taps.take())
        self.commit([tokens.shape[1]])
        mx.eval(self.batch.state(), self.context.state())

    def prefill_with(self, others: Sequence[Self], prompts: Sequence[Sequence[int]]) -> None:
        """Read whole prompts in one forward, the first into this row and one into each of
        `others`, all of length 0; commit them and wait. `prefill` says what is not read."""
        together = [self, *others]
        layout = read_packed(self._target, prompts, [rows.batch for rows in together])
        taps = self._taps.take()
        for place, rows in enumerate(together):
            rows._drafter.extend(rows.context, layout.outputs(taps, place))
            rows.commit([layout.lengths[place]])
        mx.eval([[rows.batch.state(), rows.context.state()] for rows in together])

    def decode(self, tokens: mx.array) -> mx.array:
        """Run one token of each row, int32 [R, 1], and commit it: logits [R, 1, V]. Lazy.

        Plain decode; the taps are kept aside, so that a row can draft at any time.
        """
        logits = self._target.forward(tokens, self.batch)
        self._deferred.append(self._taps.take())
        self.batch.advance([1] * len(self))
        if len(self._deferred) >= DEFERRED_TOKENS:
            self._settle()
            mx.async_eval(self.context.state())
        return logits

    def draft(
        self,
        anchors: mx.array,
        *,
        cap: int | None = None,
        choose: Choose = greedy,
        keep_logits: bool = False,
        starts: mx.array | None = None,
        reach: int = 0,
    ) -> Draft:
        """Draft behind `anchors` [R] int32; see `Drafter.draft`. Lazy.

        Behind a verification that nobody has read, anchors and `starts` come from its outcome,
        `lengths + accepted + 1`, and `reach` is its width. The device then goes on to draft
        while the host still waits, and one read fetches what was committed together with the
        confidences that decide the next width.
        """
        self._settle()
        return self._drafter.draft(
            self.context,
            anchors,
            cap=cap,
            choose=choose,
            keep_logits=keep_logits,
            starts=starts,
            reach=reach,
        )

    def verify(
        self,
        anchors: mx.array,
        drafts: mx.array | None = None,
        *,
        lengths: Sequence[int] | None = None,
        choose: Choose = greedy,
    ) -> Verification:
        """Run the target on `anchors` [R] and `drafts` [R, c], the first `lengths[r]` of which
        count (all, when None; no drafts at all is a serial step). Lazy.

        The drafter's context takes in all of it, behind what is committed.
        """
        if drafts is None:
            drafts = mx.zeros((len(self), 0), dtype=mx.int32)
        logits = self._forward(mx.concatenate([anchors[:, None], drafts], axis=1))
        chosen = choose(logits, 0)
        return Verification(chosen, count_matches(drafts, chosen, _bound(lengths)), logits)

    def verify_rejecting(
        self,
        anchors: mx.array,
        draft: Draft,
        *,
        distribution: Distribution,
        seeds: Sequence[int],
        lengths: Sequence[int] | None = None,
    ) -> Verification:
        """As `verify`, by rejection sampling: the target's distribution is kept, its own
        samples are not.

        `draft` holds logits, and was drawn from `distribution` of them. `seeds[r]` is the
        request's; its noise here is independent of the noise that drafts are drawn with.
        """
        if draft.logits is None:
            raise ValueError("rejection sampling needs the drafter's logits: keep_logits=True")
        logits = self._forward(mx.concatenate([anchors[:, None], draft.tokens], axis=1))
        count = draft.tokens.shape[1]
        folded = mx.array([(seed ^ seed >> 32) & 0xFFFFFFFF for seed in seeds], dtype=mx.uint32)
        first = mx.array(self.lengths, dtype=mx.int32)[:, None] + 1
        uniforms = keyed_uniforms(folded, first + mx.arange(count), Stream.ACCEPT)
        accepted, left = reject(
            draft.tokens,
            distribution(draft.logits, 0),
            distribution(logits, 0),
            uniforms,
            _bound(lengths),
        )
        noise = keyed_gumbel(folded, first[:, 0] + accepted, left.shape[-1], Stream.REDRAW)
        drawn = draw(left, noise)[:, None]
        places = mx.arange(count + 1) == accepted[:, None]
        tokens = mx.where(places, drawn, mx.pad(draft.tokens, [(0, 0), (0, 1)]))
        return Verification(tokens, accepted, logits)

    def _settle(self) -> None:
        """Bring the context up to the caches after plain decode."""
        if not self._deferred:
            return
        count = len(self._deferred)
        taps = mx.concatenate(self._deferred, axis=1)
        self._deferred = []
        self._drafter.extend(self.context, taps)
        self.context.advance([count] * len(self.context))

    def _forward(self, tokens: mx.array) -> mx.array:
        self._settle()
        logits = self._target.forward(tokens, self.batch)
        self._drafter.extend(self.context, self._taps.take())
        return logits

    def commit(self, counts: Sequence[int]) -> None:
        """Keep the first `counts[r]` tokens of the last forward: the anchor and the accepted
        drafts, not the token that follows them, which is the next anchor."""
        self.batch.advance(counts)
        self.context.advance(counts)

    def join(self, *others: SpeculativeRows) -> None:
        """Append the rows of `others`, which are empty afterwards."""
        self._settle()
        self.batch.join(*(other.batch for other in others))
        self.context.join(*(other.context for other in others))

    def leave(self, row: int) -> int | None:
        """Remove a row; the last one takes its place. Returns that one's old index, or None."""
        self._settle()
        moved = self.batch.leave(row)
        self.context.leave(row)
        return moved


def chooser(rows: Sequence[RowSampling], lengths: Sequence[int] | mx.array) -> Choose:
    """The `Choose` of rows whose anchors are at `lengths`: noise and filters of each request.

    `lengths` may be an array [R] that nobody has read. Rows with penalties cannot speculate:
    their logits depend on the tokens in between. Where all take the best of the logits as they
    are, the choice is `greedy` itself, which a drafter knows how to make cheaper.
    """
    if all(row.greedy and row.plain for row in rows):
        return greedy

    def choose_columns(logits: mx.array, column: int) -> mx.array:
        first = 1 + column
        if isinstance(lengths, mx.array):
            return choose(logits, rows, lengths + first)
        return choose(logits, rows, [length + first for length in lengths])

    return choose_columns


def _bound(lengths: Sequence[int] | None) -> mx.array | None:
    return None if lengths is None else mx.array(list(lengths), dtype=mx.int32)
