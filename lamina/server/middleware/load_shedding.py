"""Refuses requests before their bodies are read if the queue is full, since a refusal must cost next to nothing.

Refused clients come again, and the cores that would read their bodies also serve the accepted requests.
"""

from __future__ import annotations

from collections.abc import Iterable

from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from lamina.server.errors import ApiError, error_response
from lamina.server.queue_limit import QueueLimit


class LoadShedding:
    """Checks that ``admission`` has space for one completion, on the ``routes`` that need it."""

    def __init__(self, app: ASGIApp, admission: QueueLimit, routes: Iterable[BaseRoute]) -> None:
        self._app = app
        self._admission = admission
        self._routes = {r.path: r for r in routes if isinstance(r, Route)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in self._routes:
            try:
                self._admission.check(1)
            except ApiError as e:
                scope["route"] = self._routes[scope["path"]]  # the metrics show it
                await error_response(e)(scope, receive, send)
                return
        await self._app(scope, receive, send)
