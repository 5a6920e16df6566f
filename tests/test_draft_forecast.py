"""What a row's drafts are granted: by calibration, by threshold, by what was accepted."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.calibration import Calibration
from models.checkpoint import inspect
from models.dspark.rows import SpeculativeRows
from models.platt_scaling import PlattFit
from models.sampling import RowSampling
from models.sampling_settings import Sampling
from models.taps import Taps
from models.target import Target
from scheduler.draft_forecast import DraftForecast
from scheduler.forecast_correction import ForecastCorrection
from scheduler.round_costs import CostKey, CostRecord, MeasuredCost, RoundCosts
from scheduler.row import Row
from scheduler.speculative_lane import SpeculationSettings, SpeculativeLane
from tests.dspark.pairs import FIXTURES, make_drafter, target

LOGITS = [1.0, 0.0, -1.0]


def _fit(heat: float, bias: float) -> PlattFit:
    return PlattFit(
        sampling_temperature=heat,
        scales=[1.0] * 3,
        biases=[bias] * 3,
        rounds=1,
        conversations=1,
        error_before=[0.0] * 3,
        error_temperatures_only=[0.0] * 3,
        error_after=[0.0] * 3,
        noise_floor=[0.0] * 3,
    )


RECORD = Calibration(
    temperatures=[1.0] * 3,
    rounds=1,
    error_before=[0.0] * 3,
    error_after=[0.0] * 3,
    fits=[_fit(0.0, 0.0), _fit(1.0, -1.0)],
)


@pytest.mark.parametrize(("heat", "bias"), [(0.0, 0.0), (0.5, -0.5), (1.0, -1.0), (2.0, -1.0)])
def test_equal_confidence_is_worth_less_at_a_higher_temperature(heat: float, bias: float) -> None:
    forecast = DraftForecast(3, RECORD)
    expected = np.cumprod(1 / (1 + np.exp(-(np.array(LOGITS) + bias))))
    assert not forecast.learns
    assert forecast.survival(1, LOGITS, heat) == pytest.approx(expected.tolist())


def test_a_threshold_is_a_rule_whatever_the_temperature() -> None:
    forecast = DraftForecast(3, RECORD, threshold=0.5)
    for heat in (0.0, 1.0):
        assert forecast.survival(1, LOGITS, heat) == [1.0, 1.0]


def test_without_calibration_what_was_accepted_counts() -> None:
    forecast = DraftForecast(3, None)
    before = forecast.survival(1, LOGITS, 0.0)
    assert before == forecast.survival(1, LOGITS, 1.0)
    for _ in range(8):
        forecast.observe(1, 3, 0)
    after = forecast.survival(1, LOGITS, 0.0)
    assert forecast.learns and after[0] < before[0] / 2


def test_a_rows_calibrated_forecast_is_corrected_by_what_its_drafts_proved_worth() -> None:
    forecast = DraftForecast(3, RECORD)
    before = forecast.survival(1, LOGITS, 0.0)
    for _ in range(10):
        for name, accepted in ((1, 0), (2, 3)):
            forecast.survival(name, LOGITS, 0.0)
            forecast.observe(name, 3, accepted)
    bad, good = (forecast.survival(name, LOGITS, 0.0) for name in (1, 2))
    assert bad[0] < 0.7 * before[0] and good == pytest.approx(before)
    for name in (1, 2):
        forecast.forget(name)
    # Whoever comes next starts from all rows; after another text, from the calibration.
    assert bad[0] < forecast.survival(3, LOGITS, 0.0)[0] <= before[0]
    for _ in range(40):
        forecast.survival(4, LOGITS, 0.0)
        forecast.observe(4, 3, 0)
    assert forecast.learns and forecast.survival(5, LOGITS, 0.0)[0] < 0.7 * before[0]
    forecast.another_text()
    assert not forecast.learns
    assert forecast.survival(6, LOGITS, 0.0) == pytest.approx(before)


@given(
    st.lists(
        st.lists(st.floats(0.0, 1.0), min_size=1, max_size=7).flatmap(
            lambda chances: st.tuples(st.just(chances), st.integers(0, len(chances)))
        ),
        max_size=60,
    ),
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=7),
)
def test_a_correction_takes_away_and_never_adds(
    rounds: list[tuple[list[float], int]], chances: list[float]
) -> None:
    correction = ForecastCorrection()
    for conditional, accepted in rounds:
        correction.observe(np.cumprod(conditional).tolist(), accepted)
        assert 0.0 <= correction.ratio <= 1.0
    survival = np.cumprod(chances)
    corrected = np.array(correction.corrected(survival.tolist()))
    assert (corrected <= survival + 1e-12).all() and (np.diff(corrected) <= 1e-12).all()
    with pytest.raises(ValueError, match="2 drafts accepted of 1"):
        correction.observe([0.5], 2)


class _Recorder(DraftForecast):
    """Notes what each row's forecast was asked for."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size, None)
        self.asked: dict[int, set[float]] = {}

    def survival(
        self,
        request_id: int,
        confidence_logits: Sequence[float] | None,
        sampling_temperature: float,
    ) -> list[float]:
        self.asked.setdefault(request_id, set()).add(sampling_temperature)
        return super().survival(request_id, confidence_logits, sampling_temperature)


def test_the_lane_asks_for_each_rows_own_temperature() -> None:
    """A row that always takes the best token counts as temperature 0."""
    wanted = {1: (0.0, 0), 2: (0.8, 0), 3: (0.8, 1)}
    pair = Target(inspect(FIXTURES / "qwen3" / "target"), target("qwen3"), "float32")
    drafter = make_drafter("qwen3", dtype=mx.float32)
    taps = Taps(pair.model, drafter.configuration.tap_layers)
    try:
        forecast = _Recorder(drafter.block_size)
        lane = SpeculativeLane(
            SpeculativeRows(pair, drafter, taps),
            forecast,
            RoundCosts(_free_drafts()),
            SpeculationSettings(always=True),
        )
        for name, (heat, best) in wanted.items():
            rows = SpeculativeRows(pair, drafter, taps)
            rows.open_row()
            rows.prefill(mx.array([[5, 6, 7]], dtype=mx.int32))
            sampling = Sampling(temperature=heat, top_k=best, seed=name)
            row = Row(
                request_id=name,
                sampling=RowSampling(sampling, pair.vocabulary_size, []),
                position=4,
                produced=0,
                maximum=40,
                stop_tokens=frozenset(),
                logprobs=None,
            )
            lane.join([row], [rows], [8])
        for _ in range(3):
            lane.step()
    finally:
        taps.remove()
    assert forecast.asked == {1: {0.0}, 2: {0.8}, 3: {0.0}}


def _free_drafts() -> CostRecord:
    key = CostKey(machine="", backend="", blas="", mlx="", target="", drafter="", maximum_rows=4)
    return CostRecord(
        key=key,
        verify=[
            MeasuredCost(depth=1, rows=rows, width=width, seconds=1.0)
            for rows in range(1, 5)
            for width in range(1, 9)
        ],
        draft=dict.fromkeys(range(1, 5), 0.0),
    )
