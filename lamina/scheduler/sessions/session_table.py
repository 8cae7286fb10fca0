"""Sessions: conversations with a name, and the place of their KV. Pure policy: no torch, no I/O, no clock.

Between turns, a session's KV is retained in the pool, longer than other KV. With offloading, its whole pages are
stored, too. Its next turn forks or loads them. If its KV was evicted, it is recomputed: a session is never lost
for lack of room, it only continues more slowly. After CachedAttention (arXiv 2403.19708).
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import msgspec

from lamina.protocol.kv_placement import FIRST_LOCATION, KvLocation
from lamina.request.bounds import MOST_COUNT, Count, Identity, Salt, TokenBytes, Word
from lamina.scheduler.prefix_index import Holding, PrefixIndex

from .token_ranges import TokenRanges

MAX_SESSIONS = 1 << 14  # beyond these, the sessions whose last turn was the longest ago are forgotten
POOL, NOWHERE = "pool", "none"  # tiers, in addition to the names of storage backends


class SessionName(NamedTuple):
    """A session's name within a tenant. ``tenant``: derived from the API key; other keys do not find the name."""

    tenant: bytes
    name: str


class SessionInfo(NamedTuple):
    """A session as its owner sees it. ``tokens``: in its last turn's KV; ``tier``: the fastest place that has it."""

    name: str
    turns: int
    tokens: int
    tier: str


@dataclass(eq=False)
class SessionState:
    """The state of one conversation. ``keys``: those of its last turn's pages, the last of which may be partial."""

    name: SessionName
    waits_by_tier: dict[str, float] = field(default_factory=dict)  # see Sessions
    tier: str = ""  # that had the KV of the turn whose first row is to come; empty: none has, or it is the first turn
    turns: int = 0
    leaf: Holding | None = None  # the retained sequence that has its KV
    length: int = 0  # tokens of that
    location: KvLocation = FIRST_LOCATION
    keys: list[bytes] = field(default_factory=list)
    stale_page_keys: dict[bytes, None] = field(default_factory=dict)  # keys of pages that only earlier turns had
    discarded_ranges: TokenRanges = ()  # tokens of the conversation that its KV has no more
    tokens: array[int] = field(default_factory=lambda: array("I"))  # in its pages
    salt: bytes = b""  # of its last turn
    number: int = 0  # in the index of prefixes

    @property
    def retained_sequence(self) -> int | None:
        """The id of the retained sequence that has its KV."""
        return None if self.leaf is None else self.leaf.sequence.id

    def forget_leaf(self) -> None:
        """Record that its KV in the pool was dropped."""
        if self.leaf is not None:
            self.leaf.session = None
            self.leaf = None

    def on_turn_began(self, waited_s: float) -> None:
        """Record that the first row of a turn is scheduled."""
        if self.tier:
            self.waits_by_tier[self.tier] = self.waits_by_tier.get(self.tier, 0.0) + waited_s
            self.tier = ""


@dataclass(eq=False)
class SessionTurn:
    """The facts of a sequence that sessions need. ``session``: that of which it is a turn. ``discarded_ranges``: tokens
    dropped from a longer prompt, ``original_prompt``; it then shares KV only with its session.
    """

    session: SessionState | None = None
    discarded_ranges: TokenRanges = ()
    original_prompt: list[int] = field(default_factory=list)


class SessionCopy(msgspec.Struct, frozen=True, kw_only=True):
    """A session for export to another engine, which finds the KV by its tokens.

    ``identity``: that of the model and its KV; ``tokens``: those of whole pages, 4 bytes each, little-endian.
    """

    identity: Identity
    name: Word
    turns: Count
    salt: Salt
    tokens: TokenBytes


class Sessions:
    """All sessions of an engine, the least recently used first. The index of prefixes has their pages."""

    def __init__(self, prefix_index: PrefixIndex) -> None:
        self._index, self._numbers = prefix_index, count()
        self._by_name: OrderedDict[SessionName, SessionState] = OrderedDict()
        self._by_number: dict[int, SessionState] = {}
        self.hits = Counter[str]()  # turns after the first one of a session, by the tier that had its KV
        self.waits = dict[str, float]()  # seconds for which these waited for their first row

    def get_or_create(self, name: SessionName) -> SessionState:
        """Return the session of a name for a new turn, or create it."""
        if (session := self._by_name.get(name)) is None:
            session = self._by_name[name] = SessionState(name, self.waits, number=next(self._numbers))
            self._by_number[session.number] = session
        self._by_name.move_to_end(name)
        if len(self._by_name) > MAX_SESSIONS and (oldest := self.drop(next(iter(self._by_name)))) is not None:
            oldest.forget_leaf()
        return session

    def get(self, name: SessionName) -> SessionState | None:
        """Return the session of a name; None if there is none."""
        return self._by_name.get(name)

    def list_tenant(self, tenant: bytes) -> list[SessionState]:
        return [session for name, session in self._by_name.items() if name.tenant == tenant]

    def list_all(self) -> Iterable[SessionState]:
        """Return the sessions of all tenants."""
        return self._by_name.values()

    def on_turn_began(self, session: SessionState, tier: str) -> None:
        """Record that a turn begins, with KV from ``tier``."""
        if session.turns:
            self.hits[tier] += 1
            session.tier = tier
        session.turns = min(session.turns + 1, MOST_COUNT)

    def on_turn_ended(self, session: SessionState, leaf: Holding, length: int, discarded: TokenRanges = ()) -> None:
        """Record that a turn has ended, whose KV ``leaf`` has."""
        session.forget_leaf()
        session.length, session.location, session.discarded_ranges = length, leaf.sequence.location, discarded
        if self._by_name.get(session.name) is session:  # else it was dropped while this turn ran
            session.leaf, leaf.session = leaf, session

    def set_pages(self, session: SessionState, keys: list[bytes]) -> None:
        """Set the stored pages of a session's last turn."""
        if self._by_name.get(session.name) is session:  # else it was dropped while this turn ran
            self._index.end_lease(session.number, session.keys)
            self._index.lease(session.number, keys)
        session.keys = keys

    def has_page(self, key: bytes) -> bool:
        """Return True if a page is one of a session's last turn."""
        return bool(self._index.leases(key))

    def with_page(self, key: bytes) -> Iterator[SessionState]:
        """Yield the sessions whose last turns have a page."""
        return (self._by_number[number] for number in self._index.leases(key))

    def drop(self, name: SessionName) -> SessionState | None:
        """Remove a session, whose KV the caller must drop. Returns None for an unknown one."""
        if (session := self._by_name.pop(name, None)) is not None:
            del self._by_number[session.number]
            self._index.end_lease(session.number, session.keys)
        return session
