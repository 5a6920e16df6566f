"""Prompts that a drafter was not trained on, as token ids.

Runs on the calling thread. They are the questions of a corpus' held-out
conversations, or lines of a file for drafters whose corpus is not at hand, such as published
ones; whether those were trained on is the caller's to know. Raises `RunError`, which names the
line.
"""

from __future__ import annotations

import json
from pathlib import Path

from models.workshop.chat_text import ChatText
from models.workshop.corpus import Corpus
from models.workshop.run_folder import RunError, fingerprint


def prompts_of_corpus(folder: Path, target: Path, held_out: int) -> list[list[int]]:
    """What comes before the answer in the last `held_out` conversations, as training splits."""
    corpus = Corpus(folder)
    corpus.check(fingerprint(target))
    _, indices = corpus.split(held_out)
    found = []
    for index in indices:
        conversation = corpus[int(index)]
        found.append(list(conversation.tokens[: conversation.answer]))
    return found


def prompts_of_file(file: Path, target: Path) -> list[list[int]]:
    """The prompts of JSON lines: `prompt_ids` as they are, or a `prompt`, which is framed with
    the target's chat template."""
    text: ChatText | None = None
    found = []
    try:
        lines = file.read_text().splitlines()
    except (OSError, ValueError) as error:
        raise RunError(f"{file} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            ids = record.get("prompt_ids")
            words = record.get("prompt")
        except (ValueError, AttributeError) as error:
            raise RunError(f"{file}, line {number}: not a JSON object: {error}") from error
        if isinstance(words, str) == isinstance(ids, list):
            raise RunError(
                f"{file}, line {number}: give either `prompt`, a text, or `prompt_ids`, a list of "
                "token ids"
            )
        if isinstance(words, str):
            text = text or ChatText(target)
            found.append(text.prompt(words))
        elif ids and all(type(one) is int and one >= 0 for one in ids):
            found.append(ids)
        else:
            raise RunError(f"{file}, line {number}: `prompt_ids` must be token ids, at least one")
    return found
