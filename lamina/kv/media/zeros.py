"""Pages of zeros: every page is there, and its K and V are 0. For decoding behind prompts that nobody computes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lamina.kv.media import AtomLostError, Bytes, HeldPage, MediumPlace
from lamina.kv.pages import Atom, Page


class ZeroMedium:
    """Takes no room. Writes are forgotten; reads give zeros for every key."""

    def reserve(self, nbytes: int) -> list[bytes]:
        """Nobody gives way."""
        return []

    def write(self, page: Page, atoms: Mapping[Atom, Bytes]) -> None:
        """Nothing is kept."""

    def read(self, key: bytes, into: Mapping[Atom, bytearray | memoryview]) -> None:
        """Fill the buffers with zeros."""
        for buffer in into.values():
            view = memoryview(buffer).cast("B")
            view[:] = bytes(view.nbytes)

    def take(self, key: bytes, atoms: frozenset[Atom] | None = None) -> tuple[Page, dict[Atom, bytes]]:
        """Raises AtomLostError: no page has a name here."""
        raise AtomLostError("zeros have no pages to take")

    def held(self, key: bytes) -> HeldPage | None:
        """None."""
        return None

    def expect(self, turn: int, keys: Sequence[bytes]) -> None:
        """Nothing is nearer than it is."""

    def prolong(self, keys: Iterable[bytes], seconds: float) -> None:
        """Nothing gives way."""

    def copied(self, key: bytes, *, yes: bool) -> None:
        """Nobody gives way."""

    def fetch(self, atoms: frozenset[Atom]) -> list[bytes] | None:
        """None: nothing is to be done."""
        return None

    def drop(self, keys: Iterable[bytes]) -> None:
        """Nothing is kept."""

    def divide(self, workers: int) -> list[bytes]:
        """Nothing has a size."""
        return []

    def pages(self) -> list[HeldPage]:
        """None, by name."""
        return []

    def keys(self, atoms: frozenset[Atom], most: int) -> list[bytes]:
        """None, by name."""
        return []

    def close(self) -> None:
        """Nothing is held."""


def open_medium(place: MediumPlace) -> ZeroMedium:
    """Of no size."""
    return ZeroMedium()
