"""Metric names and labels, which dashboards rely on, and what is counted where."""

from __future__ import annotations

import os
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from daemon.generation import FinishReason, RefusalKind
from daemon.metrics import Metrics, RequestTimes
from scheduler.messages import MeasuringProgress, Memory, Output, RoundRecord, Step, StepKind

EXPECTED = {
    "sparklane_accepted_tokens_by_position_total": ("counter", {"model", "position"}),
    "sparklane_accepted_tokens_total": ("counter", {"model"}),
    "sparklane_draft_seconds_total": ("counter", {"model"}),
    "sparklane_draft_tokens_total": ("counter", {"model"}),
    "sparklane_drafts_total": ("counter", {"model"}),
    "sparklane_parked_row_seconds_total": ("counter", {"model"}),
    "sparklane_parked_rows": ("gauge", {"model"}),
    "sparklane_probes_total": ("counter", {"model", "result"}),
    "sparklane_rounds_total": ("counter", {"model"}),
    "sparklane_verify_seconds_total": ("counter", {"model"}),
    "sparklane_verify_width_tokens": ("histogram", {"model"}),
    "sparklane_batch_rows": ("histogram", {"model", "kind"}),
    "sparklane_build_info": ("gauge", {"version", "python_version"}),
    "sparklane_cancellations_total": ("counter", {"model", "reason"}),
    "sparklane_end_to_end_latency_seconds": ("histogram", {"model"}),
    "sparklane_engine_heartbeat_age_seconds": ("gauge", {"model"}),
    "sparklane_engine_memory_bytes": ("gauge", {"model", "kind"}),
    "sparklane_cost_measurements_timed": ("gauge", {"model"}),
    "sparklane_cost_measurements_planned": ("gauge", {"model"}),
    "sparklane_engine_ready": ("gauge", {"model"}),
    "sparklane_engine_restarts_total": ("counter", {"model", "reason"}),
    "sparklane_engine_up": ("gauge", {"model"}),
    "sparklane_generated_tokens_total": ("counter", {"model", "lane"}),
    "sparklane_inter_token_latency_seconds": ("histogram", {"model", "lane"}),
    "sparklane_kv_cache_budget_bytes": ("gauge", {"model"}),
    "sparklane_kv_cache_reserved_bytes": ("gauge", {"model"}),
    "sparklane_process_resident_memory_bytes": ("gauge", {"process", "model"}),
    "sparklane_prompt_tokens_total": ("counter", {"model"}),
    "sparklane_refusals_total": ("counter", {"model", "kind"}),
    "sparklane_replayed_requests_total": ("counter", {"model"}),
    "sparklane_request_decode_time_seconds": ("histogram", {"model"}),
    "sparklane_request_prefill_time_seconds": ("histogram", {"model"}),
    "sparklane_request_queue_time_seconds": ("histogram", {"model"}),
    "sparklane_requests_running": ("gauge", {"model"}),
    "sparklane_requests_total": ("counter", {"model", "finish_reason"}),
    "sparklane_requests_waiting": ("gauge", {"model"}),
    "sparklane_step_duration_seconds": ("histogram", {"model", "kind"}),
    "sparklane_time_per_output_token_seconds": ("histogram", {"model", "lane"}),
    "sparklane_time_to_first_token_seconds": ("histogram", {"model", "lane"}),
    "sparklane_waiting_prompt_tokens": ("gauge", {"model"}),
}


class Reading:
    """A served model as the gauges see it, with fixed values."""

    requests_running = 3
    requests_waiting = 2
    waiting_prompt_tokens = 70
    kv_reserved_bytes = 1000
    kv_budget_bytes = 4000
    engine_pid: int | None = os.getpid()
    is_ready = True
    heartbeat_age: float | None = 0.5
    engine_memory: Memory | None = Memory(active=1, cache=2, peak=3)
    measuring: MeasuringProgress | None = MeasuringProgress(12, 144)


