"""Who is given up first where a tier is full. Pure policy: no torch, no I/O, no clock.

lru        the page that was used the longest ago
fifo       the one that came first
lfu        the one that was used the fewest times, of those the least recently
length     the one furthest from its sequence's beginning, of those the least recently: beginnings are shared
scheduler  one that no waiting request needs, the least recently used first; then those of the request that waits
           behind all others
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple, get_args

Policy = Literal["scheduler", "lru", "fifo", "lfu", "length"]
POLICIES: tuple[str, ...] = get_args(Policy)


class Use(NamedTuple):
    """What is known of a page. ``came`` and ``used`` are counts of a clock that each page's use moves on."""

    key: bytes
    number: int  # of the page in its sequence
    nbytes: int
    came: int
    used: int
    uses: int = 1
    turn: int | None = None  # of the first waiting request that needs it; None = no one does


Rank = tuple[int, ...]
_RANKS: dict[Policy, Callable[[Use], Rank]] = {
    "scheduler": lambda use: (0, use.used) if use.turn is None else (1, -use.turn, use.used),
    "lru": lambda use: (use.used,),
    "fifo": lambda use: (use.came,),
    "lfu": lambda use: (use.uses, use.used),
    "length": lambda use: (-use.number, use.used),
}


def rank_of(policy: Policy) -> Callable[[Use], Rank]:
    """The page of the lowest rank goes first. Raises ValueError for a name that is none."""
    if policy not in _RANKS:
        raise ValueError(f"--kv-eviction-policy must be one of {', '.join(POLICIES)}, not {policy!r}")
    return _RANKS[policy]


def choose(policy: Policy, uses: Iterable[Use], nbytes: int) -> list[bytes]:
    """Pages to give up so that ``nbytes`` become free, the worst first; all of them where they are not enough."""
    given: list[bytes] = []
    for use in sorted(uses, key=rank_of(policy)):
        if nbytes <= 0:
            break
        given.append(use.key)
        nbytes -= use.nbytes
    return given
