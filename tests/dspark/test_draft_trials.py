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
from scheduler.draft_trials import (
    CHANCE_STEPS,
    LONGEST_WAIT_SECONDS,
    MOST_LOST_STEPS,
    PROBE_SHARE,
    PROBE_STEPS,
    DraftTrials,
)
from scheduler.round_costs import CostKey, CostRecord, MeasuredCost, RoundCosts
from scheduler.width_policy import WidthChoice, cheapest_width

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
        self.trials = DraftTrials(lambda: self.now)
        self._row = 0

    def text(
        self, accepted: Sequence[int], confidences: Sequence[Sequence[float]] | None = None
    ) -> float:
        """Decode a text of len(accepted) tokens and return the time. `accepted[n]` drafts of a
        block behind n tokens would be accepted; `confidences[n]` are the block's."""
        self._row += 1
        self.forecast.another_text()
        self.trials.another_text(alone=True)
        began, done = self.now, 0
        drafted = True
        while done < len(accepted):
            if self.trials.waiting:
                self.now += self.table.serial_seconds(1)
                done += 1
                drafted = False
                continue
            if not drafted:
                self.now += self.table.draft_seconds(1)
            drafted = True
            if done == 0:
                # Behind a prompt nothing has been drafted yet.
                self.now += self.table.round_seconds(1, 1)
                done += 1
                continue
            block = self._confidences if confidences is None else confidences[done]
            choice = cheapest_width(
                [self.forecast.survival(self._row, block, 0.0)],
                self.table,
                limits=[len(accepted) - done - 1],
                must_draft=self.trials.parked and self.forecast.learns,
            )
            length = choice.lengths[0]
            taken = min(accepted[done], length)
            self.now += self.table.round_seconds(1, choice.width)
            believed = not self.forecast.learns
            self.trials.verified(choice, 1 + taken, self.table, believed=believed)
            self.forecast.observe(self._row, length, taken)
            self.rounds += choice.width > 1
            done += 1 + taken
        self.forecast.forget(self._row)
        return self.now - began


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
    for bound in (MOST_LOST_STEPS, *[PROBE_STEPS] * 9):
        lost = lane.text([0] * 100) / serial - 100
        assert bound <= lost <= bound + 2.5


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
    assert lost <= (CHANCE_STEPS + MOST_LOST_STEPS + 2.5) * lane.table.serial_seconds(1)


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
    assert before - paid - 400 * serial <= (16 if good == 0 else 26) * serial
    assert lane.trials.parked


def test_a_doubted_forecast_is_tried_again_and_believed_again() -> None:
    lane = believing(CPU, 0.9)
    serial = lane.table.serial_seconds(1)
    alone = believing(CPU, 0.9).text([5] * 1000)
    assert alone < 0.6 * 1000 * serial
    lane.text([0] * 300)
    assert lane.trials.parked
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


# A default pair on two cores, roughly: nothing is lost by a draft but 0.3 of a step.
STEPS = ([10.0, 12.0, 13.0, 14.0, 15.0, 16.0, 17.0, 18.0], 3.0)


def noisy_text(
    random: np.random.Generator, tokens: int, mean: float
) -> tuple[list[int], list[list[float]]]:
    """Accepted drafts and confidences behind each token. From block to block the chance of a draft
    varies over all that is possible, `mean` on average, and the confidences tell it as it is."""
    chances = random.beta(1.2 * mean / (1 - mean), 1.2, tokens).clip(0.01, 0.99)
    accepted = (random.geometric(1 - chances) - 1).clip(0, BLOCK)
    logits = np.log(chances / (1 - chances))
    return accepted.tolist(), [[logit] * BLOCK for logit in logits.tolist()]


