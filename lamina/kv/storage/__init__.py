"""Storage backends of offloaded pages: a seam, and the table of its entries.

Contract, the same for every entry (tests/contract/test_media.py):

- A page is identified by its key. Any number of workers write its fragments, in any number of writes: each writes those
  that it holds. A fragment that is written again replaces the old one.
- A write stores all of its fragments or none, even if the process is killed during it. Before ``write`` returns, no
  process reads them. After that, all processes with the storage open do, and ``pages`` lists them.
- A read fills buffers with the bytes that were written, or raises FragmentLostError; then the buffers hold anything.
  Bytes are checked: damage, a missing part or bytes of another fragment raise FragmentLostError. A page with a damaged
  fragment stays until its reader deletes it. If nothing of the page is stored, a read raises PageGoneError.
- Storage holds at most its size. ``reserve`` evicts pages for the next write, the lowest first by the policy that it
  was opened with; ``write`` evicts none.
- Pages with retention are evicted after pages without, for that time. Pages that waiting requests ``hint`` are evicted
  after all others, those of the last request first.
- Any thread may call, several at once. A call blocks for as long as the disk takes, so it belongs on an I/O thread. The
  caller may use a buffer again after the call.
- After ``close`` every call raises StorageError; ``close`` itself does nothing.
- Errors of the system (EIO, ENOSPC) are StorageError. After one, storage still works as far as the system does.

One entry stores nothing: ``zeros`` has every page, and discards writes (tests/e2e/kv/test_decode_only.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import NamedTuple, Protocol

from lamina.kv.pages import Page, PageFragment
from lamina.netstack.contract.plugins import load_plugin, plugins

# name -> module of this package with a function ``open_storage(config)``; imported when first used
STORAGE_BACKENDS: dict[str, str] = {"host": "host", "file": "file", "layered": "layered", "zeros": "zeros"}

STORES_NOTHING = "zeros"
PLUGINS = "LAMINA_MEDIA"  # more entries, or replacements of these, with full names of modules

Bytes = bytes | bytearray | memoryview


class StorageError(Exception):
    """A storage call failed, for the reason in the text, and has changed nothing."""


class FragmentLostError(StorageError):
    """A fragment is missing or damaged."""


class PageGoneError(FragmentLostError):
    """Nothing of a page is stored, such as after it was evicted or has expired."""

    def __init__(self, text: str = "it was evicted or has expired") -> None:
        super().__init__(text)


class StorageFullError(StorageError):
    """A write finds no space, and no page may be evicted for it."""


class StoredPage(NamedTuple):
    """A page, and the fragments of it that are stored."""

    page: Page
    fragments: frozenset[PageFragment]
    nbytes: int  # bytes that the page occupies


class StorageConfig(NamedTuple):
    """The options with which storage is opened.

    ``total_bytes``: for all workers of this server on this host, which are ``workers``; each has an equal part.
    ``memory_bytes``: host memory of layered storage, while ``total_bytes`` is its disk space. ``policy``: the order of
    eviction. ``identity``: pages of another one are not listed and not read, but may be evicted.

    The others are for file storage. ``secret``: of the store (lamina.kv.page_keys). ``server``: names the server whose
    workers share ``directory``; no other server may open it meanwhile. ``encrypt``: encrypts fragments by a key of
    their tenant. ``ttl_s``: seconds without use after which pages are deleted, by ``expire``, ``reserve`` or a start.
    0: never.
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
    """One worker's access to storage of pages."""

    def reserve(self, nbytes: int) -> list[bytes]:
        """Free space for one write of ``nbytes`` bytes of fragments. Returns the keys of evicted pages, of which no
        fragment is left. The space is reserved until the next ``reserve`` or ``write`` of this worker. Raises
        StorageFullError, StorageError.
        """
        ...

    def write(self, page: Page, fragments: Mapping[PageFragment, Bytes]) -> None:
        """Add ``fragments`` to ``page``, which is created if missing. Raises StorageFullError, StorageError. Raises
        ValueError if there is no fragment, or if the stored page has another number, tenant or count of tokens.
        """
        ...

    def read(self, key: bytes, into: Mapping[PageFragment, bytearray | memoryview]) -> None:
        """Fill each buffer with its fragment of the page, and record a use of the page. Buffers are writable,
        contiguous and as long as the fragment. Raises FragmentLostError, StorageError, and ValueError for a buffer of
        another length.
        """
        ...

    def read_page(
        self, key: bytes, fragments: frozenset[PageFragment] | None = None
    ) -> tuple[Page, dict[PageFragment, bytes]]:
        """Return a page and the bytes of its stored ``fragments``; None for all. This is not counted as a use. Raises
        FragmentLostError, also if none of them is stored, and StorageError.
        """
        ...

    def lookup(self, key: bytes) -> StoredPage | None:
        """Return a stored page; None if it is missing. Raises StorageError."""
        ...

    def hint(self, turn: int, keys: Sequence[bytes]) -> None:
        """Note that a waiting request needs pages, from the beginning of its sequence on. Does no I/O. Many pages come
        in several calls. No keys: it needs none any more. ``turn``: its number; earlier requests have smaller ones.
        """
        ...

    def mark_copied(self, key: bytes, *, yes: bool) -> None:
        """Note if other storage has all that is stored of a page, which is then evicted before all others. Does no
        I/O.
        """
        ...

    def set_retention(self, keys: Iterable[bytes], seconds: float) -> None:
        """Evict these pages after all others, and do not delete them for their age, for ``seconds`` from now on. An
        earlier call that reaches further stays in force; missing pages are ignored. Raises StorageError.
        """
        ...

    def set_last_use(self, keys: Iterable[bytes], seconds_ago: float) -> None:
        """Note that these pages were last used so many seconds ago; missing ones are ignored. Raises StorageError."""
        ...

    def expire(self) -> list[bytes]:
        """Delete pages that were not used for ``ttl_s`` seconds, unless that was done a moment ago. Returns the keys of
        pages of which no fragment is left. Raises StorageError.
        """
        ...

    def prefetch_next(self, fragments: frozenset[PageFragment]) -> list[bytes] | None:
        """Move one expected page, as far as it has ``fragments``, to where it is read faster. Returns the keys of
        evicted pages, as ``reserve`` does; None if there is nothing to move. Raises StorageError.
        """
        ...

    def delete(self, keys: Iterable[bytes]) -> None:
        """Delete pages, with all fragments of all workers; missing ones are ignored. Raises StorageError."""
        ...

    def set_num_workers(self, workers: int) -> list[bytes]:
        """Share the size among ``workers`` workers in equal parts from now on. Pages stay as far as they fit in this
        worker's part. Returns the keys of evicted pages. Raises StorageError.
        """
        ...

    def pages(self) -> list[StoredPage]:
        """Return the stored pages of this identity, the most recently used last. Raises StorageError."""
        ...

    def keys(self, fragments: frozenset[PageFragment], most: int) -> list[bytes]:
        """Return keys of pages of this identity that have all of ``fragments``, in the order of their last use. These
        are the ``most`` (at least one) that were used last. Takes milliseconds for thousands of pages. Raises
        StorageError.
        """
        ...

    def close(self) -> None:
        """Release all resources. Files stay for the next server."""
        ...


def open_storage(name: str, config: StorageConfig) -> StorageBackend:
    """Open entry ``name`` of LAMINA_MEDIA or of the table. Raises ValueError, with one line, for an unknown name or
    storage that cannot be opened, and ImportError for a module of LAMINA_MEDIA that cannot be imported.
    """
    plugin = plugins(PLUGINS).get(name, "")
    if name not in STORAGE_BACKENDS and not plugin:
        raise ValueError(f"a storage backend is one of {', '.join(STORAGE_BACKENDS)}, not {name!r}")
    module = load_plugin(PLUGINS, plugin) if plugin else import_module(f"{__name__}.{STORAGE_BACKENDS[name]}")
    medium: StorageBackend = module.open_storage(config)
    return medium
