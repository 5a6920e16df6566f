"""Text from tokens as they come.

Owns the undecoded tail of one sequence; on the event loop; cannot fail. A character whose bytes
are spread over several tokens appears when its last byte has come; what is incomplete at the
end is dropped, so U+FFFD is never sent for bytes that merely had not arrived. Where tokens are
valid text, the pieces together are what decoding all of them at once gives.

The tokenizers library has a `DecodeStream` for this. It raises in the middle of an answer when
a byte-fallback vocabulary produces bytes that are no UTF-8, because they change how earlier
bytes of the same run decode; a model may well do that, and its stream must go on.
"""

from __future__ import annotations

from collections.abc import Collection

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
MOST_HELD = 16
"""Tokens to wait for the rest of a character. None needs so many: beyond it, it is no text."""


class Detokenizer:
    """One sequence's decoder. Special tokens have no text.

    Decodes a window: the tokens behind the last piece, and before them those of that piece,
    since how a token begins (with a space or without) depends on what it follows.
    """

    def __init__(self, tokenizer: Tokenizer, special_tokens: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._special_tokens = special_tokens
        self._window: list[int] = []
        self._known = 0
        self._known_text = ""

    def add(self, token: int) -> str:
        """The text that became complete with `token`; often empty inside a character."""
        if token in self._special_tokens:
            return ""
        self._window.append(token)
        piece = self._new_text()
        held = len(self._window) - self._known
        if (not piece or piece.endswith(REPLACEMENT)) and held < MOST_HELD:
            return ""
        self._window = self._window[self._known :]
        self._known = len(self._window)
        self._known_text = self._decode(self._window)
        return piece

    def finish(self) -> str:
        """What was still held back, without an incomplete character at the end."""
        return self._new_text().rstrip(REPLACEMENT)

    def _new_text(self) -> str:
        text = self._decode(self._window)
        if text.startswith(self._known_text):
            return text[len(self._known_text) :]
        # The new tokens made the known ones decode differently: they stand for themselves.
        return self._decode(self._window[self._known :])

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text