@pytest.fixture
def metrics() -> Metrics:
    made = Metrics("1.2.3")
    made.watch("m", Reading())
    return made


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


ROUND = Step(
    kind=StepKind.SPECULATIVE,
    seconds=0.25,
    rows=2,
    tokens=8,
    outputs=[Output(1, [5, 6, 7]), Output(2, [9])],
    round=RoundRecord(4, 6, 2, [1, 1, 0], 0.05),
    probe_paid=True,
)


def test_a_round_is_counted_in_its_parts(metrics: Metrics) -> None:
    model = metrics.model("m")
    model.step(ROUND)
    model.step(Step(kind=StepKind.SERIAL, seconds=0.5, rows=2, tokens=2, parked_rows=2))

    def total(name: str, **labels: str) -> float | None:
        return value(metrics, f"sparklane_{name}", model="m", **labels)

    assert (total("rounds_total"), total("drafts_total")) == (1, 2)
    assert (total("draft_tokens_total"), total("accepted_tokens_total")) == (6, 2)
    assert total("accepted_tokens_by_position_total", position="2") == 1
    assert total("accepted_tokens_by_position_total", position="3") == 0
    assert total("draft_seconds_total") == pytest.approx(0.05)
    assert total("verify_seconds_total") == pytest.approx(0.20)
    assert total("verify_width_tokens_sum") == 4
    assert total("probes_total", result="paid") == 1
    assert (total("parked_rows"), total("parked_row_seconds_total")) == (2, 1.0)
    assert total("generated_tokens_total", lane="speculative") == 4


def test_names_and_labels_are_pinned(metrics: Metrics) -> None:
    metrics.model("m").step(ROUND)
    found = {}
    for family in text_string_to_metric_families(metrics.exposition()[0].decode()):
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        name = family.name + ("_total" if family.type == "counter" else "")
        found[name] = (family.type, labels)
    assert found == EXPECTED


def test_names_keep_prometheus_conventions(metrics: Metrics) -> None:
    for name, (kind, _) in EXPECTED.items():
        assert re.fullmatch(r"sparklane_[a-z_]+[a-z]", name)
        assert name.endswith("_total") == (kind == "counter")
        assert not re.search(r"_(ms|milliseconds|kb|mb|gb|percent)(_|$)", name)
    for family in metrics.registry.collect():
        assert family.documentation.endswith(".")


def test_the_exposition_is_text_for_prometheus(metrics: Metrics) -> None:
    body, content_type = metrics.exposition()
    assert content_type.startswith("text/plain")
    assert b'sparklane_build_info{python_version="' in body
    assert b'version="1.2.3"' in body
    assert b"_created" not in body


def test_gauges_are_read_at_the_scrape(metrics: Metrics) -> None:
    assert value(metrics, "sparklane_requests_running", model="m") == 3
    assert value(metrics, "sparklane_requests_waiting", model="m") == 2
    assert value(metrics, "sparklane_engine_up", model="m") == 1
    assert value(metrics, "sparklane_engine_memory_bytes", model="m", kind="peak") == 3
    assert value(metrics, "sparklane_cost_measurements_timed", model="m") == 12
    assert value(metrics, "sparklane_cost_measurements_planned", model="m") == 144
    resident = value(
        metrics, "sparklane_process_resident_memory_bytes", process="engine", model="m"
    )
    assert resident is not None and resident > 1_000_000


def test_an_engine_that_is_away_has_no_readings() -> None:
    class Away(Reading):
        engine_pid = None
        heartbeat_age = None
        engine_memory = None
        measuring = None

    metrics = Metrics()
    metrics.watch("m", Away())
    assert value(metrics, "sparklane_engine_up", model="m") == 0
    assert value(metrics, "sparklane_engine_heartbeat_age_seconds", model="m") is None
    assert value(metrics, "sparklane_engine_memory_bytes", model="m", kind="peak") is None
    assert value(metrics, "sparklane_cost_measurements_timed", model="m") is None


