"""From logits to tokens: penalties, filters and noise that is a function of (seed, position).

Owns each request's penalty counts on the device; used on the engine's MLX thread. Nothing
here evaluates. A token depends on its row's logits, settings, seed and position alone: not
on the rows beside it, nor on the column of a verify block in which its position comes up.

Order, as in vLLM: `logit_bias` and the penalties act on the raw logits (penalties count
generated tokens, as OpenAI's do); then temperature; then `min_p`, `top_k`, `top_p`, each on
what the one before has left; then Gumbel noise and argmax, which draws from the softmax.
Temperature 0 and `top_k` 1 are argmax without noise; among equals the lowest id wins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import mlx.core as mx

from models.sampling_settings import Sampling

_UINT64 = (1 << 64) - 1


class RowSampling:
    """One request's settings, and what it has produced as far as penalties need it."""

    def __init__(self, sampling: Sampling, vocabulary_size: int, produced: Sequence[int]) -> None:
        """Prepare `sampling` for a row that has generated `produced` already.

        Raises:
            ValueError: a token of `logit_bias` is outside the vocabulary, or a setting is
                outside its range.
        """
        _check(sampling, vocabulary_size)
        self.greedy = sampling.temperature == 0 or sampling.top_k == 1
        self.temperature = sampling.temperature
        self.top_p = sampling.top_p if sampling.top_p < 1 else None
        self.top_k = sampling.top_k if 0 < sampling.top_k < vocabulary_size else None
        self.min_p = sampling.min_p if sampling.min_p > 0 else None
        self.seed = sampling.seed
        self._presence = sampling.presence_penalty
        self._frequency = sampling.frequency_penalty
        self._bias: mx.array | None = None
        self._counts: mx.array | None = None
        if sampling.logit_bias:
            self._bias = _sparse(sampling.logit_bias, vocabulary_size)
        if self._presence or self._frequency:
            self._counts = _sparse(Counter(produced), vocabulary_size)

    @property
    def penalised(self) -> bool:
        """Whether the next token's logits depend on the generated ones beside the context."""
        return self._counts is not None

    @property
    def plain(self) -> bool:
        """Whether the logits are used as they are."""
        return self._counts is None and self._bias is None

    def adjust(self, logits: mx.array) -> mx.array:
        """`logit_bias` and penalties applied to float32 logits [W, V]."""
        if self._bias is not None:
            logits = logits + self._bias
        if self._counts is not None:
            logits = logits - self._frequency * self._counts
            logits = logits - self._presence * (self._counts > 0).astype(mx.float32)
        return logits

    def count(self, tokens: mx.array) -> None:
        """Add generated tokens, int [n], to the penalty counts."""
        if self._counts is not None:
            self._counts = self._counts.at[tokens].add(1.0)


def choose(
    logits: mx.array, rows: Sequence[RowSampling], positions: Sequence[int] | mx.array
) -> mx.array:
    """Choose a token for every row and column: logits [R, W, V] -> int32 [R, W].

    Column w of row r is at position `positions[r] + w` of prompt and generated tokens. The
    positions may be an array, int32 [R], that the host has not read.

    Raises:
        ValueError: a row with penalties and more than one column, whose later columns would
            need the tokens chosen in the earlier ones.
    """
    count, width, _ = logits.shape
    if width > 1 and any(row.penalised for row in rows):
        raise ValueError(f"penalties need one column a step; the logits have {width}")
    if not count == len(rows) == len(positions):
        raise ValueError(f"{len(rows)} rows and {len(positions)} positions for {count} logits")
    if not all(row.plain for row in rows):
        logits = logits.astype(mx.float32)
        logits = mx.stack([row.adjust(logits[index]) for index, row in enumerate(rows)])
    drawn = [index for index, row in enumerate(rows) if not row.greedy]
    if not drawn:
        return mx.argmax(logits, axis=-1).astype(mx.int32)
    settings = [rows[index] for index in drawn]
    everyone = len(drawn) == count
    chosen = logits if everyone else logits[mx.array(drawn)]
    scores = _filtered(chosen.astype(mx.float32), settings)
    seeds = [row.seed for row in settings for _ in range(width)]
    starts = positions if isinstance(positions, mx.array) else mx.array(list(positions))
    places = starts[mx.array(drawn)][:, None] + mx.arange(width)
    noise = gumbel(seeds, places.reshape(-1), scores.shape[-1]).reshape(scores.shape)
    tokens = mx.argmax(scores + noise, axis=-1).astype(mx.int32)
    if everyone:
        return tokens
    result = mx.argmax(logits, axis=-1).astype(mx.int32)
    result[mx.array(drawn)] = tokens
    return result


def observe(rows: Sequence[RowSampling], tokens: mx.array) -> None:
    """Count the generated `tokens` [R, W] for the rows with penalties, without reading them."""
    for index, row in enumerate(rows):
        if row.penalised:
            row.count(tokens[index])


def distribution(logits: mx.array, rows: Sequence[RowSampling]) -> mx.array:
    """What `choose` draws from: logits [R, W, V] -> probabilities [R, W, V], float32.

    Rejection sampling compares these of drafter and target. A greedy row has all its mass on
    one token. Penalties are not applied; rows with penalties do not speculate.
    """
    logits = logits.astype(mx.float32)
    if not all(row.plain for row in rows):
        logits = mx.stack([row.adjust(logits[index]) for index, row in enumerate(rows)])
    greedy = mx.array([row.greedy for row in rows])[:, None, None]
    best = mx.arange(logits.shape[-1]) == mx.argmax(logits, axis=-1, keepdims=True)
    if all(row.greedy for row in rows):
        return best.astype(mx.float32)
    drawn = mx.softmax(_filtered(logits, rows), axis=-1, precise=True)
    return mx.where(greedy, best.astype(mx.float32), drawn)


