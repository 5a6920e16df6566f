"""Percentiles, summaries and ratios, against a second way of computing them."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.bench.timings import (
    StreamTiming,
    decode_speed,
    percentile,
    percentiles,
    ratio,
    summarise,
)

SAMPLES = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=60)


def stream(sent: float, arrivals: list[float], tokens: int | None = None) -> StreamTiming:
    return StreamTiming(
        sent=sent,
        arrivals=arrivals,
        ended=arrivals[-1],
        tokens=len(arrivals) if tokens is None else tokens,
        prompt_tokens=3,
    )


class TestPercentile:
    @given(SAMPLES)
    def test_agrees_with_the_standard_library(self, sample: list[float]) -> None:
        cuts = statistics.quantiles(sample, n=100, method="inclusive")
        for place in (1, 50, 90, 99):
            expected = pytest.approx(cuts[place - 1], rel=1e-9, abs=1e-6)
            assert percentile(sample, place / 100) == expected

    @given(SAMPLES, st.floats(0, 1), st.floats(0, 1))
    def test_grows_with_its_share_and_stays_inside(
        self, sample: list[float], one: float, other: float
    ) -> None:
        low, high = sorted((one, other))
        assert percentile(sample, low) <= percentile(sample, high) + 1e-6
        assert min(sample) <= percentile(sample, low) <= max(sample)

    def test_ends_and_a_single_value(self) -> None:
        assert percentile([3.0, 1.0, 2.0], 0.0) == 1.0
        assert percentile([3.0, 1.0, 2.0], 1.0) == 3.0
        assert percentile([7.0], 0.99) == 7.0

    def test_refuses_what_has_no_answer(self) -> None:
        with pytest.raises(ValueError, match="empty"):
            percentile([], 0.5)
        with pytest.raises(ValueError, match="share is 50"):
            percentile([1.0], 50)

    def test_nothing_measured_is_not_zero(self) -> None:
        assert percentiles([]).p50 is None


class TestSummary:
    def test_by_hand(self) -> None:
        summary = summarise(
            [
                stream(0.0, [1.0, 1.5, 2.0]),
                stream(1.0, [3.0, 4.0], tokens=5),
                StreamTiming(sent=0.0, ended=100.0, tokens=9, error="HTTP 503"),
            ]
        )
        assert (summary.requests, summary.errors, summary.first_error) == (
            3,
            1,
            "HTTP 503",
        )
        assert (summary.tokens, summary.prompt_tokens, summary.seconds) == (8, 6, 4.0)
        assert summary.tokens_per_second == 2.0
        assert summary.first_token_seconds.p50 == 1.5
        assert summary.inter_token_seconds.count == 3
        assert summary.inter_token_seconds.maximum == 1.0
        assert summary.end_to_end_seconds.maximum == 3.0

    def test_rounds_leave_out_what_was_between_them(self) -> None:
        summary = summarise([stream(0.0, [1.0, 2.0])], [stream(50.0, [51.0, 52.0])])
        assert (summary.requests, summary.seconds, summary.tokens_per_second) == (2, 4.0, 1.0)

    def test_only_errors(self) -> None:
        summary = summarise([StreamTiming(sent=0.0, error="refused")])
        assert (summary.errors, summary.tokens_per_second) == (1, 0.0)
        assert summary.first_token_seconds.count == 0


class TestDecodeSpeed:
    def test_counts_only_while_all_decode(self) -> None:
        long = stream(0.0, [0.5, 1.0, 2.0, 3.0, 4.0])
        short = stream(0.0, [2.0, 3.0])
        # In (2, 3] each of them got one token.
        assert decode_speed([long, short]) == 2.0

    def test_several_tokens_at_once(self) -> None:
        assert decode_speed([stream(0.0, [1.0, 2.0, 3.0], tokens=6)]) == 2.0

    def test_streams_that_never_ran_together(self) -> None:
        assert math.isnan(decode_speed([stream(0.0, [1.0, 2.0]), stream(5.0, [6.0, 7.0])]))
        assert math.isnan(decode_speed([]))


class TestRatio:
    def test_is_the_median_of_pairs(self) -> None:
        # The machine got three times slower after the first round, on both sides.
        found = ratio("speed", "tok/s", [30.0, 11.0, 9.0], [30.0, 10.0, 10.0], 1.0)
        assert found.rounds == [1.0, 1.1, 0.9]
        assert (found.value, found.reached) == (1.0, True)

    def test_targets_from_both_sides(self) -> None:
        assert ratio("wait", "s", [1.0], [2.0], 0.5, at_most=True).reached
        assert not ratio("wait", "s", [1.2], [2.0], 0.5, at_most=True).reached
        assert not ratio("speed", "tok/s", [0.9], [1.0], 1.0).reached

    def test_needs_pairs(self) -> None:
        with pytest.raises(ValueError, match="no rounds"):
            ratio("speed", "tok/s", [], [], 1.0)
        with pytest.raises(ValueError):
            ratio("speed", "tok/s", [1.0], [1.0, 2.0], 1.0)
