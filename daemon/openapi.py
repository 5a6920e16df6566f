"""GET /openapi.json, made from the schemas that requests are decoded with.

Pure; built once at the first request.
"""

from __future__ import annotations

import functools
from typing import Any

import msgspec
from aiohttp import web

from daemon.errors import ErrorAnswer
from daemon.health import Health
from daemon.openai_answers import (
    ChatChunk,
    ChatCompletion,
    Completion,
    ModelCard,
    ModelList,
)
from daemon.openai_requests import ChatRequest, CompletionRequest
from daemon.version import VERSION

_REFUSALS = {
    "400": "The request is wrong; `param` names the field.",
    "401": "An API key is needed.",
    "403": "The Host header is not this server's.",
    "404": "There is no such model.",
    "413": "The body is too large.",
    "429": "Too many requests of this tenant wait; see Retry-After.",
    "500": "Something that nobody foresaw.",
    "503": "The queue is full, or the model is not ready; see Retry-After.",
}


@functools.cache
def document() -> dict[str, Any]:
    """The OpenAPI 3.1 description of every route."""
    types = (
        ChatRequest,
        CompletionRequest,
        ChatCompletion,
        ChatChunk,
        Completion,
        ModelCard,
        ModelList,
        Health,
        ErrorAnswer,
    )
    references, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    schema: dict[type, dict[str, Any]] = {
        kind: reference for kind, reference in zip(types, references, strict=True)
    }

    def answers(success: dict[str, Any], *refusals: str) -> dict[str, Any]:
        found: dict[str, Any] = {"200": {"description": "Success.", "content": success}}
        for status in refusals:
            found[status] = {
                "description": _REFUSALS[status],
                "content": {"application/json": {"schema": schema[ErrorAnswer]}},
            }
        return found

    def post(request: type, answer: type, event: type, summary: str) -> dict[str, Any]:
        return {
            "summary": summary,
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": schema[request]}},
            },
            "responses": answers(
                {
                    "application/json": {"schema": schema[answer]},
                    "text/event-stream": {
                        "schema": {"type": "string"},
                        "x-event-schema": schema[event],
                    },
                },
                *_REFUSALS,
            ),
        }

    def get(answer: type | None, summary: str, *refusals: str) -> dict[str, Any]:
        content: dict[str, Any] = (
            {"text/plain": {"schema": {"type": "string"}}}
            if answer is None
            else {"application/json": {"schema": schema[answer]}}
        )
        return {"summary": summary, "responses": answers(content, "401", "403", "500", *refusals)}

    def health(summary: str) -> dict[str, Any]:
        content = {"application/json": {"schema": schema[Health]}}
        found = get(Health, summary)
        found["responses"]["503"] = {"description": "It is not.", "content": content}
        return found

    one_model = get(ModelCard, "One model.", "404")
    one_model["parameters"] = [
        {
            "name": "model",
            "in": "path",
            "required": True,
            "schema": {"type": "string", "pattern": "^[^/]*[^/.][^/]*$"},
        }
    ]
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "sparklane",
            "version": VERSION,
            "description": "Language models on MLX, for OpenAI's clients.",
        },
        "paths": {
            "/v1/chat/completions": {
                "post": post(ChatRequest, ChatCompletion, ChatChunk, "Answer a conversation.")
            },
            "/v1/completions": {
                "post": post(CompletionRequest, Completion, Completion, "Continue a text.")
            },
            "/v1/models": {"get": get(ModelList, "What is served.")},
            "/v1/models/{model}": {"get": one_model},
            "/livez": {"get": health("Whether the daemon is alive.")},
            "/readyz": {"get": health("Whether requests are answered now.")},
            "/health": {"get": health("The same as /readyz.")},
            "/metrics": {"get": get(None, "Prometheus metrics.")},
        },
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


async def openapi(request: web.Request) -> web.Response:
    """The description of this API."""
    return web.Response(body=msgspec.json.encode(document()), content_type="application/json")
