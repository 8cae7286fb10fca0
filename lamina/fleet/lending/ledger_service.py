"""The ledger as a process: heartbeats come in, proposals go out. Nothing that is lent depends on it."""

from __future__ import annotations

import random
import threading
import time

import msgspec

from lamina.lending.debtor import Outgoing
from lamina.lending.ledger import DebtLedger
from lamina.lending.messages import (
    AskDebts,
    DebtCycle,
    DebtsAre,
    Frozen,
    Heartbeat,
    LenderRow,
    Query,
    Refusing,
    ToLedger,
)
from lamina.lending.settler import Settler
from lamina.protocol.control import ControlLink, LinkClosedError

from .links import LEDGER_NAME, LendingDoor, Place

SETTLE_S = 5.0  # between looks for cycles


class LedgerService:
    """``silent_s``: after which an instance is not proposed any more."""

    def __init__(self, place: Place, key: bytes, silent_s: float = 5.0) -> None:
        """Raises OSError where it cannot listen."""
        self._ledger = DebtLedger(silent_s)
        self._settler = Settler(self._ledger, random.Random())
        self._lock = threading.Lock()
        self._links: dict[str, ControlLink] = {}  # of instances that have asked something
        self._door = LendingDoor(place, key, LEDGER_NAME, ToLedger, self._attend)
        self.address = self._door.address

    def serve(self, over: threading.Event) -> None:
        """Until ``over``: looks for cycles of debts now and then."""
        while not over.wait(SETTLE_S):
            with self._lock:
                self._ledger.forget(time.monotonic())
                orders = self._settler.begin(time.monotonic())
            self._send(orders)

    def close(self) -> None:
        self._door.close()

    def _attend(self, name: str, link: ControlLink) -> None:
        try:
            while True:
                self._hear(name, link, link.recv())
        finally:
            if self._links.get(name) is link:
                del self._links[name]

    def _hear(self, name: str, link: ControlLink, message: msgspec.Struct) -> None:
        """What one says of another does not count."""
        now, out = time.monotonic(), list[Outgoing]()
        if not isinstance(message, Heartbeat):  # orders go to who borrows: a creditor of the same name has its own link
            self._links[name] = link
        with self._lock:
            if isinstance(message, Heartbeat) and message.name == name:
                self._ledger.hear(message, now)
            elif isinstance(message, Query) and message.debtor == name:
                out = [(name, self._ledger.answer(message, now))]
            elif isinstance(message, Refusing):
                self._ledger.refusal(message)
            elif isinstance(message, Frozen) and message.name == name:
                out = self._settler.hear(message, now)
            elif isinstance(message, AskDebts):
                out = [(name, self._shown(now))]
        self._send(out)

    def _send(self, out: list[Outgoing]) -> None:
        for to, message in out:
            if (link := self._links.get(to)) is not None:
                try:
                    link.send(message)
                except LinkClosedError:
                    link.close()

    def _shown(self, now: float) -> DebtsAre:
        rows = [
            LenderRow(
                e.beat.name, e.beat.place, e.beat.address, e.beat.free, e.beat.cap, e.beat.lent,
                e.beat.number <= e.refused, round(now - e.heard_at, 2),
            )
            for e in sorted(self._ledger.entries.values(), key=lambda e: e.beat.name)
        ]  # fmt: skip
        cycles = tuple(DebtCycle(s.cycle, s.blocks) for s in self._settler.plan(now))
        return DebtsAre(lenders=tuple(rows), cycles=cycles)
