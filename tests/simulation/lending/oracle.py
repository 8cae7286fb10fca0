"""Rules that must hold among lending instances after any loss, delay or death; checked by bookkeeping of its own."""

from __future__ import annotations

from collections.abc import Mapping

from lamina.lending.creditor import RESERVE_S
from lamina.lending.debt_ledger import LedgerEntry
from lamina.lending.lending_messages import (
    MAX_CANDIDATES,
    Candidates,
    CandidatesRequest,
    CreditorRefused,
    Heartbeat,
    LoanGranted,
    LoanRefused,
    LoanRequest,
    Renew,
)

from .instance import SimInstance
from .scenario import LendingScenario

NOBODY = 0.0, ""


class LendingOracle:
    """Each method raises AssertionError, with what does not hold."""

    def __init__(self, of: LendingScenario) -> None:
        self._of = of
        self._sent: dict[tuple[str, int], tuple[Heartbeat, int]] = {}  # and what had changed by then
        self._changed: dict[str, int] = {}  # blocks that were lent or came back, of each creditor
        self._lent: dict[str, dict[str, int]] = {}  # as it was when it was looked at last
        self._newest: dict[str, int] = {}  # heartbeat that has come to the ledger
        self._refused: dict[str, int] = {}
        self._kept: dict[str, tuple[tuple[float, str], float]] = {}  # room, for the first claim that found none
        self._kept_next = NOBODY, 0.0  # the same, once the ask that ``fits`` looked at has its answer
        self._answers: dict[tuple[str, str], tuple[int, object]] = {}  # by creditor and debtor: its last ask

    # Of one instance, whenever something has happened there:
    def instance(self, one: SimInstance, others: Mapping[str, SimInstance]) -> None:
        self._memory(one)
        self._data(one)
        self._leases(one, others)

    def _memory(self, one: SimInstance) -> None:
        creditor = one.creditor
        blocks = [b for lease in creditor.leases.values() for b in lease.blocks]
        assert len(blocks) == len(set(blocks)), f"{one.name}: a block has two debtors"
        assert len(blocks) + creditor.free_blocks == creditor.size, f"{one.name}: blocks are lost"
        lent: dict[str, int] = {}
        for lease in creditor.leases.values():
            if lease.debtor != one.name:
                lent[lease.debtor] = lent.get(lease.debtor, 0) + len(lease.blocks)
        assert sum(lent.values()) <= self._of.cap, f"{one.name} lends {lent}, more than {self._of.cap}"
        most = max(lent.values(), default=0)
        assert most <= self._of.debtor_cap, f"{one.name}: one debtor has {most} blocks of {self._of.debtor_cap}"
        before = self._lent.get(one.name, {})
        moved = sum(abs(lent.get(d, 0) - before.get(d, 0)) for d in lent.keys() | before.keys())
        self._changed[one.name] = self._changed.get(one.name, 0) + moved
        self._lent[one.name] = lent

    def _data(self, one: SimInstance) -> None:
        places = one.local, one.debtor.num_borrowed, one.swapped
        assert sum(places) == one.data or (sum(places) > one.data and not one.swapped), (
            f"{one.name} uses {one.data} blocks, and has at home, on loan, in swap: {places}"
        )

    def _leases(self, one: SimInstance, others: Mapping[str, SimInstance]) -> None:
        """A lease that a debtor believes in is of memory that its creditor has not given to another debtor."""
        now = one.now()
        for loan in one.debtor.loans.values():
            assert loan.until > now, (
                f"{one.name} still has what {loan.creditor} lent it until {now - loan.until:g} s ago"
            )
            if (creditor := others.get(loan.creditor)) is not None:
                self._same(one, loan.lease, loan.blocks, creditor)
        for other in {x.debtor for x in one.creditor.leases.values()} | self._lent.get(one.name, {}).keys():
            debtor = others.get(other)
            if debtor is not None and debtor is not one:
                self._believed(debtor, one)

    def _believed(self, debtor: SimInstance, creditor: SimInstance) -> None:
        for loan in debtor.debtor.loans.values():
            if loan.creditor == creditor.name and loan.until > debtor.now():
                self._same(debtor, loan.lease, loan.blocks, creditor)

    def _same(self, debtor: SimInstance, number: int, blocks: int, creditor: SimInstance) -> None:
        lease = creditor.creditor.leases.get(number)
        has = len(lease.blocks) if lease is not None and lease.debtor == debtor.name else 0
        assert has >= blocks, f"{debtor.name} thinks that it has {blocks} blocks of {creditor.name}, who lends it {has}"

    def answered(self, one: SimInstance, ask: LoanRequest, fits: bool, answer: object) -> bool:
        """First come, first served: an ask that fits is granted at once, another one is not. An ask that comes twice
        has one answer. Returns whether the answer is a new one.
        """
        last, told = self._answers.get((one.name, ask.debtor), (-1, None))
        if ask.number <= last:
            assert ask.number < last or answer == told, f"{one.name}: {ask} has two answers, {told} and {answer}"
            return False
        self._kept[one.name] = self._kept_next
        expected = LoanGranted if fits else LoanRefused
        assert isinstance(answer, expected), f"{one.name}: {ask} fits: {fits}; the answer is {answer}"
        self._answers[one.name, ask.debtor] = ask.number, answer
        return True

    def renewed(self, one: SimInstance, message: Renew) -> None:
        """No room is kept for a claim that has ended."""
        (_, debtor), _ = kept = self._kept.get(one.name, (NOBODY, 0.0))
        is_new = message.number > self._answers.get((one.name, message.debtor), (-1, None))[0]
        if is_new and debtor == message.debtor and not (message.is_waiting and message.since == kept[0][0]):
            self._kept[one.name] = NOBODY, 0.0

    def fits(self, one: SimInstance, ask: LoanRequest) -> bool:
        """Returns whether a loan has room, counted anew."""
        now, creditor = one.now(), one.creditor
        live = [x for x in creditor.leases.values() if x.until > now]
        used = sum(len(x.blocks) for x in live)
        lent = sum(len(x.blocks) for x in live if x.debtor != one.name)
        had = sum(len(x.blocks) for x in live if x.debtor == ask.debtor)
        of, claim = self._of, (ask.since, ask.debtor)
        kept, until = self._kept.get(one.name, (NOBODY, 0.0))
        if kept[1] == ask.debtor and kept != claim:
            kept, until = NOBODY, 0.0
        self._kept_next = kept, until
        if until > now and kept < claim:
            return False
        if of.one_way and one.lacks and (one.since, one.name) < claim:
            return False
        may_have = of.debtor_cap - had
        if ask.since and of.blocks - used < ask.blocks <= may_have and (until <= now or claim <= kept):
            self._kept_next = claim, now + RESERVE_S
        fits = ask.blocks <= min(of.blocks - used, of.cap - lent, may_have)
        if fits and kept == claim:
            self._kept_next = NOBODY, 0.0
        return fits

    def ended(self, creditor: SimInstance, dead: str) -> None:
        """A lease's time after a debtor's end, and the time of the messages that were in flight."""
        had = creditor.creditor.lent_to(dead)
        assert not had, f"{creditor.name} lends {had} blocks to {dead}, which is dead for longer than a lease"

    # Of the ledger:
    def beat(self, beat: Heartbeat) -> None:
        """An instance sends this."""
        self._sent[beat.name, beat.number] = beat, self._changed.get(beat.name, 0)

    def came(self, message: Heartbeat | CreditorRefused) -> None:
        """To the ledger."""
        if isinstance(message, CreditorRefused):
            self._refused[message.creditor] = max(message.beat, self._refused.get(message.creditor, -1))
        else:
            self._newest[message.name] = max(message.number, self._newest.get(message.name, 0))

    def forgotten(self) -> None:
        """The ledger begins anew."""
        self._newest.clear()
        self._refused.clear()

    def entry(self, entry: LedgerEntry, others: Mapping[str, SimInstance]) -> None:
        """It is wrong by what has changed since the last heartbeat, and by no more."""
        beat, name = entry.heartbeat, entry.heartbeat.name
        assert beat.number == self._newest[name], f"the ledger has an old heartbeat of {name}"
        sent, before = self._sent[name, beat.number]
        assert beat == sent, f"the ledger has made up {beat}"
        if name in others:
            had, has = {d.debtor: d.blocks for d in beat.lent}, self._lent.get(name, {})
            wrong = sum(abs(had.get(d, 0) - has.get(d, 0)) for d in had.keys() | has.keys())
            assert wrong <= self._changed.get(name, 0) - before, f"the ledger is wrong of {name} by {wrong} blocks"

    def proposed(self, query: CandidatesRequest, answer: Candidates) -> None:
        """At most three, none of whom has refused since its last heartbeat."""
        names = [c.name for c in answer.creditors]
        assert len(names) <= MAX_CANDIDATES, f"{len(names)} creditors for one query"
        assert len({*names, query.debtor}) == len(names) + 1, f"{names} for {query.debtor}"
        for name in names:
            assert self._newest[name] > self._refused.get(name, -1), f"{name} has refused, and sent no heartbeat since"


def debts_of(one: SimInstance) -> dict[str, int]:
    """Creditor -> blocks."""
    debts: dict[str, int] = {}
    for loan in one.debtor.loans.values():
        debts[loan.creditor] = debts.get(loan.creditor, 0) + loan.blocks
    return debts
