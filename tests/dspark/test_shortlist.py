"""Drafting from a shortlist: what is proposed, what is refused, and that no text changes."""

from __future__ import annotations

import functools
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from models.acceptance import probabilities
from models.dspark import compare
from models.dspark.configuration import DrafterError
from models.dspark.decode import ReferenceDecoder
from models.dspark.drafter import Choose, Draft, Drafter, greedy
from models.dspark.loader import save_drafter
from models.dspark.rows import chooser
from models.dspark.short_head import gather_rows
from models.dspark.shortlist import FILE_NAME, Shortlist, stored_size
from models.sampling import RowSampling
from models.sampling_settings import Sampling
from models.workshop.dequantized import dequantize_network
from models.workshop.measurement import load_pair

from .pairs import FAMILIES, FIXTURES, make_drafter, target, trace
from .test_batches import Decoding, prompts
from .test_distributions import chi_square, distribution
from .test_loader import Weights, altered, load

VOCABULARY = 512
HEADS = ("vanilla", "gated", "rnn", "none")
EVERYTHING = tuple(range(VOCABULARY))


@functools.cache
def frequent(family: str, size: int = 24) -> tuple[int, ...]:
    """The commonest tokens of the recorded answers: some, not all, of what is drafted."""
    counts = Counter(t for prompt in trace(family)["prompts"] for t in prompt["output_ids"])
    return tuple(sorted(token for token, _ in counts.most_common(size)))


def shortlist(*tokens: int) -> Shortlist:
    return Shortlist(tokens=tokens, coverage=0.9, counted=100, corpus="c0ffee")


def with_head(folder: Path, family: str, kind: str) -> Path:
    """A copy of the reference drafter with a head of another kind, its new matrices random."""
    if kind == "vanilla":
        return altered(folder, family)
    if kind == "none":
        return altered(
            folder,
            family,
            settings={"markov_rank": 0, "enable_confidence_head": False},
            weights=lambda all_: {
                n: v for n, v in all_.items() if not n.startswith(("markov", "confidence"))
            },
        )

    def grown(weights: Weights) -> Weights:
        rank = weights["markov_head.markov_w1.weight"].shape[1]
        hidden = weights["norm.weight"].shape[0]
        name, shape = {
            "gated": ("gate_proj", (rank, hidden + rank)),
            "rnn": ("joint_proj", (3 * rank, 2 * rank + hidden)),
        }[kind]
        matrix = mx.random.normal(shape, key=mx.random.key(1)) * 0.2
        more = {f"{name}.weight": matrix, f"{name}.bias": mx.zeros(shape[:1])}
        return weights | {f"markov_head.{n}": value for n, value in more.items()}

    return altered(folder, family, settings={"markov_head_type": kind}, weights=grown)


def restricted(drafter: Drafter, tokens: tuple[int, ...]) -> Drafter:
    drafter.shorten(tokens)
    return drafter


def drafts(family: str, drafter: Drafter, choose: Choose, keep_logits: bool = True) -> Draft:
    """Behind the answers' fifth tokens of three prompts, which are of unequal length."""
    decoding = Decoding(family, drafter, None)
    recorded = {tuple(p["prompt_ids"]): p["output_ids"] for p in trace(family)["prompts"]}
    for name, prompt in enumerate(prompts(family, 3)):
        decoding.join(name, prompt + recorded[tuple(prompt)][:5])
    return decoding.rows.draft(mx.array(decoding.anchors), choose=choose, keep_logits=keep_logits)


def masked(choose: Choose, tokens: tuple[int, ...]) -> Choose:
    """What a shortlist must come to: the choice over the full logits, others at -inf."""
    allowed = mx.array(np.isin(np.arange(VOCABULARY), tokens))
    return lambda logits, column: choose(mx.where(allowed, logits, -mx.inf), column)


def sampled() -> Choose:
    rows = [
        RowSampling(Sampling(temperature=0.8, seed=3), VOCABULARY, []),
        RowSampling(Sampling(temperature=1.0, seed=2**40, top_p=0.8, top_k=40), VOCABULARY, []),
        RowSampling(Sampling(temperature=0, logit_bias={40: 3.0}), VOCABULARY, []),
    ]
    return chooser(rows, [30, 40, 50])


