"""What Prometheus is told.

Owns every metric of the daemon, in a registry of its own. Counters and histograms are fed on
the event loop from records of steps and requests; gauges are read when scraped, so that an
idle daemon computes nothing. Labels are bounded: configured models and fixed reasons. Feeding
and scraping cannot fail.

    p99 time to first token:
        histogram_quantile(0.99, sum by (le) (rate(sparklane_time_to_first_token_seconds_bucket[5m])))
    generated tokens per second:
        sum(rate(sparklane_generated_tokens_total[1m]))
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import psutil
from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from daemon.drafting_metrics import DraftingMetrics
from daemon.generation import FinishReason, RefusalKind
from scheduler.messages import MeasuringProgress, Memory, Step, StepKind

# Bounds that public dashboards expect; finer ones where a small model or a GPU is faster.
# fmt: off
_FIRST_TOKEN = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40,
                80, 160, 640, 2560)
_TOKEN = (.001, .002, .003, .004, .005, .006, .008, .01, .015, .02, .025, .05, .075, .1, .15, .2,
          .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST = (.01, .05, .1, .3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480,
            960, 1920, 7680)
_STEP = (.001, .002, .003, .004, .005, .0075, .01, .015, .02, .03, .05, .075, .1, .15, .2, .3, .5,
         .75, 1, 2.5, 5, 10, 60)
_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256)
# fmt: on


class EngineReading(Protocol):
    """What is read of a served model when Prometheus scrapes."""

    @property
    def requests_running(self) -> int: ...
    @property
    def requests_waiting(self) -> int: ...
    @property
    def waiting_prompt_tokens(self) -> int: ...
    @property
    def kv_reserved_bytes(self) -> int: ...
    @property
    def kv_budget_bytes(self) -> int: ...
    @property
    def engine_pid(self) -> int | None: ...
    @property
    def is_ready(self) -> bool: ...
    @property
    def heartbeat_age(self) -> float | None: ...
    @property
    def engine_memory(self) -> Memory | None: ...
    @property
    def measuring(self) -> MeasuringProgress | None: ...


@dataclass(frozen=True)
class RequestTimes:
    """When things happened to a finished request, in seconds of one monotonic clock.

    `started` is when its prompt began to be read.
    """

    arrived: float
    started: float
    first_token: float
    last_token: float


class Metrics:
    """All metrics of one daemon."""

    def __init__(self, version: str = "0") -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._gauges = _Gauges(version)
        self.registry.register(self._gauges)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"sparklane_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, bounds: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(
                f"sparklane_{name}", text, labels, registry=self.registry, buckets=bounds
            )

        self.first_token = histogram(
            "time_to_first_token_seconds",
            "Time from a request's arrival to its first token.",
            _FIRST_TOKEN, "model", "lane",
        )  # fmt: skip
        self.inter_token = histogram(
            "inter_token_latency_seconds",
            "Time between two consecutive outputs of a request.",
            _TOKEN, "model", "lane",
        )  # fmt: skip
        self.per_output_token = histogram(
            "time_per_output_token_seconds",
            "Decode time of a finished request per token after the first.",
            _TOKEN, "model", "lane",
        )  # fmt: skip
        self.queue_time = histogram(
            "request_queue_time_seconds",
            "Time from a request's arrival until its prompt began to be read.",
            _REQUEST, "model",
        )  # fmt: skip
        self.prefill_time = histogram(
            "request_prefill_time_seconds",
            "Time from the start of reading a prompt to the first token.",
            _REQUEST, "model",
        )  # fmt: skip
        self.decode_time = histogram(
            "request_decode_time_seconds",
            "Time from the first token of a request to its last.",
            _REQUEST, "model",
        )  # fmt: skip
        self.end_to_end = histogram(
            "end_to_end_latency_seconds",
            "Time from a request's arrival to its last token.",
            _REQUEST, "model",
        )  # fmt: skip
        self.step_time = histogram(
            "step_duration_seconds", "Time of one engine step.", _STEP, "model", "kind"
        )
        self.batch_rows = histogram(
            "batch_rows", "Rows that one engine step worked on.", _ROWS, "model", "kind"
        )
        self.prompt_tokens = counter(
            "prompt_tokens_total", "Prompt tokens of requests that gave a first token.", "model"
        )
        self.generated_tokens = counter(
            "generated_tokens_total", "Tokens generated.", "model", "lane"
        )
        self.requests = counter(
            "requests_total", "Requests finished, by finish reason.", "model", "finish_reason"
        )
        self.cancellations = counter(
            "cancellations_total",
            "Requests given up by their client, by what they were doing.",
            "model", "reason",
        )  # fmt: skip
        self.refusals = counter("refusals_total", "Requests refused, by reason.", "model", "kind")
        self.restarts = counter(
            "engine_restarts_total", "Engine processes started again.", "model", "reason"
        )
        self.replayed = counter(
            "replayed_requests_total", "Requests sent again to a new engine.", "model"
        )
        self.drafting = DraftingMetrics(self.registry)
        self._unknown_model = self.refusals.labels("", RefusalKind.UNKNOWN_MODEL.value)

    def model(self, name: str) -> ModelMetrics:
        """The metrics of one model, all present from the start."""
        return ModelMetrics(self, name)

    def watch(self, name: str, reading: EngineReading) -> None:
        """Read the gauges of a model from `reading` at every scrape."""
        self._gauges.readings[name] = reading

    def refused_unknown_model(self) -> None:
        """A request named a model that is not served. Its name is no label: it is unbounded."""
        self._unknown_model.inc()

    def exposition(self) -> tuple[bytes, str]:
        """The text to answer a scrape with, and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST


