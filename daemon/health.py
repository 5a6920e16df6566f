"""GET /livez, /readyz, /health, /metrics and the list of models.

Runs on the event loop; cannot fail. Live is not ready: live means that restarting the daemon
would not help, ready that a request would be answered now.
"""

from __future__ import annotations

import msgspec
from aiohttp import web

from daemon.edge import DISPATCHER, METRICS, model_of
from daemon.errors import json_response
from daemon.generation import MeasuringProgress, ModelState, ServedModel
from daemon.openai_answers import ModelCard, ModelList


class ModelHealth(msgspec.Struct, frozen=True, kw_only=True):
    """One model: its state and, when it is down, why.

    `measuring` says how far a ready model with a drafter is in measuring what rounds cost, such
    as "costs 12/144"; it drafts as far as costs are known.
    """

    state: ModelState
    problem: str | None = None
    measuring: str | None = None


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """How the daemon is."""

    live: bool
    ready: bool
    draining: bool
    models: dict[str, ModelHealth]


def health_of(request: web.Request) -> Health:
    """The state of the daemon and its models."""
    dispatcher = request.app[DISPATCHER]
    models = {
        name: ModelHealth(
            state=model.state, problem=model.problem, measuring=_words(model.measuring)
        )
        for name, model in dispatcher.models.items()
    }
    loaded = all(model.state is ModelState.READY for model in models.values())
    return Health(
        live=not dispatcher.wedged,
        ready=loaded and not dispatcher.draining and not dispatcher.wedged,
        draining=dispatcher.draining,
        models=models,
    )


async def livez(request: web.Request) -> web.Response:
    """200 unless work is pending and nothing has moved for too long."""
    health = health_of(request)
    return json_response(health, status=200 if health.live else 503)


async def readyz(request: web.Request) -> web.Response:
    """200 when every model can answer and the daemon is not stopping."""
    health = health_of(request)
    return json_response(health, status=200 if health.ready else 503)


async def metrics(request: web.Request) -> web.Response:
    """Prometheus text."""
    body, content_type = request.app[METRICS].exposition()
    return web.Response(body=body, headers={"Content-Type": content_type})


async def list_models(request: web.Request) -> web.Response:
    """What is served."""
    models = request.app[DISPATCHER].models.values()
    return json_response(ModelList(data=[_card(model) for model in models]))


async def get_model(request: web.Request) -> web.Response:
    """One model."""
    return json_response(_card(model_of(request, request.match_info["model"])))


def _words(measuring: MeasuringProgress | None) -> str | None:
    return None if measuring is None else f"costs {measuring.timed}/{measuring.total}"


def _card(model: ServedModel) -> ModelCard:
    return ModelCard(id=model.name, created=model.created, max_model_len=model.context_length)
