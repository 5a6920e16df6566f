"""At temperature 1 what is said has the target's distribution, under both acceptance rules."""

from __future__ import annotations

import json

import mlx.core as mx
import numpy as np
import pytest

from models.acceptance import probabilities
from models.dspark.rows import chooser
from models.sampling import RowSampling
from models.sampling_settings import Sampling

from .pairs import FAMILIES, FIXTURES, trace
from .test_batches import Decoding, drafter_of


def distribution(logits: mx.array, column: int) -> mx.array:
    return probabilities(logits, 1.0)


def chi_square(tokens: list[int], wanted: mx.array) -> tuple[float, int]:
    """Statistic and degrees of freedom; what is expected fewer than 5 times is one class."""
    counts = np.bincount(tokens, minlength=wanted.shape[0])
    expected = np.array(wanted) * len(tokens)
    often = expected >= 5
    seen = np.append(counts[often], counts[~often].sum())
    hoped = np.append(expected[often], expected[~often].sum())
    return float(((seen - hoped) ** 2 / hoped).sum()), len(hoped) - 1


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_next_token_over_many_seeds(family: str, rule: str) -> None:
    copies, repeats = 16, 32
    decoding = Decoding(family, drafter_of(family), None)
    # In the middle of a story, where several words are likely.
    story = next(p for p in trace(family)["prompts"] if p["id"] == "story")
    prompt = story["prompt_ids"] + story["output_ids"][:14]
    for name in range(copies):
        decoding.join(name, prompt)
    anchors = mx.array(decoding.anchors, dtype=mx.int32)
    rows, tokens = decoding.rows, []
    # A round that is not committed leaves no trace, so the same rows serve again and again.
    for repeat in range(repeats):
        seeds = [repeat * copies + name for name in range(copies)]
        settings = [RowSampling(Sampling(temperature=1.0, seed=seed), 512, []) for seed in seeds]
        choose = chooser(settings, rows.lengths)
        draft = rows.draft(anchors, cap=2, choose=choose, keep_logits=True)
        outcome = (
            rows.verify(anchors, draft.tokens, choose=choose)
            if rule == "coupled"
            else rows.verify_rejecting(anchors, draft, distribution=distribution, seeds=seeds)
        )
        tokens += outcome.tokens[:, 0].tolist()
    statistic, freedom = chi_square(tokens, distribution(outcome.logits[0, 0], 0))
    assert freedom >= 2
    # Far out in the tail: mean + 5 standard deviations.
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("family", FAMILIES)
def test_rejection_accepts_as_much_as_the_reference(family: str) -> None:
    """Tokens a round, in the reference loop's protocol: the first token is decoded plainly.

    The recorded mean is over nine prompts, of which six are here, and four seeds give a standard
    error of 0.18; hence the room. 25 seeds of eight prompts gave 3.77 and 3.80 for the recorded
    3.86 and 3.88, each with a standard error of 0.06.
    """
    given = [p for p in trace(family)["prompts"] if p["max_new_tokens"] > 5]
    cases = [(prompt, seed) for seed in range(4) for prompt in given]
    samplings = [Sampling(temperature=1.0, seed=1000 + seed) for _, seed in cases]
    decoding = Decoding(family, drafter_of(family), samplings)
    for name, (prompt, _) in enumerate(cases):
        decoding.join(name, prompt["prompt_ids"])
    stops = set(trace(family)["stop_token_ids"])
    rounds = tokens = 0
    decoding.round(0)
    while decoding.order:
        anchors = mx.array(decoding.anchors, dtype=mx.int32)
        draft = decoding.rows.draft(anchors, choose=decoding.choose(), keep_logits=True)
        outcome = decoding.rows.verify_rejecting(
            anchors,
            draft,
            distribution=distribution,
            seeds=[samplings[name].seed for name in decoding.order],
        )
        mx.eval(outcome.tokens, outcome.accepted)
        counts = [count + 1 for count in outcome.accepted.tolist()]
        decoding.rows.commit(counts)
        done = []
        for row, name in enumerate(decoding.order):
            new = outcome.tokens[row].tolist()[: counts[row]]
            end = next((i + 1 for i, token in enumerate(new[:-1]) if token in stops), len(new))
            rounds, tokens = rounds + 1, tokens + end
            decoding.produced[name] += new
            decoding.anchors[row] = new[-1]
            budget = cases[name][0]["max_new_tokens"]
            if stops & set(new) or len(decoding.produced[name]) >= budget:
                done.append(name)
        for name in done:
            decoding.leave(name)
    recorded = json.loads((FIXTURES / family / "sampled_T1.json").read_text())["accept_len"]
    assert rounds > 150
    assert tokens / rounds == pytest.approx(recorded, abs=0.5)
