"""The bytes that a token stands for, for the `bytes` of OpenAI's logprobs.

Owns the inverse of the tokenizer's byte alphabet; pure. Byte-level vocabularies write every
byte as a printable character; byte-fallback ones have tokens such as `<0xE2>`; others are
taken as their text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_METASPACE = "\u2581"


class TokenBytes:
    """Looks tokens up in one vocabulary."""

    def __init__(self, tokenizer: Tokenizer, description: Mapping[str, Any]) -> None:
        """`description` is the parsed tokenizer.json, which tells the kind of decoder."""
        self._tokenizer = tokenizer
        decoder = description.get("decoder") or {}
        kinds = {decoder.get("type")} | {part.get("type") for part in decoder.get("decoders", [])}
        self._byte_level = _byte_level_alphabet() if "ByteLevel" in kinds else None
        self._special = {token["id"] for token in description.get("added_tokens", [])}

    def of(self, token: int) -> bytes:
        """The bytes of `token`; empty for an id without an entry."""
        text = self._tokenizer.id_to_token(token)
        if text is None:
            return b""
        if token in self._special:
            return str(text).encode()
        if self._byte_level is not None:
            return bytes(self._byte_level[character] for character in text)
        if match := _BYTE_TOKEN.fullmatch(text):
            return bytes([int(match[1], 16)])
        return str(text).replace(_METASPACE, " ").encode()


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + place): byte for place, byte in enumerate(others)}
