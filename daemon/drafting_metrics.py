"""What Prometheus is told about speculation.

Owns the metrics of the speculative lane, in the daemon's registry; fed on the event loop from
the records of rounds. Acceptance has several definitions. Here the rate is accepted / drafted,
and the acceptance length is the tokens that a row commits in a round, the bonus included:

    acceptance rate:
        rate(sparklane_accepted_tokens_total[5m]) / rate(sparklane_draft_tokens_total[5m])
    acceptance length:
        1 + rate(sparklane_accepted_tokens_total[5m]) / rate(sparklane_drafts_total[5m])
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from scheduler.messages import Step

_WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)


class DraftingMetrics:
    """The metrics of all models."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"sparklane_{name}", text, ("model", *labels), registry=registry)

        self.drafts = counter("drafts_total", "Rows that were verified, over all rounds.")
        self.draft_tokens = counter("draft_tokens_total", "Draft tokens that were verified.")
        self.accepted_tokens = counter("accepted_tokens_total", "Draft tokens accepted.")
        self.accepted_by_position = counter(
            "accepted_tokens_by_position_total",
            "Draft tokens accepted, by their position in the block.",
            "position",
        )
        self.rounds = counter("rounds_total", "Speculative rounds.")
        self.draft_seconds = counter(
            "draft_seconds_total", "Time of rounds spent drafting, by its measured cost."
        )
        self.verify_seconds = counter(
            "verify_seconds_total", "Time of rounds spent on everything but drafting."
        )
        self.parked_seconds = counter(
            "parked_row_seconds_total", "Time that rows decoded plainly because drafting cost more."
        )
        self.probes = counter(
            "probes_total", "Trials of parked rows, by whether drafting paid again.", "result"
        )
        self.parked_rows = Gauge(
            "sparklane_parked_rows",
            "Rows that could draft and do not, because it does not pay.",
            ("model",),
            registry=registry,
        )
        self.width = Histogram(
            "sparklane_verify_width_tokens",
            "Tokens verified for a row in a round, the anchor included.",
            ("model",),
            registry=registry,
            buckets=_WIDTHS,
        )

    def model(self, name: str) -> ModelDraftingMetrics:
        """The metrics of one model."""
        return ModelDraftingMetrics(self, name)


class ModelDraftingMetrics:
    """One model's metrics, labels resolved."""

    def __init__(self, metrics: DraftingMetrics, model: str) -> None:
        self._model = model
        self._by_position = metrics.accepted_by_position
        self._drafts = metrics.drafts.labels(model)
        self._draft_tokens = metrics.draft_tokens.labels(model)
        self._accepted = metrics.accepted_tokens.labels(model)
        self._rounds = metrics.rounds.labels(model)
        self._draft_seconds = metrics.draft_seconds.labels(model)
        self._verify_seconds = metrics.verify_seconds.labels(model)
        self._parked_seconds = metrics.parked_seconds.labels(model)
        self._parked_rows = metrics.parked_rows.labels(model)
        self._width = metrics.width.labels(model)
        self._probes = {
            paid: metrics.probes.labels(model, "paid" if paid else "failed")
            for paid in (True, False)
        }

    def step(self, step: Step) -> None:
        """One step of the engine, of whatever kind."""
        self._parked_rows.set(step.parked_rows)
        if step.parked_rows:
            self._parked_seconds.inc(step.seconds * step.parked_rows)
        if step.probe_paid is not None:
            self._probes[step.probe_paid].inc()
        record = step.round
        if record is None:
            return
        self._rounds.inc()
        self._drafts.inc(step.rows)
        self._draft_tokens.inc(record.drafted)
        self._accepted.inc(record.accepted)
        self._width.observe(record.width)
        self._draft_seconds.inc(record.draft_seconds)
        self._verify_seconds.inc(max(step.seconds - record.draft_seconds, 0.0))
        for position, count in enumerate(record.accepted_by_position, start=1):
            self._by_position.labels(self._model, str(position)).inc(count)
