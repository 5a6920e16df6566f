"""Prometheus' own view of our metrics, and every query of the dashboard on real data."""

from __future__ import annotations

import json
import math
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.system.conftest import DEPLOY, MODEL, PATIENCE, TINY, Prometheus
from tests.test_end_to_end import Running

DASHBOARD = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]

ZERO_AT_REST = {
    "Running",
    "Waiting",
    "Running and waiting",
    "Waiting prompt tokens",
    "Rows parked",
}
"""Panels that show nothing but zeros once the traffic is over."""


def filled(query: str) -> str:
    """A query with Grafana's variables filled in as for all models."""
    return query.replace("$__rate_interval", "5m").replace("$model", ".*")


def test_promtool_has_no_objection_to_the_metrics(daemon: Running) -> None:
    with urllib.request.urlopen(f"{daemon.url}/metrics") as answer:
        exposed = answer.read()
    assert b"sparklane_generated_tokens_total" in exposed
    done = subprocess.run(["promtool", "check", "metrics"], input=exposed, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.parametrize(
    "arguments", [("config", "prometheus.yml"), ("rules", "alerts.yml")], ids=" ".join
)
def test_promtool_accepts_our_files(arguments: tuple[str, str]) -> None:
    kind, name = arguments
    done = subprocess.run(
        ["promtool", "check", kind, name], cwd=DEPLOY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout and "FAILED" not in done.stdout


def series(name: str, per_minute: float) -> dict[str, str]:
    """A counter of one model that rises evenly for two days."""
    labels = '{instance="here", model="a"}'
    return {"series": f"sparklane_{name}{labels}", "values": f"0+{per_minute:g}x2880"}


# By minute: 60 rounds of one row in 30 s of 50 s of steps, all of them decode.
SPECULATING = {
    "drafts_total": 60.0,
    "accepted_tokens_total": 120.0,
    "draft_seconds_total": 6.0,
    "verify_seconds_total": 24.0,
    "step_duration_seconds_sum": 50.0,
    "inter_token_latency_seconds_sum": 50.0,
    "parked_row_seconds_total": 20.0,
}
PROBING = {"drafts_total": 1.0, "draft_seconds_total": 0.1, "verify_seconds_total": 0.4}


@pytest.mark.parametrize(
    ("changes", "firing"),
    [
        ({}, set()),
        ({"accepted_tokens_total": 6.0}, {"SparklaneDraftsWasted"}),
        (
            {"accepted_tokens_total": 0.0, "parked_row_seconds_total": 44.0},
            {"SparklaneDraftsWasted"},
        ),
        # Probes of a parked lane cost next to nothing, and are not worth a warning.
        (
            {**PROBING, "accepted_tokens_total": 0.0, "parked_row_seconds_total": 49.0},
            {"SparklaneParkedAllDay"},
        ),
        (dict.fromkeys(SPECULATING, 0.0), set()),
    ],
    ids=["well", "wasted", "half parked", "parked", "idle"],
)
def test_speculation_that_fails_is_told(
    changes: dict[str, float], firing: set[str], tmp_path: Path
) -> None:
    names = ("SparklaneDraftsWasted", "SparklaneParkedAllDay")
    counters = SPECULATING | changes
    checks = [
        {
            "expr": f'count(ALERTS{{alertname="{name}", alertstate="firing"}})',
            "eval_time": "40h",
            "exp_samples": [{"labels": "{}", "value": 1}] if name in firing else [],
        }
        for name in names
    ]
    test = {
        "rule_files": [str(DEPLOY / "alerts.yml")],
        "evaluation_interval": "5m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [series(*counter) for counter in counters.items()],
                "promql_expr_test": checks,
            }
        ],
    }
    (tmp_path / "test.yml").write_text(json.dumps(test))
    done = subprocess.run(
        ["promtool", "test", "rules", "test.yml"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_shows_data(panel: dict[str, Any], prometheus: Prometheus) -> None:
    shown = []
    for target in panel["targets"]:
        values = prometheus.values(filled(target["expr"]))
        # A series without traffic, such as a lane that is not used, may have no quotient.
        finite = [value for value in values if math.isfinite(value)]
        assert finite, f"{target['expr']} gave {values}"
        shown += finite
    assert min(shown) >= 0
    assert (max(shown) > 0) is (panel["title"] not in ZERO_AT_REST)


def test_models_can_be_chosen_and_restarts_are_marked(prometheus: Prometheus) -> None:
    (variable,) = [one for one in DASHBOARD["templating"]["list"] if one["name"] == "model"]
    assert variable["definition"] == "label_values(sparklane_engine_up, model)"
    names = prometheus.get("label/model/values", **{"match[]": "sparklane_engine_up"})
    assert names == [MODEL, TINY]
    (marks,) = DASHBOARD["annotations"]["list"]
    prometheus.wait_for(filled(marks["expr"]), lambda values: max(values, default=0.0) > 0)


def test_alerts_are_evaluated_and_quiet(prometheus: Prometheus) -> None:
    def rules() -> list[dict[str, Any]]:
        (group,) = prometheus.get("rules")["groups"]
        return list(group["rules"])

    assert len(rules()) >= 5
    deadline = time.monotonic() + PATIENCE
    while any(rule["health"] == "unknown" for rule in rules()):
        assert time.monotonic() < deadline, rules()
        time.sleep(0.1)
    for rule in rules():
        assert rule["health"] == "ok", rule
        assert rule["state"] != "firing", rule
