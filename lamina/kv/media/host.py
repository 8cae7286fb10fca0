"""Pages in the host's memory, of one process. A checksum (CRC-32) of each atom is kept beside it."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from lamina.kv.media import AtomLostError, Bytes, Held, MediumError, MediumPlace, NoRoomError
from lamina.kv.pages import Atom, Page
from lamina.kv.victims import Use, choose, rank_of


@dataclass
class _Shelf:
    page: Page
    came: int
    used: int = 0
    uses: int = 0
    atoms: dict[Atom, tuple[bytes, int]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(len(atom) for atom, _ in self.atoms.values())


class Host:
    """A worker's part of the size is all that it takes, without what Python adds."""

    def __init__(self, place: MediumPlace) -> None:
        rank_of(place.policy)
        self._size = place.size // place.workers
        self._policy = place.policy
        self._lock = threading.Lock()
        self._shelves: dict[bytes, _Shelf] | None = {}
        self._taken = 0
        self._clock = 0

    def reserve(self, nbytes: int) -> list[bytes]:
        """See Medium."""
        with self._lock:
            shelves = self._open()
            if nbytes > self._size:
                raise NoRoomError(f"{nbytes} bytes are more than this worker's part of the medium, {self._size}")
            uses = (Use(k, s.page.number, s.nbytes, s.came, s.used, s.uses) for k, s in shelves.items())
            given = choose(self._policy, uses, self._taken + nbytes - self._size)
            self._drop(given)
            return given

    def write(self, page: Page, atoms: Mapping[Atom, Bytes]) -> None:
        """See Medium."""
        if not atoms:
            raise ValueError("a write has at least one atom")
        new = {atom: (bytes(data), zlib.crc32(data)) for atom, data in atoms.items()}
        with self._lock:
            shelf = self._open().get(page.key)
            if shelf is not None and not page.is_same(shelf.page):
                raise ValueError("another page has this key")
            kept = {} if shelf is None or shelf.page != page else shelf.atoms
            more = sum(len(data) for data, _ in (kept | new).values()) - (shelf.nbytes if shelf is not None else 0)
            if self._taken + more > self._size:
                raise NoRoomError(f"no room for {more} bytes: {self._taken} of {self._size} are taken")
            if shelf is None:
                shelf = self._open()[page.key] = _Shelf(page, self._clock + 1)
            shelf.page, shelf.atoms = page, kept | new
            self._taken += more
            self._use(shelf)

    def read(self, key: bytes, into: Mapping[Atom, bytearray | memoryview]) -> None:
        """See Medium."""
        with self._lock:
            shelf = self._open().get(key)
            if shelf is None or not into.keys() <= shelf.atoms.keys():
                raise AtomLostError("no such atom is here")
            found = [(shelf.atoms[atom], memoryview(buffer).cast("B")) for atom, buffer in into.items()]
            self._use(shelf)
        for (data, _), buffer in found:
            if buffer.nbytes != len(data):
                raise ValueError(f"an atom of {len(data)} bytes, and a buffer of {buffer.nbytes}")
        for (data, crc), buffer in found:
            buffer[:] = data
            if zlib.crc32(buffer) != crc:
                raise AtomLostError("an atom is damaged")

    def drop(self, keys: Iterable[bytes]) -> None:
        """See Medium."""
        with self._lock:
            self._drop(keys)

    def pages(self) -> list[Held]:
        """See Medium."""
        with self._lock:
            shelves = sorted(self._open().values(), key=lambda shelf: shelf.used)
            return [Held(shelf.page, frozenset(shelf.atoms), shelf.nbytes) for shelf in shelves]

    def close(self) -> None:
        """See Medium."""
        with self._lock:
            self._shelves = None

    def _open(self) -> dict[bytes, _Shelf]:
        if self._shelves is None:
            raise MediumError("the medium is closed")
        return self._shelves

    def _use(self, shelf: _Shelf) -> None:
        self._clock += 1
        shelf.used = self._clock
        shelf.uses += 1

    def _drop(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            shelf = self._open().pop(key, None)
            self._taken -= shelf.nbytes if shelf is not None else 0


def open_medium(place: MediumPlace) -> Host:
    """An empty one. Raises ValueError."""
    return Host(place)
