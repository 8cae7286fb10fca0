"""Pages that the media are to give up, and those of which they were told last. Pure policy: no torch, no I/O, no clock.

Nobody hears what became of a Drop. So behind a loss all that media were told to give up under the epoch before, and
have not been given again since, are told once more: until then nobody finds them, although memory workers may have
them yet.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from collections.abc import Sequence as Several

from lamina.protocol.step_plan import MAX_PAGES_PER_TRANSFER, DeletePages

MAX_DELETES_PER_PLAN = 1024  # pages in one plan
MAX_REMEMBERED_PAGES = 1 << 16  # pages; the last ones


class PendingDeletes:
    """Of one engine."""

    def __init__(self) -> None:
        self.pending: list[bytes] = []  # that no plan has told of yet, or none that all have surely done
        self._deleted: dict[bytes, None] = {}

    def delete_ops(self, sequence: int, keys: Several[bytes]) -> list[DeletePages]:
        """The ops of the next plan. ``sequence``: whose pages they were."""
        self._deleted |= dict.fromkeys(keys)
        for key in list(self._deleted)[: max(0, len(self._deleted) - MAX_REMEMBERED_PAGES)]:
            del self._deleted[key]
        return [
            DeletePages(sequence, list(keys[low : low + MAX_PAGES_PER_TRANSFER]))
            for low in range(0, len(keys), MAX_PAGES_PER_TRANSFER)
        ]

    def next_ops(self) -> list[DeletePages]:
        """For the next plan, of those that are due."""
        some, self.pending = self.pending[:MAX_DELETES_PER_PLAN], self.pending[MAX_DELETES_PER_PLAN:]
        return self.delete_ops(-1, some)

    def on_saved(self, keys: Collection[bytes]) -> None:
        """These are saved behind that."""
        for key in self._deleted.keys() & keys:
            del self._deleted[key]

    def restart(self) -> None:
        """Behind a loss."""
        self.pending += self._deleted
        self._deleted.clear()

    def exclude_deleted(self, keys: Iterable[bytes]) -> set[bytes]:
        """Those of ``keys`` that may be found."""
        return set(keys).difference(self.pending)
