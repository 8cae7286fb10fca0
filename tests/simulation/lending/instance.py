"""An instance with data of its own, as blocks: at home as far as they fit, else on loan, else in swap. It gives back
whole leases, as engines do.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec

from lamina.lending.creditor import Creditor, LendingTerms
from lamina.lending.debtor import BorrowingTerms, Debtor, Outgoing
from lamina.lending.lending_messages import NEVER, GiveBack, LoanGranted, LoanRefused, LoanRequest, Renew

from .scenario import LendingScenario


class SimInstance:
    """The shipped policy of both sides, on data that is simulated. ``now``: by this instance's own clock."""

    def __init__(
        self, name: str, place: str, of: LendingScenario, now: Callable[[], float], rng: random.Random
    ) -> None:
        self.name, self.now, self.alive = name, now, True
        self.data = 0  # blocks that it has, wherever
        self.swapped = 0
        self._recalls, self._one_way, self._rng = of.recalls, of.one_way, rng
        self._asks, self.since = 0, 0.0  # when it began to want what it has, by its own clock
        terms = LendingTerms(of.cap, of.debtor_cap, of.lease_s, place)
        self.creditor = Creditor(name, of.blocks, terms, lacks_since=self._lacks_since)
        self.debtor = Debtor(name, BorrowingTerms(place, answer_s=0.5, retry_s=0.4))

    @property
    def local(self) -> int:
        return self.creditor.lent_to(self.name)

    def _lacks_since(self) -> float:
        return self.since if self._one_way and self.lacks else NEVER

    @property
    def lacks(self) -> bool:
        """Returns whether it waits for memory."""
        return self.swapped > 0 or self.debtor.is_seeking

    def want(self, data: int) -> list[Outgoing]:
        """From now on it has so many blocks of data."""
        self.data = data
        if self._one_way:
            self.since = self.debtor.since = self.now()
        return self.settle_down()

    def tick(self) -> list[Outgoing]:
        """Data on leases that have ended is computed again; what is recalled goes home, or to swap."""
        now = self.now()
        self.creditor.expire(now)
        out = self.debtor.tick(now)
        for loan in [b for b in self.debtor.loans.values() if b.is_recalled]:
            out += self.debtor.give_back(loan.creditor, loan.lease)
        out += self.settle_down()
        return out + self._recall()

    def hear(self, sender: str, message: msgspec.Struct) -> list[Outgoing]:
        """Returns its answers to a message."""
        now, out = self.now(), list[Outgoing]()
        if isinstance(message, LoanRequest):
            if (answer := self.creditor.answer_request(message, now)) is not None:
                out.append((sender, answer))
            if isinstance(answer, LoanRefused):
                out += self._outdone_by(message)
        elif isinstance(message, Renew):
            out.append((sender, self.creditor.renew(message, now)))
        elif isinstance(message, GiveBack):
            if (lease := self.creditor.leases.get(message.lease)) is not None and lease.debtor == sender:
                self.creditor.end_lease(message.lease)
        else:
            out += self.debtor.on_message(message, now)
        return out + self.settle_down()

    def settle_down(self) -> list[Outgoing]:
        """Ends leases that ended sequences leave empty: at home or on loan, by chance.

        New data goes home as far as there is room.
        """
        out, now = list[Outgoing](), self.now()
        self.debtor.expire(now)
        home_first = self._rng.random() < 0.5
        if home_first:
            self._shrink_home()
        spare = self.local + self.debtor.num_borrowed - self.data
        for loan in list(self.debtor.loans.values()):
            if loan.blocks <= spare:
                out += self.debtor.give_back(loan.creditor, loan.lease)
                spare -= loan.blocks
        self._shrink_home()
        self._grow_home(now)
        self.swapped = max(0, self.data - self.local - self.debtor.num_borrowed)
        self.debtor.is_waiting = self.swapped > 0
        self._own_leases()
        own_first = self._one_way and self.swapped and self.creditor.reclaimable(self.local, now)
        self.debtor.num_wanted = 0 if own_first else self.swapped
        return out

    def _outdone_by(self, ask: LoanRequest) -> list[Outgoing]:
        """Its own memory comes back at once, and that of others when they have heard of it."""
        out, held = list[Outgoing](), {lease.number: lease.debtor for lease in self.creditor.leases.values()}
        for order in self.creditor.outdone_by(ask):
            if held[order.lease] == self.name:
                self.creditor.end_lease(order.lease)
            else:
                out.append((held[order.lease], order))
        return out

    def _recall(self) -> list[Outgoing]:
        """Now and then, and not as an answer: else two who lend each other would go on for ever."""
        if not ((self._recalls or self._one_way) and self.swapped and self.creditor.lent_blocks):
            return []
        held = {lease.number: lease.debtor for lease in self.creditor.leases.values()}
        return [(held[order.lease], order) for order in self.creditor.recall(self.swapped)]

    def _shrink_home(self) -> None:
        """Give its own leases of its own memory back as far as its data does not need them."""
        spare = self.local + self.debtor.num_borrowed - self.data
        for lease in [x for x in self.creditor.leases.values() if x.debtor == self.name]:
            if len(lease.blocks) <= spare:
                self.creditor.end_lease(lease.number)
                spare -= len(lease.blocks)

    def _own_leases(self) -> None:
        """Its own leases are of its claim now, and are used once it lacks nothing."""
        waits = self.data > self.local + self.debtor.num_borrowed
        own = tuple(x.number for x in self.creditor.leases.values() if x.debtor == self.name)
        self._asks += 1
        self.creditor.renew(
            Renew(debtor=self.name, number=self._asks, leases=own, since=self.debtor.since, is_waiting=waits),
            self.now(),
        )

    def _grow_home(self, now: float) -> None:
        more = min(self.creditor.free_blocks, self.data - self.local - self.debtor.num_borrowed)
        if more > 0:
            self._asks += 1
            own = LoanRequest(debtor=self.name, number=self._asks, blocks=more, since=self.debtor.since)
            answer = self.creditor.answer_request(own, now)
            kept = isinstance(answer, LoanRefused) and "came earlier" in answer.why
            assert isinstance(answer, LoanGranted) or kept, "an instance has its own free blocks, in its turn"
