"""The parts of the comparison with other programs' speculation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Sequence
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.utils import load

from daemon.bench.drafted_prompts import QUESTIONS, of_trace, our_questions
from daemon.bench.peer_process import PeerUnusable, peer
from daemon.bench.speculation import MARGIN, SerialTexts
from daemon.exit_codes import SparklaneError
from models.peers.answer import answer
from models.peers.messages import PeerAsk, PeerSetting
from models.peers.mlx_lm_peers import DraftModelPeer, PlainPeer, lower_layers, until_stop

PAIR = Path(__file__).parent / "fixtures" / "dspark" / "qwen3"
TRACE = PAIR / "trace_float32_thr0.json"
ANSWERS = [prompt["output_ids"] for prompt in json.loads(TRACE.read_text())["prompts"]]


def texts() -> SerialTexts:
    return SerialTexts([[1, 2, 3], [4, 5]], [[1.0, MARGIN / 2, 1.0], [1.0, 1.0]])


def test_the_same_texts_leave_no_trace() -> None:
    found = texts()
    found.compare("a peer", 1, [[1, 2, 3], [4, 5]])
    assert found.partings == []


def test_a_parting_at_a_near_tie_is_noted_once() -> None:
    found = texts()
    for _ in range(2):
        found.compare("a peer", 4, [[1, 9, 9, 9], [4, 5]])
    (parting,) = found.partings
    assert (parting.side, parting.rows, parting.prompt, parting.place) == ("a peer", 4, 0, 1)
    assert parting.margin == MARGIN / 2


@pytest.mark.parametrize(
    "tokens",
    [[[9, 2, 3], [4, 5]], [[1, 2, 3], [4, 6]], [[1, 2], [4, 5]], [[1, 2, 3, 4], [4, 5]]],
    ids=["first", "second text", "short", "long"],
)
def test_another_text_is_no_comparison(tokens: list[list[int]]) -> None:
    with pytest.raises(SparklaneError, match="a peer at 1 rows"):
        texts().compare("a peer", 1, tokens)


def test_prompts_of_a_trace_are_its_own() -> None:
    found = of_trace(TRACE, 4)
    trace = json.loads(TRACE.read_text())
    assert found.tokens == [prompt["prompt_ids"] for prompt in trace["prompts"][:4]]
    assert found.stop_tokens == trace["stop_token_ids"]


def test_more_prompts_than_there_are_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SparklaneError, match="--prompts is 9"):
        of_trace(TRACE, 9)
    with pytest.raises(SparklaneError, match=f"has {len(QUESTIONS)} prompts"):
        our_questions(PAIR / "target", len(QUESTIONS) + 1)
    with pytest.raises(SparklaneError, match="no DeepSpec trace"):
        of_trace(PAIR / "target" / "config.json", 1)


def test_our_questions_are_in_the_chat_template() -> None:
    found = our_questions(PAIR / "target", 4)
    start = found.tokens[0][:3]
    assert all(tokens[:3] == start for tokens in found.tokens)
    assert len({tuple(tokens) for tokens in found.tokens}) == 4


class Counting:
    """A peer that says how many prompts it was given at once."""

    def __init__(self) -> None:
        self.name, self.batches = "counting", True
        self.settings: list[PeerSetting] = []

    def decode(
        self,
        prompts: Sequence[list[int]],
        max_tokens: int,
        stop_tokens: Collection[int],
        setting: PeerSetting,
    ) -> list[list[int]]:
        return [[len(prompts), *prompt] for prompt in prompts]


@pytest.mark.parametrize(("rows", "sizes"), [(1, [1, 1, 1]), (2, [2, 2, 1]), (4, [3, 3, 3])])
def test_prompts_go_out_in_groups_and_come_back_in_order(rows: int, sizes: list[int]) -> None:
    ask = PeerAsk(
        prompts=[[7], [8], [9]],
        rows=rows,
        max_tokens=1,
        stop_tokens=[],
        setting=PeerSetting("nothing", 0),
    )
    found = answer(Counting(), ask)
    assert found.tokens == [[size, prompt] for size, prompt in zip(sizes, (7, 8, 9), strict=True)]
    assert found.seconds > 0 and found.processor_seconds >= 0


def test_a_text_ends_behind_its_first_stop_token() -> None:
    steps = iter([(1, "a"), (2, "b"), (3, "c")])
    assert until_stop(steps, [2]) == [1, 2]
    assert next(steps) == (3, "c")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return of_trace(TRACE, 4).tokens


def test_mlx_lm_says_what_the_reference_says(prompts: list[list[int]]) -> None:
    stops = of_trace(TRACE, 1).stop_tokens
    expected = [tokens[:20] for tokens in ANSWERS[:4]]
    plain = PlainPeer(PAIR / "target")
    (setting,) = plain.settings
    assert plain.decode(prompts, 20, stops, setting) == expected
    assert [plain.decode([p], 20, stops, setting)[0] for p in prompts] == expected
    drafting = DraftModelPeer(PAIR / "target", None)
    for setting in drafting.settings:
        assert drafting.decode(prompts[:2], 20, stops, setting) == expected[:2]


def test_lower_layers_are_a_model_of_their_own() -> None:
    whole = load(str(PAIR / "target"))[0]
    lower = lower_layers(whole, 2)
    assert (len(lower.layers), len(whole.layers)) == (2, 5)
    tokens = mx.array([[1, 2, 3]])
    assert not mx.allclose(lower(tokens), whole(tokens)).item()


def test_a_peer_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    async def start(*arguments: str) -> None:
        async with peer(arguments):
            raise AssertionError("it has started")

    with pytest.raises(PeerUnusable, match="mlx-lm-plain cannot be used"):
        asyncio.run(start("mlx-lm-plain", f"--model={tmp_path}"))
    with pytest.raises(PeerUnusable, match="ended with code 2"):
        asyncio.run(start("another", f"--model={tmp_path}"))
