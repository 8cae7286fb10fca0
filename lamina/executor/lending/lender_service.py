"""A creditor: it lends memory of its host, and runs a memory worker, the guest, for each part of a lease.

A host that only lends runs it as a process (`lamina-launch lend`). A serving engine has a creditor on threads of its
own (`lend` of --lending). The engine borrows from it as other debtors do, and they give memory back that it lacks. But
a request that came earlier keeps what it has.

The debtor opens the guest's control link, and gives the guest a key for that lease alone. The guest does not know the
cluster's key, and uses no more memory than was lent (LAMINA_LEASE_BYTES). When a lease ends, its processes end, and the
kernel wipes the memory before reuse. When one of them ends, so does the lease. The end of a debtor's link shows that
the debtor is gone.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from lamina.executor.launchers.process import SpawnedProcess, exit_status_text
from lamina.lending.creditor import Creditor, LendingTerms
from lamina.lending.lending_messages import (
    NEVER,
    FromLedger,
    GiveBack,
    GuestEnded,
    LoanGranted,
    LoanRefused,
    LoanRequest,
    Recall,
    Renew,
    ToCreditor,
)
from lamina.protocol.control import ControlLink, LinkClosedError

from .guest_workers import GuestBudget, GuestProcess, start_guest
from .lending_listener import LEDGER_NAME, LendingListener, Place, open_link

log = logging.getLogger(__name__)
BLOCK_BYTES = 1 << 20  # of a lent block
TICK_S = 0.1
HEARTBEAT_S = 1.0
CLAIM_S = 10.0  # for a debtor to connect to its guest
END_S = 1.0  # for a guest to end by itself, after its debtor's order


def guest_name(lease: int, debtor: str, part: int = 0) -> str:
    """Return the name of the connection by which a debtor reaches a guest of a lease."""
    return f"g{lease}.{part}:{debtor}"


class LenderService:
    """Serves one creditor. ``needs``: a function that returns why no loan may be made now, "" = no reason;
    ``lacks_since``: see Creditor. This service's threads call both.

    ``threads``: of each guest, 0: as many as there are cores. ``most_cores``, ``most_gbps``: cores that all guests may
    use, and gigabits of K and V that they may read in a second, before new loans are refused.
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
        lacks_since: Callable[[], float] = lambda: NEVER,
    ) -> None:
        """Start to listen. Raises OSError if it cannot, or there is no ledger, ValueError if the ledger refuses."""
        self.name, self._ledger_at, self._key, self._threads = name, ledger, key, threads
        self.creditor = Creditor(name, blocks, terms, self._busy, lacks_since)
        self._lock = threading.RLock()
        self.guests: dict[tuple[int, int], GuestProcess] = {}  # lease and part -> guest
        self._ending = dict[int, float]()  # lease -> until when its guests may end by themselves
        self._awaited: dict[str, tuple[int, int, float]] = {}  # name of a connection -> lease, part and deadline
        self._debtors: dict[str, Callable[[msgspec.Struct], None]] = {}  # debtor -> function that sends it a message
        self._beat_at = 0.0
        self._local_need, self._budget = needs, GuestBudget(most_cores, most_gbps, time.monotonic())
        self._ledger: ControlLink | None = self._reach_ledger()
        try:
            self._listener = LendingListener(place, key, name, ToCreditor, self._serve_link, self._start_guest)
        except BaseException:
            self._ledger.close()
            raise
        self.address = self._listener.address
        self.creditor.terms = replace(terms, address=self.address)  # heartbeats have it, and begin later

    def serve(self, over: threading.Event) -> None:
        """End expired leases and send heartbeats, until ``over``."""
        while not over.wait(TICK_S):
            now = time.monotonic()
            self._end_overdue(now)
            self._kill_overdue(now)
            if now >= self._beat_at:
                self._beat_at = now + HEARTBEAT_S
                with self._lock:
                    self._budget.measure(list(self.guests.values()), now)
                self._send_heartbeat(now)

    def recall(self, blocks: int) -> None:
        """Request ``blocks`` blocks back from debtors: their leases are not renewed."""
        with self._lock:
            orders = self._addressed(self.creditor.recall(blocks))
        for debtor, order in orders:
            self._tell(debtor, order)

    def _addressed(self, orders: list[Recall]) -> list[tuple[str, Recall]]:
        return [(self.creditor.leases[order.lease].debtor, order) for order in orders]

    @property
    def lent_blocks(self) -> dict[str, int]:
        """The lent blocks by debtor."""
        with self._lock:
            return {x.debtor: self.creditor.lent_to(x.debtor) for x in self.creditor.leases.values()}

    def close(self) -> None:
        """End all guests."""
        self._listener.close()
        for lease in {lease for lease, _ in list(self.guests)}:
            self._end(lease)
        if self._ledger is not None:
            self._ledger.close()

    def reclaimable(self, used: int) -> int:
        """Return the blocks that can come for this process's claim, beyond ``used`` that it uses."""
        with self._lock:
            return self.creditor.reclaimable(used, time.monotonic())

    def reclaim(self, blocks: int) -> bool:
        """Return whether ``blocks`` blocks are free for this process itself. If not, debtors must give some back."""
        with self._lock:
            lacking = blocks - self.creditor.free_blocks
        if lacking > 0:
            self.recall(lacking)
        return lacking <= 0

    def serve_in_process(self, tell: Callable[[msgspec.Struct], None]) -> Callable[[msgspec.Struct], None]:
        """Lend to this process itself, too. ``tell``: receives the creditor's messages; returns a function that sends
        it messages. These leases do not expire.
        """
        with self._lock:
            assert self.name not in self._debtors
            self._debtors[self.name] = tell
        return lambda message: self._on_message(self.name, tell, message)

    def _busy(self) -> str:
        return self._local_need() or self._budget.exceeded()

    # Debtors
    def _serve_link(self, name: str, link: ControlLink) -> None:
        """Serve one debtor until its link ends, which ends all its leases."""
        with self._lock:
            # This process's own requests have no limit, and their leases no end.
            if name == self.name or name in self._debtors:
                return
            self._debtors[name] = link.send
        try:
            while True:
                self._on_message(name, link.send, link.recv())
        finally:
            with self._lock:
                del self._debtors[name]
                leases = [n for n, x in self.creditor.leases.items() if x.debtor == name and n not in self._ending]
            for lease in leases:
                self._end(lease)

    def _on_message(self, name: str, tell: Callable[[msgspec.Struct], None], message: Any) -> None:
        now = time.monotonic()
        if getattr(message, "debtor", name) != name:
            raise LinkClosedError(f"{name} uses the name of {message.debtor}")
        if isinstance(message, LoanRequest):
            orders = list[tuple[str, Recall]]()
            with self._lock:
                answer = self.creditor.answer_request(message, now)
                if isinstance(answer, LoanRefused):
                    orders = self._addressed(self.creditor.outdone_by(message))
                if isinstance(answer, LoanGranted):
                    for part in range(message.parts):
                        self._awaited[guest_name(answer.lease, name, part)] = answer.lease, part, now + CLAIM_S
                    log.info("lease %d: %d MiB to %s", answer.lease, answer.blocks, name)
            if answer is not None:
                tell(answer)
            for debtor, order in orders:
                self._tell(debtor, order)
        elif isinstance(message, Renew):
            with self._lock:
                renewed = self.creditor.renew(message, now)
            tell(renewed)
        elif isinstance(message, GiveBack):
            self._end(message.lease, debtor=name)

    def _tell(self, debtor: str, message: msgspec.Struct) -> None:
        tell = self._debtors.get(debtor)
        if tell is not None:
            with contextlib.suppress(LinkClosedError):
                tell(message)

    # Guests
    def _start_guest(self, name: str, sock: Any, keys: bytes) -> bool:
        """Start the guest for a debtor's connection, which the guest's process gets. Returns False if no lease awaits
        it. Raises OSError.
        """
        with self._lock:
            awaited = self._awaited.pop(name, None)
            if awaited is None or awaited[0] not in self.creditor.leases or awaited[0] in self._ending:
                return False
            lease, part, _ = awaited
            held = self.creditor.leases[lease]
            try:
                with sock:
                    lent = len(held.blocks) * BLOCK_BYTES // held.parts
                    guest = self.guests[lease, part] = start_guest(sock, keys, self._threads, lent)
            except OSError as error:
                self._end_guests(lease, 0.0)
                failed = error
            else:
                self.creditor.own_blocks.add(lease)
                args = lease, part, guest.process
                threading.Thread(target=self._watch, args=args, name=f"lamina-guest-{lease}", daemon=True).start()
                return True
        self._tell(held.debtor, GuestEnded(lease=lease, fate=f"could not be started: {failed}"))
        raise failed

    def _watch(self, lease: int, part: int, process: SpawnedProcess) -> None:
        fate = exit_status_text(status := process.wait())
        with self._lock:
            if (guest := self.guests.pop((lease, part), None)) is not None:
                guest.close()
            is_first, held = lease not in self._ending, self.creditor.leases.get(lease)
            self._end_guests(lease, 0.0 if status else END_S)  # others end after a clean end, too
        log.info("lease %d: its memory worker %s", lease, fate)
        if held is not None and is_first:
            self._tell(held.debtor, GuestEnded(lease=lease, fate=fate))

    def _end_guests(self, lease: int, patience_s: float) -> None:
        """Let the guests of a lease end by themselves for a time, then kill them. Without any, its blocks are free."""
        if any(number == lease for number, _ in self.guests):
            until = time.monotonic() + patience_s
            self._ending[lease] = min(until, self._ending.get(lease, until))
            if not patience_s:
                self._kill_overdue(until)
            return
        self._ending.pop(lease, None)
        if lease in self.creditor.leases:
            self.creditor.end_lease(lease)

    def _kill_overdue(self, now: float) -> None:
        """Kill the guests that should have ended by themselves."""
        with self._lock:
            for (lease, _), guest in self.guests.items():
                if self._ending.get(lease, NEVER) <= now:
                    guest.process.kill()

    def _end(self, lease: int, debtor: str = "") -> None:
        """End a lease without waiting. Its blocks are free once its guests are gone."""
        with self._lock:
            held = self.creditor.leases.get(lease)
            if held is not None and debtor in ("", held.debtor):  # an engine's own have no order to end
                self._end_guests(lease, END_S if debtor not in ("", self.name) else 0.0)

    def _end_overdue(self, now: float) -> None:
        with self._lock:
            late = [lease for lease, _, until in self._awaited.values() if until <= now]
            self._awaited = {n: x for n, x in self._awaited.items() if x[2] > now}
            over = [x.number for x in self.creditor.leases.values() if x.until <= now]
        for lease in {*late, *over}:
            self._end(lease)

    # The ledger
    def _send_heartbeat(self, now: float) -> None:
        try:
            self._ledger = self._ledger or self._reach_ledger()
            with self._lock:
                message = self.creditor.heartbeat(now)
            self._ledger.send(message)
        except (OSError, ValueError, LinkClosedError):  # this ledger or another one will come
            if self._ledger is not None:
                self._ledger.close()
            self._ledger = None

    def _reach_ledger(self) -> ControlLink:
        return open_link(self._ledger_at, self._key, FromLedger, name=self.name, peer=LEDGER_NAME, what="ledger")
