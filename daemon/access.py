"""Who may call: keys, Host headers and CORS.

Middlewares, one concern each, on the event loop. Health checks need no key, because a
supervisor must be able to ask. The Host header is checked because a web page can make a browser
call a loopback address under a name of its own (DNS rebinding).
"""

from __future__ import annotations

import hmac

from aiohttp import web

from daemon.edge import SETTINGS
from daemon.errors import ApiError, Handler

OPEN_ROUTES = frozenset({"/livez", "/readyz", "/health"})


@web.middleware
async def host_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse Host headers that are not ours."""
    allowed = request.app[SETTINGS].allowed_hosts
    # Not `request.host`: without a header, that asks the resolver for this machine's name.
    host = request.headers.get("Host", "")
    if allowed and _host_name(host) not in allowed:
        raise ApiError(
            403,
            f"the Host header {host!r} is not one of this server's; add it to server.allowed_hosts",
            code="host_not_allowed",
        )
    return await handler(request)


@web.middleware
async def keys_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Ask for a key where keys are set."""
    keys = request.app[SETTINGS].api_keys
    if keys and request.path not in OPEN_ROUTES and request.method != "OPTIONS":
        offered = _offered_key(request).encode()
        # Every key is compared, so that the time taken tells nothing.
        if not sum(hmac.compare_digest(offered, key.encode()) for key in keys):
            raise ApiError(
                401,
                "the API key is missing or wrong; send it as `Authorization: Bearer KEY`",
                code="invalid_api_key",
            )
    return await handler(request)


@web.middleware
async def cors_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Let configured origins call from a browser, and answer their preflights."""
    origin = request.headers.get("Origin", "")
    if origin not in request.app[SETTINGS].cors_origins:
        return await handler(request)
    if request.method == "OPTIONS":
        response: web.StreamResponse = web.Response(status=204)
        response.headers["Access-Control-Allow-Methods"] = "GET, POST"
        response.headers["Access-Control-Allow-Headers"] = "Authorization, Content-Type"
        _allow(response, origin)
        return response
    return await handler(request)


async def allow_origin(request: web.Request, response: web.StreamResponse) -> None:
    """Signal handler: a stream's headers leave before its handler returns."""
    origin = request.headers.get("Origin", "")
    if origin in request.app[SETTINGS].cors_origins:
        _allow(response, origin)


def _allow(response: web.StreamResponse, origin: str) -> None:
    response.headers["Access-Control-Allow-Origin"] = origin
    response.headers["Vary"] = "Origin"


def _offered_key(request: web.Request) -> str:
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _host_name(host: str) -> str:
    """The name without its port; IPv6 addresses keep their brackets."""
    if host.startswith("["):
        return host.partition("]")[0].lower() + "]"
    return host.rpartition(":")[0].lower() if ":" in host else host.lower()
