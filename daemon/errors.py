"""Errors as OpenAI's clients expect them, and the one place that makes them.

Owns the middleware that turns every exception into an answer; on the event loop. Nothing that a
handler raises gets past it: what nobody foresaw is logged and answered with 500.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from daemon.generation import Refusal, RefusalKind

log = logging.getLogger("sparklane.http")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong: `param` names the field, `code` is for programs, `message` for people."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(msgspec.Struct, frozen=True):
    """The body of every error, and of the error event of a stream."""

    error: ErrorBody


class ApiError(Exception):
    """Becomes the answer to a request."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after
        self.answer = ErrorAnswer(
            ErrorBody(message=message, type=_type_of(status), param=param, code=code)
        )

    def response(self) -> web.Response:
        """The HTTP response."""
        headers = {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after)))
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return json_response(self.answer, status=self.status, headers=headers)


def invalid(param: str, message: str) -> ApiError:
    """A 400 that names a field."""
    return ApiError(400, message, param=param, code="invalid_value")


def of_refusal(refusal: Refusal) -> ApiError:
    """What the dispatcher refused, as an answer."""
    code: str = refusal.kind
    param = None
    if refusal.kind is RefusalKind.CONTEXT_LENGTH:
        code, param = "context_length_exceeded", "messages"
    elif refusal.kind is RefusalKind.UNKNOWN_MODEL:
        code, param = "model_not_found", "model"
    return ApiError(
        refusal.kind.status,
        refusal.message,
        param=param,
        code=code,
        retry_after=refusal.retry_after,
    )


def of_exception(error: Exception) -> ApiError:
    """Any exception of a handler, as an answer."""
    match error:
        case ApiError():
            return error
        case Refusal():
            return of_refusal(error)
        case web.HTTPRequestEntityTooLarge():
            words = f"the request body is too large: {error.text} "
            words += "Send less, or raise server.maximum_body_bytes."
            return ApiError(413, words, code="request_too_large")
        case web.RequestPayloadError():
            return ApiError(400, f"the request body cannot be read: {error}", code="invalid_body")
        case web.HTTPNotFound():
            return ApiError(404, "there is no such route; see /openapi.json", code="not_found")
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            words = f"{error.method} is not allowed here; use {allowed}"
            return ApiError(405, words, code="method_not_allowed")
        case web.HTTPException():
            return ApiError(error.status, error.reason)
    log.error("a request failed", exc_info=error)
    return ApiError(500, "internal error; the daemon's log has the details", code="internal_error")


@web.middleware
async def errors_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer exceptions."""
    try:
        return await handler(request)
    except Exception as error:
        response = of_exception(error).response()
        if isinstance(error, web.HTTPMethodNotAllowed):
            response.headers["Allow"] = ", ".join(sorted(error.allowed_methods))
        return response


def json_response(
    body: msgspec.Struct, *, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    """A JSON answer."""
    return web.Response(
        body=msgspec.json.encode(body),
        status=status,
        content_type="application/json",
        headers=headers,
    )


def _type_of(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    if status in (401, 403):
        return "authentication_error"
    return "invalid_request_error" if status < 500 else "server_error"
