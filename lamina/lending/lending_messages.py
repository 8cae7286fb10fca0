"""What debtors, creditors and the ledger tell each other. Counts of blocks and names alone: no content, no key.

A name belongs to one life of a process: a process that starts again has another name. Any message may be late, lost, or
come twice, without harm.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

VERSION = 1
MAX_NAMES = 4096  # in one message
MAX_CANDIDATES = 3
MAX_BLOCKS = 1 << 40
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_BLOCKS)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Text = Annotated[str, msgspec.Meta(max_length=256)]
Seconds = Annotated[float, msgspec.Meta(gt=0.0, le=86400.0)]


class LendingHello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """Whoever comes -> the ledger or a creditor, first. Answered by LendingWelcome."""

    version: int = VERSION


class LendingWelcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """``error``: why the one who came is of no use; the link ends behind it."""

    version: int = VERSION
    error: Text = ""


class GuestEnded(msgspec.Struct, frozen=True, kw_only=True, tag="guest-ended"):
    """Creditor -> debtor: the memory worker of a lease has ended, and the lease with it."""

    lease: Number
    fate: Text


class DebtsRequest(msgspec.Struct, frozen=True, tag="ask-debts"):
    """Anybody -> ledger. Answered by DebtsReply."""


class Debt(msgspec.Struct, frozen=True, array_like=True):
    """The blocks that ``debtor`` has of the creditor that sends this."""

    debtor: Name
    blocks: Count


class LeaseRemainder(msgspec.Struct, frozen=True, array_like=True):
    """A lease of which its debtor still has so many blocks: never more than before."""

    lease: Number
    blocks: Count


Debts = Annotated[tuple[Debt, ...], msgspec.Meta(max_length=MAX_NAMES)]
Leases = Annotated[tuple[LeaseRemainder, ...], msgspec.Meta(max_length=MAX_NAMES)]


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="heartbeat"):
    """Instance -> ledger, each period. ``free``: blocks that it would lend now; ``cap``: that it lends at most, to all
    and to one debtor.
    """

    name: Name
    number: Number  # of this heartbeat
    free: Count
    cap: Count
    debtor_cap: Count
    threshold: Count = 1  # debts smaller than this are not worth a settlement
    lent: Debts = ()
    place: Text = ""  # parts by "/", the widest first: zone/rack/host
    address: Text = ""  # where debtors come, HOST:PORT


class CandidatesRequest(msgspec.Struct, frozen=True, kw_only=True, tag="query"):
    """Debtor -> ledger: who may lend so many blocks? Answered by Candidates."""

    debtor: Name
    number: Number
    blocks: Count
    place: Text = ""


class Candidate(msgspec.Struct, frozen=True, array_like=True):
    name: Name
    address: Text
    free: Count  # for this debtor, by its last heartbeat, less what was proposed since


class Candidates(msgspec.Struct, frozen=True, kw_only=True, tag="candidates"):
    """Ledger -> debtor: a proposal, nothing more."""

    number: Number
    creditors: Annotated[tuple[Candidate, ...], msgspec.Meta(max_length=MAX_CANDIDATES)]


class LoanRequest(msgspec.Struct, frozen=True, kw_only=True, tag="loan-ask"):
    """Debtor -> creditor, and an instance to itself. Answered by LoanGranted or LoanRefused; never passed on."""

    debtor: Name
    number: Number  # higher than of any ask of this debtor before
    blocks: Count


class LoanGranted(msgspec.Struct, frozen=True, kw_only=True, tag="loan-granted"):
    """All that was asked for, for ``lease_s`` from the ask on, unless it is renewed."""

    number: Number
    creditor: Name
    lease: Number
    blocks: Count
    lease_s: Seconds


class LoanRefused(msgspec.Struct, frozen=True, kw_only=True, tag="loan-refused"):
    """``beat``: the creditor's last heartbeat before."""

    number: Number
    creditor: Name
    beat: Number
    why: Text = ""


class CreditorRefused(msgspec.Struct, frozen=True, kw_only=True, tag="refusing"):
    """Debtor -> ledger: this creditor has refused, when it had last sent heartbeat ``beat``."""

    creditor: Name
    beat: Number


class Renew(msgspec.Struct, frozen=True, kw_only=True, tag="renew"):
    """Debtor -> creditor, a few times within each lease: all that it has of that creditor. Answered by Renewed."""

    debtor: Name
    number: Number
    leases: Leases


class Renewed(msgspec.Struct, frozen=True, kw_only=True, tag="renewed"):
    """The leases that go on, for ``lease_s`` from that Renew on. Others of it end, or have ended."""

    number: Number
    creditor: Name
    leases: Annotated[tuple[Number, ...], msgspec.Meta(max_length=MAX_NAMES)]
    lease_s: Seconds


class GiveBack(msgspec.Struct, frozen=True, kw_only=True, tag="give-back"):
    """Debtor -> creditor: what is left of a lease; 0 ends it. A lost one is made good by the next Renew."""

    debtor: Name
    left: LeaseRemainder


class Recall(msgspec.Struct, frozen=True, kw_only=True, tag="recall"):
    """Creditor -> debtor: give back so many blocks of a lease, which is not renewed any more."""

    creditor: Name
    lease: Number
    blocks: Count


class Freeze(msgspec.Struct, frozen=True, kw_only=True, tag="freeze"):
    """Ledger -> each of a cycle: could you give ``blocks`` back to ``creditor``? Lend and borrow nothing until then.
    Answered by Frozen.
    """

    settlement: Number
    creditor: Name
    blocks: Count
    freeze_s: Seconds


class Frozen(msgspec.Struct, frozen=True, kw_only=True, tag="frozen"):
    settlement: Number
    name: Name
    ready: bool  # else it is not frozen either


class Settle(msgspec.Struct, frozen=True, kw_only=True, tag="settle"):
    """Ledger -> each of a cycle, all of whom are ready: give back what Freeze said, to free space or swap."""

    settlement: Number


class Thaw(msgspec.Struct, frozen=True, kw_only=True, tag="thaw"):
    """Ledger -> each of a cycle of which somebody is not ready: go on as before."""

    settlement: Number


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
        """Blocks, to all debtors together."""
        return sum(debt.blocks for debt in self.lent)


class DebtCycle(msgspec.Struct, frozen=True, array_like=True):
    """Instances each of which could give so many blocks back to the next one."""

    members: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_NAMES)]
    blocks: Count


class DebtsReply(msgspec.Struct, frozen=True, kw_only=True, tag="debts-are"):
    """Ledger -> who asked."""

    lenders: Annotated[tuple[LenderRow, ...], msgspec.Meta(max_length=MAX_NAMES)]
    cycles: Annotated[tuple[DebtCycle, ...], msgspec.Meta(max_length=MAX_NAMES)]


ToLedger = LendingHello | Heartbeat | CandidatesRequest | CreditorRefused | Frozen | DebtsRequest
FromLedger = LendingWelcome | Candidates | Freeze | Settle | Thaw | DebtsReply
ToCreditor = LendingHello | LoanRequest | Renew | GiveBack
FromCreditor = LendingWelcome | LoanGranted | LoanRefused | Renewed | Recall | GuestEnded
