"""A creditor: it lends memory of its host, and runs a memory worker for each lease.

A host that lends all day runs one as a process (`lamina-launch lend`). An engine that serves has a creditor on threads
of its own (`lend` of --lending). It borrows of it as other debtors do; but its questions come first, and the others
give back memory that it lacks.

A guest has its control link from the debtor, who gives it a key for that lease alone; of the cluster's key it knows
nothing, and it takes no more than was lent (LAMINA_LEASE_BYTES). Its memory is its process's: when a lease ends, the
process does, and the kernel gives its pages to nobody before they are wiped. A debtor that is gone is known by its
link's end.
"""

from __future__ import annotations

import contextlib
import logging
import math
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from lamina.executor.launchers.local import exit_status_text
from lamina.lending.creditor import Creditor, LendingTerms
from lamina.lending.lending_messages import (
    MAX_BLOCKS,
    FromLedger,
    GiveBack,
    GuestEnded,
    LeaseRemainder,
    LoanGranted,
    LoanRequest,
    Renew,
    ToCreditor,
)
from lamina.protocol.control import ControlLink, LinkClosedError

from .guest_workers import GuestBudget, GuestProcess, start_guest
from .lending_listener import LEDGER_NAME, LendingListener, Place, open_link

log = logging.getLogger(__name__)
BLOCK_BYTES = 1 << 20  # of a block that is lent
TICK_S = 0.1
HEARTBEAT_S = 1.0
CLAIM_S = 10.0  # for a debtor to come for its guest
END_S = 1.0  # for a guest to end by itself, once its debtor has told it to


def guest_name(lease: int, debtor: str) -> str:
    """Of the connection by which a debtor comes for the guest of a lease."""
    return f"g{lease}:{debtor}"


