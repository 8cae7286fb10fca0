"""Keys of pages: a key stands for all tokens up to the page's end, the model that has seen them, and their tenant.

    key(page n) = SHA-256(tag, key(page n - 1), n, tokens of page n)
    key(page -1) = root = HMAC-SHA256(store secret; tag, identity, tenant, salt, era where there was a reset)

Each field goes in with its length before it, so that no two lists of fields are the same bytes. Who lacks the secret
cannot tell from a key which tokens it stands for, nor try tokens out. Numbers are little-endian, of 8 bytes; tokens of
4.
"""

from __future__ import annotations

import hmac
import sys
from array import array
from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple

from .pages import PAGE, TENANT_BYTES

SECRET_BYTES = 32
SALT_BYTES = 32  # of a salt's part that names the tenant
ERA_BYTES = 16
_LENGTH_BYTES = 8


class Identity(NamedTuple):
    """All that K and V depend on beside tokens: pages of one identity mean the same to every engine that has it."""

    weights: str  # the fingerprint of the checkpoint's weights
    layers: tuple[str, ...]  # the shape and the attention's settings of each layer
    rope: str  # the parameters of its positions
    wire_dtype: str
    kv_dtype: str

    def digest(self) -> bytes:
        """32 bytes."""
        texts = (self.weights, self.rope, self.wire_dtype, self.kv_dtype, *self.layers)
        return sha256(_joined(b"lamina kv identity 1", *(text.encode() for text in texts))).digest()


def tenant_of(salt: bytes) -> bytes:
    """The tenant of a request's salt; empty for the one of a server without API keys."""
    tenant = salt[:SALT_BYTES]
    return tenant if any(tenant) else b""


def tenant_tag(secret: bytes, tenant: bytes) -> bytes:
    """What a store calls ``tenant``: TENANT_BYTES that tell nobody who it is."""
    return _hmac(secret, b"lamina kv tenant 1", tenant)[:TENANT_BYTES]


def root_key(secret: bytes, identity: bytes, tenant: bytes, salt: bytes = b"", era: bytes = b"") -> bytes:
    """The parent of the first pages of ``tenant``, a tag. ``salt``: divides its pages further; requests with another
    one share nothing. ``era``: ERA_BYTES, others with each reset of what is found; empty before the first one. 32
    bytes. Raises ValueError for a secret or a tag of the wrong length.
    """
    if len(tenant) != TENANT_BYTES:
        raise ValueError(f"a tenant's tag has {TENANT_BYTES} bytes, not {len(tenant)}")
    return _hmac(secret, b"lamina kv root 1", identity, tenant, salt, *([era] if era else []))


def page_key(parent: bytes, number: int, tokens: Sequence[int]) -> bytes:
    """Of page ``number`` with ``tokens``, 1 .. PAGE of them, behind the page of key ``parent``. 32 bytes. Raises
    ValueError; OverflowError for a token that is not of 32 bits.
    """
    if not 1 <= len(tokens) <= PAGE:
        raise ValueError(f"a page has 1 to {PAGE} tokens, not {len(tokens)}")
    words = array("I", tokens)
    if sys.byteorder == "big":
        words.byteswap()
    return sha256(_joined(b"lamina kv page 1", parent, number.to_bytes(8, "little"), words.tobytes())).digest()


def data_key_wrapper(secret: bytes) -> bytes:
    """The key that tenants' data keys are encrypted with where they lie. 32 bytes."""
    return _hmac(secret, b"lamina kv data keys 1")


def _hmac(secret: bytes, *fields: bytes) -> bytes:
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"the store's secret has {SECRET_BYTES} bytes, not {len(secret)}")
    return hmac.digest(secret, _joined(*fields), "sha256")


def _joined(*fields: bytes) -> bytes:
    return b"".join(part for field in fields for part in (len(field).to_bytes(_LENGTH_BYTES, "little"), field))
