"""Reads bodies within limits, decodes them, and makes the requests of openai_protocol.py."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lamina.server.errors import ApiError, error_response
from lamina.server.limits import decoding_bytes, held_bytes
from lamina.server.request import json_decoding
from lamina.server.request.generation_config import fields_of
from lamina.server.request.openai_protocol import PromptCacheOptions
from lamina.server.request.unsupported_fields import IGNORED, MESSAGE, PART, STREAM_OPTIONS, UNSUPPORTED, check_neutral
from lamina.server.server_config import ServerConfig

from .budget import MemoryBudget
from .intake import SMALL, Intake

if TYPE_CHECKING:
    from lamina.server.call import Service

M = TypeVar("M", bound=BaseModel)
_NULL = msgspec.Raw(b"null")
INLINE_BYTES = SMALL  # a longer body is decoded on a thread, off the event loop
_PLAIN_WORDS = (  # replacements in pydantic's messages
    ("^(Dictionary|Input|List|String) should ", "must "),
    ("^Field required$", "must be given"),
    ("^Value error, | after validation", ""),
    ("greater than or equal to", "at least"),
    ("less than or equal to", "at most"),
    ("a valid dictionary.*", "an object"),
    ("a valid boolean", "true or false"),
    ("a valid integer", "an integer"),
    ("a valid ", "a "),
)
LONG = ("prompt", "messages", "session", "tokens")  # fields with limits of their own
MAX_NEUTRAL_BYTES = 256  # a longer value of an unsupported field is never neutral


async def parse(model: type[M], request: Request) -> M:
    """Return the request's body as ``model``. The request counts the decoded values from now on. Raises ApiError."""
    service, state = request.app.state.service, request.state
    body, intake = state.body, state.intake
    del state.body
    if len(body) <= INLINE_BYTES:
        value, held = _parse(model, body, service)
        intake.hold(held)
        return value
    loop = asyncio.get_running_loop()
    async with service.decoding:  # one at a time, as each may take many times its size
        intake.hold(decoding_bytes(len(body)))
        value, held = await loop.run_in_executor(service.decode_executor, _parse, model, body, service)
        intake.hold(held)
    return value


def _parse(model: type[M], body: bytes | bytearray, service: Service) -> tuple[M, int]:
    """Return a body as ``model``, and the bytes that it takes. Raises ApiError."""
    config = service.config
    given: dict[str, Any] = {}
    fields = json_decoding.split_fields(body, config.max_nesting)
    cuts = service.client.ready.truncates
    is_cut = "truncate_prompt_tokens" in model.model_fields and fields.get("truncate_prompt_tokens", _NULL) != _NULL
    limit = json_decoding.MAX_COMMAS if is_cut or cuts else service.client.ready.max_model_len
    rest = json_decoding.Allowance("the body")
    for name, raw in fields.items():
        if name in model.model_fields:
            if name not in LONG:
                rest.take(raw)
            given[name] = _value(name, raw, config, limit)
        elif name in UNSUPPORTED:
            small = len(bytes(raw)) <= MAX_NEUTRAL_BYTES
            check_neutral(
                name, json_decoding.decode_value(name, raw, config.max_nesting) if small else ..., UNSUPPORTED[name]
            )
        elif name not in IGNORED:
            service.unknown_fields.check_name(name, [*model.model_fields, *UNSUPPORTED])
    if given.get("generation_config") is not None and "generation_config" in model.model_fields:
        given = {**fields_of(given["generation_config"]), **{k: v for k, v in given.items() if v is not None}}
    _check_inner(given, service)
    try:
        return model.model_validate(given), held_bytes(given)
    except ValidationError as e:
        raise _refused(e) from e


def _refused(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False)[0]
    where, message, given = ".".join(map(str, first["loc"])), first["msg"], first["input"]
    for pattern, plain in _PLAIN_WORDS:
        message = re.sub(pattern, plain, message)
    text = f"{where or 'body'}{'' if message.startswith('must ') else ':'} {message.removeprefix(f'{where}: ')}"
    if first["type"] in ("greater_than_equal", "less_than_equal"):
        text += f", not {given!s:.64}"
        text += f" ({first['type']})" if where == "seed" else ""  # clients of vLLM look for this word there
    return ApiError(400, text, param=where or None, code="invalid_value")


