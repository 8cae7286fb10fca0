"""A debtor's links: one to the ledger and one to each creditor, on a thread that requests, renews and gives back.

lamina.lending.debtor decides what a debtor borrows. This module sends its messages, and gives each lease the control
link of its memory worker. The end of that link shows that the worker is lost.
"""

from __future__ import annotations

import ipaddress
import logging
import queue
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from lamina.executor.launchers.remote_links import any_port, connect
from lamina.lending.debtor import LEDGER, Borrowed, BorrowingTerms, Debtor, Outgoing
from lamina.lending.lending_messages import DebtsReply, DebtsRequest, FromCreditor, FromLedger, GuestEnded
from lamina.netstack import ChannelError
from lamina.protocol.control import ControlLink, LinkClosedError
from lamina.protocol.encrypted_socket import EncryptedSocket

from .lender_service import BLOCK_BYTES, LenderService, guest_name
from .lending_listener import LEDGER_NAME, Place, open_link, parse_address

log = logging.getLogger(__name__)
TICK_S = 0.05
DEBTS_S = 5.0  # between two requests for debts
RETRY_S = 1.0  # between attempts to reach a lost ledger
REACH_S = 2.0
LEASE_KEY_BYTES = 32


class GuestWorker:
    """A memory worker of a lease, which ``parts`` share, as its debtor sees it. ``key``: a fresh one, which its peers
    must prove.
    """

    role, pid, is_stopped = "memory", 0, False

    def __init__(self, loan: Borrowed, host: str, sock: EncryptedSocket, links: BorrowerLinks, parts: int = 1) -> None:
        self.loan, self.sock, self.index = loan, sock, -1
        self.host = "" if ipaddress.ip_address(host).is_loopback else any_port(host)
        self.key = secrets.token_bytes(LEASE_KEY_BYTES)
        self.nbytes = loan.blocks * BLOCK_BYTES // parts
        self.lost_reason = ""  # how it ended
        self._links = links

    @property
    def is_recalled(self) -> bool:
        """Return whether its creditor has recalled it."""
        return self.loan.is_recalled

    def exit_reason(self) -> str | None:
        return (self.lost_reason and f"on loan from {self.loan.creditor} {self.lost_reason}") or None

    def join(self, timeout_s: float) -> None:
        """Give its memory back, without waiting."""
        self._links.give_back(self)


class InProcessLink:
    """A link by calls to the creditor of this very process. ``answer(link, message)``: receives its messages."""

    def __init__(self, own: LenderService, answer: Callable[[InProcessLink, msgspec.Struct], None]) -> None:
        self.send = own.serve_in_process(lambda message: answer(self, message))

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


