"""What the routes share: the dispatcher, the settings, and finding a model's text side.

Owns the application's keys. Handlers run on the event loop.
"""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web

from daemon.errors import ApiError
from daemon.generation import Dispatcher, ModelState, ServedModel
from daemon.metrics import Metrics
from daemon.text.side import TextSide, TextSides

LOADING_RETRY_SECONDS = 5.0


@dataclass
class HttpSettings:
    """How HTTP is served. Fields may be changed while serving (a reload does).

    Keys are compared in constant time; none means that no key is asked for. `allowed_hosts`
    are Host headers without a port; empty means that any is accepted.
    """

    api_keys: frozenset[str] = frozenset()
    allowed_hosts: frozenset[str] = frozenset()
    cors_origins: frozenset[str] = frozenset()
    maximum_body_bytes: int = 8 * 1024 * 1024
    keepalive_seconds: float = 10.0


DISPATCHER: web.AppKey[Dispatcher] = web.AppKey("dispatcher", Dispatcher)
SETTINGS = web.AppKey("settings", HttpSettings)
METRICS = web.AppKey("metrics", Metrics)
TEXT_SIDES = web.AppKey("text_sides", TextSides)


def model_of(http: web.Request, name: str) -> ServedModel:
    """The served model of that name.

    Raises:
        ApiError: 404, naming what is served.
    """
    models = http.app[DISPATCHER].models
    if name not in models:
        served = ", ".join(sorted(models))
        raise ApiError(
            404,
            f"model {name!r} is not served here; served are: {served}",
            param="model",
            code="model_not_found",
        )
    return models[name]


async def text_of(http: web.Request, name: str) -> tuple[ServedModel, TextSide]:
    """The model of that name with its tokenizer.

    Raises:
        ApiError: 404 for an unknown model, 503 for one that is down or not fetched yet.
    """
    model = model_of(http, name)
    if model.state is ModelState.DOWN:
        raise ApiError(
            503, f"model {name!r} is down: {model.problem}", param="model", code="model_down"
        )
    if model.folder is None:
        raise ApiError(
            503,
            f"model {name!r} is still being fetched; try again soon",
            param="model",
            code="model_loading",
            retry_after=LOADING_RETRY_SECONDS,
        )
    return model, await http.app[TEXT_SIDES].of(model.folder)
