"""Tokenizer and chat template of one served checkpoint.

Owns both; made once per checkpoint in a worker thread, used from the event loop. Long texts
are encoded in a worker thread, where the tokenizer lets go of the interpreter. A folder without
a usable tokenizer raises `CheckpointError`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from daemon.text.chat_template import TemplateRefusal, read_chat_template
from daemon.text.detokenizer import Detokenizer
from daemon.text.token_bytes import TokenBytes
from models.checkpoint import CheckpointError, inspect

LONG_TEXT = 2_048
"""Characters from which encoding would hold up the event loop for longer than half a millisecond
(measured); a thread costs a tenth of that."""


class TextSide:
    """What a model reads and writes, as text."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
            self._template = read_chat_template(folder)
        except TemplateRefusal as error:
            raise CheckpointError(folder, str(error), "fetch the checkpoint again") from error
        except Exception as error:  # the tokenizers library raises bare exceptions
            remedy = "fetch the checkpoint again; a fast tokenizer (tokenizer.json) is needed"
            raise CheckpointError(path, f"cannot be read: {error}", remedy) from error
        self.stop_tokens = list(inspect(folder).stop_tokens)
        self.vocabulary_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_tokens = frozenset(id_ for id_, token in added.items() if token.special)
        self.token_bytes = TokenBytes(self._tokenizer, json.loads(path.read_text("utf-8")))

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt of a conversation.

        Raises:
            TemplateRefusal: the template, or its absence, does not allow these messages.
        """
        if self._template is None:
            raise TemplateRefusal("this model has no chat template; use /v1/completions")
        return self._template.render(messages)

    async def encode(self, text: str, *, special_tokens: bool) -> list[int]:
        """Token ids; `special_tokens` adds what the tokenizer puts around a plain text."""
        if len(text) >= LONG_TEXT:
            return await asyncio.to_thread(self._encode, text, special_tokens)
        return self._encode(text, special_tokens)

    def detokenizer(self) -> Detokenizer:
        """A decoder for one sequence."""
        return Detokenizer(self._tokenizer, self._special_tokens)

    def _encode(self, text: str, special_tokens: bool) -> list[int]:
        # Of a batch, because `encode` itself keeps the interpreter's lock and would hold up the
        # event loop from any thread.
        encodings = self._tokenizer.encode_batch_fast([text], add_special_tokens=special_tokens)
        ids: list[int] = encodings[0].ids
        return ids


class TextSides:
    """The text sides of all served models, each loaded when it is first needed."""

    def __init__(self) -> None:
        self._loading: dict[Path, asyncio.Task[TextSide]] = {}

    async def of(self, folder: Path) -> TextSide:
        """The text side of a checkpoint. Requests that come together share one load."""
        task = self._loading.get(folder)
        if task is None or (task.done() and task.exception() is not None):
            task = asyncio.create_task(asyncio.to_thread(TextSide, folder))
            self._loading[folder] = task
        return await asyncio.shield(task)
