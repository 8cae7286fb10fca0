"""Keys of pages: a key identifies all tokens up to the page's end, the model and the tenant, and not the page's size.

    key(n tokens) = SHA-256(tag, key(m tokens), m, tokens m .. n)   m: the last multiple of KEY_TOKENS before n
    key(0 tokens) = root = HMAC-SHA256(store secret; tag, identity, tenant, salt, era where there was a reset)

So a prefix has one key in the pool, in storage and on prefill workers, whose pages differ in size. Each field goes in
with its length before it, so that no two lists of fields are the same bytes. Without the secret, a key does not reveal
its tokens, and guesses cannot be checked. Numbers are little-endian, of 8 bytes; tokens of 4.

    key(states after page n, whole or begun) = first bytes of the key of the last whole page, number of tokens,
                                               first bytes of SHA-256(tag, key(page n))

The states that follow a page are found by their keys alone.
"""

from __future__ import annotations

import hmac
import sys
from array import array
from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import NamedTuple

from .pages import TENANT_BYTES

KEY_TOKENS = 16  # most block sizes are multiples
SECRET_BYTES = 32
SALT_BYTES = 32  # bytes of the part of a salt that names the tenant
ERA_BYTES = 16
STATE_PREFIX_BYTES = 12  # of the key of states, which are those of the last whole page before their end
_COUNT_BYTES = 4  # of the number of tokens after them
_LENGTH_BYTES = 8


class Identity(NamedTuple):
    """All that K and V depend on except tokens: engines of the same identity can share pages."""

    weights: str  # a fingerprint of the checkpoint's weights
    layers: tuple[str, ...]  # shape and attention settings of each layer
    rope: str  # parameters of the positions
    wire_dtype: str
    kv_dtype: str

    def digest(self) -> bytes:
        """Return the identity as 32 bytes."""
        texts = (self.weights, self.rope, self.wire_dtype, self.kv_dtype, *self.layers)
        return sha256(_joined(b"lamina kv identity 1", *(text.encode() for text in texts))).digest()


def tenant_of(salt: bytes) -> bytes:
    """Return the tenant in a request's salt; empty for a server without API keys."""
    tenant = salt[:SALT_BYTES]
    return tenant if len(tenant) == SALT_BYTES and any(tenant) else b""


def tenant_tag(secret: bytes, tenant: bytes) -> bytes:
    """Return the tag of ``tenant`` in a store: TENANT_BYTES that do not reveal the tenant."""
    return _hmac(secret, b"lamina kv tenant 1", tenant)[:TENANT_BYTES]


def root_key(secret: bytes, identity: bytes, tenant: bytes, salt: bytes = b"", era: bytes = b"") -> bytes:
    """Return the key, 32 bytes, that precedes the first pages of ``tenant``, a tag. ``salt``: divides the tenant's
    pages further; requests with different salts share nothing. ``era``: ERA_BYTES, new with each reset of the prefix
    cache; empty before the first one. Raises ValueError for a secret or a tag of the wrong length.
    """
    if len(tenant) != TENANT_BYTES:
        raise ValueError(f"a tenant's tag has {TENANT_BYTES} bytes, not {len(tenant)}")
    return _hmac(secret, b"lamina kv root 1", identity, tenant, salt, *([era] if era else []))


class ChainRoot:
    """The key before the first page of every chain of an engine. It depends on the salt of the sequence."""

    def __init__(self, secret: bytes = bytes(SECRET_BYTES), identity: bytes = b"", era: bytes = b"") -> None:
        """``secret``: of the store; without one, no one else sees a key. ``identity``: of the model and its KV."""
        self._secret, self._identity, self.era = secret, identity, era

    def __call__(self, salt: bytes, owner: bytes | None = None) -> bytes:
        """Return the root for ``salt``, of the tenant of prompts with the salt ``owner``; None: with ``salt``."""
        return root_key(self._secret, self._identity, self.tenant_tag(salt if owner is None else owner), salt, self.era)

    def tenant_tag(self, salt: bytes) -> bytes:
        """Return the tag of the tenant of a prompt with ``salt``."""
        return tenant_tag(self._secret, tenant_of(salt))


def prefix_keys(parent: bytes, first: int, tokens: Sequence[int]) -> Iterator[bytes]:
    """Yield the keys, 32 bytes each, of prefixes that end after each KEY_TOKENS of ``tokens``, and of the one that ends
    with these. ``parent``: the key of what is before, which are ``first`` tokens, a multiple of KEY_TOKENS. Raises
    OverflowError for a token that does not fit in 32 bits.
    """
    words, step = array("I", tokens), 4 * KEY_TOKENS
    if sys.byteorder == "big":
        words.byteswap()
    data, head = words.tobytes(), _PAGE_TAG + len(parent).to_bytes(_LENGTH_BYTES, "little")
    for at in range(0, len(data), step):  # fields as ``_joined`` joins them, in less time
        some, number = data[at : at + step], (first + at // 4).to_bytes(_LENGTH_BYTES, "little")
        after = len(some).to_bytes(_LENGTH_BYTES, "little")
        parent = sha256(b"%b%b%b%b%b%b" % (head, parent, _EIGHT, number, after, some)).digest()
        yield parent


def page_key(parent: bytes, first: int, tokens: Sequence[int]) -> bytes:
    """Return the last one of ``prefix_keys``. Raises ValueError if there are no tokens."""
    if not tokens:
        raise ValueError("a page has at least one token")
    *_, key = prefix_keys(parent, first, tokens)
    return key


def state_key(whole: bytes, last: bytes, tokens: int) -> bytes:
    """Return the key, 32 bytes, of the recurrent states after ``tokens`` tokens. ``whole``: the key of the last whole
    page of these tokens; ``last``: that of the page with which they end, which may be the same.
    """
    count = tokens.to_bytes(_COUNT_BYTES, "little")
    rest = sha256(_joined(b"lamina states 1", last)).digest()
    return (whole[:STATE_PREFIX_BYTES] + count + rest)[: len(whole)]


def tokens_of_state(key: bytes) -> int:
    """Return the number of tokens in the states of a key by ``state_key``."""
    return int.from_bytes(key[STATE_PREFIX_BYTES : STATE_PREFIX_BYTES + _COUNT_BYTES], "little")


def data_key_wrapper(secret: bytes) -> bytes:
    """Return the key, 32 bytes, that encrypts the stored data keys of tenants."""
    return _hmac(secret, b"lamina kv data keys 1")


def _hmac(secret: bytes, *fields: bytes) -> bytes:
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"the store's secret has {SECRET_BYTES} bytes, not {len(secret)}")
    return hmac.digest(secret, _joined(*fields), "sha256")


def _joined(*fields: bytes) -> bytes:
    return b"".join(part for field in fields for part in (len(field).to_bytes(_LENGTH_BYTES, "little"), field))


_PAGE_TAG, _EIGHT = _joined(b"lamina kv page 2"), (8).to_bytes(_LENGTH_BYTES, "little")