class LenderService:
    """``threads``: of each guest, 0 = as many as there are cores; ``most_cores``, ``most_gbps``: cores that all guests
    may use, and gigabits of K and V that they may read in a second, before no new loan is made; ``needs``: why else
    there is to be none now, "" = nothing. ``needs`` is asked on threads of this service.
    """

    def __init__(
        self,
        place: Place,
        ledger: Place,
        key: bytes,
        name: str,
        blocks: int,
        terms: LendingTerms,
        *,
        threads: int = 0,
        most_cores: float = math.inf,
        most_gbps: float = math.inf,
        needs: Callable[[], str] = lambda: "",
    ) -> None:
        """Raises OSError where it cannot listen or there is no ledger, ValueError where that refuses."""
        self.name, self._ledger_at, self._key, self._threads = name, ledger, key, threads
        self._ledger: ControlLink | None = self._reach_ledger()
        self._lock = threading.RLock()
        self._guests: dict[int, GuestProcess] = {}
        self._awaited: dict[str, tuple[int, float]] = {}  # by the name of its connection: lease, and until when
        self._debtors: dict[str, Callable[[msgspec.Struct], None]] = {}  # how each is told something
        self._beat_at = 0.0
        self._local_need, self._budget = needs, GuestBudget(most_cores, most_gbps, time.monotonic())
        self.creditor = Creditor(name, blocks, terms, self._busy)
        self._listener = LendingListener(place, key, name, ToCreditor, self._serve_link, self._start_guest)
        self.address = self._listener.address
        self.creditor.terms = replace(terms, address=self.address)

    def serve(self, over: threading.Event) -> None:
        """Until ``over``: ends leases by their time, and sends heartbeats."""
        while not over.wait(TICK_S):
            now = time.monotonic()
            self._end_overdue(now)
            if now >= self._beat_at:
                self._beat_at = now + HEARTBEAT_S
                with self._lock:
                    self._budget.measure(list(self._guests.values()), now)
                self._send_heartbeat(now)

    def recall(self, blocks: int) -> None:
        """Ask debtors for so many blocks: their leases are not renewed."""
        with self._lock:
            orders = [(self.creditor.leases[o.lease].debtor, o) for o in self.creditor.recall(blocks)]
        for debtor, order in orders:
            self._tell(debtor, order)

    @property
    def lent_blocks(self) -> dict[str, int]:
        """Blocks by debtor."""
        with self._lock:
            return {x.debtor: self.creditor.lent_to(x.debtor) for x in self.creditor.leases.values()}

    def close(self) -> None:
        """End all guests."""
        self._listener.close()
        for lease in list(self._guests):
            self._end(lease)
        if self._ledger is not None:
            self._ledger.close()

    def reclaim(self, blocks: int) -> bool:
        """Whether so many are free for this process itself to ask for; else debtors are asked to give them back."""
        with self._lock:
            lacking = blocks - self.creditor.free_blocks
        if lacking > 0:
            self.recall(lacking)
        return lacking <= 0

    def serve_in_process(self, tell: Callable[[msgspec.Struct], None]) -> Callable[[msgspec.Struct], None]:
        """Be the creditor of this process itself, too, which is answered by ``tell``; returns what hears it. What it
        borrows has no end but its own.
        """
        with self._lock:
            assert self.name not in self._debtors
            self._debtors[self.name] = tell
        return lambda message: self._on_message(self.name, tell, message)

    def _busy(self) -> str:
        return self._local_need() or self._budget.exceeded()

    # Debtors:
    def _serve_link(self, name: str, link: ControlLink) -> None:
        """One debtor, until its link ends, and all its leases with it."""
        with self._lock:
            if name == self.name or name in self._debtors:  # its own asks have no limit, and no end
                return
            self._debtors[name] = link.send
        try:
            while True:
                self._on_message(name, link.send, link.recv())
        finally:
            with self._lock:
                del self._debtors[name]
                leases = [x.number for x in self.creditor.leases.values() if x.debtor == name]
            for lease in leases:
                self._end(lease)

    def _on_message(self, name: str, tell: Callable[[msgspec.Struct], None], message: Any) -> None:
        now = time.monotonic()
        if getattr(message, "debtor", name) != name:
            raise LinkClosedError(f"{name} speaks for {message.debtor}")
        if isinstance(message, LoanRequest):
            with self._lock:
                answer = self.creditor.answer_request(message, now)
                if isinstance(answer, LoanGranted):
                    self._awaited[guest_name(answer.lease, name)] = answer.lease, now + CLAIM_S
                    log.info("lease %d: %d MiB to %s", answer.lease, answer.blocks, name)
            if answer is not None:
                tell(answer)
        elif isinstance(message, Renew):
            whole = tuple(
                LeaseRemainder(x.lease, MAX_BLOCKS) for x in message.leases
            )  # a guest gives nothing back in part
            with self._lock:
                renewed = self.creditor.renew(msgspec.structs.replace(message, leases=whole), now)
            tell(renewed)
        elif isinstance(message, GiveBack) and not message.left.blocks:
            self._end(message.left.lease, debtor=name)

    def _tell(self, debtor: str, message: msgspec.Struct) -> None:
        tell = self._debtors.get(debtor)
        if tell is not None:
            with contextlib.suppress(LinkClosedError):
                tell(message)

    # Guests:
    def _start_guest(self, name: str, sock: Any, keys: bytes) -> bool:
        """A debtor comes for the guest of its lease: that process has this connection from now on. Raises OSError."""
        with self._lock:
            awaited = self._awaited.pop(name, None)
            if awaited is None or awaited[0] not in self.creditor.leases:
                return False
            lease = awaited[0]
            lent = len(self.creditor.leases[lease].blocks) * BLOCK_BYTES
            try:
                with sock:
                    guest = self._guests[lease] = start_guest(sock, keys, self._threads, lent)
            except OSError:
                self.creditor.end_lease(lease)
                raise
            self.creditor.own_blocks.add(lease)
        threading.Thread(
            target=self._watch, args=(lease, guest.process), name=f"lamina-guest-{lease}", daemon=True
        ).start()
        return True

    def _watch(self, lease: int, process: subprocess.Popen[bytes]) -> None:
        fate = exit_status_text(process.wait())
        with self._lock:
            if (guest := self._guests.pop(lease, None)) is not None:
                guest.close()
            debtor = self.creditor.leases[lease].debtor if lease in self.creditor.leases else ""
            if debtor:
                self.creditor.end_lease(lease)
        log.info("lease %d: its memory worker %s", lease, fate)
        if debtor:
            self._tell(debtor, GuestEnded(lease=lease, fate=fate))

    def _end(self, lease: int, debtor: str = "") -> None:
        """Its blocks are free once its process is gone."""
        with self._lock:
            held = self.creditor.leases.get(lease)
            if held is None or (debtor and held.debtor != debtor):
                return
            guest = self._guests.get(lease)
            if guest is None:
                self.creditor.end_lease(lease)
                return
        try:
            guest.process.wait(END_S if debtor not in ("", self.name) else 0.0)  # an engine waits for none of its own
        except subprocess.TimeoutExpired:
            guest.process.kill()

    def _end_overdue(self, now: float) -> None:
        with self._lock:
            late = [lease for lease, until in self._awaited.values() if until <= now]
            self._awaited = {n: x for n, x in self._awaited.items() if x[1] > now}
            over = [x.number for x in self.creditor.leases.values() if x.until <= now]
        for lease in {*late, *over}:
            self._end(lease)

    # The ledger:
    def _send_heartbeat(self, now: float) -> None:
        try:
            self._ledger = self._ledger or self._reach_ledger()
            with self._lock:
                message = self.creditor.heartbeat(now)
            self._ledger.send(message)
        except (OSError, ValueError, LinkClosedError):  # it comes back, or another one does
            if self._ledger is not None:
                self._ledger.close()
            self._ledger = None

    def _reach_ledger(self) -> ControlLink:
        return open_link(self._ledger_at, self._key, FromLedger, name=self.name, peer=LEDGER_NAME, what="ledger")
