"""Text from tokens as they come.

Owns the undecoded tail of one sequence; on the event loop. A character whose bytes are spread
over several tokens appears when its last byte has come; what is incomplete at the end is
dropped, so U+FFFD is never sent for bytes that merely had not arrived. The pieces together are
the text that decoding all tokens at once gives.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

REPLACEMENT = "\ufffd"


class Detokenizer:
    """One sequence's decoder. Special tokens have no text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._tokens: list[int] = []
        self._sent = ""

    def add(self, token: int) -> str:
        """The text that became complete with `token`; often empty inside a character."""
        self._tokens.append(token)
        piece = self._stream.step(self._tokenizer, token) or ""
        self._sent += piece
        return piece

    def finish(self) -> str:
        """What the stream still held back, without an incomplete character at the end."""
        whole = self.decode(self._tokens)
        if not whole.startswith(self._sent):
            return ""
        return whole[len(self._sent) :].rstrip(REPLACEMENT)

    def decode(self, tokens: Sequence[int]) -> str:
        """All of `tokens` at once."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text
