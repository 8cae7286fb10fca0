"""The settlement of debts in a cycle by the ledger: it freezes all members, and only if each is ready, all give back.

Each part is safe by itself: a member moves its own data to free space or swap before it gives blocks back. So a dead
member or a lost order leaves debts smaller or unchanged, and a freeze ends by its time.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from .debt_graph import Settlement, settlements
from .debt_ledger import DebtLedger
from .debtor import Outgoing
from .lending_messages import Freeze, Frozen, Settle, Thaw


@dataclass
class _OpenSettlement:
    plan: Settlement
    until: float
    ready: set[str] = field(default_factory=set)


class Settler:
    """Settles cycles of debts. ``freeze_s``: the longest time for which members of a cycle lend and borrow nothing."""

    def __init__(self, ledger: DebtLedger, rng: random.Random, freeze_s: float = 5.0) -> None:
        self.settled = 0  # cycles whose members were all ordered to give back
        self._ledger, self._rng, self._freeze_s = ledger, rng, freeze_s
        self._underway: dict[int, _OpenSettlement] = {}
        self._next = rng.getrandbits(48)  # a restarted ledger uses other numbers

    def plan(self, now: float) -> list[Settlement]:
        """Return the present cycles, as far as the ledger knows."""
        return settlements(self._ledger.debts(now), self._ledger.thresholds(now), self._rng)

    def begin(self, now: float) -> list[Outgoing]:
        """Freeze the members of cycles that share none with each other, nor with one in progress. Returns messages."""
        self._underway = {n: u for n, u in self._underway.items() if now < u.until}
        taken = {name for u in self._underway.values() for name in u.plan.members}
        out: list[Outgoing] = []
        for settlement in self.plan(now):
            if taken & set(settlement.members):
                continue
            taken |= set(settlement.members)
            self._next += 1
            self._underway[self._next] = _OpenSettlement(settlement, now + self._freeze_s)
            for debtor, creditor in settlement.pairs:
                order = Freeze(
                    settlement=self._next, creditor=creditor, blocks=settlement.blocks, freeze_s=self._freeze_s
                )
                out.append((debtor, order))
        return out

    def on_message(self, message: Frozen, now: float) -> list[Outgoing]:
        """Handle a reply. The last ready member has all give back; one that is not ready has all continue."""
        underway = self._underway.get(message.settlement)
        if underway is None or message.name not in underway.plan.members or now >= underway.until:
            return []
        underway.ready.add(message.name)
        members = underway.plan.members
        if message.ready and len(underway.ready) < len(members):
            return []
        del self._underway[message.settlement]
        if not message.ready:
            return [(name, Thaw(settlement=message.settlement)) for name in members]
        self.settled += 1
        return [(name, Settle(settlement=message.settlement)) for name in members]
