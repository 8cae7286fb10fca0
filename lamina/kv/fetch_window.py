"""The KV that is fetched ahead, and the order of eviction, by the queue of waiting requests.

See CachedAttention, section 3.3 (arXiv 2403.19708). Pure policy: no torch, no I/O, no clock.

Memory is fast, the disk is large. The *fetch window* has the items at the head of the queue that fit in memory; those
on the disk are fetched. The *eviction window* has the items that fit in memory and on the disk together. Items outside
of it are evicted first, least recently used first: with an empty queue this is LRU. Then come items in the window, from
its tail on.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import TypeVar

from .eviction_policy import EvictionRank, PageUsage

Item = TypeVar("Item")


def fetch_window_size(room_bytes: float, item_bytes: float) -> int:
    """Return how many items from the head of the queue on fit: L = C / S. ``item_bytes``: mean bytes of an item."""
    if item_bytes <= 0:
        raise ValueError(f"an item of {item_bytes} bytes: it must have some")
    return int(room_bytes // item_bytes)


def items_to_fetch(queue: Sequence[Item], window: int, memory: Container[Item]) -> list[Item]:
    """Return the items that memory lacks, the ones needed first before others."""
    return [item for item in dict.fromkeys(queue[:window]) if item not in memory]


def eviction_order(queue: Sequence[Item], window: int, oldest: Iterable[Item]) -> list[Item]:
    """Return items in the order of eviction. ``oldest``: the items, the least recently used first."""
    places = {item: number for number, item in reversed(list(enumerate(queue[:window])))}
    return sorted(oldest, key=lambda item: -places.get(item, len(queue)))


class FetchWindow:
    """The pages that waiting requests need. Requests are numbered in order of arrival, and all are in the eviction
    window.
    """

    def __init__(self) -> None:
        self._turns: dict[int, list[bytes]] = {}
        self._needed: dict[bytes, list[int]] = {}  # page -> the requests that need it, the next one first
        self.copied_keys: set[bytes] = set()  # pages that other storage has, too

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self._turns)

    def hint(self, turn: int, keys: Iterable[bytes]) -> set[bytes]:
        """Note that request ``turn`` also needs ``keys``, from its sequence's beginning on; without keys, it needs none
        any more. Returns the keys of pages whose first request has changed.
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
        """Return the first request that needs a page; None if no request does."""
        turns = self._needed.get(key)
        return turns[0] if turns else None

    def first_pages(self, count: int) -> list[bytes]:
        """Return ``count`` pages from the head of the queue on, each once."""
        pages = (key for turn in sorted(self._turns) for key in self._turns[turn])
        head = dict[bytes, None]()
        for key in pages:
            if len(head) == count:
                break
            head[key] = None
        return list(head)

    def rank(
        self, use: PageUsage, otherwise: Callable[[PageUsage], EvictionRank], retained: Container[bytes] = ()
    ) -> EvictionRank:
        """Return the rank of a page in the order of eviction. Copied pages go first. Then come pages that no waiting
        request needs, by ``otherwise``, those in ``retained`` last. Then come the others, from the tail of the queue
        on.
        """
        if use.key in self.copied_keys:
            return (-1, *otherwise(use))
        turn = self.next_turn_of(use.key)
        if turn is None:
            return (int(use.key in retained), *otherwise(use))
        return (2, -turn, -use.number)
