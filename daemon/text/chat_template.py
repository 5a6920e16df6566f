"""A checkpoint's chat template, rendered as transformers renders it.

Owns one compiled Jinja template; pure, any thread. Templates come with checkpoints, so they run
in Jinja's sandbox and can neither reach Python objects nor change what they are given. A
template that refuses its messages raises `TemplateRefusal` with the template's own words.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

DEFAULT_NAME = "default"


class GenerationTag(Extension):
    """`{% generation %}` marks an assistant's words for training; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The nodes between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateRefusal(ValueError):
    """These messages cannot be rendered, in the words of the template or of Jinja."""


class ChatTemplate:
    """Renders messages to the prompt that the model was trained on."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile `source`; `special_tokens` are its variables (bos_token, eos_token, ...).

        Raises:
            TemplateRefusal: the source is no Jinja template.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _strftime_now
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateRefusal(f"the chat template cannot be compiled: {error}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The prompt of `messages`, with the header of the assistant's turn behind them.

        Raises:
            TemplateRefusal: the template does not take these messages.
        """
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=True,
                # Templates tell "none" from "undefined", and are written for the former.
                **({"tools": None, "documents": None} | self._special_tokens | variables),
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise TemplateRefusal(str(error) or type(error).__name__) from error


def read_chat_template(folder: Path) -> ChatTemplate | None:
    """The template of a checkpoint folder, None when it has none (a base model).

    Raises:
        TemplateRefusal: there is one, and it cannot be used.
    """
    config: dict[str, Any] = {}
    path = folder / "tokenizer_config.json"
    if path.exists():
        config = json.loads(path.read_text(encoding="utf-8"))
    source = config.get("chat_template")
    file = folder / "chat_template.jinja"
    if file.exists():
        source = file.read_text(encoding="utf-8")
    if isinstance(source, list):
        # Several named templates; the one without tools is the default.
        named = {entry.get("name"): entry.get("template") for entry in source}
        source = named.get(DEFAULT_NAME)
    if not source:
        return None
    return ChatTemplate(source, _special_tokens(config))


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name, value in config.items():
        if name.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[name] = text
    return found


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which would change the prompt.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
