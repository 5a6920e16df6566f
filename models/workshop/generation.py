"""Thousands of conversations written by a target side by side, in lockstep.

Owns the caches of one wave of rows; runs on the calling thread. Every row begins at position 0
and takes one token a step, its prefix included, so all rows are at the same position: no
padding, no mask, a cache that is a plain array. When a row's own user turn ends, the tokens of
the chat format up to the answer are forced on it. Noise is a function of the seed, the wave and
the position, so a wave can be written again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray

from models.workshop.chat_text import Frame
from models.workshop.lockstep_attention import lockstep_attention
from models.workshop.prompts import Prefix

# The phases of a row: reading its prefix or writing its user turn; then one for each forced
# token behind it; then its answer; then nothing.
_USER = 0
_LOOK_EVERY = 16
# Rows are left out once so few of them still write.
_CROWDED = 0.75


class LockstepCache:
    """Keys and values of one layer, [R, heads, T, dim], in mlx-lm's cache protocol."""

    def __init__(self, length: int) -> None:
        self.offset = 0
        self._length = length
        self._keys: mx.array | None = None
        self._values: mx.array | None = None

    def rewind(self) -> None:
        """Begin again; what lies ahead is never read before it is written."""
        self.offset = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append one position."""
        if self._keys is None or self._values is None or len(self._keys) != len(keys):
            rows, heads, _, dim = keys.shape
            self._keys = mx.zeros((rows, heads, self._length, dim), keys.dtype)
            self._values = mx.zeros((rows, heads, self._length, values.shape[-1]), values.dtype)
        end = self.offset + keys.shape[2]
        self._keys[:, :, self.offset : end] = keys
        self._values[:, :, self.offset : end] = values
        self.offset = end
        return self._keys[:, :, :end], self._values[:, :, :end]

    def make_mask(
        self, count: int, return_array: bool = False, window_size: int | None = None
    ) -> None:
        """One token sees all that came before."""
        if window_size is not None and self._length > window_size:
            raise ValueError(f"sequences of {self._length} tokens pass the window {window_size}")
        return None

    def keep(self, rows: mx.array) -> None:
        """Go on with the rows at these indices [n], in their order."""
        if self._keys is not None and self._values is not None:
            self._keys, self._values = self._keys[rows], self._values[rows]

    @property
    def arrays(self) -> list[mx.array]:
        """What to evaluate."""
        return [array for array in (self._keys, self._values) if array is not None]


class WaveSettings(NamedTuple):
    """`longest` positions in all; a user turn is ended after `user_tokens` of its own, an
    answer after `answer_tokens`. `temperatures` of the user turns, then one for each part of
    the rows' answers. A wave ends when fewer than `least_active` of its rows still write."""

    longest: int = 352
    user_tokens: int = 72
    answer_tokens: int = 256
    user_temperature: float = 0.9
    answer_temperatures: tuple[float, ...] = (0.0, 0.7)
    least_active: float = 0.12


class Written(NamedTuple):
    """One row: its `tokens`, where the answer begins, and whether it came to an end."""

    tokens: NDArray[np.int32]
    answer: int
    ended: bool
    temperature: float


class _State(NamedTuple):
    phase: mx.array
    since: mx.array
    answer: mx.array


class _Live(NamedTuple):
    """The rows that still write: their numbers in the wave, and their part of everything."""

    rows: NDArray[np.intp]
    forced: mx.array
    sizes: mx.array
    heat: mx.array
    state: _State


