"""The text side: decoding, stop strings and templates, on the real tokenizer and a tiny one."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from daemon.text.chat_template import ChatTemplate, TemplateRefusal, read_chat_template
from daemon.text.detokenizer import MOST_HELD, Detokenizer
from daemon.text.side import TextSide
from daemon.text.stop_strings import StopStrings

TEXTS = [
    "plain words, then 12345 digits",
    "café naïve — “quotes” …",
    "日本語とかな交じり文。汉字",
    "family 👨‍👩‍👧‍👦 flag 🇺🇦 wave 👋🏽",
    "  leading and trailing  ",
    "emoji🎉in🎉between",
]


def byte_fallback_tokenizer() -> Tokenizer:
    """A vocabulary of some words and all bytes, as sentencepiece models have."""
    words = ["<unk>", "▁hello", "▁world", "a", "b"]
    vocabulary = {word: index for index, word in enumerate(words)}
    vocabulary |= {f"<0x{byte:02X}>": len(words) + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2 / "tokenizer.json"))


def streamed(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    added = tokenizer.get_added_tokens_decoder().items()
    detokenizer = Detokenizer(tokenizer, {token for token, entry in added if entry.special})
    return [detokenizer.add(token) for token in tokens] + [detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_make_the_whole_and_no_character_is_torn(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    found = streamed(tokenizer, tokens)
    assert "".join(found) == text
    assert all("\ufffd" not in piece for piece in found)


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_one_by_one_make_whole_characters(text: str) -> None:
    tokens = [5 + byte for byte in text.strip().encode()]
    found = streamed(byte_fallback_tokenizer(), tokens)
    assert "".join(found) == text.strip()
    assert all("\ufffd" not in piece for piece in found)


def test_an_answer_cut_inside_a_character_ends_before_it() -> None:
    tokens = [1] + [5 + byte for byte in "é🎉".encode()[:-1]]
    assert "".join(streamed(byte_fallback_tokenizer(), tokens)) == "helloé"


@settings(max_examples=60)
@given(tokens=st.lists(st.integers(0, 49_000), max_size=30))
def test_any_tokens_stream_as_they_decode(smollm2_tokenizer: Tokenizer, tokens: list[int]) -> None:
    whole = smollm2_tokenizer.decode(tokens, skip_special_tokens=True)
    assert "".join(streamed(smollm2_tokenizer, tokens)) in (whole, whole.rstrip("\ufffd"))


BYTE_FALLBACK = byte_fallback_tokenizer()
WORDS = {1: "hello", 2: "world", 3: "a", 4: "b"}


@given(
    st.lists(
        st.sampled_from([[1], [2], [3], [4]])
        | st.characters(exclude_categories=["Cs"]).map(
            lambda character: [5 + byte for byte in character.encode()]
        ),
        max_size=20,
    )
)
def test_words_and_bytes_stream_as_they_decode(parts: list[list[int]]) -> None:
    tokens = [token for part in parts for token in part]
    whole = BYTE_FALLBACK.decode(tokens)
    found = "".join(streamed(BYTE_FALLBACK, tokens))
    assert found in (whole, whole.rstrip("\ufffd"))


@given(st.lists(st.sampled_from([1, 2, 3, 4]) | st.integers(5 + 0x80, 5 + 0xFF), max_size=40))
def test_bytes_that_are_no_text_lose_no_word(tokens: list[int]) -> None:
    """Decoding all at once would spoil good characters beside bad bytes; nothing else is lost."""
    found = "".join(streamed(BYTE_FALLBACK, tokens))
    kept = "".join(character for character in found if character in "helowrdab")
    assert kept == "".join(WORDS.get(token, "") for token in tokens)


def test_endless_rubbish_is_not_held_back_for_ever() -> None:
    found = streamed(BYTE_FALLBACK, [5 + 0xFF] * (3 * MOST_HELD))
    assert sum(map(bool, found)) >= 2


def test_special_tokens_do_not_tear_what_is_around_them(tokenizer: Tokenizer) -> None:
    special = tokenizer.token_to_id("<|im_end|>")
    tokens = tokenizer.encode("wave 👋🏽", add_special_tokens=False).ids
    spread = [token for pair in zip(tokens, [special] * len(tokens), strict=True) for token in pair]
    assert "".join(streamed(tokenizer, spread)) == "wave 👋🏽"


@pytest.fixture(scope="module")
def smollm2_tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    return tokenizer


def through(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    scanner = StopStrings(stops)
    sent = "".join(scanner.add(piece) for piece in pieces) + scanner.finish()
    return sent, scanner.stopped


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        (["END"], ["the E", "ND of it"], ("the ", True)),
        (["END"], ["the EN", "D"], ("the ", True)),
        (["END"], ["the EN", "TER"], ("the ENTER", False)),
        (["\n\n", "\nQ"], ["a\n", "b\n", "Q:"], ("a\nb", True)),
        (["aab"], ["aa", "aab"], ("aa", True)),
        ([], ["a", "b"], ("ab", False)),
        (["x"], ["", ""], ("", False)),
    ],
)
def test_stop_strings_over_token_borders(
    stops: list[str], pieces: list[str], expected: tuple[str, bool]
) -> None:
    assert through(stops, pieces) == expected


@given(
    text=st.text(alphabet="abc", max_size=30),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=6),
)
def test_any_split_stops_at_the_same_place(text: str, stops: list[str], cuts: list[int]) -> None:
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    sent, stopped = through(stops, pieces)
    assert (sent, stopped) == through(stops, list(text)) == through(stops, [text])
    assert stopped == any(stop in text for stop in stops)
    if not stopped:
        assert sent == text
    else:
        assert text.startswith(sent)
        assert not any(stop in sent for stop in stops)
        assert any(text.startswith(stop, len(sent)) for stop in stops)


def test_the_real_template_renders_a_conversation(smollm2: Path) -> None:
    template = read_chat_template(smollm2)
    assert template is not None
    prompt = template.render([{"role": "user", "content": "Hi"}])
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


CONVERSATION = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": "Grüße 🦥"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Why?"},
]


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}\n  {{ m.role }}\n{% endfor %}\n",
        "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
        "{% if tools is not none %}tools{% endif %}{% if tools is defined %}defined{% endif %}",
        "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.content }}"
        "{% endfor %}",
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}",
        "{{ eos_token }}{% if add_generation_prompt %}go{% endif %}{{ nothing }}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
        "{{ ns.n }}",
    ],
)
def test_templates_render_as_transformers_renders_them(source: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    theirs, _ = render_jinja_template(
        [CONVERSATION], chat_template=source, add_generation_prompt=True, eos_token="</s>"
    )
    ours = ChatTemplate(source, {"eos_token": "</s>"}).render(CONVERSATION)
    assert [ours] == theirs


def test_a_template_refuses_in_its_own_words() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(TemplateRefusal, match="roles must alternate"):
        template.render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    with pytest.raises(TemplateRefusal):
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])


def test_special_tokens_and_named_templates(tmp_path: Path) -> None:
    config = {
        "bos_token": {"content": "<s>"},
        "chat_template": [
            {"name": "tool_use", "template": "no"},
            {"name": "default", "template": "{{ bos_token }}{{ messages[0].content|tojson }}"},
        ],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = read_chat_template(tmp_path)
    assert template is not None
    assert template.render([{"role": "user", "content": "a <b>"}]) == '<s>"a <b>"'


def test_token_bytes_of_parts_of_a_character(smollm2: Path) -> None:
    side = TextSide(smollm2)
    tokens = Tokenizer.from_file(str(smollm2 / "tokenizer.json")).encode("🦥 é").ids
    assert b"".join(side.token_bytes.of(token) for token in tokens).decode() == "🦥 é"


async def _encoded_while_the_loop_runs(side: TextSide, text: str) -> tuple[list[int], int]:
    """The tokens, and how often the event loop turned while the library was encoding."""
    turns = 0

    class Watched:
        def __init__(self, tokenizer: Any) -> None:
            self.tokenizer = tokenizer
            self.turned = 0

        def encode_batch_fast(self, *arguments: Any, **options: Any) -> Any:
            before = turns
            found = self.tokenizer.encode_batch_fast(*arguments, **options)
            self.turned = turns - before
            return found

    watched = Watched(side._tokenizer)
    side._tokenizer = watched  # type: ignore[assignment]
    encoding = asyncio.create_task(side.encode(text, special_tokens=False))
    while not encoding.done():
        turns += 1
        await asyncio.sleep(0)
    return await encoding, watched.turned


def test_a_long_prompt_does_not_hold_up_the_event_loop(smollm2: Path) -> None:
    text = "It was the best of times. " * 20_000
    # Nobody is made to give up the interpreter's lock, so the loop turns only if it is released.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(30.0)
    try:
        tokens, turned = asyncio.run(_encoded_while_the_loop_runs(TextSide(smollm2), text))
    finally:
        sys.setswitchinterval(interval)
    assert len(tokens) > 100_000
    assert turned > 0
