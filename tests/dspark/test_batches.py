"""Rows that speculate together give what each gives alone, and what serial decode gives."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest

from models.dspark.drafter import Choose, Drafter, greedy
from models.dspark.rows import SpeculativeRows, chooser
from models.sampling import RowSampling
from models.sampling_settings import Sampling
from models.taps import Taps
from models.target import Target

from .pairs import FAMILIES, FIXTURES, make_drafter, trace

TOKENS = 16


@functools.cache
def loaded_target(family: str) -> Target:
    return Target.load(FIXTURES / family / "target", "float32")


@functools.cache
def drafter_of(family: str, bits: int | None = None) -> Drafter:
    return make_drafter(family, bits=bits)


@functools.cache
def taps_of(family: str) -> Taps:
    return Taps(loaded_target(family).model, drafter_of(family).configuration.tap_layers)


def prompts(family: str, count: int) -> list[list[int]]:
    recorded = [prompt["prompt_ids"] for prompt in trace(family)["prompts"]]
    # The long one, of many windows, is always among them.
    chosen: list[list[int]] = [recorded[-1], *recorded[:-1]][:count]
    return chosen


class Decoding:
    """A loop of rounds over rows with samplings of their own."""

    def __init__(self, family: str, drafter: Drafter, samplings: Sequence[Sampling] | None) -> None:
        self.family = family
        self.drafter = drafter
        self.samplings = samplings
        self.rows = self.new_rows()
        self.order: list[int] = []
        self.anchors: list[int] = []
        self.produced: dict[int, list[int]] = {}
        self.accepted = 0

    def new_rows(self) -> SpeculativeRows:
        return SpeculativeRows(loaded_target(self.family), self.drafter, taps_of(self.family))

    def join(self, name: int, prompt: list[int], chunk: int = 64) -> None:
        row = self.new_rows()
        row.open_row()
        for start in range(0, len(prompt) - 1, chunk):
            row.prefill(mx.array([prompt[start : min(start + chunk, len(prompt) - 1)]]))
        self.rows.join(row)
        self.order.append(name)
        self.anchors.append(prompt[-1])
        self.produced[name] = []

    def join_together(self, prompts: Sequence[list[int]]) -> None:
        """As `join`, of prompts that are read in one forward."""
        rows = [self.new_rows() for _ in prompts]
        for row in rows:
            row.open_row()
        rows[0].prefill_with(rows[1:], [prompt[:-1] for prompt in prompts])
        self.rows.join(*rows)
        for prompt in prompts:
            name = len(self.produced)
            self.order.append(name)
            self.anchors.append(prompt[-1])
            self.produced[name] = []

    def leave(self, name: int) -> None:
        row = self.order.index(name)
        self.rows.leave(row)
        for column in (self.order, self.anchors):
            last: Any = column.pop()
            if row < len(column):
                column[row] = last

    def choose(self) -> Choose:
        if self.samplings is None:
            return greedy
        settings = [
            RowSampling(self.samplings[name], 512, self.produced[name]) for name in self.order
        ]
        return chooser(settings, self.rows.lengths)

    def round(self, cap: int, lengths: Sequence[int] | None = None) -> None:
        anchors = mx.array(self.anchors, dtype=mx.int32)
        choose = self.choose()
        drafts = self.rows.draft(anchors, cap=cap, choose=choose).tokens if cap else None
        outcome = self.rows.verify(anchors, drafts, lengths=lengths, choose=choose)
        mx.eval(outcome.tokens, outcome.accepted)
        accepted = outcome.accepted.tolist()
        for row, name in enumerate(self.order):
            tokens = outcome.tokens[row].tolist()[: accepted[row] + 1]
            self.produced[name] += tokens
            self.anchors[row] = tokens[-1]
        self.accepted += sum(accepted)
        self.rows.commit([count + 1 for count in accepted])


def run(
    family: str,
    prompt_list: Sequence[list[int]],
    cap: int,
    *,
    samplings: Sequence[Sampling] | None = None,
    bits: int | None = None,
) -> tuple[list[list[int]], int]:
    decoding = Decoding(family, drafter_of(family, bits), samplings)
    for name, prompt in enumerate(prompt_list):
        decoding.join(name, prompt)
    while any(len(tokens) < TOKENS for tokens in decoding.produced.values()):
        decoding.round(cap)
    return [decoding.produced[name][:TOKENS] for name in range(len(prompt_list))], (
        decoding.accepted
    )


@functools.cache
def serial(family: str, count: int = 8) -> list[list[int]]:
    return [run(family, [prompt], 0)[0][0] for prompt in prompts(family, count)]


@pytest.mark.parametrize("family", FAMILIES)
def test_serial_decode_of_these_rows_is_what_the_trace_says(family: str) -> None:
    for prompt, tokens in zip(prompts(family, 8), serial(family), strict=True):
        recorded = next(p for p in trace(family)["prompts"] if p["prompt_ids"] == prompt)
        shared = min(TOKENS, len(recorded["output_ids"]))
        assert tokens[:shared] == recorded["output_ids"][:shared]


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_equals_each_alone(family: str, count: int) -> None:
    together, accepted = run(family, prompts(family, count), 7)
    assert together == serial(family)[:count]
    assert accepted > 0


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_quantized_drafter_changes_nothing(family: str, bits: int) -> None:
    assert run(family, prompts(family, 3), 5, bits=bits)[0] == serial(family)[:3]


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_seeded_samples_equal_serial_ones_token_for_token(family: str, temperature: float) -> None:
    samplings = [
        Sampling(temperature=temperature, seed=41, top_p=0.9),
        Sampling(temperature=temperature, seed=42, top_k=20),
        Sampling(temperature=temperature, seed=43, min_p=0.05),
    ]
    speculative, accepted = run(family, prompts(family, 3), 7, samplings=samplings)
    plain, _ = run(family, prompts(family, 3), 0, samplings=samplings)
    assert speculative == plain
    # The drafter draws with the same noise, so it is right far more often than by chance.
    assert accepted > TOKENS


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_join_leave_and_change_width(family: str) -> None:
    decoding = Decoding(family, drafter_of(family), None)
    given = prompts(family, 5)
    decoding.join(0, given[0], chunk=5)
    decoding.round(7)
    decoding.join(1, given[1])
    decoding.join(2, given[2], chunk=7)
    decoding.round(3, lengths=[0, 3, 2])  # one row of three does not draft
    decoding.leave(1)
    decoding.round(7)
    decoding.round(0)  # parked: the contexts follow
    decoding.join(3, given[3])
    decoding.round(7, lengths=[7, 1, 4])
    decoding.leave(0)
    decoding.join(4, given[4])
    for _ in range(6):
        decoding.round(7)
    assert decoding.accepted > 0
    for name, tokens in decoding.produced.items():
        shared = min(TOKENS, len(tokens))
        assert tokens[:shared] == serial(family)[name][:shared], name


@pytest.mark.parametrize("family", FAMILIES)
def test_contexts_of_a_batch_are_those_of_each_row(family: str) -> None:
    """Confidences of ragged rows, which show a wrong position or mask where tokens do not."""
    given, drafter = prompts(family, 3), drafter_of(family)
    together = Decoding(family, drafter, None)
    alone = [Decoding(family, drafter, None) for _ in given]
    for name, prompt in enumerate(given):
        together.join(name, prompt)
        alone[name].join(0, prompt)
    for _ in range(3):
        joint = together.rows.draft(mx.array(together.anchors))
        for row, decoding in enumerate(alone):
            single = decoding.rows.draft(mx.array(decoding.anchors))
            assert joint.tokens[row].tolist() == single.tokens[0].tolist()
            assert joint.confidence_logits is not None and single.confidence_logits is not None
            difference = joint.confidence_logits[row] - single.confidence_logits[0]
            assert mx.abs(difference).max().item() < 1e-4
        together.round(7)
        for decoding in alone:
            decoding.round(7)


@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_read_together_are_those_read_alone(family: str, count: int) -> None:
    """Caches, contexts and the text that follows; among the prompts is one of many windows."""
    given, drafter = prompts(family, count), drafter_of(family)
    together, apart = (Decoding(family, drafter, None) for _ in range(2))
    together.join_together(given)
    for name, prompt in enumerate(given):
        apart.join(name, prompt)
    assert together.rows.lengths == together.rows.context.lengths == apart.rows.lengths
    for layer in range(drafter.configuration.layer_count):
        for row in range(count):
            found = together.rows.context.committed(layer, row)
            expected = apart.rows.context.committed(layer, row)
            for one, other in zip(found, expected, strict=True):
                assert mx.allclose(one, other, atol=1e-4).item()
    while any(len(tokens) < TOKENS for tokens in together.produced.values()):
        together.round(7)
    assert [together.produced[name][:TOKENS] for name in range(count)] == serial(family)[:count]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_draft_may_start_where_the_host_has_not_looked(
    family: str, count: int, temperature: float
) -> None:
    """The next block is built from the verification's outcome before anything is read."""
    samplings = [Sampling(temperature=temperature, seed=90 + name) for name in range(count)]
    chained = Decoding(family, drafter_of(family), samplings)
    for name, prompt in enumerate(prompts(family, count)):
        chained.join(name, prompt)
    # Drafters are trained on anchors inside answers, not on the prompt's last token.
    chained.round(0)
    rows, choose = chained.rows, chained.choose()
    anchors = mx.array(chained.anchors, dtype=mx.int32)
    outcome = rows.verify(anchors, rows.draft(anchors, choose=choose).tokens, choose=choose)
    following = mx.take_along_axis(outcome.tokens, outcome.accepted[:, None], axis=1)[:, 0]
    starts = mx.array(rows.lengths) + outcome.accepted + 1
    settings = [RowSampling(one, 512, []) for one in samplings]
    ahead = rows.draft(
        following, choose=chooser(settings, starts), starts=starts, reach=rows.block_size + 1
    )
    accepted = outcome.accepted.tolist()
    assert count == 1 or len(set(accepted)) > 1
    rows.commit([number + 1 for number in accepted])
    assert rows.lengths == starts.tolist()
    after = rows.draft(mx.array(following.tolist()), choose=chooser(settings, rows.lengths))
    assert ahead.tokens.tolist() == after.tokens.tolist()
    assert ahead.confidence_logits is not None and after.confidence_logits is not None
    assert mx.abs(ahead.confidence_logits - after.confidence_logits).max().item() < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_decode_keeps_the_context_in_step(family: str) -> None:
    given = prompts(family, 2)
    decoding = Decoding(family, drafter_of(family), None)
    for name, prompt in enumerate(given):
        decoding.join(name, prompt)
    plain = decoding.rows
    for _ in range(3):
        logits = plain.decode(mx.array(decoding.anchors)[:, None])
        decoding.anchors = mx.argmax(logits[:, 0], axis=-1).tolist()
        for name, token in enumerate(decoding.anchors):
            decoding.produced[name].append(token)
    assert plain.lengths == [len(prompt) + 2 for prompt in given]
    decoding.round(7)
    assert plain.lengths == plain.context.lengths
    assert decoding.accepted > 0
    for name, tokens in decoding.produced.items():
        shared = min(TOKENS, len(tokens))
        assert tokens[:shared] == serial(family)[name][:shared]


def test_memory_is_what_was_foretold() -> None:
    drafter = drafter_of("gemma4")
    decoding = Decoding("gemma4", drafter, None)
    for name, prompt in enumerate(prompts("gemma4", 3)):
        decoding.join(name, prompt)
    decoding.round(7)
    context = decoding.rows.context
    assert context.nbytes == context.bytes_for(3, max(context.lengths) + 8)
    assert context.bytes_for(1, 256) == 256 * drafter.context_bytes_per_token


def test_the_wrong_number_of_rows_is_refused() -> None:
    context = drafter_of("qwen3").new_context()
    context.open_row()
    with pytest.raises(ValueError, match="empty context"):
        context.open_row()
    with pytest.raises(ValueError, match="2 counts for 1 rows"):
        context.advance([1, 1])
    with pytest.raises(ValueError, match="row 1 does not exist"):
        context.leave(1)
    with pytest.raises(ValueError, match="nothing has been written"):
        context.committed(0, 0)