class Generator:
    """Writes waves of up to `rows` conversations with one target."""

    def __init__(
        self, model: Any, frame: Frame, stops: frozenset[int], settings: WaveSettings
    ) -> None:
        self._model, self._frame, self._settings = model, frame, settings
        self._cache_count = len(make_prompt_cache(model))
        self._caches: list[LockstepCache] = []
        self._stops = mx.array(sorted(stops), dtype=mx.int32)
        self._pad = min(stops)
        self._answering = len(frame.after) + 1
        self._after = mx.array(frame.after, dtype=mx.int32)
        self._choose: Callable[..., tuple[mx.array, _State]] = mx.compile(self._next)

    def write(self, prefixes: Sequence[Prefix], seed: int, wave: int) -> Iterator[Written]:
        """A whole wave; nothing is yielded before its end."""
        with lockstep_attention(self._model):
            return self._write(prefixes, seed, wave)

    def _write(self, prefixes: Sequence[Prefix], seed: int, wave: int) -> Iterator[Written]:
        settings, rows = self._settings, len(prefixes)
        forced, sizes = _pad([prefix.tokens for prefix in prefixes], settings.longest, self._pad)
        answering = np.array([prefix.answering for prefix in prefixes])
        kinds = settings.answer_temperatures
        heat = np.array([kinds[row % len(kinds)] for row in range(rows)], dtype=np.float32)
        answers = np.where(answering, sizes, settings.longest).astype(np.int32)
        state = _State(
            mx.array(np.where(answering, self._answering, _USER).astype(np.int32)),
            mx.array(sizes),
            mx.array(answers),
        )
        live = _Live(np.arange(rows), mx.array(forced), mx.array(sizes), mx.array(heat), state)
        if not self._caches:
            self._caches = [LockstepCache(settings.longest) for _ in range(self._cache_count)]
        for cache in self._caches:
            cache.rewind()
        tokens = np.full((rows, settings.longest), self._pad, dtype=np.int32)
        tokens[:, 0] = forced[:, 0]
        token = live.forced[:, 0]
        pending: list[tuple[int, mx.array]] = []
        keys = mx.random.split(mx.random.key(seed * 1_000_003 + wave), settings.longest)
        for position in range(1, settings.longest):
            logits = self._model(token[:, None], cache=self._caches)[:, 0]
            token, state = self._choose(
                logits,
                live.forced[:, min(position, forced.shape[1] - 1)],
                live.sizes,
                live.heat,
                live.state,
                mx.array(position, dtype=mx.int32),
                keys[position],
            )
            live = live._replace(state=state)
            mx.async_eval(token, state, [cache.arrays for cache in self._caches])
            pending.append((position, token))
            if position % _LOOK_EVERY and position + 1 < settings.longest:
                continue
            for place, column in pending:
                tokens[live.rows, place] = np.array(column)
            pending = []
            answers[live.rows] = np.array(state.answer)
            active = np.flatnonzero(np.array(state.phase) <= self._answering)
            if len(active) <= settings.least_active * rows:
                break
            if len(active) < _CROWDED * len(live.rows):
                token, live = self._narrow(active, token, live)
        return self._cut(tokens, answers, heat)

    def _narrow(
        self, active: NDArray[np.intp], token: mx.array, live: _Live
    ) -> tuple[mx.array, _Live]:
        """Go on with `active` rows only: one that has ended costs as much as one that writes."""
        kept = mx.array(active.astype(np.int32))
        for cache in self._caches:
            cache.keep(kept)
            # One layer after the other: all copies at once would need the memory twice.
            mx.eval(cache.arrays)
        state = _State(*(part[kept] for part in live.state))
        parts = (live.forced[kept], live.sizes[kept], live.heat[kept])
        return token[kept], _Live(live.rows[active], *parts, state)

    def _next(
        self,
        logits: mx.array,
        forced: mx.array,
        lengths: mx.array,
        answer_heat: mx.array,
        state: _State,
        position: mx.array,
        key: mx.array,
    ) -> tuple[mx.array, _State]:
        """The tokens at `position` [R], and the rows' phases behind them."""
        settings, count = self._settings, len(self._frame.after)
        phase, since, answer = state
        writing = phase == count + 1
        heat = mx.where(writing, answer_heat, settings.user_temperature)
        noise = mx.random.gumbel(logits.shape, key=key)
        sampled = mx.argmax(logits.astype(mx.float32) + heat[:, None] * noise, axis=-1)
        sampled = sampled.astype(mx.int32)
        in_prefix = position < lengths
        in_user = (phase == _USER) & ~in_prefix
        over_long = position - since >= settings.user_tokens
        stopped = (sampled[:, None] == self._stops).any(axis=-1) | (sampled == self._after[0])
        ends_user = in_user & (stopped | over_long)
        connecting = (phase > _USER) & (phase <= count)
        at = mx.where(connecting, mx.minimum(phase, count - 1), 0)
        token = mx.where(connecting | ends_user, self._after[at], sampled)
        token = mx.where(in_prefix, forced, token)
        ends_answer = (
            writing & ~in_prefix & (stopped | (position - answer >= settings.answer_tokens - 1))
        )
        token = mx.where(phase > count + 1, self._pad, token)
        # The first forced token is the one that ended the turn.
        following = mx.where(ends_user, 1, mx.where(connecting, phase + 1, phase))
        following = mx.where((following == count) & (phase < count), count + 1, following)
        following = mx.where(ends_answer, count + 2, following)
        begun = (following == count + 1) & ~writing
        return token, _State(following, since, mx.where(begun, position + 1, answer))

    def _cut(
        self, tokens: NDArray[np.int32], answers: NDArray[np.int32], heat: NDArray[np.float32]
    ) -> Iterator[Written]:
        """Rows whose answer began, without what follows its end."""
        stops = set(np.array(self._stops).tolist())
        for row, answer, temperature in zip(tokens, answers.tolist(), heat.tolist(), strict=True):
            body = row[answer : answer + self._settings.answer_tokens]
            if len(body) == 0:
                continue
            ends = np.flatnonzero(np.isin(body, list(stops)))
            ended = len(ends) > 0
            size = int(ends[0]) + 1 if ended else len(body)
            yield Written(row[: answer + size], answer, ended, temperature)


def _pad(
    prefixes: Sequence[list[int]], longest: int, fill: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    sizes = np.array([min(len(prefix), longest - 1) for prefix in prefixes], dtype=np.int32)
    tokens = np.full((len(prefixes), int(sizes.max())), fill, dtype=np.int32)
    for row, prefix in enumerate(prefixes):
        tokens[row, : sizes[row]] = prefix[: sizes[row]]
    return tokens, sizes
