"""What the CUDA backend is told, and that an operator's word counts more."""

from __future__ import annotations

import pytest

from models import cuda_settings

NAMES = [*cuda_settings.LONG_LIVED, *cuda_settings.GROWING_KEYS]


@pytest.mark.parametrize(("growing", "expected"), [(True, ["0", "0"]), (False, ["0", None])])
def test_what_is_not_set_is_set(
    monkeypatch: pytest.MonkeyPatch, growing: bool, expected: list[str | None]
) -> None:
    environment: dict[str, str] = {}
    monkeypatch.setattr("os.environ", environment)
    cuda_settings.prepare(growing_keys=growing)
    assert [environment.get(name) for name in NAMES] == expected


def test_what_an_operator_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = dict.fromkeys(NAMES, "1")
    monkeypatch.setattr("os.environ", environment)
    cuda_settings.prepare(growing_keys=True)
    assert environment == dict.fromkeys(NAMES, "1")