LANE_OF_STEP = {StepKind.SERIAL: "serial", StepKind.SPECULATIVE: "speculative"}
CANCELLATION_REASONS = ("queued", "prefill", "decode")
RESTART_REASONS = ("exited", "wedged", "silent", "load_timeout")


class ModelMetrics:
    """One model's counters and histograms, labels resolved."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._queue_time = metrics.queue_time.labels(model)
        self._prefill_time = metrics.prefill_time.labels(model)
        self._decode_time = metrics.decode_time.labels(model)
        self._end_to_end = metrics.end_to_end.labels(model)
        self._prompt_tokens = metrics.prompt_tokens.labels(model)
        self._replayed = metrics.replayed.labels(model)
        lanes = LANE_OF_STEP.values()
        self._first_token = {lane: metrics.first_token.labels(model, lane) for lane in lanes}
        self._inter_token = {lane: metrics.inter_token.labels(model, lane) for lane in lanes}
        self._drafting = metrics.drafting.model(model)
        self._per_token = {lane: metrics.per_output_token.labels(model, lane) for lane in lanes}
        self._generated = {lane: metrics.generated_tokens.labels(model, lane) for lane in lanes}
        self._step_time = {kind: metrics.step_time.labels(model, kind.value) for kind in StepKind}
        self._rows = {kind: metrics.batch_rows.labels(model, kind.value) for kind in StepKind}
        self._requests = {
            reason: metrics.requests.labels(model, reason.value) for reason in FinishReason
        }
        self._cancellations = {
            reason: metrics.cancellations.labels(model, reason) for reason in CANCELLATION_REASONS
        }
        self._refusals: dict[RefusalKind, Counter] = {
            kind: metrics.refusals.labels(model, kind.value)
            for kind in RefusalKind
            if kind is not RefusalKind.UNKNOWN_MODEL
        }
        self._restarts = {
            reason: metrics.restarts.labels(model, reason) for reason in RESTART_REASONS
        }

    def step(self, step: Step) -> None:
        """One step of the engine."""
        self._step_time[step.kind].observe(step.seconds)
        if step.rows:
            self._rows[step.kind].observe(step.rows)
        self._drafting.step(step)
        if step.outputs and step.kind in LANE_OF_STEP:
            tokens = sum(len(output.tokens) for output in step.outputs)
            self._generated[LANE_OF_STEP[step.kind]].inc(tokens)

    def first_token(self, lane: str, prompt_tokens: int, arrived: float, now: float) -> None:
        """A request's first output."""
        self._first_token[lane].observe(now - arrived)
        self._prompt_tokens.inc(prompt_tokens)

    def next_token(self, lane: str, seconds: float) -> None:
        """A later output, `seconds` after the one before."""
        self._inter_token[lane].observe(seconds)

    def finished(
        self, reason: FinishReason, lane: str, generated: int, times: RequestTimes
    ) -> None:
        """A request that has come to its end."""
        self._requests[reason].inc()
        self._queue_time.observe(times.started - times.arrived)
        self._prefill_time.observe(times.first_token - times.started)
        decode = times.last_token - times.first_token
        self._decode_time.observe(decode)
        self._end_to_end.observe(times.last_token - times.arrived)
        if generated > 1:
            self._per_token[lane].observe(decode / (generated - 1))

    def cancelled(self, reason: str) -> None:
        """A request that its client gave up while it was queued, in prefill or in decode."""
        self._cancellations[reason].inc()

    def refused(self, kind: RefusalKind) -> None:
        """A request that was refused, at its entry or later."""
        self._refusals[kind].inc()

    def restarted(self, reason: str) -> None:
        """An engine was lost and another is started."""
        self._restarts[reason].inc()

    def replayed(self, requests: int) -> None:
        """So many requests were sent to a new engine."""
        self._replayed.inc(requests)


