"""When tokens came, and what follows from it: percentiles, speeds, ratios.

Pure; every benchmark reduces its streams here, so that two sides of a comparison are counted
by the same code. Times are seconds on one monotonic clock.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import msgspec


class StreamTiming(msgspec.Struct, kw_only=True):
    """One request as its client saw it. `arrivals` are the times at which tokens came, several
    at once counting as one; `tokens` is how many were produced. `error` None = it went well."""

    sent: float
    arrivals: list[float] = []
    ended: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    error: str | None = None

    @property
    def first_token_seconds(self) -> float:
        """Time to first token; nan when none came."""
        return self.arrivals[0] - self.sent if self.arrivals else math.nan

    @property
    def gaps(self) -> list[float]:
        """Pauses between arrivals."""
        return [
            later - earlier
            for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)
        ]


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Of a sample, in its own unit. `count` 0 means that there was nothing to measure."""

    count: int
    p50: float | None
    p90: float | None
    p99: float | None
    maximum: float | None


class LoadSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A load's result. Speeds are tokens per second of all streams together, over the time from
    the first request's sending to the last one's end, summed over rounds."""

    requests: int
    errors: int
    first_error: str | None
    seconds: float
    tokens: int
    prompt_tokens: int
    tokens_per_second: float
    requests_per_second: float
    first_token_seconds: Percentiles
    inter_token_seconds: Percentiles
    end_to_end_seconds: Percentiles


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """Ours over theirs, from rounds taken in turn. `value` is the median of `rounds`."""

    name: str
    unit: str
    ours: float
    theirs: float
    rounds: list[float]
    value: float
    target: float
    at_most: bool = False

    @property
    def reached(self) -> bool:
        """Whether the target is met."""
        return self.value <= self.target if self.at_most else self.value >= self.target


def percentile(sample: Sequence[float], share: float) -> float:
    """The value under which `share` of a sample lies, by straight line between neighbours.

    Raises:
        ValueError: an empty sample, or a share outside 0..1.
    """
    if not sample:
        raise ValueError("the sample is empty")
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"share is {share}; it must be from 0 to 1")
    ordered = sorted(sample)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    if ordered[low] == ordered[high]:
        return ordered[low]
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def percentiles(sample: Sequence[float]) -> Percentiles:
    """The usual ones."""
    if not sample:
        return Percentiles(count=0, p50=None, p90=None, p99=None, maximum=None)
    return Percentiles(
        count=len(sample),
        p50=percentile(sample, 0.5),
        p90=percentile(sample, 0.9),
        p99=percentile(sample, 0.99),
        maximum=max(sample),
    )


def summarise(*rounds: Sequence[StreamTiming]) -> LoadSummary:
    """One load, or several that ran one after the other with anything between them.

    Streams that failed count as errors and for nothing else; time between rounds does not
    count.
    """
    streams = [stream for streams_ in rounds for stream in streams_]
    good = [stream for stream in streams if stream.error is None]
    seconds = sum(_span(streams_) for streams_ in rounds)
    tokens = sum(stream.tokens for stream in good)
    return LoadSummary(
        requests=len(streams),
        errors=len(streams) - len(good),
        first_error=next((s.error for s in streams if s.error is not None), None),
        seconds=seconds,
        tokens=tokens,
        prompt_tokens=sum(stream.prompt_tokens for stream in good),
        tokens_per_second=tokens / seconds if seconds > 0 else 0.0,
        requests_per_second=len(good) / seconds if seconds > 0 else 0.0,
        first_token_seconds=percentiles([s.first_token_seconds for s in good if s.arrivals]),
        inter_token_seconds=percentiles([gap for stream in good for gap in stream.gaps]),
        end_to_end_seconds=percentiles([stream.ended - stream.sent for stream in good]),
    )


def _span(streams: Sequence[StreamTiming]) -> float:
    good = [stream for stream in streams if stream.error is None]
    return max(s.ended for s in good) - min(s.sent for s in good) if good else 0.0


def decode_speed(streams: Sequence[StreamTiming]) -> float:
    """Tokens per second of streams that ran together, their first tokens left out.

    From the last stream's first token to the first stream's end, all are decoding: only what
    comes in that time is counted, so reading prompts and trailing off do not blur the speed.
    nan when there is no such time.
    """
    opened = max((s.arrivals[0] for s in streams if s.arrivals), default=math.nan)
    closed = min((s.arrivals[-1] for s in streams if s.arrivals), default=math.nan)
    if not closed > opened:
        return math.nan
    tokens = 0.0
    for stream in streams:
        inside = sum(opened < arrival <= closed for arrival in stream.arrivals)
        # What an arrival brings: several tokens may come at once.
        tokens += inside * stream.tokens / len(stream.arrivals)
    return tokens / (closed - opened)


def ratio(
    name: str,
    unit: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    target: float,
    *,
    at_most: bool = False,
) -> Ratio:
    """The paired ratio of rounds that were measured in turn.

    Pairs are neighbours in time, so a machine that slows down in the middle of a run slows
    both halves of a pair. Sides are shown by their medians.

    Raises:
        ValueError: no rounds, or not as many on one side as on the other.
    """
    if not ours:
        raise ValueError(f"{name}: no rounds were measured")
    rounds = [a / b for a, b in zip(ours, theirs, strict=True)]
    return Ratio(
        name=name,
        unit=unit,
        ours=statistics.median(ours),
        theirs=statistics.median(theirs),
        rounds=rounds,
        value=statistics.median(rounds),
        target=target,
        at_most=at_most,
    )
