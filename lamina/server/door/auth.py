"""API keys: every route needs one, whatever its path, but for a few that are named here."""

from __future__ import annotations

import hashlib
import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from lamina.server.errors import ApiError, error_response

OPEN = frozenset({"/health"})


class Auth:
    """Refuses requests without one of the keys. No keys: all may come in."""

    def __init__(self, app: ASGIApp, keys: list[str]) -> None:
        self._app = app
        self._digests = [hashlib.sha256(k.encode()).digest() for k in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._digests and scope["path"] not in OPEN and not self._known(scope):
            error = ApiError(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _known(self, scope: Scope) -> bool:
        given = next((v for k, v in scope["headers"] if k == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        # All are compared, in constant time, so that nothing can be learnt from how long it takes.
        matches = [hmac.compare_digest(digest, d) for d in self._digests]
        return any(matches) and scheme.lower() == b"bearer"
