"""Where pages lie beside the pool: a seam, and the table of its entries.

Contract, the same for every entry (tests/contract/test_media.py):

- A page is known by its key. Its atoms come in any number of writes, by any number of workers: each writes those that
  it holds. An atom that is written twice is there once, as it was written last.
- A write is all or nothing, for all atoms that it is given: also where the process is killed half way. Before ``write``
  returns nobody reads them, behind it everybody does who has the medium open, and ``pages`` has them.
- A read fills buffers with the bytes that were written, or raises AtomLostError; then the buffers hold anything. Bytes
  are checked: damage, a missing part or another atom's bytes in their place are an AtomLostError, never a wrong answer.
  A page with a damaged atom stays until its reader drops it.
- The medium holds at most its size. ``reserve`` gives up pages for what is to come, the worst first by the policy that
  the medium was opened with; ``write`` gives up none.
- Pages that were prolonged give way behind those that were not, for that time; those that waiting turns ``expect``
  give way behind all others, the ones of the last turn first.
- Any thread calls, several at once. A call blocks for as long as the disk takes, and so belongs on an I/O thread. A
  buffer is the caller's again behind the call.
- Behind ``close`` every call raises MediumError, ``close`` itself does nothing.
- Errors of the system (EIO, ENOSPC) are MediumError. Behind one the medium still works, as far as the system does.

One entry is no store: ``zeros`` has every page, and keeps nothing that is written (tests/e2e/kv/test_decode_only.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import NamedTuple, Protocol

from lamina.kv.pages import Atom, Page
from lamina.netstack.contract.plugins import load_plugin, plugins

# name -> module of this package with a function ``open_medium(place)``; imported when first used
MEDIA: dict[str, str] = {"host": "host", "file": "file", "layered": "layered", "zeros": "zeros"}

PLUGINS = "LAMINA_MEDIA"  # more entries, or others in place of these, with whole names of modules

Bytes = bytes | bytearray | memoryview


class MediumError(Exception):
    """The medium failed, and says how; whatever was asked for has not happened."""


class AtomLostError(MediumError):
    """An atom is not there, or is not as it was written."""


class NoRoomError(MediumError):
    """There is no room for a write, and no page that may be given up for it."""


class HeldPage(NamedTuple):
    """A page, and what the medium has of it."""

    page: Page
    atoms: frozenset[Atom]
    nbytes: int  # of room that the page takes


class MediumPlace(NamedTuple):
    """How to open a medium.

    ``size``: bytes for all workers of this server on this host, which are ``workers``; each has the same part of it.
    ``memory``: the layered medium's, the same of the host's memory, while ``size`` is the disk's.
    ``policy``: who is given up first. ``identity``: pages of another one are not listed and not read, but may be given
    up. What follows is the file medium's: ``secret`` is the store's (lamina.kv.keys), and ``server`` names the server
    whose workers share ``directory``; no other one may open it meanwhile. ``encrypt``: atoms lie there encrypted, by a
    key of their tenant. ``ttl_s``: pages that were not used for so many seconds are given up, with the next ``reserve``
    or start; 0 = they are not.
    """

    size: int
    identity: bytes = b""
    workers: int = 1
    policy: str = "lru"
    directory: str = ""
    secret: bytes = b""
    server: str = ""
    encrypt: bool = True
    memory: int = 0
    ttl_s: float = 0.0


class Medium(Protocol):
    """One worker's end of a tier."""

    def reserve(self, nbytes: int) -> list[bytes]:
        """Make room for one write of ``nbytes`` of atoms; returns the keys of the pages that were given up, of which
        no atom is left. The room holds until the next ``reserve`` or ``write`` of this worker. Raises NoRoomError,
        MediumError.
        """
        ...

    def write(self, page: Page, atoms: Mapping[Atom, Bytes]) -> None:
        """Add ``atoms`` to ``page``, which is made where it is not there. Raises NoRoomError, MediumError; ValueError
        where there is no atom, or where the page is there with another number, tenant or count of tokens.
        """
        ...

    def read(self, key: bytes, into: Mapping[Atom, bytearray | memoryview]) -> None:
        """Fill each buffer with its atom of the page: writable, contiguous and of the atom's length. It is a use of
        the page. Raises AtomLostError, MediumError; ValueError for a buffer of another length.
        """
        ...

    def take(self, key: bytes, atoms: frozenset[Atom] | None = None) -> tuple[Page, dict[Atom, bytes]]:
        """A page and the bytes of its ``atoms`` that are there; None: of all. The policy does not count it as a use of
        the page. Raises AtomLostError, also where there is none of them; MediumError.
        """
        ...

    def held(self, key: bytes) -> HeldPage | None:
        """One page; None where it is not there. Raises MediumError."""
        ...

    def expect(self, turn: int, keys: Sequence[bytes]) -> None:
        """A waiting turn needs pages, those from the beginning of its sequence on, in several calls where they are
        many; no keys: it needs none any more. ``turn``: the earlier ones have the smaller numbers. It does no I/O.
        """
        ...

    def copied(self, key: bytes, *, yes: bool) -> None:
        """Whether all that is here of a page lies elsewhere too: so it goes before all others. It does no I/O."""
        ...

    def prolong(self, keys: Iterable[bytes], seconds: float) -> None:
        """These pages are not given up for so many seconds from now on, as long as others can be, nor for their age. An
        earlier word that reaches further stays; those that are not there are none. Raises MediumError.
        """
        ...

    def fetch(self, atoms: frozenset[Atom]) -> list[bytes] | None:
        """Bring one page that is expected to where it is read faster, as far as it has ``atoms``. Returns as
        ``reserve``, or None: there is nothing to do. Raises MediumError.
        """
        ...

    def drop(self, keys: Iterable[bytes]) -> None:
        """Give up pages, all atoms of all workers; those that are not there are none. Raises MediumError."""
        ...

    def divide(self, workers: int) -> list[bytes]:
        """From now on ``workers`` workers share the size in equal parts. Pages stay as far as this worker's part has
        room for them. Returns as ``reserve``. Raises MediumError.
        """
        ...

    def pages(self) -> list[HeldPage]:
        """The pages of this identity that are there; the most recently used last. Raises MediumError."""
        ...

    def keys(self, atoms: frozenset[Atom], most: int) -> list[bytes]:
        """Keys of pages of this identity that have all of ``atoms``: the ``most``, one at least, that were used last,
        in the order of their last use. It takes milliseconds for thousands of pages. Raises MediumError.
        """
        ...

    def close(self) -> None:
        """Give back what it has. What a file medium keeps stays, and the next one finds it."""
        ...


def open_medium(name: str, place: MediumPlace) -> Medium:
    """Open entry ``name`` of LAMINA_MEDIA or of the table. Raises ValueError, with one line, for an unknown name or a
    place that cannot be had; ImportError for a module of LAMINA_MEDIA that cannot be imported.
    """
    plugin = plugins(PLUGINS).get(name, "")
    if name not in MEDIA and not plugin:
        raise ValueError(f"a medium is one of {', '.join(MEDIA)}, not {name!r}")
    module = load_plugin(PLUGINS, plugin) if plugin else import_module(f"{__name__}.{MEDIA[name]}")
    medium: Medium = module.open_medium(place)
    return medium
