"""Which sessions are fetched ahead of their turn, and which give way: by the queue of waiting turns, which tells who is
needed next (CachedAttention section 3.3, arXiv 2403.19708). Pure policy: no torch, no I/O, no clock.

An item is a whole session: its KV is used as a whole or not at all. Memory is fast, the disk is large. The *fetch
window* has the turns whose KV memory can hold; those of them that lie on the disk are fetched. The *eviction window*
has the turns whose KV memory and disk can hold together; who is in it gives way where everybody is, its tail first.
Who is in no window gives way first, the least recently used before others: with an empty queue this is LRU.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, TypeVar

Item = TypeVar("Item")


class Windows(NamedTuple):
    """In items, counted from the head of the queue of those that wait."""

    fetch: int
    eviction: int


def windows_of(memory_bytes: float, disk_bytes: float, item_bytes: float) -> Windows:
    """L_pw = C_mem / S_kv, and (C_mem + C_disk) / S_kv; ``item_bytes``: S_kv, of a session on average."""
    if item_bytes <= 0:
        raise ValueError(f"a session of {item_bytes} bytes: it must have some")
    return Windows(int(memory_bytes // item_bytes), int((memory_bytes + disk_bytes) // item_bytes))


def to_fetch(queue: Sequence[Item], windows: Windows, memory: Collection[Item], disk: Collection[Item]) -> list[Item]:
    """Items of the disk that memory is to have, those that are needed first before others."""
    ahead = dict.fromkeys(queue[: windows.fetch])
    return [item for item in ahead if item not in memory and item in disk]


def victims(queue: Sequence[Item], windows: Windows, oldest: Iterable[Item]) -> list[Item]:
    """The items of a place in the order in which they give way. ``oldest``: the least recently used first."""
    places = {item: number for number, item in reversed(list(enumerate(queue[: windows.eviction])))}
    return sorted(oldest, key=lambda item: -places.get(item, len(queue)))
