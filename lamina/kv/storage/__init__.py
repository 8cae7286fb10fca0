"""Where pages lie beside the pool: a seam, and the table of its entries.

Contract, the same for every entry (tests/contract/test_media.py):

- A page is known by its key. Its fragments come in any number of writes, by any number of workers: each writes those
  that it holds. A fragment that is written twice is there once, as it was written last.
- A write is all or nothing, for all fragments that it is given: also where the process is killed half way. Before
  ``write`` returns nobody reads them, behind it everybody does who has the medium open, and ``pages`` has them.
- A read fills buffers with the bytes that were written, or raises FragmentLostError; then the buffers hold anything.
Bytes
  are checked: damage, a missing part or another fragment's bytes in their place are an FragmentLostError, never a wrong
  answer. A page with a damaged fragment stays until its reader drops it.
- The medium holds at most its size. ``reserve`` gives up pages for what is to come, the worst first by the policy that
  the medium was opened with; ``write`` gives up none.
- Pages that were prolonged give way behind those that were not, for that time; those that waiting turns ``hint``
  give way behind all others, the ones of the last turn first.
- Any thread calls, several at once. A call blocks for as long as the disk takes, and so belongs on an I/O thread. A
  buffer is the caller's again behind the call.
- Behind ``close`` every call raises StorageError, ``close`` itself does nothing.
- Errors of the system (EIO, ENOSPC) are StorageError. Behind one the medium still works, as far as the system does.

One entry is no store: ``zeros`` has every page, and keeps nothing that is written (tests/e2e/kv/test_decode_only.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import NamedTuple, Protocol

from lamina.kv.pages import Page, PageFragment
from lamina.netstack.contract.plugins import load_plugin, plugins

# name -> module of this package with a function ``open_storage(place)``; imported when first used
STORAGE_BACKENDS: dict[str, str] = {"host": "host", "file": "file", "layered": "layered", "zeros": "zeros"}

PLUGINS = "LAMINA_MEDIA"  # more entries, or others in place of these, with whole names of modules

Bytes = bytes | bytearray | memoryview


class StorageError(Exception):
    """The medium failed, and says how; whatever was asked for has not happened."""


class FragmentLostError(StorageError):
    """A fragment is not there, or is not as it was written."""


class StorageFullError(StorageError):
    """There is no room for a write, and no page that may be given up for it."""


class StoredPage(NamedTuple):
    """A page, and what the medium has of it."""

    page: Page
    fragments: frozenset[PageFragment]
    nbytes: int  # of room that the page takes


class StorageConfig(NamedTuple):
    """How to open a medium.

    ``total_bytes``: bytes for all workers of this server on this host, which are ``workers``; each has the same part of
    it. ``memory_bytes``: the layered medium's, the same of the host's memory, while ``total_bytes`` is the disk's.
    ``policy``: who is given up first. ``identity``: pages of another one are not listed and not read, but may be given
    up. What follows is the file medium's: ``secret`` is the store's (lamina.kv.page_keys), and ``server`` names the
    server whose workers share ``directory``; no other one may open it meanwhile. ``encrypt``: fragments lie there
    encrypted, by a key of their tenant. ``ttl_s``: pages that were not used for so many seconds are given up, with the
    next ``reserve`` or start; 0 = they are not.
    """

    total_bytes: int
    identity: bytes = b""
    workers: int = 1
    policy: str = "lru"
    directory: str = ""
    secret: bytes = b""
    server: str = ""
    encrypt: bool = True
    memory_bytes: int = 0
    ttl_s: float = 0.0


class StorageBackend(Protocol):
    """One worker's end of a tier."""

    def reserve(self, nbytes: int) -> list[bytes]:
        """Make room for one write of ``nbytes`` of fragments; returns the keys of the pages that were given up, of
        which no fragment is left. The room holds until the next ``reserve`` or ``write`` of this worker. Raises
        StorageFullError, StorageError.
        """
        ...

    def write(self, page: Page, fragments: Mapping[PageFragment, Bytes]) -> None:
        """Add ``fragments`` to ``page``, which is made where it is not there. Raises StorageFullError, StorageError;
        ValueError where there is no fragment, or where the page is there with another number, tenant or count of
        tokens.
        """
        ...

    def read(self, key: bytes, into: Mapping[PageFragment, bytearray | memoryview]) -> None:
        """Fill each buffer with its fragment of the page: writable, contiguous and of the fragment's length. It is a
        use of the page. Raises FragmentLostError, StorageError; ValueError for a buffer of another length.
        """
        ...

    def read_page(
        self, key: bytes, fragments: frozenset[PageFragment] | None = None
    ) -> tuple[Page, dict[PageFragment, bytes]]:
        """A page and the bytes of its ``fragments`` that are there; None: of all. The policy does not count it as a use
        of the page. Raises FragmentLostError, also where there is none of them; StorageError.
        """
        ...

    def lookup(self, key: bytes) -> StoredPage | None:
        """One page; None where it is not there. Raises StorageError."""
        ...

    def hint(self, turn: int, keys: Sequence[bytes]) -> None:
        """A waiting turn needs pages, those from the beginning of its sequence on, in several calls where they are
        many; no keys: it needs none any more. ``turn``: the earlier ones have the smaller numbers. It does no I/O.
        """
        ...

    def mark_copied(self, key: bytes, *, yes: bool) -> None:
        """Whether all that is here of a page lies elsewhere too: so it goes before all others. It does no I/O."""
        ...

    def set_retention(self, keys: Iterable[bytes], seconds: float) -> None:
        """These pages are not given up for so many seconds from now on, as long as others can be, nor for their age. An
        earlier word that reaches further stays; those that are not there are none. Raises StorageError.
        """
        ...

    def prefetch_next(self, fragments: frozenset[PageFragment]) -> list[bytes] | None:
        """Bring one page that is expected to where it is read faster, as far as it has ``fragments``. Returns as
        ``reserve``, or None: there is nothing to do. Raises StorageError.
        """
        ...

    def delete(self, keys: Iterable[bytes]) -> None:
        """Give up pages, all fragments of all workers; those that are not there are none. Raises StorageError."""
        ...

    def set_num_workers(self, workers: int) -> list[bytes]:
        """From now on ``workers`` workers share the size in equal parts. Pages stay as far as this worker's part has
        room for them. Returns as ``reserve``. Raises StorageError.
        """
        ...

    def pages(self) -> list[StoredPage]:
        """The pages of this identity that are there; the most recently used last. Raises StorageError."""
        ...

    def keys(self, fragments: frozenset[PageFragment], most: int) -> list[bytes]:
        """Keys of pages of this identity that have all of ``fragments``: the ``most``, one at least, that were used
        last, in the order of their last use. It takes milliseconds for thousands of pages. Raises StorageError.
        """
        ...

    def close(self) -> None:
        """Give back what it has. What a file medium keeps stays, and the next one finds it."""
        ...


def open_storage(name: str, config: StorageConfig) -> StorageBackend:
    """Open entry ``name`` of LAMINA_MEDIA or of the table. Raises ValueError, with one line, for an unknown name or a
    place that cannot be had; ImportError for a module of LAMINA_MEDIA that cannot be imported.
    """
    plugin = plugins(PLUGINS).get(name, "")
    if name not in STORAGE_BACKENDS and not plugin:
        raise ValueError(f"a medium is one of {', '.join(STORAGE_BACKENDS)}, not {name!r}")
    module = load_plugin(PLUGINS, plugin) if plugin else import_module(f"{__name__}.{STORAGE_BACKENDS[name]}")
    medium: StorageBackend = module.open_storage(config)
    return medium
