"""One sequence on its way from tokens to text.

Owns the decoder, the stop strings and the logprobs that wait for their text; on the event loop.
The same pieces make a stream and a whole answer, so both say the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field

from daemon.generation import Delta, FinishReason, Generation, Speculation, TokenLogprobs
from daemon.text.side import TextSide
from daemon.text.stop_strings import StopStrings


@dataclass(frozen=True)
class TokenDetail:
    """A token with its logprobs and where its text begins in the sequence."""

    token: int
    offset: int
    logprobs: TokenLogprobs


@dataclass(frozen=True)
class Piece:
    """What one delta added to a sequence. `finish` is set on the last piece only."""

    index: int
    text: str
    details: list[TokenDetail] = field(default_factory=list)
    finish: FinishReason | None = None


class SequenceText:
    """Turns the deltas of one generation into pieces of text."""

    def __init__(
        self, index: int, generation: Generation, text: TextSide, stops: Sequence[str]
    ) -> None:
        self.index = index
        self.generation = generation
        self.generated = 0
        self.lane = "serial"
        self.speculation: Speculation | None = None
        self._stop_tokens = frozenset(generation.stop_tokens)
        self._detokenizer = text.detokenizer()
        self._stops = StopStrings(stops)
        self._decoded = 0
        self._sent = 0
        self._waiting: list[TokenDetail] = []

    def take(self, delta: Delta) -> Piece:
        """The text that may be sent now. A piece with a `finish` is the last; what follows a
        stop string is not wanted any more."""
        sent = ""
        self.lane = delta.lane
        self.speculation = delta.speculation
        details: Sequence[TokenLogprobs | None] = delta.logprobs or [None] * len(delta.tokens)
        for token, logprobs in zip(delta.tokens, details, strict=True):
            self.generated += 1
            offset = self._decoded
            if token not in self._stop_tokens:
                piece = self._detokenizer.add(token)
                self._decoded += len(piece)
                sent += self._stops.add(piece)
            if logprobs is not None:
                self._waiting.append(TokenDetail(token, offset, logprobs))
            if self._stops.stopped:
                return self._piece(sent, FinishReason.STOP)
        if delta.finish is None:
            return self._piece(sent, None)
        sent += self._stops.add(self._detokenizer.finish())
        sent += self._stops.finish()
        return self._piece(sent, FinishReason.STOP if self._stops.stopped else delta.finish)

    def _piece(self, text: str, finish: FinishReason | None) -> Piece:
        self._sent += len(text)
        # A stop string's tokens are not part of the answer; a natural end sends all it has.
        cut = finish is None or self._stops.stopped
        ready = [d for d in self._waiting if not cut or d.offset < self._sent]
        self._waiting = self._waiting[len(ready) :]
        return Piece(self.index, text, ready, finish)


async def pieces(
    sequences: Sequence[SequenceText], deltas: Sequence[AsyncIterator[Delta]]
) -> AsyncGenerator[Piece, None]:
    """The pieces of all sequences as they come, each sequence up to its finish.

    Raises what a source raises; then, and when the consumer leaves, the others end, too.
    """
    if len(sequences) == 1:
        async for piece in _pieces_of(sequences[0], deltas[0]):
            yield piece
        return
    ready: asyncio.Queue[Piece | Exception] = asyncio.Queue()

    async def forward(sequence: SequenceText, source: AsyncIterator[Delta]) -> None:
        try:
            async for piece in _pieces_of(sequence, source):
                ready.put_nowait(piece)
        except Exception as error:
            ready.put_nowait(error)

    tasks = [
        asyncio.create_task(forward(sequence, source))
        for sequence, source in zip(sequences, deltas, strict=True)
    ]
    try:
        unfinished = len(tasks)
        while unfinished:
            item = await ready.get()
            if isinstance(item, Exception):
                raise item
            unfinished -= item.finish is not None
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pieces_of(sequence: SequenceText, source: AsyncIterator[Delta]) -> AsyncIterator[Piece]:
    async for delta in source:
        piece = sequence.take(delta)
        if piece.text or piece.details or piece.finish is not None:
            yield piece
        if piece.finish is not None:
            return
