"""Descriptions of bodies and replies in /openapi.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from .server_config import ServerConfig

Answers = dict[int | str, dict[str, Any]]

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_WHY = {
    202: "it is being computed: retry after Retry-After",
    400: "the request is wrong: param names its field",
    401: "an API key is needed",
    403: "a foreign host or origin",
    404: "there is no such thing",
    408: "the body did not arrive in time",
    409: "not now, or not so: nothing has changed",
    413: "the body is too large",
    415: "the body is no JSON, or encoded",
    429: "too many requests wait: again after Retry-After",
    500: "the server failed",
    503: "the server shuts down, the engine is gone, or memory is full now",
}
_WORDS = {"ge": "minimum", "le": "maximum"}  # pydantic's names, for integers that may be written as 1.0
_SCORES = ("logprobs", "top_logprobs", "prompt_logprobs")
_ANY = (401, 403, 500)  # statuses of any route
_WITH_BODY = (400, 404, 408, 413, 415, 503)


class DescribedApp(FastAPI):
    """An application whose description states the limits of ``config``."""

    def __init__(self, config: ServerConfig, **options: Any) -> None:
        super().__init__(**options)
        self._limits = {
            "n": {"maximum": config.max_n},
            "stop": {"maxItems": config.max_stop, "maxLength": config.max_stop_chars},
            "bad_words": {"maxItems": config.max_logit_bias, "maxLength": config.max_stop_chars},
            "stop_token_ids": {"maxItems": config.max_logit_bias},
            "logit_bias": {"maxProperties": config.max_logit_bias},
        }
        if config.max_logprobs >= 0:
            self._limits |= {name: {"maximum": config.max_logprobs} for name in _SCORES}

    def openapi(self) -> dict[str, Any]:
        """Return the description of all routes, made at the first call."""
        if self.openapi_schema is None:
            self.openapi_schema = _plain(_limited(super().openapi(), self._limits))
        return self.openapi_schema


def _plain(description: Any) -> Any:
    """Return a description whose texts are Markdown: docstrings have code between two backticks on each side."""
    if isinstance(description, list):
        return [_plain(x) for x in description]
    if isinstance(description, dict):
        return {key: _plain(value) for key, value in description.items()}
    return description.replace("``", "`") if isinstance(description, str) else description


def _limited(description: Any, limits: Mapping[str, Mapping[str, int]]) -> Any:
    """Return a description in which no bound of a property exceeds its entry in ``limits``."""
    if isinstance(description, list):
        return [_limited(x, limits) for x in description]
    if not isinstance(description, dict):
        return description
    copied = {key: _limited(value, limits) for key, value in description.items()}
    if isinstance(properties := copied.get("properties"), dict):
        copied["properties"] = {n: _lowered(form, limits[n]) if n in limits else form for n, form in properties.items()}
    return copied


def _lowered(form: Any, limit: Mapping[str, int]) -> Any:
    if isinstance(form, list):
        return [_lowered(x, limit) for x in form]
    if not isinstance(form, dict):
        return form
    return {
        key: min(value, limit[key]) if key in limit and isinstance(value, int | float) else _lowered(value, limit)
        for key, value in form.items()
    }


def responses_of(*statuses: int, kinds: tuple[str, ...] = ("application/json",), body: bool = False) -> Answers:
    """Return the replies of a route: status 200 in one of ``kinds``, ``statuses``, the statuses of every route and,
    with ``body``, the statuses of routes that read a body.
    """
    by_status: Answers = {200: {"description": "all is well", "content": {kind: {} for kind in kinds}}}
    for status in sorted({*_ANY, *statuses, *(_WITH_BODY if body else ())}):
        schema = {"schema": _ERROR} if status >= 400 else {}
        by_status[status] = {"description": _WHY[status], "content": {"application/json": schema}}
    return by_status


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """Return the description of a route's body."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    definitions = schema.pop("$defs", {})
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": _inlined(schema, definitions)}}}
    }


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(schema, dict):
        if "$ref" in schema:
            return _inlined(definitions[schema["$ref"].rsplit("/", 1)[1]], definitions)
        return {k if isinstance(v, dict) else _WORDS.get(k, k): _inlined(v, definitions) for k, v in schema.items()}
    return [_inlined(x, definitions) for x in schema] if isinstance(schema, list) else schema
