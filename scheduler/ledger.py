"""The admission ledger: who holds a row, and what all of them together may need of memory.

Pure; used on the daemon's event loop. The caches of a batch are a rectangle, as many rows as
there are requests and as long as the longest may become, so one long request makes every row
dear. That is why the ledger keeps each request's need and prices the rectangle, instead of
adding up needs. It is exact: what was reserved is given back once, whoever asks how often.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from models.cache_capacity import row_capacity, slot_capacity


class KvCost(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine's caches cost in bytes.

    `bytes_per_token` is one token of one row in the layers that keep every token;
    `bytes_per_row` is what the sliding windows of a row take when they are full.
    """

    bytes_per_token: int
    bytes_per_row: int = 0

    def rectangle(self, rows: int, longest: int) -> int:
        """Bytes of `rows` rows of which the longest has `longest` tokens."""
        if rows == 0:
            return 0
        per_row = slot_capacity(longest) * self.bytes_per_token + self.bytes_per_row
        return row_capacity(rows) * per_row

    def longest(self, rows: int, budget: int) -> int:
        """Tokens that the longest of `rows` rows may have within `budget` bytes."""
        if self.bytes_per_token == 0:
            return 0 if self.rectangle(rows, 0) > budget else 1 << 31
        low, high = 0, budget // self.bytes_per_token + 1
        while low < high:
            middle = (low + high + 1) // 2
            if self.rectangle(rows, middle) <= budget:
                low = middle
            else:
                high = middle - 1
        return low


class CacheRoom(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine's caches may take: `budget` bytes, by the prices of the plan."""

    budget: int
    cost: KvCost

    def has_room(self, needs: Sequence[int], rows: int, tokens: int) -> bool:
        """Whether a batch of `rows` rows of `tokens` has room beside requests that may become
        `needs` tokens long."""
        requests = self.cost.rectangle(len(needs), max(needs, default=0))
        return requests + self.cost.rectangle(rows, tokens) <= self.budget


class Ledger:
    """Reservations by request: at most `maximum_rows`, within `budget` bytes together."""

    def __init__(self, maximum_rows: int, budget: int, cost: KvCost) -> None:
        self.maximum_rows = maximum_rows
        self.budget = budget
        self.cost = cost
        self._needs: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._needs)

    @property
    def reserved_bytes(self) -> int:
        """What the requests that hold a reservation may need together."""
        return self.cost.rectangle(len(self._needs), max(self._needs.values(), default=0))

    def holds(self, key: int) -> bool:
        """Whether this request has a reservation."""
        return key in self._needs

    def fits(self, tokens: int) -> bool:
        """Whether a request that may become `tokens` long has room now."""
        rows = len(self._needs) + 1
        longest = max(tokens, max(self._needs.values(), default=0))
        return rows <= self.maximum_rows and self.cost.rectangle(rows, longest) <= self.budget

    def longest_possible(self) -> int:
        """Tokens that a request alone could have."""
        return self.cost.longest(1, self.budget)

    def reserve(self, key: int, tokens: int) -> None:
        """Take a row and room for `tokens`. `ValueError` if it does not fit or is held."""
        if key in self._needs:
            raise ValueError(f"request {key} holds a reservation already")
        if not self.fits(tokens):
            raise ValueError(
                f"request {key} needs room for {tokens} tokens; {len(self)} of "
                f"{self.maximum_rows} rows are taken, {self.reserved_bytes} of {self.budget} bytes"
            )
        self._needs[key] = tokens

    def release(self, key: int) -> bool:
        """Give a reservation back. False, and nothing done, if there is none."""
        return self._needs.pop(key, None) is not None
