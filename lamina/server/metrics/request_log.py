"""The outermost layer of each request: its id, log line and metrics, and a reply if the program fails."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lamina.observe.log_lines import REQUEST_ID
from lamina.server.errors import CLIENT_CLOSED_REQUEST, ApiError, error_response

from .http_metrics import ServerMetrics

MAX_PATH = 256  # characters of a path in the log
_SAFE_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
logger = logging.getLogger(__name__)


class RequestLog:
    """The outermost layer. It returns and logs a client's X-Request-Id, which has no other meaning. Callbacks in
    ``state["at_end"]`` run after the reply, or when the client has left.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: ServerMetrics,
        routes: Sequence[BaseRoute],
        *,
        log_requests: bool,
        heads: bool = True,
    ) -> None:
        """``routes``: whose paths name a request if an outer layer has replied to it. ``heads``: whether replies carry
        the id.
        """
        self._heads = heads
        self._app = app
        self._routes = [r for r in routes if isinstance(r, Route)]
        self._metrics = metrics
        self._log_requests = log_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((v for k, v in scope["headers"] if k == b"x-request-id"), b"")
        request_id = given if _SAFE_ID.fullmatch(given) else secrets.token_hex(16).encode()
        REQUEST_ID.set(request_id.decode())
        start, status = time.monotonic(), 0
        state = scope.setdefault("state", {})
        state["arrival_s"], state["at_end"] = start, ExitStack()

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            if self._heads and message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", []), (b"x-request-id", request_id)]}
            await send(message)

        with state["at_end"]:
            try:
                await self._app(scope, receive, tagged)
            except Exception:
                logger.exception("failed")
                if not status:
                    await error_response(ApiError(500, "the server failed; see its log"))(scope, receive, tagged)
        left = state.get("left") or not status
        self._finish(scope, state, CLIENT_CLOSED_REQUEST if left else status, time.monotonic() - start)

    def _finish(self, scope: Scope, state: dict[str, Any], status: int, seconds: float) -> None:
        route = scope.get("route") or next((r for r in self._routes if r.matches(scope)[0] != Match.NONE), None)
        handler = getattr(route, "path", "unmatched")
        self._metrics.on_http_request(handler, scope["method"], status, seconds)
        call = state.get("call")
        if self._log_requests and (call is not None or status >= 400):
            fields = {"status": status, "seconds": round(seconds, 4), **(call.log_fields() if call is not None else {})}
            if status >= 400:
                fields |= _why(scope, state)
            logger.info("%s %s", scope["method"], handler, extra={"fields": fields})


def _why(scope: Scope, state: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a refused request's line: who asked for what, and the error."""
    path = (state.get("raw_path") or scope.get("raw_path") or b"")[:MAX_PATH].decode("ascii", "backslashreplace")
    fields = {"path": path, "client": (scope.get("client") or ("",))[0]}
    if isinstance(error := state.get("error"), ApiError):
        fields |= {"code": error.code, "param": error.param, "error": error.message}
    return {name: value for name, value in fields.items() if value}
