"""Which page is given up first where a tier is full. Pure policy: no torch, no I/O, no clock.

lru        the page that was used the longest ago
fifo       the one that came first
lfu        the one that was used the fewest times, of those the least recently
length     the one furthest from its sequence's beginning, of those the least recently: beginnings are shared
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from itertools import takewhile
from typing import NamedTuple

from lamina.config.offload import POLICIES


class PageUsage(NamedTuple):
    """The use of a page so far. ``first_used`` and ``last_used`` are counts of a clock that each page's use moves
    on."""

    key: bytes
    number: int  # of the page in its sequence
    nbytes: int
    first_used: int
    last_used: int
    num_uses: int = 1


EvictionRank = tuple[int, ...]
_STALE = 4  # entries of a heap for each page, of which one counts
_RANKS: dict[str, Callable[[PageUsage], EvictionRank]] = {
    "lru": lambda use: (use.last_used,),
    "fifo": lambda use: (use.first_used,),
    "lfu": lambda use: (use.num_uses, use.last_used),
    "length": lambda use: (-use.number, use.last_used),
}


def eviction_rank(policy: str) -> Callable[[PageUsage], EvictionRank]:
    """The page of the lowest rank goes first. Raises ValueError for a name that is none."""
    if policy not in _RANKS:
        raise ValueError(f"--kv-offload eviction= must be one of {', '.join(POLICIES)}, not {policy!r}")
    return _RANKS[policy]


class EvictionQueue:
    """The pages of a tier, in the order in which they give way. A page's use moves the clock on by one.

    The way to use a prefix: look it up, ``record_use`` its pages from the last one to the first, then ``evict``.
    So of one prefix the last page is the first that the clock makes old, and a page never goes before those that need
    it.
    """

    def __init__(self, policy: str, size: int, rank: Callable[[PageUsage], EvictionRank] | None = None) -> None:
        """``size``: bytes. ``rank``: in place of the one of ``policy``. Raises ValueError."""
        self._rank = rank or eviction_rank(policy)
        self.size = size
        self._uses: dict[bytes, PageUsage] = {}
        self._order: list[tuple[EvictionRank, bytes]] = []  # a heap; an entry counts if its page still has this rank
        self._clock = 0
        self.nbytes = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self._uses

    def __len__(self) -> int:
        return len(self._uses)

    def num_cached(self, keys: Iterable[bytes]) -> int:
        """How many of a prefix's pages are here, up to the first that is not."""
        return sum(1 for _ in takewhile(self._uses.__contains__, keys))

    def record_use(self, key: bytes, number: int, nbytes: int) -> None:
        """Of page ``number`` of its sequence; it comes if it is not here, or gets another size."""
        self._clock += 1
        old = self._uses.get(key)
        came, uses = (old.first_used, old.num_uses + 1) if old is not None else (self._clock, 1)
        self.nbytes += nbytes - (old.nbytes if old is not None else 0)
        self._put(PageUsage(key, number, nbytes, came, self._clock, uses))

    def forget(self, key: bytes) -> None:
        """Forget a page, if it is here."""
        use = self._uses.pop(key, None)
        self.nbytes -= use.nbytes if use is not None else 0

    def update_ranks(self, keys: Iterable[bytes]) -> None:
        """Their ranks are others now."""
        for key in keys:
            if key in self._uses:
                self._put(self._uses[key])

    def next_victim(self, *, room: int = 0) -> bytes | None:
        """The page that goes next, where the rest and ``room`` bytes have more than its size; None: they have not."""
        while self.nbytes + room > self.size and self._order:
            rank, key = self._order[0]
            if key in self._uses and self._rank(self._uses[key]) == rank:
                return key
            heappop(self._order)
        return None

    def evict(self, *, room: int = 0) -> list[bytes]:
        """Forget pages, the worst first, until the rest and ``room`` bytes have its size. Returns their keys."""
        given = []
        while (key := self.next_victim(room=room)) is not None:
            given.append(key)
            self.forget(key)
        return given

    def _put(self, use: PageUsage) -> None:
        self._uses[use.key] = use
        heappush(self._order, (self._rank(use), use.key))
        if len(self._order) > _STALE * len(self._uses) + _STALE:  # most of them do not count any more
            self._order = [(self._rank(use), key) for key, use in self._uses.items()]
            heapify(self._order)
