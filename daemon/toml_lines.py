"""Finds the line of a key in TOML text, for error messages.

Pure. Python's parser drops positions, so the text is searched again: good enough to point a
person at the line, and never wrong about what is wrong. A key that is not found on a line of
its own (in an inline table, say) gets the line of the nearest table or key around it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_HEADER = re.compile(r"\s*(\[\[?)\s*([^\]]+?)\s*\]\]?\s*(?:#.*)?$")
_KEY = re.compile(r"""\s*((?:[A-Za-z0-9_.-]|"[^"]*"|'[^']*')+)\s*=""")


def line_of(text: str, path: Sequence[str | int]) -> int | None:
    """The line, from 1, of the value at `path`, such as `["models", 0, "name"]`.

    None when no part of the path is found.
    """
    wanted = tuple(path)
    table: tuple[str | int, ...] = ()
    counts: dict[str, int] = {}
    best: tuple[int, int] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            name = ".".join(_parts(header[2]))
            table = tuple(_parts(header[2]))
            if header[1] == "[[":
                counts[name] = counts.get(name, -1) + 1
                table = (*table, counts[name])
            here = table
        elif key := _KEY.match(line):
            here = (*table, *_parts(key[1]))
        else:
            continue
        depth = len(here)
        if here == wanted[:depth] and (best is None or depth > best[0]):
            best = depth, number
    return best[1] if best else None


def _parts(dotted: str) -> list[str]:
    return [part.strip().strip("\"'") for part in dotted.split(".")]
