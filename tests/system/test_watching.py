"""Prometheus' own view of our metrics, and every query of the dashboard on real data."""

from __future__ import annotations

import json
import math
import subprocess
import time
import urllib.request
from typing import Any

import pytest

from tests.system.conftest import DEPLOY, PATIENCE, Prometheus
from tests.test_end_to_end import Running

DASHBOARD = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]

ZERO_AT_REST = {"Running", "Waiting", "Running and waiting", "Waiting prompt tokens"}
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
    assert names == ["smollm2-135m"]
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
