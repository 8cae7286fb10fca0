"""The debt ledger as a process: it receives heartbeats and sends proposals. Existing loans do not depend on it."""

from __future__ import annotations

import threading
import time

import msgspec

from lamina.lending.debt_graph import debt_cycles
from lamina.lending.debt_ledger import DebtLedger
from lamina.lending.lending_messages import (
    CandidatesRequest,
    CreditorRefused,
    DebtsReply,
    DebtsRequest,
    Heartbeat,
    LenderRow,
    ToLedger,
)
from lamina.protocol.control import ControlLink

from .lending_listener import LEDGER_NAME, LendingListener, Place

FORGET_S = 5.0  # between looks for instances that have been silent for very long


class LedgerService:
    """Serves the ledger. ``silent_s``: seconds without a heartbeat after which an instance is not proposed any more."""

    def __init__(self, place: Place, key: bytes, silent_s: float = 5.0) -> None:
        """Listen. Raises OSError if that is impossible."""
        self.ledger = DebtLedger(silent_s)
        self._lock = threading.Lock()
        self._listener = LendingListener(place, key, LEDGER_NAME, ToLedger, self._serve_link)
        self.address = self._listener.address

    def serve(self, over: threading.Event) -> None:
        """Forget silent instances now and then, until ``over``."""
        while not over.wait(FORGET_S):
            with self._lock:
                self.ledger.forget(time.monotonic())

    def close(self) -> None:
        self._listener.close()

    def _serve_link(self, name: str, link: ControlLink) -> None:
        while True:
            reply = self._reply_to(name, link.recv())
            if reply is not None:
                link.send(reply)

    def _reply_to(self, name: str, message: msgspec.Struct) -> msgspec.Struct | None:
        """Handle a message. What an instance reports about another one is ignored."""
        now = time.monotonic()
        with self._lock:
            if isinstance(message, Heartbeat) and message.name == name:
                self.ledger.on_heartbeat(message, now)
            elif isinstance(message, CandidatesRequest) and message.debtor == name:
                return self.ledger.answer(message, now)
            elif isinstance(message, CreditorRefused):
                self.ledger.on_refusal(message)
            elif isinstance(message, DebtsRequest):
                return self._shown(now)
        return None

    def _shown(self, now: float) -> DebtsReply:
        rows = [
            LenderRow(
                e.heartbeat.name, e.heartbeat.place, e.heartbeat.address, e.heartbeat.free, e.heartbeat.cap,
                e.heartbeat.lent,
                e.heartbeat.number <= e.refused, round(now - e.received_at, 2),
            )
            for e in sorted(self.ledger.entries.values(), key=lambda e: e.heartbeat.name)
        ]  # fmt: skip
        return DebtsReply(lenders=tuple(rows), cycles=tuple(debt_cycles(self.ledger.debts(now))))
