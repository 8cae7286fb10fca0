"""Errors in the format of OpenAI's API: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lamina.request import ErrorOrigin, Refusal

CLIENT_CLOSED_REQUEST = 499  # the client left before the reply's end; used in the log and metrics
_RETRY_S = 5
_TYPES = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "service_unavailable_error"}


class ApiError(Exception):
    """An error reply with ``status``. ``param``: the request's field that is wrong. ``code``: a word for programs;
    ``more``: further fields of the body.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int = 0,
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.more = more

    @property
    def body(self) -> dict[str, Any]:
        """The reply's JSON object."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code, **self.more}}


def context_length_error(limit: int, asked: str, param: str) -> ApiError:
    """Return the reply to a request of more than ``limit`` tokens. Some clients recognize it by its first words and
    then use another model.
    """
    text = (
        f"This model's maximum context length is {limit} tokens. However, {asked}. Please reduce the length of {param}."
    )
    return ApiError(400, text, param=param, code="context_length_exceeded")


def error_response(error: ApiError, headers: dict[str, str] | None = None) -> Response:
    """Return the HTTP reply of an error, with ``headers`` in addition to its own."""
    headers = dict(headers or {})
    if error.retry_after_s:
        headers["Retry-After"] = str(error.retry_after_s)
    if error.status == 401:
        headers.setdefault("WWW-Authenticate", "Bearer")
    return _ErrorResponse(error, headers)


class _ErrorResponse(Response):
    """The reply of an error, which it leaves in the request's state for the log."""

    def __init__(self, error: ApiError, headers: dict[str, str]) -> None:
        super().__init__(msgspec.json.encode(error.body), error.status, headers, "application/json")
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["error"] = self._error
        await super().__call__(scope, receive, send)


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return ``content`` as a JSON reply."""
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def slo_error(text: str, refusal: Refusal) -> ApiError:
    """Return the reply to a request that would come later than promised, with the expected times."""
    expected = {"predicted_ttft_s": round(refusal.ttft_s, 6), "predicted_tbt_s": round(refusal.tbt_s, 6)}
    return ApiError(429, text, code="overloaded", retry_after_s=math.ceil(refusal.retry_after_s), more=expected)


def engine_error(text: str, blame: ErrorOrigin | None, known: frozenset[str]) -> ApiError:
    """Return the reply if the engine gives no token: 400 if other parameters help, 503 if time does, else 500."""
    if blame is ErrorOrigin.LOAD:
        return ApiError(503, text, code="no_memory", retry_after_s=_RETRY_S)
    return bad_request(text, known) if blame is ErrorOrigin.CLIENT else ApiError(500, text, code="no_token")


def engine_gone(reason: object) -> ApiError:
    """Return the reply if there is no engine now, or none any more."""
    return ApiError(503, f"the engine is gone: {reason}", code="engine_gone", retry_after_s=_RETRY_S)


def bad_request(text: str, known: frozenset[str]) -> ApiError:
    """Return the reply to a wrong request. ``param`` is set if ``text`` begins with a name in ``known``."""
    first = text.split(maxsplit=1)[0] if text else ""
    return ApiError(400, text, param=first if first in known else None, code="invalid_value")