def speeds(mean: float, *, tokens: int) -> tuple[float, float]:
    """Tokens per serial step of a lane that decides, and of one that never parks."""
    random = np.random.default_rng(1)
    drawn = [noisy_text(random, tokens, mean) for _ in range(16000 // tokens)]
    deciding = OneRow(costs_of(*STEPS), CALIBRATION)
    seconds = sum(deciding.text(*text) for text in drawn)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scheduler.draft_trials.MOST_LOST_STEPS", math.inf)
        always = OneRow(costs_of(*STEPS), CALIBRATION)
        longest = sum(always.text(*text) for text in drawn)
    steps = sum(len(accepted) for accepted, _ in drawn) * deciding.table.serial_seconds(1)
    return steps / seconds, steps / longest


@pytest.mark.parametrize("tokens", [160, 2000])
def test_noisy_blocks_that_pay_on_average_are_drafted(tokens: int) -> None:
    speed, always = speeds(0.3, tokens=tokens)
    assert 1.1 < always < 1.2
    assert speed >= 0.95 * always


@pytest.mark.parametrize("mean", [0.01, 0.08, 0.13, 0.17])
@pytest.mark.parametrize("tokens", [100, 2000])
def test_noisy_blocks_that_do_not_pay_end_at_the_serial_speed(mean: float, tokens: int) -> None:
    speed, always = speeds(mean, tokens=tokens)
    assert always < 1.0
    assert speed >= 0.98


class Account:
    """Trials fed with rounds of a width of 2, which take 2.25 serial steps with their drafts."""

    def __init__(self, serial: float = 1.0) -> None:
        self.now, self.lost, self._serial = 0.0, 0.0, serial
        self.trials = DraftTrials(lambda: self.now)
        self._costs = costs_of([1000 * serial, 2000 * serial], 250 * serial).table(256)

    def rounds(self, expected: float, tokens: int, count: int = 1, *, believed: bool) -> None:
        """Rounds that were expected to commit so many tokens, and committed so many."""
        choice = WidthChoice(width=2, lengths=[1], expected_tokens=expected)
        for _ in range(count):
            self.now += 2.25 * self._serial
            self.lost += 2.25 - tokens
            self.trials.verified(choice, tokens, self._costs, believed=believed)

    def wait(self) -> float:
        """Go on to the next probe; how long it took."""
        began = self.now
        while self.trials.waiting:
            self.now += self._serial / 2
        return self.now - began


def test_a_believed_forecast_parks_by_what_it_expected() -> None:
    account = Account()
    account.rounds(1.25, 2, believed=True)
    assert not account.trials.parked
    account.rounds(1.25, 2, believed=True)
    assert account.trials.waiting
    doubted = Account()
    doubted.rounds(1.25, 2, 7, believed=False)
    assert not doubted.trials.parked
    doubted.rounds(1.25, 2, believed=False)
    assert doubted.trials.waiting


def test_a_believed_forecast_parks_when_far_more_is_lost_than_by_chance() -> None:
    account = Account()
    account.rounds(2.5, 1, 6, believed=True)
    assert not account.trials.parked
    account.rounds(2.5, 1, believed=True)
    assert account.trials.waiting


def test_what_was_expected_counts_for_nothing_once_a_forecast_is_doubted() -> None:
    account = Account()
    account.rounds(2.5, 1, 2, believed=True)
    assert not account.trials.parked
    account.rounds(2.5, 2, believed=False)
    assert account.trials.waiting


def test_a_probe_ends_paid_or_lost_and_losing_doubles_the_wait() -> None:
    account = Account()
    account.rounds(1.0, 1, believed=False)
    assert not account.trials.parked and account.trials.probe_paid is None
    account.rounds(1.0, 1, believed=False)
    assert account.trials.waiting and account.trials.probe_paid is None
    first = account.wait()
    assert first == pytest.approx((PROBE_STEPS + 0.25) / PROBE_SHARE, abs=0.5)
    account.rounds(1.0, 1, believed=False)
    assert account.trials.waiting and account.trials.probe_paid is False
    assert account.wait() == pytest.approx((1.25 + 0.25) / PROBE_SHARE, abs=0.5)
    account.trials.probe_paid = None
    account.rounds(4.0, 4, believed=False)
    assert account.trials.parked and account.trials.probe_paid is None
    account.rounds(4.0, 4, believed=False)
    assert not account.trials.parked and account.trials.probe_paid is True


def test_a_probe_that_fails_again_doubles_the_wait_up_to_a_bound() -> None:
    account = Account(serial=0.01)
    account.rounds(1.0, 1, 2, believed=False)
    waits = []
    for _ in range(8):
        waits.append(account.wait())
        account.rounds(1.0, 1, believed=False)
    assert waits[2] == pytest.approx(2 * waits[1], rel=0.05)
    assert waits[-1] == pytest.approx(LONGEST_WAIT_SECONDS, abs=0.1)


def test_another_text_is_tried_at_once_alone_and_sooner_beside_others() -> None:
    account = Account(serial=0.01)
    account.rounds(1.0, 1, 2, believed=False)
    account.trials.another_text(alone=True)
    assert account.trials.parked and not account.trials.waiting
    for _ in range(4):
        account.rounds(1.0, 1, believed=False)
        longest = account.wait()
    account.rounds(1.0, 1, believed=False)
    account.trials.another_text(alone=False)
    assert account.trials.waiting
    assert account.wait() < longest / 2


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 2)), min_size=5, max_size=40))
def test_probes_never_take_more_than_their_share(rounds: list[tuple[bool, int]]) -> None:
    account = Account()
    account.rounds(1.0, 1, 2, believed=False)
    began, lost = account.now, 0.0
    for believed, tokens in rounds:
        account.wait()
        account.lost = 0.0
        while not account.trials.waiting:
            account.rounds(1.0 if believed else tokens, tokens, believed=believed)
        # And the draft behind the last round.
        lost += max(account.lost, 0.0) + 0.25
    account.wait()
    assert lost <= PROBE_SHARE * (account.now - began)
