"""Pages and fragments: the units in which K and V leave a memory worker's pool and come back to it.

A *page* is PAGE tokens of a sequence at absolute positions, from a multiple of PAGE on; the last one may be partial. A
*fragment* is the K and V of one page, one layer and one KV head in stored form, in rows by token. It does not depend on
the block size of the pool, the partition or the number of memory workers:

    K         [tokens, D]     in the store's dtype
    V         [tokens, Dv]
    K scales  [tokens] fp32   where the store has 8 bits
    V scales  [tokens] fp32

Recurrent states are stored like a page that ends where they do, under a key of their own. Their fragments are numbered
after those of attention layers (workers/memory/offload/state_fragments.py).
"""

from __future__ import annotations

from typing import NamedTuple

PAGE = 128  # tokens, a multiple of every block size
SCALE_BYTES = 4
TENANT_BYTES = 16
PROMPT, DECODE = "prompt", "decode"


class PageFragment(NamedTuple):
    """The name of one fragment of a page. ``head``: a KV head of the whole model's layer, not of a rank's part."""

    layer: int
    head: int


class FragmentFormat(NamedTuple):
    """The bytes of one token in the fragments of one layer: K, V, and one fp32 ``scale`` for each; 0 if they have
    none.
    """

    k: int
    v: int
    scale: int = 0

    def nbytes(self, tokens: int) -> int:
        """Return the bytes of a fragment of ``tokens`` tokens."""
        return tokens * (self.k + self.v + 2 * self.scale)


class Provenance(NamedTuple):
    """The way in which K and V of a page were computed. KV of equal provenance is equal bit for bit; else perhaps
    not.
    """

    source: str  # PROMPT or DECODE
    chunk: int = 0  # tokens of a prefill chunk
    build: str = ""  # identifies the build of the kernels
    ranks: int = 1  # number of tensor-parallel ranks


class Page(NamedTuple):
    """The name and properties of a page."""

    key: bytes  # lamina.kv.page_keys
    number: int  # its first token's position is PAGE * number
    tokens: int  # 1 .. PAGE
    tenant: bytes  # TENANT_BYTES, whose data key encrypts it
    provenance: Provenance

    def is_same_page(self, other: Page) -> bool:
        """Return whether both are the same page, even if K and V were computed in different ways."""
        return self._replace(provenance=other.provenance) == other