def same(one: mx.array | None, other: mx.array | None) -> bool:
    if one is None or other is None:
        return one is other
    return bool(mx.array_equal(one, other))


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("family", FAMILIES)
class TestEveryHead:
    @pytest.mark.parametrize("way", ["greedy", "sampled"])
    def test_the_whole_vocabulary_changes_no_bit(
        self, family: str, kind: str, way: str, tmp_path: Path
    ) -> None:
        folder = with_head(tmp_path / "drafter", family, kind)
        choose = greedy if way == "greedy" else sampled()
        plain = drafts(family, load(folder, family), choose)
        shortlist(*EVERYTHING).save(folder)
        drafter = load(folder, family)
        assert drafter.short_head is not None
        short = drafts(family, drafter, choose)
        assert all(same(a, b) for a, b in zip(plain, short, strict=True))

    @pytest.mark.parametrize("way", ["greedy", "sampled"])
    def test_a_part_of_it_is_what_the_masked_logits_say(
        self, family: str, kind: str, way: str, tmp_path: Path
    ) -> None:
        folder = with_head(tmp_path / "drafter", family, kind)
        choose = greedy if way == "greedy" else sampled()
        tokens = frequent(family)
        full = load(folder, family)
        expected = drafts(family, full, masked(choose, tokens))
        unrestricted = drafts(family, full, choose).tokens
        shortlist(*tokens).save(folder)
        short = drafts(family, load(folder, family), choose)
        assert short.tokens.tolist() == expected.tokens.tolist()
        assert short.tokens.tolist() != unrestricted.tolist()
        assert set(np.array(short.tokens).ravel().tolist()) <= set(tokens)
        if expected.confidence_logits is not None:
            assert short.confidence_logits is not None
            difference = short.confidence_logits - expected.confidence_logits
            assert mx.abs(difference).max().item() < 1e-4
        assert short.logits is not None and expected.logits is not None
        allowed = np.isin(np.arange(VOCABULARY), tokens)
        kept, whole = np.array(short.logits), np.array(expected.logits)
        assert kept.shape == whole.shape
        assert (kept[..., ~allowed] == -np.inf).all()
        assert np.abs(kept - whole)[..., allowed].max() < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
class TestMatrices:
    @pytest.mark.parametrize("bits", [4, 8])
    @pytest.mark.parametrize("own_head", [False, True])
    def test_quantized_rows_stay_packed_and_give_the_same_bits(
        self, family: str, bits: int, own_head: bool
    ) -> None:
        options: dict[str, Any] = {"bits": bits, "own_head": own_head}
        tokens = frequent(family)
        full = make_drafter(family, **options)
        expected = drafts(family, full, masked(greedy, tokens))
        short = restricted(make_drafter(family, **options), tokens)
        output: Any = short.network.markov_head.markov_w2
        assert isinstance(output, nn.QuantizedLinear)
        assert output.weight.shape[0] == output.scales.shape[0] == len(tokens)
        assert drafts(family, short, greedy).tokens.tolist() == expected.tokens.tolist()
        assert short.weight_bytes < full.weight_bytes

    def test_a_network_that_is_expanded_afterwards(self, family: str) -> None:
        tokens = frequent(family)
        full, short = make_drafter(family, bits=8), make_drafter(family, bits=8)
        short.shorten(tokens)
        for drafter in (full, short):
            dequantize_network(drafter.network)
        expected = drafts(family, full, masked(greedy, tokens))
        assert drafts(family, short, greedy).tokens.tolist() == expected.tokens.tolist()

    def test_bytes_are_those_of_the_rows(self, family: str) -> None:
        plain, tokens = make_drafter(family), frequent(family)
        c = plain.configuration
        short = restricted(make_drafter(family), tokens)
        gone = (VOCABULARY - len(tokens)) * c.markov_rank * 4
        copied = len(tokens) * c.hidden_size * 4
        assert short.weight_bytes == plain.weight_bytes - gone + copied

    def test_a_drafter_that_is_not_whole_is_not_saved(self, family: str, tmp_path: Path) -> None:
        with pytest.raises(DrafterError, match="not whole"):
            save_drafter(restricted(make_drafter(family), (1, 2)), tmp_path)


