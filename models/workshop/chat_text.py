"""A target's chat format as token ids: how a question is framed, and where its text goes.

Owns a tokenizer; any thread, free of mlx. The template comes with the checkpoint and is run in
a sandbox. Raises `RunError` for a folder without a tokenizer or a usable template.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from models.workshop.run_folder import RunError

_MARK = "0b5e1d7fmessage"


class Frame(NamedTuple):
    """Token ids before a user's text, and from its end to where the answer begins."""

    before: list[int]
    after: list[int]


class ChatText:
    """Encodes prompts as they are served."""

    def __init__(self, folder: Path) -> None:
        try:
            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            self._specials = _specials(folder)
            environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
            environment.globals["raise_exception"] = _raise
            environment.globals["strftime_now"] = datetime.datetime(2026, 1, 1).strftime
            self._template = environment.from_string(_template(folder))
        except Exception as error:  # the tokenizer's own errors are plain exceptions
            raise RunError(f"{folder}: no tokenizer with a chat template: {error}") from error
        head, found, tail = self._render(_MARK).partition(_MARK)
        if not found:
            raise RunError(f"{folder}: the chat template does not show the user's text")
        self.frame = Frame(self.encode(head), self.encode(tail))

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; special tokens in it count as such."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, tokens: list[int]) -> str:
        """Text of `tokens`, without special ones."""
        text: str = self._tokenizer.decode(tokens)
        return text

    def decode_all(self, rows: list[list[int]]) -> list[str]:
        """Texts of many rows, on all cores."""
        texts: list[str] = self._tokenizer.decode_batch(rows)
        return texts

    def prompt(self, text: str) -> list[int]:
        """A user's question, framed."""
        return self.encode(self._render(text))

    def _render(self, text: str) -> str:
        messages = [{"role": "user", "content": text}]
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, **self._specials
            )
        except TemplateError as error:
            raise RunError(f"the chat template fails: {error}") from error


def _specials(folder: Path) -> dict[str, Any]:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    found = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = settings.get(name)
        found[name] = value["content"] if isinstance(value, dict) else value
    return found


def _template(folder: Path) -> str:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text()
    template = json.loads((folder / "tokenizer_config.json").read_text()).get("chat_template")
    if not isinstance(template, str):
        raise RunError(f"{folder}: the checkpoint has no chat template")
    return template


def _raise(message: str) -> None:
    raise TemplateError(message)
