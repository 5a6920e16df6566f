"""What finding out whether drafting pays may cost: one row, costs and acceptance as given."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.calibration import Calibration
from scheduler.draft_forecast import DraftForecast
from scheduler.draft_trials import MOST_LOST_STEPS, MOST_SAVED_STEPS, DraftTrials
from scheduler.parking import PROBE_SHARE
from scheduler.round_costs import CostKey, CostRecord, MeasuredCost, RoundCosts
from scheduler.width_policy import cheapest_width

BLOCK = 7
KEY = CostKey(machine="m", backend="b", blas="b", mlx="0", target="t", drafter="d", maximum_rows=1)
# The default pair on two cores, in milliseconds: a draft and a wide verification cost as much as
# two serial steps.
CPU = ([79, 102, 110, 112, 121, 119, 135, 125], 63)
FLAT = ([20.0] * 8, 2.0)
STEEP = ([10.0 * width for width in range(1, 9)], 5.0)


def costs_of(verify: Sequence[float], draft: float) -> RoundCosts:
    return RoundCosts(
        CostRecord(
            key=KEY,
            verify=[
                MeasuredCost(depth=256, rows=1, width=width, seconds=cost / 1000)
                for width, cost in enumerate(verify, start=1)
            ],
            draft={1: draft / 1000},
        )
    )


class OneRow:
    """A lane of one row, without a model: the order of calls is that of `SpeculativeLane.step`.

    Times are in seconds; `rounds` counts verifications of more than the anchor.
    """

    def __init__(
        self,
        costs: RoundCosts,
        calibration: Calibration | None = None,
        confidence: float = 0.0,
    ) -> None:
        self._confidences = [confidence] * BLOCK
        self.table, self.now, self.rounds = costs.table(256), 0.0, 0
        self.forecast = DraftForecast(BLOCK, calibration)
        self.trials = DraftTrials(self.forecast, costs, lambda: self.now)
        self._row = 0

    def text(self, accepted: Sequence[int]) -> float:
        """Decode a text of len(accepted) tokens and return the time. `accepted[n]` drafts of a
        block behind n tokens would be accepted."""
        self._row += 1
        self.trials.another_text()
        began, done, plain = self.now, 0, False
        survival: list[float] = []
        serial, draft = self.table.serial_seconds(1), self.table.draft_seconds(1)
        while done < len(accepted):
            if plain and self.trials.waiting:
                self.now += serial
                done += 1
                continue
            if plain:
                plain, survival = False, []
            if not survival and done:
                self.now += draft
                self.trials.drafted(rows=1, depth=256)
                survival = self._survival()
            limit = len(accepted) - done - 1
            width = length = 0
            if survival:
                choice = cheapest_width([survival], self.table, limits=[limit])
                if self.trials.must_draft():
                    choice = cheapest_width([survival], self.table, limits=[limit], must_draft=True)
                else:
                    pays = cheapest_width([survival], self.table).width > 1
                    self.trials.judge(pays=pays, rows=1, depth=256)
                width, length = choice.width, choice.lengths[0]
            if self.trials.parked and not self.trials.trying:
                plain = True
                self.now += serial
                done += 1
                continue
            taken = min(accepted[done], length)
            self.forecast.observe(self._row, length, taken)
            self.now += draft + self.table.verify_seconds(1, max(width, 1))
            self.trials.committed(1 + taken, width=max(width, 1), rows=1, depth=256)
            self.rounds += width > 1
            done += 1 + taken
            survival = self._survival()
        self.forecast.forget(self._row)
        return self.now - began

    def _survival(self) -> list[float]:
        return self.forecast.survival(self._row, self._confidences, 0.0)


@pytest.mark.parametrize("prices", [CPU, STEEP], ids=["cpu", "steep"])
@given(data=st.data())
def test_a_text_loses_no_more_than_the_bound(
    prices: tuple[list[float], float], data: st.DataObject
) -> None:
    costs = costs_of(*prices)
    lane = OneRow(costs)
    serial = lane.table.serial_seconds(1)
    # The bound is noticed a round late; the first draft of a trial is a step of its own.
    round_steps = (lane.table.draft_seconds(1) + max(prices[0]) / 1000) / serial
    for _ in range(data.draw(st.integers(1, 3))):
        accepted = data.draw(st.lists(st.integers(0, BLOCK), min_size=1, max_size=150))
        lost = lane.text(accepted) - len(accepted) * serial
        # Behind a trial that failed, probes have their share of the time, the first one whole.
        bound = MOST_LOST_STEPS + round_steps + 1 + PROBE_SHARE * len(accepted)
        assert lost <= (bound + MOST_LOST_STEPS + round_steps) * serial


def test_a_drafter_that_never_fits_costs_a_few_steps_a_text() -> None:
    lane = OneRow(costs_of(*CPU))
    serial = lane.table.serial_seconds(1)
    for _ in range(10):
        lost = lane.text([0] * 100) / serial - 100
        assert MOST_LOST_STEPS <= lost <= MOST_LOST_STEPS + 2.5


def test_a_text_that_pays_is_found_out_behind_any_number_that_did_not() -> None:
    lane = OneRow(costs_of(*CPU))
    alone = lane.text([5] * 100)
    assert alone < 0.6 * 100 * lane.table.serial_seconds(1)
    for _ in range(30):
        lane.text([0] * 100)
    assert lane.text([5] * 100) < 1.1 * alone


def test_what_was_saved_is_not_all_lost_again() -> None:
    lane = OneRow(costs_of(*CPU))
    lane.text([BLOCK] * 400 + [0] * 60)
    assert lane.trials.parked
    saved = 400 * lane.table.serial_seconds(1) - OneRow(costs_of(*CPU)).text([BLOCK] * 400)
    lost = saved - (460 * lane.table.serial_seconds(1) - lane.now)
    assert lost <= (MOST_SAVED_STEPS + MOST_LOST_STEPS + 2.5) * lane.table.serial_seconds(1)


def test_where_drafts_cost_nothing_much_the_bound_is_not_met() -> None:
    lane = OneRow(costs_of(*FLAT))
    lane.text([1] * 200)
    assert not lane.trials.parked and lane.rounds >= 99


ONES = [1.0] * BLOCK
CALIBRATION = Calibration(temperatures=ONES, rounds=9, error_before=ONES, error_after=ONES)
PENNIES = ([20.0] * 8, 1.0)


def believing(prices: tuple[list[float], float], chance: float) -> OneRow:
    """A lane whose drafter gives every draft the same chance."""
    return OneRow(costs_of(*prices), CALIBRATION, confidence=math.log(chance / (1 - chance)))


@pytest.mark.parametrize(
    "prices", [CPU, STEEP, FLAT, PENNIES], ids=["cpu", "steep", "flat", "pennies"]
)
@pytest.mark.parametrize("chance", [0.75, 0.9, 0.99])
@pytest.mark.parametrize("good", [0, 200])
def test_a_forecast_that_is_all_wrong_settles_at_the_serial_speed(
    prices: tuple[list[float], float], chance: float, good: int
) -> None:
    """Nothing is accepted any more, from the beginning on or behind a text that paid."""
    before = believing(prices, chance).text([BLOCK] * good + [0] * 400)
    lane = believing(prices, chance)
    after = lane.text([BLOCK] * good + [0] * 2400)
    serial = lane.table.serial_seconds(1)
    assert 2000 * serial >= 0.98 * (after - before)
    paid = believing(prices, chance).text([BLOCK] * good) if good else 0.0
    # What was lost until then: the longer, the more was known in the drafter's favour.
    assert before - paid - 400 * serial <= (16 if good == 0 else 72) * serial
    assert lane.trials.parked


def test_a_doubted_forecast_is_tried_again_and_believed_again() -> None:
    lane = believing(CPU, 0.9)
    serial = lane.table.serial_seconds(1)
    alone = believing(CPU, 0.9).text([5] * 1000)
    assert alone < 0.6 * 1000 * serial
    lane.text([0] * 300)
    assert lane.trials.parked and lane.forecast.learns
    assert lane.text([5] * 1000) < 1.02 * alone
    both = believing(CPU, 0.9)
    seconds = both.text([0] * 300 + [5] * 1500)
    assert not both.trials.parked and not both.forecast.learns
    assert seconds < 300 * serial + 0.8 * 1500 * serial


@pytest.mark.parametrize("prices", [CPU, FLAT], ids=["cpu", "flat"])
@pytest.mark.parametrize("chance", [0.7, 0.85])
def test_a_forecast_that_is_right_loses_next_to_nothing_by_the_correction(
    prices: tuple[list[float], float], chance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Side by side with a forecast that is believed whatever happens."""
    random = np.random.default_rng(0)
    texts = [(random.geometric(1 - chance, 200) - 1).clip(0, BLOCK).tolist() for _ in range(100)]

    def seconds() -> float:
        lane = believing(prices, chance)
        return sum(lane.text(accepted) for accepted in texts)

    corrected = seconds()
    monkeypatch.setattr("scheduler.forecast_correction.PRIOR_DRAFTS", 1e12)
    believed = seconds()
    assert corrected < 1.02 * believed


def test_a_calibrated_forecast_of_nothing_is_believed_at_once() -> None:
    doubtful = believing(CPU, 0.01)
    doubtful.text([0] * 60)
    assert doubtful.trials.parked and doubtful.rounds == 0