def test_a_matrix_of_another_kind_is_refused() -> None:
    with pytest.raises(DrafterError, match="not of a Conv1d"):
        gather_rows(nn.Conv1d(2, 2, 1), mx.array([0]))


def test_outputs_with_a_bias_keep_it() -> None:
    whole = nn.Linear(64, 8)
    x, rows = mx.random.normal((3, 64), key=mx.random.key(0)), mx.array([1, 6])
    for layer in (whole, whole.to_quantized(32, 8)):
        gathered: Any = gather_rows(layer, rows)
        assert mx.allclose(gathered(x), layer(x)[:, rows], atol=1e-6)


class TestText:
    @pytest.mark.parametrize("temperature", [0.0, 0.7])
    @pytest.mark.parametrize("family", FAMILIES)
    def test_rows_say_what_they_say_without_drafts(self, family: str, temperature: float) -> None:
        drafter = restricted(make_drafter(family), frequent(family))
        samplings = [
            Sampling(temperature=temperature, seed=7),
            Sampling(temperature=temperature, seed=8, top_p=0.9),
            Sampling(temperature=0.0),
        ]
        found = []
        for cap in (0, 7):
            decoding = Decoding(family, drafter, samplings)
            for name, prompt in enumerate(prompts(family, 3)):
                decoding.join(name, prompt)
            while any(len(tokens) < 16 for tokens in decoding.produced.values()):
                decoding.round(cap)
            found.append([decoding.produced[name][:16] for name in range(3)])
        assert found[0] == found[1]
        assert decoding.accepted > 0

    @pytest.mark.parametrize("family", FAMILIES)
    def test_the_reference_loop_says_what_the_trace_says(self, family: str) -> None:
        recorded = trace(family)
        drafter = restricted(make_drafter(family), frequent(family))
        decoder = ReferenceDecoder(target(family), drafter, recorded["stop_token_ids"])
        proposed = set()
        try:
            for prompt in recorded["prompts"]:
                transcript = decoder.decode(prompt["prompt_ids"], prompt["max_new_tokens"])
                assert transcript.output == prompt["output_ids"], prompt["id"]
                proposed |= {t for one in transcript.rounds for t in one.draft_tokens}
        finally:
            decoder.close()
        assert proposed <= set(frequent(family)) and len(proposed) > 5

    def test_rejection_keeps_the_targets_distribution(self) -> None:
        """What the drafter cannot propose must still come up, by the redraw."""
        copies, repeats = 16, 32
        story = next(p for p in trace("qwen3")["prompts"] if p["id"] == "story")
        decoding = Decoding("qwen3", restricted(make_drafter("qwen3"), frequent("qwen3")), None)
        for name in range(copies):
            decoding.join(name, story["prompt_ids"] + story["output_ids"][:14])
        anchors = mx.array(decoding.anchors, dtype=mx.int32)
        tokens: list[int] = []
        for repeat in range(repeats):
            seeds = [repeat * copies + name for name in range(copies)]
            rows = [RowSampling(Sampling(temperature=1.0, seed=s), VOCABULARY, []) for s in seeds]
            choose = chooser(rows, decoding.rows.lengths)
            draft = decoding.rows.draft(anchors, cap=2, choose=choose, keep_logits=True)
            outcome = decoding.rows.verify_rejecting(
                anchors, draft, distribution=distribution, seeds=seeds
            )
            tokens += outcome.tokens[:, 0].tolist()
        wanted = probabilities(outcome.logits[0, 0], 1.0)
        assert set(tokens) - set(frequent("qwen3"))
        statistic, freedom = chi_square(tokens, wanted)
        assert freedom >= 2
        assert statistic < freedom + 5 * (2 * freedom) ** 0.5


def test_rows_that_take_the_best_are_known_as_greedy() -> None:
    def row(**options: Any) -> RowSampling:
        return RowSampling(Sampling(**options), VOCABULARY, [])

    best = [row(temperature=0), row(temperature=1.0, top_k=1)]
    assert chooser(best, [1, 2]) is greedy
    for other in (
        row(temperature=0.5),
        row(temperature=0, logit_bias={3: 1.0}),
        row(temperature=0, presence_penalty=1.0),
    ):
        assert chooser([*best, other], [1, 2, 3]) is not greedy


