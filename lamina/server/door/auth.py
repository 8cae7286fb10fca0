"""API keys: every route needs one, but for the few routes that are named here."""

from __future__ import annotations

import hashlib
import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from lamina.server.errors import ApiError, error_response

OPEN = frozenset({"/health", "/scale", "/drain", "/cordon"})  # all but the first one have a key of their own


class Auth:
    """Refuses requests without one of the keys. No keys: all may come in. The id of a request's key, which is no key,
    goes to ``state["key_id"]``: 32 bytes, or none where there are no keys.
    """

    def __init__(self, app: ASGIApp, keys: list[str]) -> None:
        self._app = app
        self._digests = [hashlib.sha256(k.encode()).digest() for k in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        key_id = self._key_id(scope) if self._digests else b""
        if key_id is None and scope["path"] not in OPEN:
            error = ApiError(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")
            await error_response(error)(scope, receive, send)
            return
        scope.setdefault("state", {})["key_id"] = key_id or b""
        await self._app(scope, receive, send)

    def _key_id(self, scope: Scope) -> bytes | None:
        """None: there is no such key."""
        given = next((v for k, v in scope["headers"] if k == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        # All are compared, in constant time, so that nothing can be learnt from how long it takes.
        matches = [hmac.compare_digest(digest, d) for d in self._digests]
        return digest if any(matches) and scheme.lower() == b"bearer" else None
