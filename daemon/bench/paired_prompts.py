"""Prompts as text and as the tokens that the daemon makes of it.

Owns a tokenizer and a chat template of its own, read as the daemon reads them, so that an
engine without HTTP gets exactly the tokens that one behind it gets. A checkpoint without them
raises `SparklaneError`.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from daemon.bench.prompts import fitted, messages
from daemon.exit_codes import ExitCode, SparklaneError
from daemon.text.chat_template import read_chat_template


class PairedPrompt(msgspec.Struct, frozen=True):
    """What a client sends, and what the model reads of it."""

    text: str
    tokens: list[int]


class PairedPrompts:
    """Makes prompts for one checkpoint, no two alike."""

    def __init__(self, folder: Path) -> None:
        try:
            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the tokenizers library raises bare exceptions
            raise SparklaneError(
                f"{folder / 'tokenizer.json'}: cannot be read: {error}", ExitCode.CHECKPOINT
            ) from error
        template = read_chat_template(folder)
        if template is None:
            raise SparklaneError(
                f"{folder} has no chat template; benchmarks over HTTP need a model that chats",
                ExitCode.CHECKPOINT,
            )
        self._template = template
        self._number = 0

    def next(self, tokens: int) -> PairedPrompt:
        """The next one: `tokens` tokens long, template included, or a few less. The shortest
        that there is when the template alone takes more."""
        self._number += 1
        text = fitted(tokens, self._number, lambda text: len(self.tokens_of(text)))
        return PairedPrompt(text, self.tokens_of(text))

    def some(self, count: int, tokens: int) -> list[PairedPrompt]:
        """`count` new ones."""
        return [self.next(tokens) for _ in range(count)]

    def tokens_of(self, text: str) -> list[int]:
        """What the model reads when a user says `text`."""
        rendered = self._template.render(messages(text))
        ids: list[int] = self._tokenizer.encode(rendered, add_special_tokens=False).ids
        return ids