def test_every_series_exists_from_the_start(metrics: Metrics) -> None:
    """A rate over a series that appears with its first event misses that event."""
    metrics.model("m")
    for reason in FinishReason:
        assert value(metrics, "sparklane_requests_total", model="m", finish_reason=reason) == 0
    for kind in RefusalKind:
        model = "" if kind is RefusalKind.UNKNOWN_MODEL else "m"
        assert value(metrics, "sparklane_refusals_total", model=model, kind=kind) == 0


def test_a_finished_request_is_measured_in_its_parts(metrics: Metrics) -> None:
    model = metrics.model("m")
    model.first_token("serial", 7, arrived=10.0, now=13.0)
    model.next_token("serial", 0.5)
    times = RequestTimes(arrived=10.0, started=11.0, first_token=13.0, last_token=17.0)
    model.finished(FinishReason.STOP, "serial", 5, times)

    def total(name: str, **labels: str) -> float | None:
        return value(metrics, f"sparklane_{name}_sum", model="m", **labels)

    assert total("time_to_first_token_seconds", lane="serial") == 3.0
    assert total("inter_token_latency_seconds", lane="serial") == 0.5
    assert total("request_queue_time_seconds") == 1.0
    assert total("request_prefill_time_seconds") == 2.0
    assert total("request_decode_time_seconds") == 4.0
    assert total("end_to_end_latency_seconds") == 7.0
    assert total("time_per_output_token_seconds", lane="serial") == 1.0
    assert value(metrics, "sparklane_prompt_tokens_total", model="m") == 7
    assert value(metrics, "sparklane_requests_total", model="m", finish_reason="stop") == 1


def test_a_single_token_has_no_time_per_output_token(metrics: Metrics) -> None:
    model = metrics.model("m")
    model.finished(FinishReason.LENGTH, "serial", 1, RequestTimes(0.0, 0.0, 1.0, 1.0))
    name = "sparklane_time_per_output_token_seconds_count"
    assert value(metrics, name, model="m", lane="serial") == 0


def test_steps_are_measured_by_kind(metrics: Metrics) -> None:
    model = metrics.model("m")
    outputs = [Output(1, [5, 6]), Output(2, [7])]
    model.step(Step(kind=StepKind.SERIAL, seconds=0.25, rows=2, tokens=2, outputs=outputs))
    model.step(Step(kind=StepKind.PREFILL, seconds=0.5, rows=1, tokens=64))
    model.step(Step(kind=StepKind.SERIAL, seconds=0.1, rows=0, tokens=0))
    steps, rows = "sparklane_step_duration_seconds", "sparklane_batch_rows"
    assert value(metrics, f"{steps}_sum", model="m", kind="prefill") == 0.5
    assert value(metrics, f"{steps}_count", model="m", kind="serial") == 2
    assert value(metrics, f"{rows}_sum", model="m", kind="serial") == 2
    assert value(metrics, f"{rows}_count", model="m", kind="serial") == 1
    assert value(metrics, "sparklane_generated_tokens_total", model="m", lane="serial") == 3


def test_bounds_are_those_that_dashboards_expect(metrics: Metrics) -> None:
    metrics.model("m")
    text = metrics.exposition()[0].decode()

    def bounds(name: str) -> set[float]:
        pattern = rf'sparklane_{name}_bucket{{lane="serial",le="([0-9.]+)"'
        return {float(bound) for bound in re.findall(pattern, text)}

    inter_token = {.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80}  # fmt: skip
    first_token = {.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560}  # fmt: skip
    assert bounds("inter_token_latency_seconds") > inter_token
    assert len([bound for bound in bounds("inter_token_latency_seconds") if bound < 0.01]) >= 4
    assert bounds("time_to_first_token_seconds") == first_token