def gumbel(seeds: Sequence[int], positions: Sequence[int] | mx.array, vocabulary: int) -> mx.array:
    """Standard Gumbel noise for pairs of 64-bit seed and position: float32 [n, vocabulary].

    Each line is a function of its own pair, whatever the others are.
    """
    places = positions if isinstance(positions, mx.array) else mx.array(list(positions))
    folded = mx.array([_fold(seed) for seed in seeds], dtype=mx.uint32)
    keys = mx.stack([folded, places.astype(mx.uint32)], axis=-1)
    draw = mx.vmap(lambda key: mx.random.gumbel((vocabulary,), key=key))
    noise: mx.array = draw(keys)
    return noise


def token_logprobs(
    logits: mx.array, tokens: mx.array, k: int
) -> tuple[mx.array, mx.array, mx.array]:
    """Natural-log probabilities under the unmodified distribution.

    logits [R, V] and tokens [R] -> those of the tokens, float32 [R]; the `k` most probable
    ids, int32 [R, k], best first; and theirs, float32 [R, k].
    """
    logits = logits.astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
    k = min(k, logits.shape[-1])
    if k == 0:
        return chosen, mx.zeros((len(tokens), 0), mx.int32), mx.zeros((len(tokens), 0))
    best = mx.argpartition(-logprobs, kth=k - 1, axis=-1)[:, :k]
    values = mx.take_along_axis(logprobs, best, axis=-1)
    order = mx.argsort(-values, axis=-1)
    ids = mx.take_along_axis(best, order, axis=-1).astype(mx.int32)
    return chosen, ids, mx.take_along_axis(values, order, axis=-1)


def _filtered(logits: mx.array, rows: Sequence[RowSampling]) -> mx.array:
    """Logits [n, W, V] over temperature, with -inf for what the rows' filters drop.

    Settings enter as arrays: mlx-lm's filters are compiled anew for every value that a
    request brings, which takes half a second on the CPU. A filter that is off for a row must
    not touch it when its neighbour's is on: hence -inf, the vocabulary's size and inf below.
    """
    vocabulary = logits.shape[-1]
    # Of a greedy row, which may have temperature 0, only the argmax is used.
    logits = logits / _column([1.0 if row.greedy else row.temperature for row in rows])
    # Relative to the best, so that exp cannot overflow at low temperatures.
    logits = logits - mx.max(logits, axis=-1, keepdims=True)
    if any(row.min_p is not None for row in rows):
        least = mx.log(_column([row.min_p or 0.0 for row in rows]))
        logits = mx.where(logits < least, -mx.inf, logits)
    if any(row.top_k is not None or row.top_p is not None for row in rows):
        ranked = mx.sort(logits, axis=-1)
        kth = [vocabulary - (row.top_k or vocabulary) for row in rows]
        place = mx.array(kth, dtype=mx.int32)[:, None, None]
        place = mx.broadcast_to(place, (*ranked.shape[:-1], 1))
        least = mx.take_along_axis(ranked, place, axis=-1)
        ranked = mx.where(ranked < least, -mx.inf, ranked)
        if any(row.top_p is not None for row in rows):
            mass = mx.exp(ranked)
            above = mx.cumsum(mass, axis=-1, reverse=True, inclusive=False)
            total = above[..., :1] + mass[..., :1]
            wanted = _column([mx.inf if row.top_p is None else row.top_p for row in rows])
            # The best token stays even for top_p 0.
            dropped = (above >= wanted * total)[..., :-1].sum(axis=-1, keepdims=True)
            least = mx.maximum(least, mx.take_along_axis(ranked, dropped, axis=-1))
        logits = mx.where(logits < least, -mx.inf, logits)
    return logits


def _column(values: list[float]) -> mx.array:
    return mx.array(values, dtype=mx.float32)[:, None, None]


def _sparse(values: dict[int, float] | Counter[int], size: int) -> mx.array:
    dense = mx.zeros((size,), mx.float32)
    if not values:
        return dense
    index = mx.array(list(values.keys()), dtype=mx.int32)
    return dense.at[index].add(mx.array(list(values.values()), dtype=mx.float32))


def _fold(seed: int) -> int:
    """A 64-bit seed as 32 bits that all depend on all of it (the finaliser of splitmix64)."""
    mixed = (seed + 0x9E3779B97F4A7C15) & _UINT64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _UINT64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _UINT64
    return (mixed ^ (mixed >> 31)) >> 32


def _check(sampling: Sampling, vocabulary_size: int) -> None:
    limits = {
        "temperature": (sampling.temperature >= 0, "at least 0"),
        "top_p": (0 <= sampling.top_p <= 1, "from 0 to 1"),
        "top_k": (sampling.top_k >= 0, "at least 0 (0 = off)"),
        "min_p": (0 <= sampling.min_p <= 1, "from 0 to 1"),
    }
    for field, (fits, limit) in limits.items():
        if not fits:
            raise ValueError(f"{field} is {getattr(sampling, field)}; it must be {limit}")
    for token in sampling.logit_bias:
        if not 0 <= token < vocabulary_size:
            raise ValueError(
                f"logit_bias names token {token}; the vocabulary has {vocabulary_size} tokens"
            )
