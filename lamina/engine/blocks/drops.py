"""Pages that the media are to give up, and those of which they were told last. Pure policy: no torch, no I/O, no clock.

Nobody hears what became of a Drop. So behind a loss all that media were told to give up under the view before, and have
not been given again since, are told once more: until then nobody finds them, although memory workers may have them yet.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from collections.abc import Sequence as Several

from lamina.protocol.plan import MOST_PAGES, Drop

MOST_DROPPED = 1024  # pages in one plan
MOST_REMEMBERED = 1 << 16  # pages; the last ones


class PageDrops:
    """Of one engine."""

    def __init__(self) -> None:
        self.due: list[bytes] = []  # that no plan has told of yet, or none that all have surely done
        self._told: dict[bytes, None] = {}

    def of(self, sequence: int, keys: Several[bytes]) -> list[Drop]:
        """The ops of the next plan. ``sequence``: whose pages they were."""
        self._told |= dict.fromkeys(keys)
        for key in list(self._told)[: max(0, len(self._told) - MOST_REMEMBERED)]:
            del self._told[key]
        return [Drop(sequence, list(keys[low : low + MOST_PAGES])) for low in range(0, len(keys), MOST_PAGES)]

    def next(self) -> list[Drop]:
        """For the next plan, of those that are due."""
        some, self.due = self.due[:MOST_DROPPED], self.due[MOST_DROPPED:]
        return self.of(-1, some)

    def given(self, keys: Collection[bytes]) -> None:
        """These are saved behind that."""
        for key in self._told.keys() & keys:
            del self._told[key]

    def again(self) -> None:
        """Behind a loss."""
        self.due += self._told
        self._told.clear()

    def without(self, keys: Iterable[bytes]) -> set[bytes]:
        """Those of ``keys`` that may be found."""
        return set(keys).difference(self.due)
