"""Who shares KV with whom: a request's salt, by its API key and by what its client says.

    salt = tenant, and behind it the division that its client asks for, if any

The tenant of an API key is a digest that nobody without the key can make; that of a server without keys is empty, or
zeros where a division follows (lamina.kv.keys.tenant_of reads it).
"""

from __future__ import annotations

import hmac

from lamina.kv.keys import SALT_BYTES


def salt_of(key_id: bytes, cache_salt: str | None) -> bytes:
    """The same bytes for the same API key and text, also in a later server, whose store may have their KV; empty where
    both are absent. Who has not the key cannot make its salt.

    ``key_id``: SHA-256 of the API key, see Auth; empty = a server without keys, which is one tenant. ``cache_salt``:
    divides the requests of one tenant.
    """
    keyed = bytes([len(key_id)])
    tenant = hmac.digest(key_id, keyed, "sha256") if key_id else b""
    if cache_salt is None:
        return tenant
    said = b"\x01" + cache_salt.encode(errors="surrogatepass")
    return (tenant or bytes(SALT_BYTES)) + hmac.digest(key_id, keyed + said, "sha256")
