"""Reading server-sent events from bytes that arrive in any pieces.

Pure. Follows the WHATWG rules as far as answers of language models use them: `data` lines are
joined by newlines, comments are counted and dropped, other fields are ignored, lines end with
LF, CRLF or CR. A stream that breaks off inside an event loses that event.
"""

from __future__ import annotations


class EventStream:
    """Turns chunks of bytes into the data of complete events."""

    def __init__(self) -> None:
        self.comments = 0
        self._pending = b""
        self._data: list[bytes] = []
        self._after_return = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of the events that `chunk` completes."""
        if self._after_return and chunk:
            # The CR before ended the line already; this may be the LF that belongs to it.
            chunk = chunk.removeprefix(b"\n")
            self._after_return = False
        if chunk.endswith(b"\r"):
            self._after_return = True
        text = self._pending + chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._pending = text.split(b"\n")
        events = []
        for line in lines:
            if line:
                self._take(line)
            elif self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events

    def _take(self, line: bytes) -> None:
        if line.startswith(b":"):
            self.comments += 1
            return
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