class _Gauges(Collector):
    """Read when scraped."""

    def __init__(self, version: str) -> None:
        self.readings: dict[str, EngineReading] = {}
        self._version = version
        self._self = psutil.Process()

    def collect(self) -> Iterable[GaugeMetricFamily]:
        build = GaugeMetricFamily(
            "sparklane_build_info", "Which version runs.", labels=["version", "python_version"]
        )
        build.add_metric([self._version, platform.python_version()], 1)
        yield build
        for name, text, read in _READINGS:
            family = GaugeMetricFamily(f"sparklane_{name}", text, labels=["model"])
            for model, reading in self.readings.items():
                value = read(reading)
                if value is not None:
                    family.add_metric([model], value)
            yield family
        yield self._engine_memory()
        yield self._footprint()

    def _engine_memory(self) -> GaugeMetricFamily:
        family = GaugeMetricFamily(
            "sparklane_engine_memory_bytes",
            "Memory as the engine's allocator counts it.",
            labels=["model", "kind"],
        )
        for model, reading in self.readings.items():
            if (memory := reading.engine_memory) is not None:
                family.add_metric([model, "active"], memory.active)
                family.add_metric([model, "cache"], memory.cache)
                family.add_metric([model, "peak"], memory.peak)
        return family

    def _footprint(self) -> GaugeMetricFamily:
        family = GaugeMetricFamily(
            "sparklane_process_resident_memory_bytes",
            "Resident memory of the daemon (model is empty) and of each engine.",
            labels=["process", "model"],
        )
        family.add_metric(["daemon", ""], self._self.memory_info().rss)
        for model, reading in self.readings.items():
            if (pid := reading.engine_pid) is not None and (size := _resident(pid)) is not None:
                family.add_metric(["engine", model], size)
        return family


_READINGS: tuple[tuple[str, str, Callable[[EngineReading], float | None]], ...] = (
    ("requests_running", "Requests that the engine works on.", lambda r: r.requests_running),
    ("requests_waiting", "Requests in the queue.", lambda r: r.requests_waiting),
    ("waiting_prompt_tokens", "Prompt tokens in the queue.", lambda r: r.waiting_prompt_tokens),
    (
        "kv_cache_reserved_bytes",
        "Memory that running requests may need for keys and values.",
        lambda r: r.kv_reserved_bytes,
    ),
    (
        "kv_cache_budget_bytes",
        "Memory that there is for keys and values.",
        lambda r: r.kv_budget_bytes,
    ),
    ("engine_up", "Whether an engine process runs.", lambda r: r.engine_pid is not None),
    ("engine_ready", "Whether the engine takes requests.", lambda r: r.is_ready),
    (
        "engine_heartbeat_age_seconds",
        "Time since the engine's last heartbeat.",
        lambda r: r.heartbeat_age,
    ),
    (
        "cost_measurements_timed",
        "Forwards timed while an engine measures what rounds cost; absent when it does not.",
        lambda r: r.measuring.timed if r.measuring else None,
    ),
    (
        "cost_measurements_planned",
        "Forwards that an engine times to know what rounds cost; absent when it does not.",
        lambda r: r.measuring.total if r.measuring else None,
    ),
)


def _resident(pid: int) -> int | None:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return None
