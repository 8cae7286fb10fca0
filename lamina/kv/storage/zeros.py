"""Pages of zeros: every page is there, and its K and V are 0. For decoding behind prompts that nobody computes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lamina.kv.pages import Page, PageFragment

from . import Bytes, FragmentLostError, StorageConfig, StoredPage


class DummyStorage:
    """Takes no room. Writes are forgotten; reads give zeros for every key."""

    def reserve(self, nbytes: int) -> list[bytes]:
        """Nobody gives way."""
        return []

    def write(self, page: Page, fragments: Mapping[PageFragment, Bytes]) -> None:
        """Nothing is kept."""

    def read(self, key: bytes, into: Mapping[PageFragment, bytearray | memoryview]) -> None:
        """Fill the buffers with zeros."""
        for buffer in into.values():
            view = memoryview(buffer).cast("B")
            view[:] = bytes(view.nbytes)

    def read_page(
        self, key: bytes, fragments: frozenset[PageFragment] | None = None
    ) -> tuple[Page, dict[PageFragment, bytes]]:
        """Raises FragmentLostError: no page has a name here."""
        raise FragmentLostError("zeros have no pages to take")

    def lookup(self, key: bytes) -> StoredPage | None:
        """None."""
        return None

    def hint(self, turn: int, keys: Sequence[bytes]) -> None:
        """Nothing is nearer than it is."""

    def set_retention(self, keys: Iterable[bytes], seconds: float) -> None:
        """Nothing gives way."""

    def mark_copied(self, key: bytes, *, yes: bool) -> None:
        """Nobody gives way."""

    def prefetch_next(self, fragments: frozenset[PageFragment]) -> list[bytes] | None:
        """None: nothing is to be done."""
        return None

    def delete(self, keys: Iterable[bytes]) -> None:
        """Nothing is kept."""

    def set_num_workers(self, workers: int) -> list[bytes]:
        """Nothing has a size."""
        return []

    def pages(self) -> list[StoredPage]:
        """None, by name."""
        return []

    def keys(self, fragments: frozenset[PageFragment], most: int) -> list[bytes]:
        """None, by name."""
        return []

    def close(self) -> None:
        """Nothing is held."""


def open_storage(config: StorageConfig) -> DummyStorage:
    """Of no size."""
    return DummyStorage()
