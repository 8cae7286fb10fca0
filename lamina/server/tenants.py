"""Who shares KV with whom: a request's salt, by its API key and by what its client says."""

from __future__ import annotations

import hmac


def salt_of(key_id: bytes, cache_salt: str | None) -> bytes:
    """The same 32 bytes for the same API key and text, also in a later server, whose store may have their KV; empty
    where both are absent. Who has not the key cannot make its salt.

    ``key_id``: SHA-256 of the API key, see Auth; empty = a server without keys, which is one tenant. ``cache_salt``:
    divides the requests of one tenant.
    """
    if not key_id and cache_salt is None:
        return b""
    said = b"" if cache_salt is None else b"\x01" + cache_salt.encode(errors="surrogatepass")
    return hmac.digest(key_id, bytes([len(key_id)]) + said, "sha256")
