"""Who shares KV with whom: a request's salt, by its API key and by what its client says."""

from __future__ import annotations

import hmac
import secrets


class Tenants:
    """Requests of one API key share KV, those of two never do; a client divides its own by ``cache_salt``. The secret
    is of this process: no client can make another one's salt, and none outlives the server.
    """

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def salt(self, key_id: bytes, cache_salt: str | None) -> bytes:
        """``key_id``: of the API key, see Auth; empty = a server without keys, which is one tenant. The same bytes for
        the same tenant and text, of 32; empty where both are absent.
        """
        if not key_id and cache_salt is None:
            return b""
        said = b"" if cache_salt is None else b"\x01" + cache_salt.encode(errors="surrogatepass")
        return hmac.digest(self._secret, bytes([len(key_id)]) + key_id + said, "sha256")
