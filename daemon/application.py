"""The aiohttp application: routes and middlewares.

Owns the assembly; runs on the event loop. Whoever runs it must use
`AppRunner(handler_cancellation=True)`: a client that leaves then cancels its handler, and with
it the generation.
"""

from __future__ import annotations

from aiohttp import web

from daemon.access import allow_origin, cors_middleware, host_middleware, keys_middleware
from daemon.chat import chat_completions
from daemon.completions import completions
from daemon.edge import DISPATCHER, METRICS, SETTINGS, TEXT_SIDES, HttpSettings
from daemon.errors import errors_middleware
from daemon.generation import Dispatcher
from daemon.health import get_model, list_models, livez, metrics, readyz
from daemon.metrics import Metrics
from daemon.openapi import openapi
from daemon.text.side import TextSides

__all__ = ["HttpSettings", "create_application"]


def create_application(
    dispatcher: Dispatcher, settings: HttpSettings, metrics_: Metrics
) -> web.Application:
    """The application over `dispatcher`. `settings` is read at every request."""
    application = web.Application(
        client_max_size=settings.maximum_body_bytes,
        middlewares=[errors_middleware, host_middleware, cors_middleware, keys_middleware],
    )
    application[DISPATCHER] = dispatcher
    application[SETTINGS] = settings
    application[METRICS] = metrics_
    application[TEXT_SIDES] = TextSides()
    application.on_response_prepare.append(allow_origin)
    application.add_routes(
        [
            web.post("/v1/chat/completions", chat_completions),
            web.post("/v1/completions", completions),
            web.get("/v1/models", list_models),
            # Names may be those of hubs, such as org/repo.
            web.get("/v1/models/{model:.+}", get_model),
            web.get("/livez", livez),
            web.get("/readyz", readyz),
            web.get("/health", readyz),
            web.get("/metrics", metrics),
            web.get("/openapi.json", openapi),
        ]
    )
    return application
