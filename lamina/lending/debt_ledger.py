"""The debt ledger: what each instance has lent and has free, by its heartbeats. It proposes creditors, and lends
nothing itself (gManager, arXiv 2401.02669 section 4.3). If it is down, only new loans wait.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from .lending_messages import (
    MAX_CANDIDATES,
    MAX_NAMES,
    Candidate,
    Candidates,
    CandidatesRequest,
    CreditorRefused,
    Heartbeat,
)


@dataclass
class LedgerEntry:
    """An instance by its last heartbeat. ``promised``: blocks for which it was the first proposal since; ``refused``:
    number of the heartbeat after which it has refused a debtor.
    """

    heartbeat: Heartbeat
    received_at: float
    promised: int = 0
    refused: int = -1

    def free_blocks_for(self, debtor: str, since: float = 0.0) -> int:
        """Return the blocks that ``debtor`` may expect, with a claim of the time ``since``."""
        beat = self.heartbeat
        had = sum(d.blocks for d in beat.lent if d.debtor == debtor)
        later = (x.blocks for x in beat.waiting if since and (x.since, x.debtor) > (since, debtor))
        waiting = sum(later)
        return max(0, min(beat.free + waiting - self.promised, beat.debtor_cap - had, beat.cap))


MAX_LATE_REFUSALS = 16  # heartbeats
FORGET_FACTOR = 10  # times ``silent_s``; until then late heartbeats are recognized as old


class DebtLedger:
    """The ledger's state. ``silent_s``: an instance without a heartbeat for so long counts as dead, by local time."""

    def __init__(self, silent_s: float = 10.0) -> None:
        self.entries: dict[str, LedgerEntry] = {}
        self.early: dict[str, int] = {}  # refusals of creditors that sent no heartbeat yet: name -> heartbeat number
        self._silent_s = silent_s

    def on_heartbeat(self, beat: Heartbeat, now: float) -> bool:
        """Record a heartbeat. Returns whether it is new: heartbeats may come in any order, and twice."""
        entry = self.entries.get(beat.name)
        if entry is None:
            refused = min(self.early.pop(beat.name, -1), beat.number + MAX_LATE_REFUSALS)
            self.entries[beat.name] = LedgerEntry(beat, now, refused=refused)
        elif beat.number > entry.heartbeat.number:
            entry.heartbeat, entry.received_at, entry.promised = beat, now, 0
        else:
            return False
        return True

    def on_refusal(self, message: CreditorRefused) -> None:
        """Exclude a creditor from proposals until it sends a later heartbeat than the one of its refusal. At most
        ``MAX_LATE_REFUSALS`` heartbeats can be on their way, so a debtor that names a far later one excludes no
        creditor for good. A restarted ledger may receive a refusal before an older heartbeat.
        """
        if (entry := self.entries.get(message.creditor)) is None:
            self.early[message.creditor] = max(message.beat, self.early.pop(message.creditor, -1))
            if len(self.early) > MAX_NAMES:
                del self.early[next(iter(self.early))]
        else:
            entry.refused = max(entry.refused, min(message.beat, entry.heartbeat.number + MAX_LATE_REFUSALS))

    def answer(self, query: CandidatesRequest, now: float) -> Candidates:
        """Return at most three instances that may lend, the nearest first, and of equally near ones the one with most
        space. The first one counts as having that much less space until its next heartbeat, so that requests spread.
        """
        able = [
            (e, e.free_blocks_for(query.debtor, query.since))
            for e in self.live_instances(now)
            if self._may_lend(e, query)
        ]
        best = heapq.nsmallest(MAX_CANDIDATES, (x for x in able if x[1]), key=lambda x: _order(x[0], x[1], query))
        if best:
            best[0][0].promised += min(query.blocks, best[0][1])
        named = tuple(Candidate(e.heartbeat.name, e.heartbeat.address, room) for e, room in best)
        return Candidates(number=query.number, creditors=named)

    def live_instances(self, now: float) -> list[LedgerEntry]:
        """Return the entries of instances that are not silent."""
        return [e for e in self.entries.values() if now - e.received_at <= self._silent_s]

    def forget(self, now: float) -> None:
        """Drop instances that have been silent for very long."""
        for name in [n for n, e in self.entries.items() if now - e.received_at > FORGET_FACTOR * self._silent_s]:
            del self.entries[name]

    def debts(self, now: float) -> dict[tuple[str, str], int]:
        """Return (debtor, creditor) -> blocks."""
        return {
            (d.debtor, e.heartbeat.name): d.blocks
            for e in self.live_instances(now)
            for d in e.heartbeat.lent
            if d.blocks
        }

    def _may_lend(self, entry: LedgerEntry, query: CandidatesRequest) -> bool:
        beat = entry.heartbeat
        is_in_turn = beat.first == query.debtor or (query.since, query.debtor) <= (beat.since, beat.first or beat.name)
        return beat.name != query.debtor and beat.number > entry.refused and is_in_turn


def _order(entry: LedgerEntry, room: int, query: CandidatesRequest) -> tuple[int, bool, int, str]:
    return distance(entry.heartbeat.place, query.place), room < query.blocks, -room, entry.heartbeat.name


def distance(place: str, other: str) -> int:
    """Return the distance of two places: the number of parts of their names below those that they share."""
    ours, theirs = place.split("/"), other.split("/")
    same = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    return max(len(ours), len(theirs)) - same
