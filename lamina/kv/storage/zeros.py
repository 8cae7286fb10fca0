"""Zeros as storage: every page exists, and its K and V are 0. Used to decode after prompts that are not computed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lamina.kv.pages import Page, PageFragment

from . import Bytes, FragmentLostError, StorageConfig, StoredPage


class DummyStorage:
    """Occupies no space. Discards writes; reads return zeros for every key."""

    def reserve(self, nbytes: int) -> list[bytes]:
        """Return no keys: nothing is evicted."""
        return []

    def write(self, page: Page, fragments: Mapping[PageFragment, Bytes]) -> None:
        """Do nothing."""

    def read(self, key: bytes, into: Mapping[PageFragment, bytearray | memoryview]) -> None:
        """Fill the buffers with zeros."""
        for buffer in into.values():
            view = memoryview(buffer).cast("B")
            view[:] = bytes(view.nbytes)

    def read_page(
        self, key: bytes, fragments: frozenset[PageFragment] | None = None
    ) -> tuple[Page, dict[PageFragment, bytes]]:
        """Raise FragmentLostError: no page is known by name here."""
        raise FragmentLostError("zeros have no pages to take")

    def lookup(self, key: bytes) -> StoredPage | None:
        return None

    def hint(self, turn: int, keys: Sequence[bytes]) -> None:
        """Do nothing."""

    def set_retention(self, keys: Iterable[bytes], seconds: float) -> None:
        """Do nothing: no page is evicted."""

    def set_last_use(self, keys: Iterable[bytes], seconds_ago: float) -> None:
        """Do nothing: no page has an age."""

    def expire(self) -> list[bytes]:
        """Return no keys: no page has an age."""
        return []

    def mark_copied(self, key: bytes, *, yes: bool) -> None:
        """Do nothing: no page is evicted."""

    def prefetch_next(self, fragments: frozenset[PageFragment]) -> list[bytes] | None:
        """Return None: no page is moved."""
        return None

    def delete(self, keys: Iterable[bytes]) -> None:
        """Do nothing."""

    def set_num_workers(self, workers: int) -> list[bytes]:
        """Return no keys: storage has no size."""
        return []

    def pages(self) -> list[StoredPage]:
        """Return no pages, as none has a name."""
        return []

    def keys(self, fragments: frozenset[PageFragment], most: int) -> list[bytes]:
        """Return no keys, as no page has a name."""
        return []

    def close(self) -> None:
        """Do nothing."""


def open_storage(config: StorageConfig) -> DummyStorage:
    """Open the storage, which ignores its options."""
    return DummyStorage()
