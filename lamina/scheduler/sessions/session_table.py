"""Conversations that have a name: whose KV is where. Pure policy: no torch, no I/O, no clock.

A session is a named leaf of what is retained (blocks.prefixes). Between two turns it *sleeps*: its KV stays in the pool
longer than KV without a name. With offload, its whole pages are stored, too. It *wakes* with
its next turn, which forks or loads them. Who has no KV any more is computed anew: a session is never lost for lack of
room, it only wakes more slowly. After CachedAttention (arXiv 2403.19708).
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from lamina.protocol.kv_placement import FIRST_LOCATION, KvLocation
from lamina.request.bounds import MOST_COUNT, Count, Identity, Salt, TokenBytes, Word

from .token_ranges import TokenRanges

if TYPE_CHECKING:
    from lamina.scheduler.prefix_index import Holding

MAX_SESSIONS = 1 << 14  # beyond these, the sessions whose last turn was the longest ago are forgotten
POOL, NOWHERE = "pool", "none"  # tiers, in addition to the names of storage backends


class SessionName(NamedTuple):
    """``tenant``: salt_of its API key, without which no request finds the name."""

    tenant: bytes
    name: str


class SessionInfo(NamedTuple):
    """The facts of a session that its owner sees. ``tokens``: of the KV that its last turn has left; ``tier``: where
    that is now, the fastest place of several.
    """

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

    @property
    def retained_sequence(self) -> int | None:
        """The number of the retained sequence that has its KV."""
        return None if self.leaf is None else self.leaf.sequence.id

    def forget_leaf(self) -> None:
        """Take note that nothing in the pool is kept for it."""
        if self.leaf is not None:
            self.leaf.session = None
            self.leaf = None

    def on_turn_began(self, waited_s: float) -> None:
        """A turn's first row is on its way."""
        if self.tier:
            self.waits_by_tier[self.tier] = self.waits_by_tier.get(self.tier, 0.0) + waited_s
            self.tier = ""


class SessionCopy(msgspec.Struct, frozen=True, kw_only=True):
    """A session as another engine takes it over, which finds the KV by the tokens, where its store has it.
    ``identity``: of the model and its KV; ``tokens``: of whole pages, 4 bytes each, little-endian.
    """

    identity: Identity
    name: Word
    turns: Count
    salt: Salt
    tokens: TokenBytes


class Sessions:
    """All sessions of an engine, those whose last turn was the longest ago first."""

    def __init__(self) -> None:
        self._by_name: OrderedDict[SessionName, SessionState] = OrderedDict()
        self.hits = Counter[str]()  # turns after the first one of a session, by the tier that had its KV
        self.waits = dict[str, float]()  # seconds for which these waited for their first row

    def get_or_create(self, name: SessionName) -> SessionState:
        """The session of that name, which a turn is about to go on with; a new one where there is none."""
        session = self._by_name.setdefault(name, SessionState(name, self.waits))
        self._by_name.move_to_end(name)
        if len(self._by_name) > MAX_SESSIONS:
            _, oldest = self._by_name.popitem(last=False)
            oldest.forget_leaf()
        return session

    def get(self, name: SessionName) -> SessionState | None:
        """The session of that name, if there is one."""
        return self._by_name.get(name)

    def list_tenant(self, tenant: bytes) -> list[SessionState]:
        """The sessions of one tenant."""
        return [session for name, session in self._by_name.items() if name.tenant == tenant]

    def list_all(self) -> Iterable[SessionState]:
        """Return the sessions of all tenants."""
        return self._by_name.values()

    def on_turn_began(self, session: SessionState, tier: str) -> None:
        """A turn begins, with KV that ``tier`` had."""
        if session.turns:
            self.hits[tier] += 1
            session.tier = tier
        session.turns = min(session.turns + 1, MOST_COUNT)

    def on_turn_ended(self, session: SessionState, leaf: Holding, length: int, discarded: TokenRanges = ()) -> None:
        """Note that a turn has ended, whose KV ``leaf`` has."""
        session.forget_leaf()
        session.length, session.location, session.discarded_ranges = length, leaf.sequence.location, discarded
        if self._by_name.get(session.name) is session:  # else it was dropped while this turn ran
            session.leaf, leaf.session = leaf, session

    def drop(self, name: SessionName) -> SessionState | None:
        """Forget a session: what it had is the caller's to give up. None: there is no such session."""
        return self._by_name.pop(name, None)
