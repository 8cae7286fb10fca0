"""The debt ledger as a process: it receives heartbeats and sends proposals. Existing loans do not depend on it."""

from __future__ import annotations

import random
import threading
import time

import msgspec

from lamina.lending.debt_ledger import DebtLedger
from lamina.lending.debtor import Outgoing
from lamina.lending.lending_messages import (
    CandidatesRequest,
    CreditorRefused,
    DebtCycle,
    DebtsReply,
    DebtsRequest,
    Frozen,
    Heartbeat,
    LenderRow,
    ToLedger,
)
from lamina.lending.settler import Settler
from lamina.protocol.control import ControlLink, LinkClosedError

from .lending_listener import LEDGER_NAME, LendingListener, Place

SETTLE_S = 5.0  # between looks for cycles


class LedgerService:
    """Serves the ledger. ``silent_s``: seconds without a heartbeat after which an instance is not proposed any more."""

    def __init__(self, place: Place, key: bytes, silent_s: float = 5.0) -> None:
        """Listen. Raises OSError if that is impossible."""
        self.ledger = DebtLedger(silent_s)
        self._settler = Settler(self.ledger, random.Random())
        self._lock = threading.Lock()
        self._links: dict[str, ControlLink] = {}  # of instances that have sent requests
        self._listener = LendingListener(place, key, LEDGER_NAME, ToLedger, self._serve_link)
        self.address = self._listener.address

    def serve(self, over: threading.Event) -> None:
        """Look for cycles of debts now and then, until ``over``."""
        while not over.wait(SETTLE_S):
            with self._lock:
                self.ledger.forget(time.monotonic())
                orders = self._settler.begin(time.monotonic())
            self._send(orders)

    def close(self) -> None:
        self._listener.close()

    def _serve_link(self, name: str, link: ControlLink) -> None:
        try:
            while True:
                self._on_message(name, link, link.recv())
        finally:
            if self._links.get(name) is link:
                del self._links[name]

    def _on_message(self, name: str, link: ControlLink, message: msgspec.Struct) -> None:
        """Handle a message. What an instance reports about another one is ignored."""
        now, out = time.monotonic(), list[Outgoing]()
        if not isinstance(message, Heartbeat):  # orders go to debtors: a creditor of the same name has its own link
            self._links[name] = link
        with self._lock:
            if isinstance(message, Heartbeat) and message.name == name:
                self.ledger.on_heartbeat(message, now)
            elif isinstance(message, CandidatesRequest) and message.debtor == name:
                out = [(name, self.ledger.answer(message, now))]
            elif isinstance(message, CreditorRefused):
                self.ledger.on_refusal(message)
            elif isinstance(message, Frozen) and message.name == name:
                out = self._settler.on_message(message, now)
            elif isinstance(message, DebtsRequest):
                out = [(name, self._shown(now))]
        self._send(out)

    def _send(self, out: list[Outgoing]) -> None:
        for to, message in out:
            if (link := self._links.get(to)) is not None:
                try:
                    link.send(message)
                except LinkClosedError:
                    link.close()

    def _shown(self, now: float) -> DebtsReply:
        rows = [
            LenderRow(
                e.heartbeat.name, e.heartbeat.place, e.heartbeat.address, e.heartbeat.free, e.heartbeat.cap,
                e.heartbeat.lent,
                e.heartbeat.number <= e.refused, round(now - e.received_at, 2),
            )
            for e in sorted(self.ledger.entries.values(), key=lambda e: e.heartbeat.name)
        ]  # fmt: skip
        cycles = tuple(DebtCycle(s.members, s.blocks) for s in self._settler.plan(now))
        return DebtsReply(lenders=tuple(rows), cycles=cycles)
