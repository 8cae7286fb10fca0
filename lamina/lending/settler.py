"""How the ledger has debts of a cycle settled: freeze all, and only if each is ready have all give back.

Each part is safe by itself: whoever gives back has put its blocks into free space or swap before. So a member that
dies, or an order that is lost, leaves debts that are smaller or as they were, and a freeze that ends by its time.
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
    """``freeze_s``: for which members of a cycle lend and borrow nothing, at most."""

    def __init__(self, ledger: DebtLedger, rng: random.Random, freeze_s: float = 5.0) -> None:
        self.settled = 0  # cycles of which all were told to give back
        self._ledger, self._rng, self._freeze_s = ledger, rng, freeze_s
        self._underway: dict[int, _OpenSettlement] = {}
        self._next = rng.getrandbits(48)  # numbers of a ledger that begins anew are others

    def plan(self, now: float) -> list[Settlement]:
        """The cycles that there are, by the ledger."""
        return settlements(self._ledger.debts(now), self._ledger.thresholds(now), self._rng)

    def begin(self, now: float) -> list[Outgoing]:
        """Freeze the members of cycles that share none with another one, nor with one under way."""
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
        """The last one that is ready has all give back; one that is not has all go on."""
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
