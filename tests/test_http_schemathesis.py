"""Whatever fits /openapi.json, and much that does not, gets an answer that it declares."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from daemon.openapi import document
from tests.fake_dispatcher import FakeDispatcher, Server, serving

schema = schemathesis.openapi.from_dict(document())


@pytest.fixture(scope="module")
def server(smollm2: Path) -> Iterator[Server]:
    with serving(FakeDispatcher(smollm2, [504, 505, 506])) as found:
        yield found


@schema.parametrize()
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_answer_is_declared(case: schemathesis.Case, server: Server) -> None:
    case.call_and_validate(
        base_url=server.url,
        checks=[
            not_a_server_error,
            status_code_conformance,
            content_type_conformance,
            response_schema_conformance,
            negative_data_rejection,
        ],
    )
