"""The order in which pages are evicted when storage is full. Pure policy: no torch, no I/O, no clock.

- lru: the page whose last use is oldest.
- fifo: the page that was stored first.
- lfu: the page that was used the fewest times, and of these the least recently used one.
- length: the page furthest from its sequence's beginning, as beginnings are shared, and of these as in lru.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from lamina.config.offload import EVICTION_POLICIES


class PageUsage(NamedTuple):
    """The use of a page so far. ``first_used`` and ``last_used`` count the uses of all pages until then."""

    key: bytes
    number: int  # the page's number in its sequence
    nbytes: int
    first_used: int
    last_used: int
    num_uses: int = 1


EvictionRank = tuple[int, ...]
_STALE = 4  # entries of a heap for each page, only one of which counts
_RANKS: dict[str, Callable[[PageUsage], EvictionRank]] = {
    "lru": lambda use: (use.last_used,),
    "fifo": lambda use: (use.first_used,),
    "lfu": lambda use: (use.num_uses, use.last_used),
    "length": lambda use: (-use.number, use.last_used),
}


def eviction_rank(policy: str) -> Callable[[PageUsage], EvictionRank]:
    """Return the rank function of a policy: the page of the lowest rank is evicted first. Raises ValueError."""
    if policy not in _RANKS:
        raise ValueError(f"--kv-offload eviction= must be one of {', '.join(EVICTION_POLICIES)}, not {policy!r}")
    return _RANKS[policy]


class EvictionQueue:
    """The pages of a tier, in the order of eviction. Each use of a page advances the clock by one. To use a prefix,
    look it up, call ``record_use`` for its pages from the last one to the first, then ``evict``. So the last page of a
    prefix ages first, and no page is evicted before the later ones, which need it.
    """

    def __init__(self, policy: str, size: int, rank: Callable[[PageUsage], EvictionRank] | None = None) -> None:
        """``size``: bytes. ``rank``: replaces the rank function of ``policy``. Raises ValueError."""
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

    def record_use(self, key: bytes, number: int, nbytes: int) -> None:
        """Record a use of page ``number`` of its sequence. The page is added, or changes its size, if necessary."""
        self._clock += 1
        old = self._uses.get(key)
        came, uses = (old.first_used, old.num_uses + 1) if old is not None else (self._clock, 1)
        self.nbytes += nbytes - (old.nbytes if old is not None else 0)
        self._put(PageUsage(key, number, nbytes, came, self._clock, uses))

    def forget(self, key: bytes) -> None:
        """Remove a page, if it is here."""
        use = self._uses.pop(key, None)
        self.nbytes -= use.nbytes if use is not None else 0

    def update_ranks(self, keys: Iterable[bytes]) -> None:
        """Update pages whose ranks have changed."""
        for key in keys:
            if key in self._uses:
                self._put(self._uses[key])

    def next_victim(self, *, room: int = 0) -> bytes | None:
        """Return the page to evict next if the pages and ``room`` bytes exceed the size; else None."""
        while self.nbytes + room > self.size and self._order:
            rank, key = self._order[0]
            if key in self._uses and self._rank(self._uses[key]) == rank:
                return key
            heappop(self._order)
        return None

    def evict(self, *, room: int = 0) -> list[bytes]:
        """Remove pages, the lowest ranks first, until the rest and ``room`` bytes fit. Returns their keys."""
        given = []
        while (key := self.next_victim(room=room)) is not None:
            given.append(key)
            self.forget(key)
        return given

    def _put(self, use: PageUsage) -> None:
        self._uses[use.key] = use
        heappush(self._order, (self._rank(use), use.key))
        if len(self._order) > _STALE * len(self._uses) + _STALE:  # most of them are stale
            self._order = [(self._rank(use), key) for key, use in self._uses.items()]
            heapify(self._order)