class BorrowerLinks:
    """All links of one debtor. ``arrived``: guests not yet used, those of a loan after each other. Methods are safe
    from any thread, and never wait.
    """

    def __init__(
        self, ledger: Place, key: bytes, name: str, place: str = "", own: LenderService | None = None, parts: int = 1
    ) -> None:
        """``own``: the creditor of this very deployment, of the same name. ``parts``: guests of a loan. Raises OSError
        if there is no ledger, ValueError if it refuses this process.
        """
        self.name, self._ledger_at, self._key, self._own = name, ledger, key, own
        self.arrived: deque[GuestWorker] = deque()
        self._lock = threading.RLock()
        self._debtor = Debtor(name, BorrowingTerms(place, parts=parts))
        self._guests: dict[tuple[str, int], list[GuestWorker]] = {}
        self._inbox: queue.SimpleQueue[tuple[str, ControlLink | InProcessLink, Any]] = queue.SimpleQueue()
        self._links: dict[str, ControlLink | InProcessLink] = {}
        self._ledger_tried = self._debts_asked = 0.0
        self.debt_cycles: int | None = None  # as the ledger last reported
        self._over = threading.Event()
        self._links[LEDGER] = self._open(LEDGER)
        if own is not None:
            self._links[name] = InProcessLink(own, lambda link, message: self._inbox.put((name, link, message)))
        self._thread = threading.Thread(target=self._run, name="lamina-loans", daemon=True)
        self._thread.start()

    def request_blocks(self, blocks: int, since: float = 0.0, *, is_waiting: bool = False, least: int = 1) -> None:
        """Borrow ``blocks`` more than there are, or are on their way, for a request that came at ``since``.
        ``is_waiting``: whether it lacks memory, wherever that comes from. ``least``: blocks of a loan that is of use.
        """
        with self._lock:
            self._debtor.num_wanted, self._debtor.since, self._debtor.is_waiting = blocks, since, is_waiting
            self._debtor.num_least = least

    @property
    def reclaimable(self) -> int:
        """The blocks of this deployment's own that can come for its claim, free or lent to later ones."""
        with self._lock:
            used = self._debtor.blocks_of(self.name)
        return 0 if self._own is None else self._own.reclaimable(used)

    def reclaim(self, blocks: int) -> None:
        """Request its own ``blocks``, at once if they are free, else when they are back. Call it until they come."""
        if self._own is None or not self._own.reclaim(blocks):
            return
        with self._lock:
            out = self._debtor.ask(self.name, self._own.address, blocks, time.monotonic())
        self._send(out)

    @property
    def borrowed_blocks(self) -> int:
        """The number of borrowed blocks."""
        with self._lock:
            return self._debtor.num_borrowed

    @property
    def borrowed_from_others(self) -> int:
        """The number of blocks that other deployments have lent."""
        with self._lock:
            return self._debtor.num_borrowed - self._debtor.blocks_of(self.name)

    @property
    def is_seeking(self) -> bool:
        """Return whether it has something of other deployments, or may get something."""
        with self._lock:
            return self._debtor.is_seeking or self.borrowed_from_others > 0

    @property
    def refusals(self) -> int:
        return self._debtor.refusals

    @property
    def by_creditor(self) -> dict[str, int]:
        """The borrowed blocks by creditor."""
        with self._lock:
            counts: dict[str, int] = {}
            for loan in self._debtor.loans.values():
                counts[loan.creditor] = counts.get(loan.creditor, 0) + loan.blocks
            return counts

    def give_back(self, guest: GuestWorker) -> None:
        """End the lease of ``guest``, with all that share it. Idempotent."""
        key = guest.loan.creditor, guest.loan.lease
        with self._lock:
            self._guests.pop(key, None)
            out = self._debtor.give_back(*key) if key in self._debtor.loans else []
        self._send(out)

    def close(self) -> None:
        """End all leases, by the end of their links. Idempotent."""
        self._over.set()
        self._thread.join(REACH_S)
        for link in list(self._links.values()):
            link.close()

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                peer, link, message = self._inbox.get(timeout=TICK_S)
            except queue.Empty:
                peer, link, message = "", None, None
            out = list[Outgoing]()
            with self._lock:
                now = time.monotonic()
                if message is not None and self._links.get(peer) is link:
                    out += self._on_message(peer, message, now)
                out += self._debtor.tick(now)
            if now - self._debts_asked > DEBTS_S:
                self._debts_asked = now
                out.append((LEDGER, DebtsRequest()))
            self._send(out)
            self._connect_guests()
            self._close_finished()

    def _on_message(self, peer: str, message: Any, now: float) -> list[Outgoing]:
        if isinstance(message, Exception):
            del self._links[peer]
            if peer != LEDGER:
                self._debtor.on_creditor_lost(peer)
            return []
        if isinstance(message, DebtsReply):
            self.debt_cycles = len(message.cycles)
            return []
        if isinstance(message, GuestEnded):
            self._debtor.on_guest_ended(peer, message.lease, now)
            for guest in self._guests.get((peer, message.lease), []):
                guest.lost_reason = message.fate
            return []
        if getattr(message, "creditor", peer) != peer:
            return []
        return self._debtor.on_message(message, now)

    # Guests
    def _connect_guests(self) -> None:
        """Open the control links to memory workers of new leases."""
        with self._lock:
            new = [(key, loan) for key, loan in self._debtor.loans.items() if key not in self._guests]
        parts = self._debtor.terms.parts
        for key, loan in new:
            socks = list[EncryptedSocket]()
            try:
                place = parse_address(self._debtor.addresses[loan.creditor], "a creditor's address")
                for part in range(parts):
                    name = guest_name(loan.lease, self.name, part)
                    socks.append(connect(*place, self._key, REACH_S, name=name, peer=loan.creditor))
            except (OSError, ChannelError, ValueError) as error:
                log.warning("no memory worker of %s: %s", loan.creditor, error)
                for sock in socks:
                    sock.close()
                with self._lock:
                    out = self._debtor.give_back(*key) if key in self._debtor.loans else []
                self._send(out)
                continue
            guests = [GuestWorker(loan, place[0], sock, self, parts) for sock in socks]
            log.info("borrowed %d MiB of %s", loan.blocks, loan.creditor)
            with self._lock:
                self._guests[key] = guests
            self.arrived.extend(guests)

    def _close_finished(self) -> None:
        """Close the links to guests whose leases have ended, which notifies their users."""
        with self._lock:
            over = [key for key in self._guests if key not in self._debtor.loans]
            guests = [guest for key in over for guest in self._guests.pop(key)]
        for guest in guests:
            guest.lost_reason = guest.lost_reason or "ended with its lease"
            with suppress(OSError):
                guest.sock.shutdown(socket.SHUT_RDWR)

    # Links
    def _send(self, out: list[Outgoing]) -> None:
        for to, message in out:
            with suppress(OSError, ValueError, LinkClosedError):  # a lost message is sent again, or to another creditor
                self._link_to(to).send(message)

    def _link_to(self, peer: str) -> ControlLink | InProcessLink:
        with self._lock:
            link = self._links.get(peer)
        if link is None:
            link = self._open(peer)
            with self._lock:
                self._links[peer] = link
        return link

    def _open(self, peer: str) -> ControlLink:
        if peer == LEDGER:
            if (now := time.monotonic()) - self._ledger_tried < RETRY_S:
                raise OSError("the ledger has gone")
            self._ledger_tried = now
            link = open_link(self._ledger_at, self._key, FromLedger, name=self.name, peer=LEDGER_NAME, what="ledger")
        else:
            place = parse_address(self._debtor.addresses[peer], "a creditor's address")
            link = open_link(place, self._key, FromCreditor, name=self.name, peer=peer, what="creditor")
        threading.Thread(target=self._read, args=(peer, link), name="lamina-loan-link", daemon=True).start()
        return link

    def _read(self, peer: str, link: ControlLink) -> None:
        try:
            while True:
                self._inbox.put((peer, link, link.recv()))
        except (LinkClosedError, msgspec.MsgspecError) as error:
            self._inbox.put((peer, link, error))
