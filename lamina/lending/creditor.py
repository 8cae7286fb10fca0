"""The blocks of one instance and their users, the instance itself or debtors (rManager, arXiv 2401.02669 section 4.2).

First come, first served: a debtor gets all that it requests, or nothing. A refusal is final, and is not forwarded to
another creditor.

Claims of all instances have one order, by the time at which their requests came. An instance that lacks memory itself
lends to earlier claims alone, and takes nothing back from these. If an earlier claim finds no room, later ones that
still wait for more give back what they have, and none gets that room before. So of several that need more than there
is, the first one is served, then the next: none waits in a circle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .lending_messages import (
    MAX_NAMES,
    NEVER,
    Debt,
    Heartbeat,
    LoanGranted,
    LoanRefused,
    LoanRequest,
    Recall,
    Renew,
    Renewed,
    WaitingDebt,
)

# Seconds without a request, after which an earlier claim no longer keeps later ones out. Most debtors tell its end.
RESERVE_S = 10.0
Claim = tuple[float, str]  # its time, and its instance: the smaller one goes first


@dataclass(frozen=True)
class LendingTerms:
    """The terms of a creditor. ``max_lent``: the most blocks lent. ``max_lent_per_debtor``: the same for one debtor."""

    max_lent: int
    max_lent_per_debtor: int
    lease_s: float = 10.0
    location: str = ""
    address: str = ""


@dataclass
class Lease:
    """Blocks that ``debtor`` has until a time of the creditor's clock. ``is_recalled``: it is not renewed. ``since``:
    the time of its debtor's claim, 0 without one; ``is_waiting``: it still lacks more. ``parts``: memory workers that
    share the blocks.
    """

    number: int
    debtor: str
    blocks: list[int]
    until: float
    is_recalled: bool = False
    since: float = 0.0
    is_waiting: bool = False
    parts: int = 1

    @property
    def claim(self) -> Claim:
        return self.since, self.debtor


class Creditor:
    """The state of one creditor. ``busy``: returns why no new loan may be made despite free blocks, such as guests'
    compute; "" = it may. ``lacks_since``: returns the time of its own claim, NEVER if it lacks no memory.
    """

    def __init__(
        self,
        name: str,
        blocks: int,
        terms: LendingTerms,
        busy: Callable[[], str] = lambda: "",
        lacks_since: Callable[[], float] = lambda: NEVER,
    ) -> None:
        self.name, self.terms, self.size = name, terms, blocks
        self.leases: dict[int, Lease] = {}
        self.refusals = 0
        self.own_blocks: set[int] = set()  # leases whose blocks a guest has: they end with the guest, not by time
        self.free = list(range(blocks - 1, -1, -1))
        self._busy, self._lacks_since = busy, lacks_since
        self._reserved: tuple[Claim, float] | None = None  # the first claim that found no room, and until when
        self._next = 0
        self._heartbeat_number = 0
        # Debtor -> its last request and the reply.
        self.answered: dict[str, tuple[int, LoanGranted | LoanRefused]] = {}

    @property
    def free_blocks(self) -> int:
        return len(self.free)

    @property
    def lent_blocks(self) -> int:
        """The number of blocks that other instances have."""
        return sum(len(x.blocks) for x in self.leases.values() if x.debtor != self.name)

    def lent_to(self, debtor: str) -> int:
        return sum(len(x.blocks) for x in self.leases.values() if x.debtor == debtor)

    def answer_request(self, ask: LoanRequest, now: float) -> LoanGranted | LoanRefused | None:
        """Grant or refuse a request, also of this instance itself. None: an old request that has come late."""
        self.expire(now)
        last, answer = self.answered.get(ask.debtor, (-1, None))
        if ask.number <= last:
            return answer if ask.number == last else None
        self._forget_claims(ask.debtor, but=ask.since)
        why = self.refusal_reason(ask, now)
        if why:
            self._reserve(ask, now)
            self.refusals += 1
            refused = LoanRefused(
                number=ask.number,
                creditor=self.name,
                beat=self._heartbeat_number,
                why=why,
                for_all=self._refuses_all(ask, now),
            )
            self.answered[ask.debtor] = ask.number, refused
            return refused
        local = ask.debtor == self.name
        until = NEVER if local else now + self.terms.lease_s
        blocks = [self.free.pop() for _ in range(ask.blocks)]
        lease = Lease(self._next, ask.debtor, blocks, until, since=ask.since, is_waiting=True, parts=ask.parts)
        self.leases[self._next] = lease
        if self._reserved is not None and self._reserved[0] == (ask.since, ask.debtor):
            self._reserved = None
        granted = LoanGranted(
            number=ask.number, creditor=self.name, lease=self._next, blocks=ask.blocks, lease_s=self.terms.lease_s
        )
        self._next += 1
        self.answered[ask.debtor] = ask.number, granted
        return granted

    def renew(self, message: Renew, now: float) -> Renewed:
        """Extend a debtor's leases."""
        self.expire(now)
        if message.number > self.answered.get(message.debtor, (-1, None))[0]:
            self._forget_claims(message.debtor, but=message.since if message.is_waiting else NEVER)
        kept = []
        for number in message.leases:
            lease = self.leases.get(number)
            if lease is not None and lease.debtor == message.debtor:
                lease.since, lease.is_waiting = message.since, message.is_waiting
            if lease is not None and lease.debtor == message.debtor and not lease.is_recalled:
                lease.until = max(lease.until, now + self.terms.lease_s)
                kept.append(number)
        return Renewed(number=message.number, creditor=self.name, leases=tuple(kept), lease_s=self.terms.lease_s)

    def recall(self, blocks: int) -> list[Recall]:
        """Return messages to debtors that bring ``blocks`` back, the newest loans first; earlier recalls count, too.
        Claims that came before its own keep theirs.
        """
        return self._recall(sorted(self._later(), key=lambda x: (not x.is_recalled, -x.number)), blocks)

    def reclaimable(self, used: int, now: float) -> int:
        """Return the blocks that can come for its own claim, beyond ``used`` that it uses: what earlier claims have or
        wait for cannot.
        """
        own = max(0, self.lent_to(self.name) - used)  # they were granted, or their guests are ending
        if self._first_claim(now) < (self._lacks_since(), self.name):
            return own
        return own + self.free_blocks + sum(len(x.blocks) for x in self._later())

    def _later(self) -> list[Lease]:
        """Return the leases of others that its own claim may take back: all but those of earlier claims."""
        own = self._lacks_since(), self.name
        kept = () if own[0] == NEVER else {n for n, x in self.leases.items() if x.since and x.claim < own}
        return [x for n, x in self.leases.items() if x.debtor != self.name and n not in kept]

    def _first_claim(self, now: float) -> Claim:
        """Return the claim for which free blocks are kept: its own, or an earlier one that found no room."""
        own = self._lacks_since(), self.name
        return min(own, self._reserved[0]) if self._reserved is not None and self._reserved[1] > now else own

    def outdone_by(self, ask: LoanRequest) -> list[Recall]:
        """Return messages that bring back what a refused request lacks, of later claims that wait for more; also of
        this instance's own.
        """
        if not ask.since or not self._may_lend_to(ask):
            return []
        later = [x for x in self.leases.values() if x.is_waiting and x.since and x.claim > (ask.since, ask.debtor)]
        return self._recall(sorted(later, key=lambda x: x.claim, reverse=True), ask.blocks - self.free_blocks)

    def _recall(self, leases: Iterable[Lease], blocks: int) -> list[Recall]:
        orders = []
        for lease in leases:
            if blocks <= 0:
                break
            lease.is_recalled = True
            orders.append(Recall(creditor=self.name, lease=lease.number))
            blocks -= len(lease.blocks)
        return orders

    def _reserve(self, ask: LoanRequest, now: float) -> None:
        """Keep later claims out for a while if a request has found no room."""
        claim, had = (ask.since, ask.debtor), self._reserved
        if not ask.since or ask.blocks <= self.free_blocks or not self._may_lend_to(ask):
            return
        if had is None or had[1] <= now or claim <= had[0]:
            self._reserved = claim, now + RESERVE_S

    def _forget_claims(self, debtor: str, but: float) -> None:
        """Keep no more room for a claim of ``debtor`` that has ended: its claim is of the time ``but`` now."""
        if self._reserved is not None and self._reserved[0][1] == debtor and self._reserved[0][0] != but:
            self._reserved = None

    def _may_lend_to(self, ask: LoanRequest) -> bool:
        """Return whether more room would help a request. If not, it is refused anyway."""
        is_behind = (self._lacks_since(), self.name) < (ask.since, ask.debtor)
        is_too_much = ask.blocks > self.terms.max_lent_per_debtor - self.lent_to(ask.debtor)
        return ask.debtor == self.name or not (is_behind or is_too_much or self._busy())

    def _refuses_all(self, ask: LoanRequest, now: float) -> bool:
        """Return whether a refused request would be refused to any debtor: not for its claim, nor for what its debtor
        has.
        """
        is_in_turn = (ask.since, ask.debtor) <= self._first_claim(now)
        may_have = self.terms.max_lent_per_debtor - self.lent_to(ask.debtor)
        return is_in_turn and (ask.debtor == self.name or 0 < ask.blocks <= may_have)

    def expire(self, now: float) -> list[Lease]:
        """End and return the leases that were not renewed in time; their blocks become free."""
        over = [x for x in self.leases.values() if x.until <= now and x.number not in self.own_blocks]
        for lease in over:
            self.end_lease(lease.number)
        return over

    def end_lease(self, number: int) -> None:
        """End a lease that is given back, or whose debtor is gone."""
        self.free += self.leases.pop(number).blocks
        self.own_blocks.discard(number)

    def heartbeat(self, now: float) -> Heartbeat:
        """Return the next heartbeat."""
        self.expire(now)
        self._heartbeat_number += 1
        busy = self._busy()
        waiting = [] if busy else [x for x in self.leases.values() if x.is_waiting and x.since]
        debtors = sorted({x.debtor for x in self.leases.values()} - {self.name})
        first = self._first_claim(now)
        room = 0 if busy else min(self.free_blocks, self.terms.max_lent - self.lent_blocks)
        return Heartbeat(
            name=self.name,
            number=self._heartbeat_number,
            free=max(0, room),
            cap=self.terms.max_lent,
            debtor_cap=self.terms.max_lent_per_debtor,
            since=first[0],
            first=first[1],
            waiting=tuple(WaitingDebt(x.since, x.debtor, len(x.blocks)) for x in waiting[:MAX_NAMES]),
            lent=tuple(Debt(d, self.lent_to(d)) for d in debtors),
            place=self.terms.location,
            address=self.terms.address,
        )

    def refusal_reason(self, ask: LoanRequest, now: float) -> str:
        """Return why a request is refused; "" if it is not."""
        debtor, blocks, claim = ask.debtor, ask.blocks, (ask.since, ask.debtor)
        if blocks < 1:
            return "no blocks were requested"
        if blocks > self.free_blocks:
            return f"{self.free_blocks} blocks are free"
        if self._reserved is not None and self._reserved[1] > now and self._reserved[0] < claim:
            return "a request that came earlier waits for them"
        if debtor == self.name:
            return ""
        if self.lent_blocks + blocks > self.terms.max_lent:
            return f"{self.lent_blocks} of {self.terms.max_lent} blocks are lent"
        if (had := self.lent_to(debtor)) + blocks > self.terms.max_lent_per_debtor:
            return f"one debtor may have {self.terms.max_lent_per_debtor} blocks, and has {had}"
        if (self._lacks_since(), self.name) < claim:
            return "it lacks memory itself, for a request that came earlier"
        return self._busy()
