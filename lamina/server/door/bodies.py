"""Bodies: read within limits, decoded, and turned into the requests of protocol.py."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lamina.server.config import ServerConfig
from lamina.server.errors import ApiError, error_response
from lamina.server.request import decoding
from lamina.server.request.generation_config import fields_of
from lamina.server.request.protocol import PromptCacheOptions
from lamina.server.request.unsupported import MESSAGE, PART, QUIET, STREAM_OPTIONS, UNSUPPORTED, check_neutral

if TYPE_CHECKING:
    from lamina.server.calls import Service

M = TypeVar("M", bound=BaseModel)
_NULL = msgspec.Raw(b"null")
INLINE_BYTES = 1 << 14  # a longer body is decoded on a thread beside the event loop
_PLAIN_WORDS = (  # for pydantic's
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
NEUTRAL_BYTES = 256  # a longer value of an unsupported field asks for something


async def parse(model: type[M], request: Request) -> M:
    """The request's body as ``model``. Raises ApiError."""
    service, body = request.app.state.service, request.state.body
    if len(body) <= INLINE_BYTES:
        return _parse(model, body, service)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(service.decoder, _parse, model, body, service)


def _parse(model: type[M], body: bytes, service: Service) -> M:
    config = service.config
    given: dict[str, Any] = {}
    fields = decoding.split(body, config.max_nesting)
    cuts = service.client.ready.truncates
    is_cut = "truncate_prompt_tokens" in model.model_fields and fields.get("truncate_prompt_tokens", _NULL) != _NULL
    limit = decoding.MAX_COMMAS if is_cut or cuts else service.client.ready.max_model_len
    for name, raw in fields.items():
        if name in model.model_fields:
            given[name] = _value(name, raw, config, limit)
        elif name in UNSUPPORTED:
            small = len(bytes(raw)) <= NEUTRAL_BYTES
            check_neutral(name, decoding.small(name, raw, config.max_nesting) if small else ..., UNSUPPORTED[name])
        elif name not in QUIET:
            service.fields.check_name(name, [*model.model_fields, *UNSUPPORTED])
    if given.get("generation_config") is not None and "generation_config" in model.model_fields:
        given = {**fields_of(given["generation_config"]), **{k: v for k, v in given.items() if v is not None}}
    _check_inner(given, service)
    try:
        return model.model_validate(given)
    except ValidationError as e:
        raise _refused(e) from e


def _refused(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False)[0]
    where, said, given = ".".join(map(str, first["loc"])), first["msg"], first["input"]
    for pattern, plain in _PLAIN_WORDS:
        said = re.sub(pattern, plain, said)
    text = f"{where or 'body'}{'' if said.startswith('must ') else ':'} {said.removeprefix(f'{where}: ')}"
    if first["type"] in ("greater_than_equal", "less_than_equal"):
        text += f", not {given!s:.64}"
        text += f" ({first['type']})" if where == "seed" else ""  # clients of vLLM look for this word there
    return ApiError(400, text, param=where or None, code="invalid_value")


def _value(name: str, raw: msgspec.Raw, config: ServerConfig, limit: int) -> Any:
    """``limit``: token ids of a prompt."""
    if raw == _NULL:
        return None
    if name == "prompt":
        return decoding.prompt(raw, config.max_prompts, limit)
    if name == "messages":
        return decoding.messages(raw, config.max_nesting)
    if name == "session":
        return decoding.session(raw, limit)
    if name == "tokens":
        try:
            return decoding.ids(name, raw, limit)
        except msgspec.DecodeError as e:
            raise ApiError(400, f"tokens must be token ids: {e}", param=name, code="invalid_value") from e
    return decoding.small(name, raw, config.max_nesting)


def _check_inner(given: dict[str, Any], service: Service) -> None:
    check = service.fields.check_inner
    if isinstance(options := given.get("stream_options"), dict):
        check(options, ("include_usage", "continuous_usage_stats"), STREAM_OPTIONS, "stream_options.")
    if isinstance(options := given.get("prompt_cache_options"), dict):
        check(options, PromptCacheOptions.model_fields, {}, "prompt_cache_options.")
    for message in given.get("messages") or ():
        check(message, ("role", "content", "name"), MESSAGE, "messages.")
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if part["type"] == "text":  # others are refused by their type
                check(part, ("type", "text"), PART, "messages.content.")


class BodyLimits:
    """Reads the body of every POST, bounded in size and time. Its bytes go to ``state["body"]``."""

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
            scope.setdefault("state", {})["body"] = body
        except ApiError as e:
            await error_response(e)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check_headers(self, headers: dict[bytes, bytes]) -> None:
        if headers.get(b"content-encoding", b"identity") != b"identity":
            raise ApiError(415, "Content-Encoding is not supported", code="unsupported_encoding")
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        nothing = b"transfer-encoding" not in headers and headers.get(b"content-length", b"0") == b"0"
        if kind != b"application/json" and not (nothing and not kind):
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
