"""API keys: every route needs one, except PUBLIC_PATHS and the page. The check reads no body."""

from __future__ import annotations

import base64
import hashlib
import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from lamina.server.errors import ApiError, error_response

OPERATOR = frozenset({"/scale", "/drain", "/cordon"})  # they accept the operator's key only
METRICS = "/metrics"  # of all tenants: where there is an operator's key, it needs that one
PUBLIC_PATHS = OPERATOR | {"/health", "/ping"}
PAGE = "/"  # the same for all: it asks its user for the key, and sends that with its requests

# Pages that a browser opens: it asks its user, who gives a key as the password. No other route takes a key in that
# form, as a browser sends it by itself, also for pages of other sites.
PAGES = frozenset({"/docs", "/openapi.json"})
ASK = {"WWW-Authenticate": 'Basic realm="Lamina: an API key as the password", charset="UTF-8"'}


class Auth:
    """Refuses requests without one of the keys. Without configured keys all requests pass. The digest of a request's
    key goes to ``state["key_id"]``: 32 bytes, or none if the server has no keys.
    """

    def __init__(self, app: ASGIApp, keys: list[str], admin_key: str) -> None:
        """``admin_key``: the operator's; empty = this server has none of the operator's routes."""
        self._app = app
        self._digests = [hashlib.sha256(k.encode()).digest() for k in keys]
        self._operator = hashlib.sha256(admin_key.strip().encode()).digest() if admin_key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((v for k, v in scope["headers"] if k == b"authorization"), b"")
        is_page = scope["path"] in PAGES and scope["method"] in ("GET", "HEAD")
        given = _bearer_of(given) if is_page else given
        key_id = _match(given, self._digests) if self._digests else b""
        error = None
        if scope["path"] in (*OPERATOR, METRICS) and self._operator is not None:
            error = _operator_error(given) if _match(given, [self._operator]) is None else None
        elif key_id is None and scope["path"] not in (*PUBLIC_PATHS, PAGE):
            error = ApiError(
                401, "a valid API key is needed: send the header Authorization: Bearer KEY", code="invalid_api_key"
            )
        if error is not None:
            await error_response(error, ASK if is_page else None)(scope, receive, send)
            return
        scope.setdefault("state", {})["key_id"] = key_id or b""
        await self._app(scope, receive, send)


def _bearer_of(given: bytes) -> bytes:
    """Return an Authorization header of a browser, whose password is a key, as one with that key; others as given."""
    scheme, _, value = given.partition(b" ")
    if scheme.lower() != b"basic":
        return given
    try:
        pair = base64.b64decode(value, validate=True)
    except ValueError:
        return b""
    return b"Bearer " + pair.partition(b":")[2]


def _match(given: bytes, digests: list[bytes]) -> bytes | None:
    """Return the digest of the key in an Authorization header; None if it is none of ``digests``."""
    scheme, _, key = given.partition(b" ")
    digest = hashlib.sha256(key.strip()).digest()
    # All are compared, in constant time, so the duration reveals nothing.
    matches = [hmac.compare_digest(digest, d) for d in digests]
    return digest if any(matches) and scheme.lower() == b"bearer" else None


def _operator_error(given: bytes) -> ApiError:
    is_needed = "is another one" if given else "is needed"
    text = f"the operator's key {is_needed}: the server's LAMINA_ADMIN_KEY, as Authorization: Bearer KEY"
    return ApiError(401, text, code="invalid_admin_key")
