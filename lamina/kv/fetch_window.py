"""Which KV is fetched ahead of its turn, and which gives way: by the queue of waiting turns, which tells who is needed
next (CachedAttention section 3.3, arXiv 2403.19708). Pure policy: no torch, no I/O, no clock.

Memory is fast, the disk is large. The *fetch window* has the items at the head of the queue that memory can hold; those
of them that lie on the disk are fetched. The *eviction window* has those that memory and disk can hold together; who is
in it gives way where everybody is, its tail first. Who is in no window gives way first, the least recently used before
others: with an empty queue this is LRU.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import TypeVar

from .eviction_policy import EvictionRank, PageUsage

Item = TypeVar("Item")


def fetch_window_size(room_bytes: float, item_bytes: float) -> int:
    """Items from the head of the queue on that have room: L = C / S. ``item_bytes``: of an item on average."""
    if item_bytes <= 0:
        raise ValueError(f"an item of {item_bytes} bytes: it must have some")
    return int(room_bytes // item_bytes)


def items_to_fetch(queue: Sequence[Item], window: int, memory: Container[Item]) -> list[Item]:
    """Items that memory is to have, those that are needed first before others."""
    return [item for item in dict.fromkeys(queue[:window]) if item not in memory]


def eviction_order(queue: Sequence[Item], window: int, oldest: Iterable[Item]) -> list[Item]:
    """The items of a place in the order in which they give way. ``oldest``: the least recently used first."""
    places = {item: number for number, item in reversed(list(enumerate(queue[:window])))}
    return sorted(oldest, key=lambda item: -places.get(item, len(queue)))


class FetchWindow:
    """The pages that waiting turns need; these are numbered in the order in which they come, and all of them are within
    the eviction window.
    """

    def __init__(self) -> None:
        self._turns: dict[int, list[bytes]] = {}
        self._needed: dict[bytes, list[int]] = {}  # page -> its turns, the next one first
        self.copied_keys: set[bytes] = set()  # pages that lie elsewhere too
        self.retained_until: Container[bytes] = ()  # pages that are not to go before others

    def __len__(self) -> int:
        """Turns."""
        return len(self._turns)

    def hint(self, turn: int, keys: Iterable[bytes]) -> set[bytes]:
        """``turn`` needs ``keys`` too, from the beginning of its sequence on; without any, it needs nothing more.
        Returns the keys of pages that are needed earlier or later than before.
        """
        more = list(keys)
        gone = [] if more else self._turns.pop(turn, [])
        before = {key: self.next_turn_of(key) for key in (*more, *gone)}
        for key in more:
            self._needed[key] = sorted({*self._needed.get(key, ()), turn})
        for key in gone:
            left = [n for n in self._needed.pop(key, ()) if n != turn]
            if left:
                self._needed[key] = left
        if more:
            self._turns.setdefault(turn, []).extend(more)
        return {key for key, was in before.items() if self.next_turn_of(key) != was}

    def next_turn_of(self, key: bytes) -> int | None:
        """The first turn that needs a page; None: nobody does."""
        turns = self._needed.get(key)
        return turns[0] if turns else None

    def first_pages(self, count: int) -> list[bytes]:
        """So many pages at the head of the queue, each once."""
        pages = (key for turn in sorted(self._turns) for key in self._turns[turn])
        head = dict[bytes, None]()
        for key in pages:
            if len(head) == count:
                break
            head[key] = None
        return list(head)

    def rank(self, use: PageUsage, otherwise: Callable[[PageUsage], EvictionRank]) -> EvictionRank:
        """The rank of a page in the order in which pages give way. Copied pages go first; then pages that no waiting
        turn needs, ranked by ``otherwise``, prolonged ones last; then the rest, from the tail of the queue on.
        """
        if use.key in self.copied_keys:
            return (-1, *otherwise(use))
        turn = self.next_turn_of(use.key)
        if turn is None:
            return (int(use.key in self.retained_until), *otherwise(use))
        return (2, -turn, -use.number)
