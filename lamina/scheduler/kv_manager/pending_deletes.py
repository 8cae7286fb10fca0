"""Pages to delete from storage. Pure policy: no torch, no I/O, no clock.

Memory workers do not report deletions. After a loss, the driver cannot know which pages were deleted. So all that were
not saved again are deleted once more. Until then no sequence finds them, although memory workers may list them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from collections.abc import Sequence as Several

from lamina.protocol.step_plan import MAX_PAGES_PER_TRANSFER, DeletePages

MAX_DELETES_PER_PLAN = 1024  # pages in one plan
MAX_REMEMBERED_PAGES = 1 << 16  # pages; the last ones


class PendingDeletes:
    """The deletions of one engine."""

    def __init__(self) -> None:
        self.pending: list[bytes] = []  # pages that no plan has deleted yet, or that may still be there
        self._deleted: dict[bytes, None] = {}

    def delete_ops(self, sequence: int, keys: Several[bytes]) -> list[DeletePages]:
        """Return the ops of the next plan that delete pages of ``sequence``."""
        self._deleted |= dict.fromkeys(keys)
        for key in list(self._deleted)[: max(0, len(self._deleted) - MAX_REMEMBERED_PAGES)]:
            del self._deleted[key]
        return [
            DeletePages(sequence, list(keys[low : low + MAX_PAGES_PER_TRANSFER]))
            for low in range(0, len(keys), MAX_PAGES_PER_TRANSFER)
        ]

    def next_ops(self) -> list[DeletePages]:
        """Return the ops of the next plan that delete pending pages."""
        some, self.pending = self.pending[:MAX_DELETES_PER_PLAN], self.pending[MAX_DELETES_PER_PLAN:]
        return self.delete_ops(-1, some)

    def on_saved(self, keys: Collection[bytes]) -> None:
        """Record that deleted pages are saved again."""
        for key in self._deleted.keys() & keys:
            del self._deleted[key]

    def restart(self) -> None:
        """Delete all pages once more, after a loss."""
        self.pending += self._deleted
        self._deleted.clear()

    def exclude_deleted(self, keys: Iterable[bytes]) -> set[bytes]:
        """Return those of ``keys`` that sequences may find."""
        return set(keys).difference(self.pending)
