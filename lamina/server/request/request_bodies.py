"""Reads bodies within limits, decodes them, and makes the requests of openai_protocol.py."""

from __future__ import annotations

import asyncio
import math
import re
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request

from lamina.server.errors import CLIENT_CLOSED_REQUEST, ApiError
from lamina.server.memory_limits import decoding_bytes, held_bytes
from lamina.server.queue_limit import MAX_RETRY_AFTER_S
from lamina.server.server_config import ServerConfig
from lamina.server.tenants import salt_of

from . import json_decoding
from .generation_config import fields_of
from .intake import SMALL, Intake
from .openai_protocol import Message, PromptCacheOptions
from .unsupported_fields import IGNORED, MESSAGE, PART, STREAM_OPTIONS, UNSUPPORTED, check_neutral

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
_ELSEWHERE = {"prompt": ("messages", "/v1/completions"), "messages": ("prompt", "/v1/chat/completions")}
LONG = ("prompt", "messages", "session", "tokens")  # fields with limits of their own
MAX_NEUTRAL_BYTES = 256  # a longer value of an unsupported field is never neutral


async def parse(model: type[M], request: Request) -> M:
    """Read the request's body, and return it as ``model``. Its decoded values count in ``state.intake`` until the reply
    has been sent, or the client has left. Raises ApiError.
    """
    service: Service = request.app.state.service
    tenant = salt_of(request.state.key_id, None)
    intake = request.state.intake = Intake(service.bodies, service.metrics.on_rejected, tenant)
    request.state.at_end.callback(intake.close)
    service.body_pace.note(tenant)
    body = await read_body(request, service, intake, tenant)
    if len(body) <= INLINE_BYTES:
        value, held = _parse(model, body, service)
        intake.hold(held)
        return value
    loop = asyncio.get_running_loop()
    async with service.decoding.turn(tenant, len(body)):  # one at a time, as each may take many times its size
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
    for name, (other, path) in _ELSEWHERE.items():
        if name in fields and name not in model.model_fields and other in model.model_fields and other not in fields:
            raise ApiError(400, f"{other} is missing; {name} belongs to {path}", param=other, code="invalid_value")
    rest = json_decoding.Allowance("the body")
    for name, raw in sorted(fields.items(), key=lambda field: field[0] not in ("tools", "functions")):
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
            service.unknown_fields.check_name(name, model.model_fields)
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
    most = json_decoding.MAX_FIELDS if name == "tools" else json_decoding.MAX_FIELD
    return json_decoding.decode_value(name, raw, config.max_nesting, most)


def _check_inner(given: dict[str, Any], service: Service) -> None:
    check = service.unknown_fields.check_inner
    if isinstance(options := given.get("stream_options"), dict):
        check(options, ("include_usage", "continuous_usage_stats"), STREAM_OPTIONS, "stream_options.")
    if isinstance(options := given.get("prompt_cache_options"), dict):
        check(options, PromptCacheOptions.model_fields, {}, "prompt_cache_options.")
    for message in given.get("messages") or ():
        check(message, Message.model_fields, MESSAGE, "messages.")
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if part["type"] == "text":  # other types are refused elsewhere
                check(part, ("type", "text"), PART, "messages.content.")


def _check_headers(headers: Headers, max_bytes: int, intake: Intake) -> None:
    if headers.get("content-encoding", "identity") != "identity":
        raise ApiError(415, "Content-Encoding is not supported", code="unsupported_encoding")
    kind, length = headers.get("content-type", "").split(";")[0].strip().lower(), headers.get("content-length", "0")
    nothing = "transfer-encoding" not in headers and length == "0"
    if kind != "application/json" and not (nothing and not kind):
        raise ApiError(415, "Content-Type must be application/json", code="unsupported_media_type")
    if length.isdigit():
        _check_size(int(length), max_bytes)
        intake.expect(int(length))


def _check_size(size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise ApiError(413, f"the body is larger than {max_bytes} bytes", code="body_too_large")


async def read_body(request: Request, service: Service, intake: Intake, tenant: bytes) -> bytearray:
    """Return the whole body. Raises ApiError if it exceeds a limit of size, time or memory, or if the client leaves."""
    config = service.config
    body, max_bytes, limit_s = bytearray(), config.max_body_bytes, config.body_timeout_s
    _check_headers(request.headers, max_bytes, intake)
    length = request.headers.get("content-length", "")
    if is_known := length.isdigit():
        await _wait_turn(service, tenant, int(length), int(length))
    try:
        async with asyncio.timeout(limit_s) as limit:
            async for part in request.stream():
                _check_size(len(body) + len(part), max_bytes)
                intake.read(len(body) + len(part))
                body += part
                if not is_known:
                    await _wait_turn(service, tenant, len(part), len(body), limit)
    except TimeoutError:
        raise ApiError(408, f"no body after {limit_s:g} s", code="timeout") from None
    except ClientDisconnect:
        raise ApiError(CLIENT_CLOSED_REQUEST, "the client has left before the end of its body") from None
    return body


async def _wait_turn(
    service: Service, tenant: bytes, nbytes: int, size: int, limit: asyncio.Timeout | None = None
) -> None:
    """Wait until ``nbytes`` of a body may be read, which so far has ``size`` bytes. ``limit`` then ends later. Raises
    ApiError if they would wait for longer than a body may take.
    """
    most_s = service.config.body_timeout_s
    if size <= SMALL or not (wait_s := service.body_pace.wait_s(tenant, nbytes, most_s)):
        return
    if wait_s > most_s:
        service.metrics.on_rejected("bodies")
        retry_s = min(math.ceil(wait_s), MAX_RETRY_AFTER_S)
        text = f"too many bytes of bodies of this API key wait to be read: send smaller ones, or retry in {retry_s} s"
        raise ApiError(429, text, code="overloaded", retry_after_s=retry_s)
    if limit is not None and (end := limit.when()) is not None:
        limit.reschedule(end + wait_s)
    await asyncio.sleep(wait_s)
