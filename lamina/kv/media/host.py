"""Pages in the host's memory, of one process. A checksum of each atom is kept beside it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from lamina.kv.media import AtomLostError, Bytes, HeldPage, MediumError, MediumPlace, NoRoomError
from lamina.kv.pages import Atom, Page
from lamina.kv.victims import VictimQueue, rank_of
from lamina.kv.windows import Expected
from lamina.netstack.checksum import checksum


class _Copy(NamedTuple):
    data: bytes
    sum: bytes


class _HostPage(NamedTuple):
    page: Page
    atoms: dict[Atom, _Copy]

    @property
    def nbytes(self) -> int:
        return sum(len(copy.data) for copy in self.atoms.values())


class HostMedium:
    """A worker's part of the size is all that it takes, without what Python adds."""

    def __init__(self, place: MediumPlace, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock``: seconds."""
        self._clock = clock
        self._whole, self.size = place.size, place.size // place.workers  # bytes: of all workers, of this one
        self._lock = threading.Lock()
        self._lying: dict[bytes, _HostPage] | None = {}  # the most recently used last
        self._expected, rank = Expected(), rank_of(place.policy)
        self._tier = VictimQueue(place.policy, self.size, lambda use: self._expected.rank(use, rank))
        self._until: dict[bytes, float] = {}  # of prolonged pages
        self._ends: list[tuple[float, bytes]] = []  # a heap: when to look at a page, at its end or before
        self._expected.prolonged = self._until

    def reserve(self, nbytes: int) -> list[bytes]:
        """Make room for ``nbytes`` in the shared buffer: the least recently used pages go. Raises NoRoomError."""
        with self._lock:
            lying = self._open()
            if nbytes > self.size:
                raise NoRoomError(f"{nbytes} bytes are more than this worker's part of it, {self.size}")
            self._pass()
            given = self._tier.evict(room=nbytes)
            for key in given:
                del lying[key]
                self._until.pop(key, None)
            return given

    def write(self, page: Page, atoms: Mapping[Atom, Bytes]) -> None:
        """Copy the atoms into the page. Raises NoRoomError; ValueError for a page that is there otherwise."""
        if not atoms:
            raise ValueError("a write has at least one atom")
        new = {atom: _Copy(bytes(data), checksum(data)) for atom, data in atoms.items()}
        with self._lock:
            old = self._open().get(page.key)
            if old is not None and not page.is_same(old.page):
                raise ValueError("another page has this key")
            lying = _HostPage(page, (old.atoms if old is not None and old.page == page else {}) | new)
            more = lying.nbytes - (old.nbytes if old is not None else 0)
            if self._tier.nbytes + more > self.size:
                raise NoRoomError(f"no room for {more} bytes: {self._tier.nbytes} of {self.size} are taken")
            self._use(lying)

    def read(self, key: bytes, into: Mapping[Atom, bytearray | memoryview]) -> None:
        """Copy the page's atoms into the buffers. Raises AtomLostError; ValueError for a buffer's length."""
        views = {atom: memoryview(buffer).cast("B") for atom, buffer in into.items()}
        with self._lock:
            lying = self._open().get(key)
            if lying is None or not into.keys() <= lying.atoms.keys():
                raise AtomLostError("no such atom is here")
            self._use(lying)
        for atom, view in views.items():
            if view.nbytes != len(lying.atoms[atom].data):
                raise ValueError(f"an atom of {len(lying.atoms[atom].data)} bytes, and a buffer of {view.nbytes}")
        for atom, view in views.items():
            view[:] = lying.atoms[atom].data
            if checksum(view) != lying.atoms[atom].sum:
                raise AtomLostError(f"an atom is damaged: layer {atom.layer}, head {atom.head}")

    def take(self, key: bytes, atoms: frozenset[Atom] | None = None) -> tuple[Page, dict[Atom, bytes]]:
        """A page and its bytes: of ``atoms``, or all. It is no use of the page. Raises AtomLostError."""
        with self._lock:
            lying = self._open().get(key)
        there = {} if lying is None else {a: c for a, c in lying.atoms.items() if atoms is None or a in atoms}
        if lying is None or not there:
            raise AtomLostError("no such atom is here")
        if any(checksum(copy.data) != copy.sum for copy in there.values()):
            raise AtomLostError("an atom is damaged")
        return lying.page, {atom: copy.data for atom, copy in there.items()}

    def held(self, key: bytes) -> HeldPage | None:
        """What is here of one page; None where it is not."""
        with self._lock:
            lying = self._open().get(key)
            return None if lying is None else HeldPage(lying.page, frozenset(lying.atoms), lying.nbytes)

    def expect(self, turn: int, keys: Sequence[bytes]) -> None:
        """Waiting turn ``turn`` needs these pages too; without any, it needs none any more."""
        with self._lock:
            self._tier.rank_again(self._expected.expect(turn, keys))

    def copied(self, key: bytes, *, yes: bool) -> None:
        """Whether another place has all that is here of a page, which goes first then."""
        with self._lock:
            (self._expected.copied.add if yes else self._expected.copied.discard)(key)
            self._tier.rank_again([key])

    def prolong(self, keys: Iterable[bytes], seconds: float) -> None:
        """Have these pages give way behind others for so many seconds."""
        with self._lock:
            lying, end = self._open(), self._clock() + seconds
            for key in keys:
                if key in lying and self._until.get(key, 0.0) < end:
                    if key not in self._until:  # else its entry is put back where it comes too early
                        heappush(self._ends, (end, key))
                    self._until[key] = end
                    self._tier.rank_again([key])
            if len(self._ends) > 2 * len(self._until) + 64:  # most are of pages that are gone
                self._ends = sorted((end, key) for key, end in self._until.items())

    def prolonged_s(self, key: bytes) -> float:
        """For how many seconds a page is still prolonged."""
        with self._lock:
            return max(0.0, self._until.get(key, 0.0) - self._clock())

    def _pass(self) -> None:
        """Pages whose time has passed go as others do."""
        while self._ends and self._ends[0][0] <= self._clock():
            _, key = heappop(self._ends)
            end = self._until.get(key, 0.0)
            if end > self._clock():
                heappush(self._ends, (end, key))
            elif self._until.pop(key, None) is not None:
                self._tier.rank_again([key])

    def fetch(self, atoms: frozenset[Atom]) -> list[bytes] | None:
        """None: there is one place, so no page is brought nearer."""
        return None

    def divide(self, workers: int) -> list[bytes]:
        """Have the part of one of so many; pages that have no room in it go with the next ``reserve``."""
        with self._lock:
            self.size = self._tier.size = self._whole // workers
        return []

    def __contains__(self, key: object) -> bool:
        with self._lock:
            return key in self._open()

    def worst(self, room: int) -> bytes | None:
        """The page that goes next where ``room`` bytes are wanted; None: there is as much."""
        with self._lock:
            self._open()
            self._pass()
            return self._tier.worst(room=room)

    def drop(self, keys: Iterable[bytes]) -> None:
        """Give up these pages, all atoms of all workers."""
        with self._lock:
            lying = self._open()
            for key in keys:
                lying.pop(key, None)
                self._until.pop(key, None)
                self._tier.forget(key)

    def pages(self) -> list[HeldPage]:
        """The pages held; the most recently used last."""
        with self._lock:
            return [HeldPage(each.page, frozenset(each.atoms), each.nbytes) for each in self._open().values()]

    def keys(self, atoms: frozenset[Atom], most: int) -> list[bytes]:
        """Keys of the last used pages that have all of ``atoms``; the most recently used last."""
        with self._lock:
            there = [key for key, each in self._open().items() if atoms <= each.atoms.keys()]
        return there[-most:]

    def close(self) -> None:
        """Give up all pages; later calls raise MediumError."""
        with self._lock:
            self._lying = None

    def _open(self) -> dict[bytes, _HostPage]:
        if self._lying is None:
            raise MediumError("the medium is closed")
        return self._lying

    def _use(self, lying: _HostPage) -> None:
        known = self._open()
        known.pop(lying.page.key, None)
        known[lying.page.key] = lying
        self._tier.use(lying.page.key, lying.page.number, lying.nbytes)


def open_medium(place: MediumPlace) -> HostMedium:
    """An empty one. Raises ValueError."""
    return HostMedium(place)
