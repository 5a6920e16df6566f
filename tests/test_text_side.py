"""The text side: decoding, stop strings and templates, on the real tokenizer and a tiny one."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from daemon.text.chat_template import ChatTemplate, TemplateRefusal, read_chat_template
from daemon.text.detokenizer import Detokenizer
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
    detokenizer = Detokenizer(tokenizer)
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
    # The first stop string is the one that is complete first; of those the earliest begins.
    complete = [text.find(stop) + len(stop) for stop in stops if stop in text]
    sent, stopped = through(stops, pieces)
    assert stopped == bool(complete)
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
