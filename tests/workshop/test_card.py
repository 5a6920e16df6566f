"""What a drafter's card says of its calibration, its shortlist and its costs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from models.calibration import Calibration
from models.dspark.shortlist import Shortlist
from models.platt_scaling import PlattFit
from models.workshop import export
from models.workshop.card import write_card
from tests.dspark.pairs import FIXTURES
from tests.workshop.corpora import TARGET

RUN: dict[str, Any] = {
    "fingerprint": {"target": "a", "tokenizer": "b"}, "anchors": 4, "seed": 0, "optimizer": {}
}  # fmt: skip
CORPUS: dict[str, Any] = {
    "conversations": 9, "answer_tokens": 99, "seed": 0, "rows": 4, "excluded": [],
    "settings": {"answer_temperatures": [0.0]},
}  # fmt: skip
OLD = Calibration(
    temperatures=[1.5] * 7, rounds=1234, error_before=[0.2] * 7, error_after=[0.04] * 7
)
FIT = PlattFit(
    sampling_temperature=0.0,
    scales=[1.25] * 7,
    biases=[-0.5] * 7,
    rounds=4321,
    conversations=123,
    error_before=[0.061] * 7,
    error_temperatures_only=[0.045] * 7,
    error_after=[0.015] * 7,
    noise_floor=[0.012] * 7,
)


COSTS: dict[str, Any] = {
    "dataset": "questions", "temperature": 0.0, "rows": 2, "tau": 2.5, "tau_first_64": 2.25,
    "looping_share": 0.0, "serial_step_seconds": 0.01234, "draft_seconds": 0.004,
    "verify_seconds": 0.0175, "round_seconds": 0.02, "break_even_tau": 1.62, "cost_rows": 2,
    "cost_depth": 321,
}  # fmt: skip


def _card(folder: Path, record: Calibration | None, results: Sequence[dict[str, Any]] = ()) -> str:
    export.export(TARGET, FIXTURES / "qwen3" / "drafter", folder, None, False)
    if record is not None:
        record.save(folder)
    return write_card(folder, RUN, [], CORPUS, results)


def test_no_calibration(tmp_path: Path) -> None:
    assert "## Calibration" not in _card(tmp_path, None)


def test_temperatures_alone(tmp_path: Path) -> None:
    lines = _card(tmp_path, OLD).splitlines()
    assert "1,234 held-out rounds." in lines
    assert "| 7 | 1.500 | 20.0 % | 4.0 % |" in lines


def test_a_table_for_each_sampling_temperature(tmp_path: Path) -> None:
    hot = msgspec.structs.replace(FIT, sampling_temperature=1.0, rounds=8765)
    lines = _card(tmp_path, msgspec.structs.replace(OLD, fits=[FIT, hot])).splitlines()
    assert "Sampling temperature 0, 4,321 rounds of 123 conversations:" in lines
    assert "Sampling temperature 1, 8,765 rounds of 123 conversations:" in lines
    assert lines.count("| 7 | 1.250 | -0.500 | 6.1 % | 4.5 % | 1.5 % | 1.2 % |") == 2
    assert not any("1.500" in line for line in lines)


def test_a_shortlist_and_what_it_covers(tmp_path: Path) -> None:
    assert "shortlist" not in _card(tmp_path, None)
    Shortlist(tokens=tuple(range(60)), coverage=0.98765, counted=12345, corpus="cafe").save(
        tmp_path
    )
    assert (
        "Drafts are chosen from a shortlist of 60 of 512 tokens, which hold 98.77 % of 12,345 "
        "answer tokens (corpus `cafe`)."
    ) in _card(tmp_path, None)


def test_costs_where_they_were_measured(tmp_path: Path) -> None:
    old = {name: value for name, value in COSTS.items() if not name.endswith("_seconds")}
    assert "milliseconds" not in _card(tmp_path, None, [old])
    lines = _card(tmp_path, None, [old, COSTS]).splitlines()
    assert lines.count("| questions | 2 | 321 | 12.34 | 4.00 | 17.50 | 20.00 | 1.62 |") == 1
