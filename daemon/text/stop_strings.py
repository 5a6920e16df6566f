"""Stop strings in text that arrives in pieces.

Owns the text that one sequence must hold back; on the event loop; cannot fail. No part of a
stop string is ever let through: the longest end of the text that some stop string begins with
waits until it is clear what it becomes.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches one sequence for its first stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` are not empty strings; there may be none of them."""
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def add(self, piece: str) -> str:
        """The text that may be sent now. After `stopped` is true there is none."""
        if self.stopped:
            return ""
        if not self._stops:
            return piece
        text = self._held + piece
        # The one that is complete first stops, so that it does not matter how the text is cut.
        found = [
            (place + len(stop), place) for stop in self._stops if (place := text.find(stop)) >= 0
        ]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)[1]]
        held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """What was held back and turned out to be no stop string."""
        held, self._held = self._held, ""
        return "" if self.stopped else held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
