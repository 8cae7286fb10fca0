"""The messages of debtors, creditors and the ledger. They have only counts of blocks and names: no content, no key.

A name belongs to one life of a process: after a restart the process has another name. Any message may be late, lost, or
come twice, without harm.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

VERSION = 4
MAX_NAMES = 4096  # in one message
MAX_CANDIDATES = 3
MAX_BLOCKS = 1 << 40
MAX_PARTS = 64
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOCKS)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Text = Annotated[str, msgspec.Meta(max_length=256)]
Seconds = Annotated[float, msgspec.Meta(gt=0.0, le=86400.0)]
# When the request came that lacks memory, by its instance's clock; 0: no claim. Of two the smaller goes first, or the
# smaller name: any fixed order will do.
Since = Annotated[float, msgspec.Meta(ge=0.0)]
NEVER = float("inf")


class LendingHello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """Client -> the ledger or a creditor, first message. The reply is LendingWelcome."""

    version: int = VERSION


class LendingWelcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """Ledger or creditor -> client. ``error``: why it is refused; the link then ends."""

    version: int = VERSION
    error: Text = ""


class GuestEnded(msgspec.Struct, frozen=True, kw_only=True, tag="guest-ended"):
    """Creditor -> debtor: a memory worker of a lease has ended, and the lease with it."""

    lease: Number
    fate: Text


class DebtsRequest(msgspec.Struct, frozen=True, tag="ask-debts"):
    """Client -> ledger. The reply is DebtsReply."""


class Debt(msgspec.Struct, frozen=True, array_like=True):
    """The blocks that ``debtor`` has from the creditor that sends this."""

    debtor: Name
    blocks: Count


class WaitingDebt(msgspec.Struct, frozen=True, array_like=True):
    """The blocks that ``debtor`` has for a claim which waits for more."""

    since: Since
    debtor: Name
    blocks: Count


Debts = Annotated[tuple[Debt, ...], msgspec.Meta(max_length=MAX_NAMES)]
Leases = Annotated[tuple[Number, ...], msgspec.Meta(max_length=MAX_NAMES)]


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="heartbeat"):
    """Instance -> ledger, periodically. ``free``: blocks that it would lend now. ``cap``, ``debtor_cap``: the most that
    it lends in total, and to one debtor. ``since``, ``first``: time and instance of the claim for which it keeps its
    blocks, its own or one that it has refused; it lends only to this and earlier ones. ``waiting``: what claims have
    that wait for more, its own too: earlier claims would get that.
    """

    name: Name
    number: Number  # of this heartbeat
    free: Count
    cap: Count
    debtor_cap: Count
    lent: Debts = ()
    since: Since = NEVER
    first: Text = ""  # "": its own
    waiting: Annotated[tuple[WaitingDebt, ...], msgspec.Meta(max_length=MAX_NAMES)] = ()
    place: Text = ""  # parts by "/", the widest first: zone/rack/host
    address: Text = ""  # where debtors connect, HOST:PORT


class CandidatesRequest(msgspec.Struct, frozen=True, kw_only=True, tag="query"):
    """Debtor -> ledger: a request for creditors that may lend ``blocks`` blocks. The reply is Candidates."""

    debtor: Name
    number: Number
    blocks: Count
    place: Text = ""
    since: Since = 0.0


class Candidate(msgspec.Struct, frozen=True, array_like=True):
    """A possible creditor."""

    name: Name
    address: Text
    free: Count  # for this debtor, by its last heartbeat, minus proposals since


class Candidates(msgspec.Struct, frozen=True, kw_only=True, tag="candidates"):
    """Ledger -> debtor: a proposal, which binds no creditor."""

    number: Number
    creditors: Annotated[tuple[Candidate, ...], msgspec.Meta(max_length=MAX_CANDIDATES)]


class LoanRequest(msgspec.Struct, frozen=True, kw_only=True, tag="loan-ask"):
    """Debtor -> creditor, also to the own instance. The reply is LoanGranted or LoanRefused; it is never forwarded.
    ``parts``: memory workers that share the blocks, one for each tensor-parallel rank of the debtor.
    """

    debtor: Name
    number: Number  # higher than in all earlier requests of this debtor
    blocks: Count
    since: Since = 0.0
    parts: Annotated[int, msgspec.Meta(ge=1, le=MAX_PARTS)] = 1


class LoanGranted(msgspec.Struct, frozen=True, kw_only=True, tag="loan-granted"):
    """Creditor -> debtor: all requested blocks, for ``lease_s`` seconds after the request was sent, unless renewed."""

    number: Number
    creditor: Name
    lease: Number
    blocks: Count
    lease_s: Seconds


class LoanRefused(msgspec.Struct, frozen=True, kw_only=True, tag="loan-refused"):
    """Creditor -> debtor: no blocks. ``beat``: the number of the creditor's last heartbeat. ``for_all``: whether any
    debtor would be refused.
    """

    number: Number
    creditor: Name
    beat: Number
    why: Text = ""
    for_all: bool = True


class CreditorRefused(msgspec.Struct, frozen=True, kw_only=True, tag="refusing"):
    """Debtor -> ledger: this creditor has refused, for all debtors, when its last heartbeat was ``beat``."""

    creditor: Name
    beat: Number


class Renew(msgspec.Struct, frozen=True, kw_only=True, tag="renew"):
    """Debtor -> creditor, a few times within each lease: all that it has of that creditor. Also to one that has refused
    a claim, once this has ended. The reply is Renewed. ``since``: of its claim now. ``is_waiting``: whether it lacks
    more, so that it does not use the leases yet.
    """

    debtor: Name
    number: Number
    leases: Leases
    since: Since = 0.0
    is_waiting: bool = False


class Renewed(msgspec.Struct, frozen=True, kw_only=True, tag="renewed"):
    """Creditor -> debtor: the leases that continue, for ``lease_s`` after that Renew. Its other leases end."""

    number: Number
    creditor: Name
    leases: Leases
    lease_s: Seconds


class GiveBack(msgspec.Struct, frozen=True, kw_only=True, tag="give-back"):
    """Debtor -> creditor: the end of a lease. If this message is lost, the lease ends as it is not renewed."""

    debtor: Name
    lease: Number


class Recall(msgspec.Struct, frozen=True, kw_only=True, tag="recall"):
    """Creditor -> debtor: give back a lease, which is not renewed any more."""

    creditor: Name
    lease: Number


class LenderRow(msgspec.Struct, frozen=True, array_like=True):
    """An instance, as the ledger knows it."""

    name: Name
    place: Text
    address: Text
    free: Count
    cap: Count
    lent: Debts
    refusing: bool  # until its next heartbeat
    silent_s: float  # since its last heartbeat

    @property
    def num_lent(self) -> int:
        """The blocks lent to all debtors together."""
        return sum(debt.blocks for debt in self.lent)


class DebtCycle(msgspec.Struct, frozen=True, array_like=True):
    """A cycle of instances, each of which owes the next one ``blocks`` blocks or more."""

    members: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_NAMES)]
    blocks: Count


class DebtsReply(msgspec.Struct, frozen=True, kw_only=True, tag="debts-are"):
    """Ledger -> client: all instances, and the cycles of their debts."""

    lenders: Annotated[tuple[LenderRow, ...], msgspec.Meta(max_length=MAX_NAMES)]
    cycles: Annotated[tuple[DebtCycle, ...], msgspec.Meta(max_length=MAX_NAMES)]


ToLedger = LendingHello | Heartbeat | CandidatesRequest | CreditorRefused | DebtsRequest
FromLedger = LendingWelcome | Candidates | DebtsReply
ToCreditor = LendingHello | LoanRequest | Renew | GiveBack
FromCreditor = LendingWelcome | LoanGranted | LoanRefused | Renewed | Recall | GuestEnded
