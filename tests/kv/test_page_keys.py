"""Keys of pages: nothing that K and V depend on is left out."""

from __future__ import annotations

import struct
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.kv.page_keys import KEY_TOKENS, ChainRoot, Identity, page_key, prefix_keys, root_key, tenant_of, tenant_tag
from lamina.kv.pages import PAGE
from lamina.scheduler.sparsity.kept_kv import FULL_ATTENTION_SALT

SECRET = b"s" * 32
IDENTITY = Identity("weights", ("layer 0", "layer 1"), "rope", "bfloat16", "int8")
ROOT = root_key(SECRET, IDENTITY.digest(), tenant_tag(SECRET, b"a"))
TOKENS = list(range(3 * PAGE + 5))


@pytest.mark.parametrize(
    "other",
    [
        Identity("weights2", ("layer 0", "layer 1"), "rope", "bfloat16", "int8"),
        Identity("weights", ("layer 0", "layer 1", ""), "rope", "bfloat16", "int8"),
        Identity("weights", ("layer 0layer 1",), "rope", "bfloat16", "int8"),
        Identity("weights", ("layer 1", "layer 0"), "rope", "bfloat16", "int8"),
        Identity("weights", ("layer 0", "layer 1"), "rope2", "bfloat16", "int8"),
        Identity("weights", ("layer 0", "layer 1"), "rope", "float16", "int8"),
        Identity("weights", ("layer 0", "layer 1"), "rope", "bfloat16", "auto"),
        Identity("weightsrope", ("layer 0", "layer 1"), "", "bfloat16", "int8"),
    ],
)
def test_an_identity_is_all_of_it(other: Identity) -> None:
    assert other.digest() != IDENTITY.digest()


def test_roots_differ() -> None:
    digest, tag = IDENTITY.digest(), tenant_tag(SECRET, b"a")
    roots = [
        ROOT,
        root_key(b"t" * 32, digest, tag),
        root_key(SECRET, b"another", tag),
        root_key(SECRET, digest, tenant_tag(SECRET, b"b")),
        root_key(SECRET, digest, tag, b"salt"),
        root_key(SECRET, digest, tag, b"salt", b"e" * 16),
        root_key(SECRET, digest, tag, era=b"e" * 16),
        root_key(SECRET, digest, tag, b"e" * 16),
        root_key(SECRET, digest + tag, tag[:0] + tag),
    ]
    assert len(set(roots)) == len(roots)
    assert root_key(SECRET, digest, tag) == ROOT, "a restart hits"


def test_a_root_is_that_of_a_store_a_tenant_and_an_era() -> None:
    root, tenant = ChainRoot(SECRET, IDENTITY.digest()), b"t" * 32
    assert root(b"") == root_key(SECRET, IDENTITY.digest(), tenant_tag(SECRET, b""))
    assert root(tenant) == root_key(SECRET, IDENTITY.digest(), tenant_tag(SECRET, tenant), tenant)
    assert root(b"x", tenant) == root_key(SECRET, IDENTITY.digest(), tenant_tag(SECRET, tenant), b"x")
    before, root.era = root(tenant), b"e" * 16
    assert root(tenant) != before
    assert ChainRoot()(b"") != ChainRoot()(tenant)


def chain(tokens: list[int]) -> list[bytes]:
    """Returns the keys of ``tokens`` after each page, and of all of them, each from the one before."""
    keys = [ROOT]
    for at in range(0, len(tokens), PAGE):
        keys.append(page_key(keys[-1], at, tokens[at : at + PAGE]))
    return keys[1:]


def test_a_prefix_has_the_key_that_its_format_says() -> None:
    """Fields with their sizes before them, hashed step by step."""
    parent, keys = ROOT, list[bytes]()
    for at in range(0, len(TOKENS), KEY_TOKENS):
        tokens = struct.pack(f"<{len(TOKENS[at : at + KEY_TOKENS])}I", *TOKENS[at : at + KEY_TOKENS])
        fields = b"lamina kv page 2", parent, struct.pack("<Q", at), tokens
        parent = sha256(b"".join(struct.pack("<Q", len(field)) + field for field in fields)).digest()
        keys.append(parent)
    assert [*prefix_keys(ROOT, 0, TOKENS)] == keys
    assert page_key(ROOT, 0, TOKENS) == chain(TOKENS)[-1] == parent


@given(at=st.integers(0, len(TOKENS) - 1), token=st.integers(0, 2**32 - 1))
def test_a_key_stands_for_all_tokens_before_its_end(at: int, token: int) -> None:
    changed = [*TOKENS[:at], token, *TOKENS[at + 1 :]]
    same = [a == b for a, b in zip(chain(TOKENS), chain(changed), strict=True)]
    first = len(same) if token == TOKENS[at] else at // PAGE
    assert same == [page < first for page in range(len(same))]


def test_a_page_depends_on_its_parent_and_number() -> None:
    tokens = TOKENS[:KEY_TOKENS]
    keys = {page_key(ROOT, 0, tokens), page_key(ROOT, 1, tokens), page_key(b"p" * 32, 0, tokens)}
    assert len(keys) == 3


def test_recorded_keys() -> None:
    """Later engines find what lies in a store: the keys change with the tags' numbers alone."""
    assert ROOT.hex()[:16] == "d322a3579462c5b9"
    assert page_key(ROOT, 0, TOKENS[:KEY_TOKENS]).hex()[:16] == "360c98aefb1d2756"


def test_refusals() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        page_key(ROOT, 0, [])
    with pytest.raises(OverflowError):
        page_key(ROOT, 0, [1 << 32])
    with pytest.raises(ValueError, match="32 bytes, not 31"):
        tenant_tag(b"s" * 31, b"a")
    with pytest.raises(ValueError, match="16 bytes, not 3"):
        root_key(SECRET, b"", b"abc")


def test_a_mark_after_an_empty_salt_names_no_tenant() -> None:
    tenant = b"t" * 32
    assert tenant_of(b"") == tenant_of(FULL_ATTENTION_SALT) == tenant_of(bytes(32) + b"d" * 32) == b""
    assert tenant_of(tenant) == tenant_of(tenant + FULL_ATTENTION_SALT) == tenant
