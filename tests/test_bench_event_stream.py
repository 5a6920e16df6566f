"""Events come out whole, however the bytes are cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from daemon.bench.event_stream import EventStream

LINES = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=12)
EVENTS = st.lists(st.lists(LINES, min_size=1, max_size=3), max_size=5)


def written(events: list[list[str]], end: str) -> bytes:
    parts = []
    for event in events:
        parts.append(f": a comment{end}event: message{end}")
        parts += [f"data: {line}{end}" for line in event]
        parts.append(end)
    return "".join(parts).encode()


@given(EVENTS, st.sampled_from(["\n", "\r\n", "\r"]), st.data())
def test_any_cut_gives_the_same_events(
    events: list[list[str]], end: str, data: st.DataObject
) -> None:
    text = written(events, end)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    stream = EventStream()
    found = []
    for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True):
        found += stream.feed(text[start:stop])
    assert found == ["\n".join(event).encode() for event in events]
    assert stream.comments == len(events)


def test_one_space_is_dropped_and_no_more() -> None:
    assert EventStream().feed(b"data:  a\ndata:b\n\n") == [b" a\nb"]


def test_an_event_that_broke_off_is_not_one() -> None:
    assert EventStream().feed(b"data: whole\n\ndata: hal") == [b"whole"]


def test_blank_lines_alone_are_no_events() -> None:
    assert EventStream().feed(b"\n\n: comment\n\nid: 3\n\n") == []
