"""Decides which requests share KV: a request's salt, from its API key and its client's cache_salt.

    salt = tenant + division, if the client sets one

The tenant of an API key is a digest that only the key's owner can make. Without keys it is empty, or zeros if a
division follows (lamina.kv.page_keys.tenant_of reads it).
"""

from __future__ import annotations

import hmac

from lamina.kv.page_keys import SALT_BYTES
from lamina.scheduler.sessions.cache_options import CacheOptions
from lamina.scheduler.sessions.session_table import SessionName
from lamina.scheduler.sessions.token_ranges import parse_ranges

from .request.openai_protocol import Sampling

RETENTIONS_S = {"24h": 86_400.0, "30m": 1_800.0}  # by the value in a body; other values mean 0


def salt_of(key_id: bytes, cache_salt: str | None) -> bytes:
    """Return equal bytes for the same API key and text, even in a later server, whose storage may have their KV. Empty
    if both are absent. A client without the key cannot make its salt.

    ``key_id``: SHA-256 of the API key, see Auth; empty = a server without keys, which is one tenant. ``cache_salt``:
    divides the requests of one tenant.
    """
    keyed = bytes([len(key_id)])
    tenant = hmac.digest(key_id, keyed, "sha256") if key_id else b""
    if cache_salt is None:
        return tenant
    salt_input = b"\x01" + cache_salt.encode(errors="surrogatepass")
    return (tenant or bytes(SALT_BYTES)) + hmac.digest(key_id, keyed + salt_input, "sha256")


def cache_options_of(key_id: bytes, salt: bytes, session: SessionName | None, body: Sampling) -> CacheOptions:
    """Return a request's cache options. ``key_id``, ``salt``: as for ``salt_of``; ``session``: the session of which it
    is a turn.
    """
    key, options = body.prompt_cache_key, body.prompt_cache_options
    affinity_key = hmac.digest(key_id, b"kin" + key.encode(errors="surrogatepass"), "sha256") if key else b""
    asked = (body.prompt_cache_retention, options.ttl if options else None)
    retention_s = max(RETENTIONS_S.get(each or "", 0.0) for each in asked)
    return CacheOptions(
        salt, session, affinity_key, retention_s, parse_ranges(body.kv_discard or ()), body.priority or 0
    )
