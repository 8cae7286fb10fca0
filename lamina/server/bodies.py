"""Bodies: read within limits, decoded, and turned into the requests of protocol.py."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .config import ServerConfig
from .errors import ApiError, error_response

M = TypeVar("M", bound=BaseModel)


def parse(model: type[M], request: Request) -> M:
    """The request's body as ``model``. Raises ApiError."""
    try:
        found = model.model_validate(request.state.json)
    except ValidationError as e:
        first = e.errors(include_input=False, include_url=False, include_context=False)[0]
        where = ".".join(str(x) for x in first["loc"])
        raise ApiError(400, f"{where or 'body'}: {first['msg']}", param=where or None, code="invalid_value") from e
    request.app.state.service.fields.check(found)
    return found


def described(model: type[BaseModel]) -> dict[str, Any]:
    """The body of a route for /openapi.json."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    definitions = schema.pop("$defs", {})
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": _inlined(schema, definitions)}}}
    }


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(schema, dict):
        if "$ref" in schema:
            return _inlined(definitions[schema["$ref"].rsplit("/", 1)[1]], definitions)
        return {k: _inlined(v, definitions) for k, v in schema.items()}
    return [_inlined(x, definitions) for x in schema] if isinstance(schema, list) else schema


class BodyLimits:
    """Reads the body of every POST: bounded in size, time and depth. The decoded JSON goes to ``state["json"]``."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._config = config
        self._max_bytes = config.max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        try:
            self._check_headers(dict(scope["headers"]))
            body = await self._read(receive)
            if body is None:
                return
            scope.setdefault("state", {})["json"] = decode(body, self._config.max_nesting)
        except ApiError as e:
            await error_response(e)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check_headers(self, headers: dict[bytes, bytes]) -> None:
        if headers.get(b"content-encoding", b"identity") != b"identity":
            raise ApiError(415, "Content-Encoding is not supported", code="unsupported_encoding")
        kind = headers.get(b"content-type", b"application/json").split(b";")[0].strip().lower()
        if kind != b"application/json":
            raise ApiError(415, "Content-Type must be application/json", code="unsupported_media_type")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_bytes:
            raise self._too_large()

    async def _read(self, receive: Receive) -> bytes | None:
        body = bytearray()
        try:
            async with asyncio.timeout(self._config.body_timeout_s):
                while True:
                    message: Message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    if len(body) > self._max_bytes:
                        raise self._too_large()
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise ApiError(408, f"no body after {self._config.body_timeout_s:g} s", code="timeout") from None

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._max_bytes} bytes", code="body_too_large")


def decode(body: bytes, max_nesting: int) -> Any:
    """JSON of bounded depth. Raises ApiError."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise ApiError(400, f"the body is not JSON: {e}", code="invalid_json") from e
    except RecursionError as e:
        raise ApiError(400, f"the body is nested deeper than {max_nesting}", code="too_deep") from e
    if body.count(b"[") + body.count(b"{") > max_nesting and _deeper(found, max_nesting):
        raise ApiError(400, f"the body is nested deeper than {max_nesting}", code="too_deep")
    return found


def _deeper(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        level = [x for v in level for x in _children(v)]
        if not level:
            return False
    return True


def _children(value: Any) -> list[Any]:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [x for x in items if isinstance(x, dict | list)]