class TestRecord:
    @settings(max_examples=60, deadline=None)
    @given(tokens=st.sets(st.integers(0, 2**31 - 2), min_size=1, max_size=50))
    def test_read_as_it_was_written(
        self, tokens: set[int], tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        folder = tmp_path_factory.mktemp("record")
        record = shortlist(*sorted(tokens))
        record.save(folder)
        assert Shortlist.load(folder, 2**31 - 1) == record
        assert stored_size(folder) == len(tokens)
        with safe_open(folder / FILE_NAME, framework="numpy") as file:
            stored = file.get_tensor("tokens")
            assert file.metadata() == {"coverage": "0.9", "counted": "100", "corpus": "c0ffee"}
        assert stored.dtype == np.int32 and stored.tolist() == sorted(tokens)
        shutil.rmtree(folder)

    def test_none_is_stored(self, tmp_path: Path) -> None:
        assert Shortlist.load(tmp_path, VOCABULARY) is None
        assert stored_size(tmp_path) is None

    @pytest.mark.parametrize(
        ("tokens", "message"),
        [
            ((), "has no tokens"),
            ((1, 5, 512), "token 512, outside the drafter's vocabulary of 512"),
            ((-1, 5), "token -1, outside"),
            ((5, 3), "token 3 behind 5"),
            ((5, 5), "token 5 behind 5"),
        ],
    )
    def test_what_does_not_fit_is_refused_at_load(
        self, tokens: tuple[int, ...], message: str, tmp_path: Path
    ) -> None:
        folder = altered(tmp_path / "drafter", "qwen3")
        shortlist(*tokens).save(folder)
        with pytest.raises(DrafterError, match=message):
            load(folder, "qwen3")
        assert load(folder, "qwen3", shortlist=False).short_head is None

    def test_what_is_no_shortlist_is_refused(self, tmp_path: Path) -> None:
        folder = altered(tmp_path / "drafter", "qwen3")
        file, facts = folder / FILE_NAME, {"coverage": "1", "counted": "1", "corpus": ""}
        for arrays, metadata, message in (
            ({"tokens": np.array([1, 2], dtype=np.int64)}, facts, "not one list"),
            ({"tokens": np.array([[1, 2]], dtype=np.int32)}, facts, "not one list"),
            ({"ids": np.array([1, 2], dtype=np.int32)}, facts, "not one list"),
            ({"tokens": np.array([1, 2], dtype=np.int32)}, None, "__metadata__"),
            ({"tokens": np.array([1, 2], dtype=np.int32)}, facts | {"counted": "x"}, "counted"),
        ):
            save_file(arrays, file, metadata)
            with pytest.raises(DrafterError, match=rf"{FILE_NAME}.*{message}.*Make the shortlist"):
                load(folder, "qwen3")
        shortlist(1, 2).save(folder)
        file.write_bytes(file.read_bytes()[:-3])
        with pytest.raises(DrafterError, match="truncated"):
            load(folder, "qwen3")


def test_a_trace_is_replayed_without_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = altered(tmp_path / "drafter", "qwen3")
    shortlist(1, 2, 3).save(folder)
    recorded = json.loads((FIXTURES / "qwen3" / "trace_float32_thr0.json").read_text())
    recorded["prompts"] = recorded["prompts"][:1]
    file = tmp_path / "trace.json"
    file.write_text(json.dumps(recorded))
    pair = ["--target", str(FIXTURES / "qwen3" / "target"), "--drafter", str(folder)]
    assert compare.main(["--trace", str(file), *pair]) == 0
    assert "equal" in capsys.readouterr().out


def test_measuring_uses_it_unless_told_not_to(tmp_path: Path) -> None:
    folder = altered(tmp_path / "drafter", "qwen3")
    shortlist(*frequent("qwen3")).save(folder)
    _, short = load_pair(FIXTURES / "qwen3" / "target", folder, bits=8)
    assert short.short_head is not None and len(short.short_head) == 24
    output: Any = short.network.markov_head.markov_w2
    assert output.weight.shape == (24, short.configuration.markov_rank)
    _, full = load_pair(FIXTURES / "qwen3" / "target", folder, bits=8, shortlist=False)
    assert full.short_head is None
