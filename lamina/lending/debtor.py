"""The loans of one instance, and the search for more: it requests candidates of the ledger, and then loans of them in
turn.

A debtor counts a lease from its request, a creditor from its grant, and a debtor ends it earlier by a part, by its own
clock. So a creditor never gets a block back that its debtor still uses, whichever messages are lost or late.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from .lending_messages import (
    Candidate,
    Candidates,
    CandidatesRequest,
    CreditorRefused,
    GiveBack,
    LoanGranted,
    LoanRefused,
    LoanRequest,
    Recall,
    Renew,
    Renewed,
)

LEDGER = ""  # the ledger's name as an address; instances have names of their own
SAFETY_FACTOR = 0.9  # part of a lease that the debtor uses, as its clock may be slower than the creditor's
RENEWALS = 3  # in the time of a lease
NEWS_S = 0.3  # at least between renewals that tell a change: requests may end many times in a second
MAX_OPEN = 64  # remembered requests without a reply, and as many renewals
Outgoing = tuple[str, msgspec.Struct]


class BorrowingTerms(NamedTuple):
    """The terms of a debtor. ``answer_s``: after which a peer counts as silent; ``retry_s``: between two searches.
    ``parts``: memory workers of each loan.
    """

    location: str = ""
    answer_s: float = 1.0
    retry_s: float = 1.0
    parts: int = 1


@dataclass
class Borrowed:
    """Blocks of a lease of ``creditor``, until a time of its debtor. ``is_recalled``: to be given back."""

    creditor: str
    lease: int
    blocks: int
    until: float
    lease_s: float
    is_recalled: bool = False


@dataclass
class _Search:
    """A search for ``blocks``: the candidates left, and the one that has the last request."""

    query: int
    blocks: int
    since: float
    left: deque[Candidate] | None = None  # None: the ledger has not replied
    asked: Candidate | None = None
    ask: int = -1


class _Open(NamedTuple):
    """A renewal without a reply."""

    creditor: str
    sent_at: float
    leases: tuple[int, ...]


@dataclass
class Debtor:
    """The state of one debtor."""

    name: str
    terms: BorrowingTerms
    num_wanted: int = 0  # blocks, in addition to what it has
    num_least: int = 1  # blocks of a loan that is of use
    since: float = 0.0  # of its claim, see lending_messages; 0: none
    is_waiting: bool = False  # whether its claim lacks memory, also while it asks for none
    loans: dict[tuple[str, int], Borrowed] = field(default_factory=dict)  # by creditor and lease
    addresses: dict[str, str] = field(default_factory=dict)  # creditor -> address, from the ledger
    refusals: int = 0
    _search: _Search | None = None
    _search_at: float = 0.0
    _renew_at: float = float("inf")
    _told: tuple[float, bool] | None = None  # its claim's time and whether it waits; None: not all creditors know
    _news_at: float = 0.0  # when a renewal may tell a change of these, before it is due
    _refused_by: dict[str, float] = field(default_factory=dict)  # creditor -> time of the claim
    _claims: dict[int, float] = field(default_factory=dict)  # request without a reply -> time of its claim
    _open: dict[int, _Open] = field(default_factory=dict)
    _number: int = 0

    @property
    def num_borrowed(self) -> int:
        """The number of borrowed blocks."""
        return sum(b.blocks for b in self.loans.values())

    @property
    def is_seeking(self) -> bool:
        """Return whether it may get more than it has."""
        return self.num_wanted > 0 or self._search is not None

    @property
    def _waits(self) -> bool:
        return self.is_waiting or self.is_seeking

    def blocks_of(self, creditor: str) -> int:
        """Return the blocks borrowed from ``creditor``."""
        return sum(b.blocks for b in self.loans.values() if b.creditor == creditor)

    def tick(self, now: float) -> list[Outgoing]:
        """End expired leases, and return messages that are due: renewals, the next loan request, a new query."""
        self.expire(now)
        out: list[Outgoing] = []
        has_news = bool(self._ended_claims() or (self.loans and self._told != (self.since, self._waits)))
        if now >= (min(self._renew_at, self._news_at) if has_news else self._renew_at):
            out += self._renew(now)
        search = self._search
        if search is not None and now - search.since > self.terms.answer_s:
            out += self._next_ask(search, now) if search.left is not None else self._give_up(now)
        return out + self._begin_search(now)

    def on_message(self, message: msgspec.Struct, now: float) -> list[Outgoing]:
        """Handle a message of the ledger or of a creditor. Returns the messages to send."""
        self.expire(now)
        match message:
            case Candidates():
                return self._candidates(message, now)
            case LoanGranted():
                return self._granted(message, now)
            case LoanRefused():
                return self._refused(message, now)
            case Renewed():
                self._renewed(message)
            case Recall():
                if (loan := self.loans.get((message.creditor, message.lease))) is not None:
                    loan.is_recalled = True
        return []

    def ask(self, creditor: str, address: str, blocks: int, now: float) -> list[Outgoing]:
        """Request blocks of one known creditor only, its own. Does nothing during another search."""
        if self._search is not None:
            return []
        self.addresses[creditor] = address
        self._search = _Search(self._count(), blocks, now, deque([Candidate(creditor, address, blocks)]))
        return self._next_ask(self._search, now)

    def give_back(self, creditor: str, lease: int) -> list[Outgoing]:
        """End a lease."""
        del self.loans[creditor, lease]
        return [(creditor, GiveBack(debtor=self.name, lease=lease))]

    def expire(self, now: float) -> list[Borrowed]:
        """End and return the leases that could not be renewed in time; their contents are lost."""
        over = [b for b in self.loans.values() if b.until <= now]
        for loan in over:
            del self.loans[loan.creditor, loan.lease]
        return over

    def on_creditor_lost(self, creditor: str) -> list[Borrowed]:
        """End and return all leases of a creditor that is gone."""
        self._refused_by.pop(creditor, None)
        over = [b for b in self.loans.values() if b.creditor == creditor]
        for loan in over:
            del self.loans[loan.creditor, loan.lease]
        return over

    def on_guest_ended(self, creditor: str, lease: int, now: float) -> None:
        """End a lease whose memory worker has ended. The next search waits, as the next one may end as soon."""
        if self.loans.pop((creditor, lease), None) is not None:
            self._search_at = max(self._search_at, now + self.terms.retry_s)

    # Search for more blocks
    def _begin_search(self, now: float) -> list[Outgoing]:
        if self.num_wanted < self.num_least or self._search is not None or now < self._search_at:
            return []
        self._search = _Search(self._count(), self.num_wanted, now)
        query = CandidatesRequest(
            debtor=self.name,
            number=self._search.query,
            blocks=self.num_wanted,
            place=self.terms.location,
            since=self.since,
        )
        return [(LEDGER, query)]

    def _candidates(self, message: Candidates, now: float) -> list[Outgoing]:
        search = self._search
        if search is None or search.query != message.number or search.left is not None:
            return []
        search.left = deque(message.creditors)
        self.addresses |= {c.name: c.address for c in message.creditors}
        return self._next_ask(search, now)

    def _next_ask(self, search: _Search, now: float) -> list[Outgoing]:
        while search.left and search.left[0].free < self.num_least:
            search.left.popleft()
        if not search.left:
            return self._give_up(now)
        search.asked, search.ask, search.since = search.left.popleft(), self._count(), now
        self._claims[search.ask] = self.since
        if len(self._claims) > MAX_OPEN:
            del self._claims[min(self._claims)]
        blocks = max(self.num_least, min(search.blocks, search.asked.free))
        ask = LoanRequest(debtor=self.name, number=search.ask, blocks=blocks, since=self.since, parts=self.terms.parts)
        return [(search.asked.name, ask)]

    def _give_up(self, now: float) -> list[Outgoing]:
        self._search, self._search_at = None, now + self.terms.retry_s
        return []

    def _granted(self, message: LoanGranted, now: float) -> list[Outgoing]:
        self._claims.pop(message.number, None)
        key, search = (message.creditor, message.lease), self._search
        if key in self.loans:
            return []  # a duplicate
        back: list[Outgoing] = [(message.creditor, GiveBack(debtor=self.name, lease=message.lease))]
        if search is None or search.asked is None or (search.ask, search.asked.name) != (message.number, key[0]):
            return back  # the search is over
        self._search, self._search_at = None, now
        until = search.since + SAFETY_FACTOR * message.lease_s
        if until <= now:
            return back
        self.loans[key] = Borrowed(*key, message.blocks, until, message.lease_s)
        self._told = None
        self._renew_at = min(self._renew_at, now + message.lease_s / RENEWALS)
        self.num_wanted = max(0, self.num_wanted - message.blocks)
        return self._begin_search(now)  # for the rest

    def _refused(self, message: LoanRefused, now: float) -> list[Outgoing]:
        told: Outgoing = LEDGER, CreditorRefused(creditor=message.creditor, beat=message.beat)
        outgoing = [told] if message.for_all else []
        if claim := self._claims.pop(message.number, 0.0):  # it may have ended since, and so may the search
            self._refused_by[message.creditor] = claim
        search = self._search
        if search is None or search.ask != message.number:
            return outgoing
        self.refusals += 1
        return outgoing + self._next_ask(search, now)

    # Renewal of leases
    def _renew(self, now: float) -> list[Outgoing]:
        out: list[Outgoing] = []
        self._renew_at = min((now + b.lease_s / RENEWALS for b in self.loans.values()), default=float("inf"))
        self._told, self._news_at = (self.since, self._waits), now + NEWS_S
        ended = self._ended_claims()
        for creditor in sorted({b.creditor for b in self.loans.values()} | ended):
            held = tuple(b.lease for b in self.loans.values() if b.creditor == creditor)
            number = self._count()
            self._open[number] = _Open(creditor, now, held)
            renew = Renew(debtor=self.name, number=number, leases=held, since=self.since, is_waiting=self._waits)
            out.append((creditor, renew))
        self._refused_by = {creditor: since for creditor, since in self._refused_by.items() if creditor not in ended}
        while len(self._open) > MAX_OPEN:
            del self._open[min(self._open)]
        return out

    def _ended_claims(self) -> set[str]:
        """Return the creditors that may keep room for a claim that has ended."""
        return {creditor for creditor, since in self._refused_by.items() if since != self.since or not self._waits}

    def _renewed(self, message: Renewed) -> None:
        """Extend renewed leases. A lease that its creditor does not renew is recalled."""
        asked = self._open.pop(message.number, None)
        if asked is None or asked.creditor != message.creditor:
            return
        for lease in asked.leases:
            if (loan := self.loans.get((message.creditor, lease))) is None:
                continue
            if lease in message.leases:
                loan.until = max(loan.until, asked.sent_at + SAFETY_FACTOR * message.lease_s)
            else:
                loan.is_recalled = True

    def _count(self) -> int:
        self._number += 1
        return self._number