def _value(name: str, raw: msgspec.Raw, config: ServerConfig, limit: int) -> Any:
    """Decode a field with a limit of its own. ``limit``: the most token ids of a prompt. Raises ApiError."""
    if raw == _NULL:
        return None
    if name == "prompt":
        return json_decoding.prompt(raw, config.max_prompts, limit)
    if name == "messages":
        return json_decoding.messages(raw, config.max_nesting)
    if name == "session":
        return json_decoding.session(raw, limit)
    if name == "tokens":
        try:
            return json_decoding.ids(name, raw, limit)
        except msgspec.DecodeError as e:
            raise ApiError(400, f"tokens must be token ids: {e}", param=name, code="invalid_value") from e
    return json_decoding.decode_value(name, raw, config.max_nesting)


def _check_inner(given: dict[str, Any], service: Service) -> None:
    check = service.unknown_fields.check_inner
    if isinstance(options := given.get("stream_options"), dict):
        check(options, ("include_usage", "continuous_usage_stats"), STREAM_OPTIONS, "stream_options.")
    if isinstance(options := given.get("prompt_cache_options"), dict):
        check(options, PromptCacheOptions.model_fields, {}, "prompt_cache_options.")
    for message in given.get("messages") or ():
        check(message, ("role", "content", "name"), MESSAGE, "messages.")
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if part["type"] == "text":  # other types are refused elsewhere
                check(part, ("type", "text"), PART, "messages.content.")


class BodyLimits:
    """Reads the bodies of routes that take one, with limits on size, time and total memory; other bodies stay unread. A
    body goes to ``state["body"]``, its share of the budget to ``state["intake"]``. Callbacks in ``state["ends"]`` run
    after the reply, or when the client has left.
    """

    def __init__(
        self,
        app: ASGIApp,
        config: ServerConfig,
        budget: MemoryBudget,
        refused: Callable[[str], None],
        routes: Iterable[BaseRoute],
    ) -> None:
        """``refused``: as for Intake. ``routes``: all routes; those that describe a body to OpenAPI take one."""
        self._app = app
        self._config = config
        self._budget = budget
        self._refused = refused
        self._paths = frozenset(r.path for r in routes if isinstance(r, APIRoute) and r.openapi_extra)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in self._paths:
            await self._app(scope, receive, send)
            return
        intake, state = Intake(self._budget, self._refused), scope.setdefault("state", {})
        with ExitStack() as ends:
            ends.callback(intake.close)
            state.update(intake=intake, ends=ends)
            try:
                self._check_headers(dict(scope["headers"]), intake)
                state["body"] = await self._read(receive, intake)
            except ApiError as e:
                await error_response(e)(scope, receive, send)
                return
            if state["body"] is not None:
                await self._app(scope, receive, send)

    def _check_headers(self, headers: dict[bytes, bytes], intake: Intake) -> None:
        if headers.get(b"content-encoding", b"identity") != b"identity":
            raise ApiError(415, "Content-Encoding is not supported", code="unsupported_encoding")
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        nothing = b"transfer-encoding" not in headers and headers.get(b"content-length", b"0") == b"0"
        if kind != b"application/json" and not (nothing and not kind):
            raise ApiError(415, "Content-Type must be application/json", code="unsupported_media_type")
        length = headers.get(b"content-length", b"0")
        if length.isdigit():
            self._check_size(int(length))
            intake.expect(int(length))

    async def _read(self, receive: Receive, intake: Intake) -> bytearray | None:
        """Return the whole body, or None if the client left. Raises ApiError."""
        body, limit_s = bytearray(), self._config.body_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    message: Message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    part = message.get("body", b"")
                    self._check_size(len(body) + len(part))
                    intake.read(len(body) + len(part))
                    body += part
                    if not message.get("more_body", False):
                        return body
        except TimeoutError:
            raise ApiError(408, f"no body after {limit_s:g} s", code="timeout") from None

    def _check_size(self, size: int) -> None:
        if size > self._config.max_body_bytes:
            text = f"the body is larger than {self._config.max_body_bytes} bytes"
            raise ApiError(413, text, code="body_too_large")
