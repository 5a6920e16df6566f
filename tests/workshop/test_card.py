"""What a drafter's card says of its calibration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from models.calibration import Calibration
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


def _card(folder: Path, record: Calibration | None) -> str:
    export.export(TARGET, FIXTURES / "qwen3" / "drafter", folder, None, False)
    if record is not None:
        record.save(folder)
    return write_card(folder, RUN, [], CORPUS, [])


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
