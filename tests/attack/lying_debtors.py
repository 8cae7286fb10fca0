"""A stranger, and a debtor that has the cluster's key and lies: neither costs an honest debtor its memory.

The ledger and the creditor are the real programs. The liar has a name and a link of its own. It uses another's name,
gives back another's lease, requests everything, sends noise to its guest, and tells the ledger of memory that is not
there.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from verdict import Verdict, first_failure

from lamina.executor.launchers.remote_links import connect
from lamina.executor.lending.borrower_links import BorrowerLinks, GuestWorker
from lamina.executor.lending.lender_service import guest_name
from lamina.executor.lending.lending_listener import LEDGER_NAME, Place, open_link, parse_address
from lamina.lending.lending_messages import (
    MAX_BLOCKS,
    DebtsReply,
    DebtsRequest,
    FromCreditor,
    FromLedger,
    GiveBack,
    Heartbeat,
    LenderRow,
    LoanGranted,
    LoanRequest,
    Renew,
    ToCreditor,
)
from lamina.protocol.control import ControlLink, LinkClosedError, MemoryReady, StartMemory

BLOCKS, CAP, HONEST = 8, 4, 3
SOON_S, LEASE_S = 60.0, 3.0


def attack(folder: Path, cap: int = CAP) -> Verdict:
    """``cap``: blocks that the creditor lends to one debtor."""
    key = secrets.token_bytes(32)
    with ExitStack() as stack:
        ledger = stack.enter_context(_program(key, "ledger", "serve", "127.0.0.1:0"))
        flags = [f"--ledger={ledger[0]}:{ledger[1]}", f"--lend-memory={BLOCKS}MiB", f"--debtor-cap={cap}MiB"]
        creditor = stack.enter_context(_program(key, "lend", *flags, f"--lease-s={LEASE_S}", "--threads=1"))
        name = _soon(lambda: next(iter(_rows(ledger, key)), None)).name
        liar = stack.enter_context(closing(_link(creditor, key, "liar", name)))
        liar.send(LoanRequest(debtor="liar", number=1, blocks=MAX_BLOCKS))
        too_much = liar.recv(SOON_S)
        granted = [_ask(liar, number, 1) for number in range(2, 2 + BLOCKS)]
        leases = [loan.lease for loan in granted if isinstance(loan, LoanGranted)]

        honest = stack.enter_context(closing(BorrowerLinks(ledger, key, "honest")))
        honest.request_blocks(HONEST)
        end = time.monotonic() + 2 * LEASE_S
        while not honest.arrived and time.monotonic() < end:
            liar.send(Renew(debtor="liar", number=len(leases), leases=tuple(leases)))
            liar.recv(SOON_S)
            time.sleep(LEASE_S / 10)
        guest = honest.arrived.popleft() if honest.arrived else None
        checks = {
            "a stranger is refused": _is_refused(creditor, name) and _is_refused(ledger, LEDGER_NAME),
            "more than there is is refused": not isinstance(too_much, LoanGranted),
            "an honest debtor gets memory beside one that takes all it can": guest is not None,
        }
        if guest is not None:
            link = _begun(guest)
            _hit_another(liar, guest)
            for number in range(2):  # a link that has lied has ended
                with closing(_link(creditor, key, f"liar-{number}", name)) as again:
                    _hit_another(again, guest)
            _lie_to_the_ledger(ledger, key)
            checks["nonsense to a guest of its own is one guest's"] = _noise_to_guest(creditor, key, name)
            time.sleep(2 * LEASE_S)  # leases of the liar end, one that is renewed does not
            checks["the honest debtor's lease stands"] = not guest.exit_reason() and not guest.is_recalled
            checks["its memory worker lives"] = _lives(link)
            checks["what the liar took is free again"] = bool(
                _soon(lambda: [r for r in _rows(ledger, key) if r.name == name and r.num_lent == HONEST])
            )
    return first_failure(checks, f"1 stranger, {len(leases)} blocks taken and lost again, 4 lies")


@contextmanager
def _program(key: bytes, *words: str) -> Iterator[Place]:
    """Run ``lamina-launch`` with these words. Yields where it says that it listens."""
    environment = {**os.environ, "LAMINA_CLUSTER_KEY": key.hex()}
    command = [sys.executable, "-m", "lamina.cli.launch", *words]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        yield parse_address(process.stdout.readline().strip().rpartition(" ")[2], "the address that it prints")
    finally:
        process.terminate()
        process.wait(SOON_S)


def _soon(true: Callable[[], Any]) -> Any:
    """Return what ``true`` returns once that is true, or at the end of the time."""
    end = time.monotonic() + SOON_S
    while not (value := true()) and time.monotonic() < end:
        time.sleep(0.05)
    return value


def _link(place: Place, key: bytes, name: str, peer: str) -> ControlLink:
    """A link to the creditor, over which the other side's messages may be sent, too."""
    return open_link(place, key, FromCreditor | ToCreditor | Heartbeat, name=name, peer=peer, what="creditor")


def _rows(ledger: Place, key: bytes) -> tuple[LenderRow, ...]:
    name = f"show-{secrets.token_hex(4)}"
    with closing(open_link(ledger, key, FromLedger, name=name, peer=LEDGER_NAME, what="ledger")) as link:
        link.send(DebtsRequest())
        answer = link.recv(SOON_S)
        assert isinstance(answer, DebtsReply)
        return answer.lenders


def _ask(link: ControlLink, number: int, blocks: int) -> Any:
    link.send(LoanRequest(debtor="liar", number=number, blocks=blocks))
    return link.recv(SOON_S)


def _is_refused(place: Place, peer: str) -> bool:
    try:
        open_link(place, secrets.token_bytes(32), FromLedger, name="stranger", peer=peer, what="peer").close()
    except (ValueError, OSError):
        return True
    return False


def _begun(guest: GuestWorker) -> ControlLink:
    """The control link of an honest debtor's guest, which has begun."""
    link = ControlLink(guest.sock, MemoryReady)
    link.send(StartMemory(scheme="shm", address="", name="g", key=guest.key, threads=1))
    link.recv(SOON_S)
    return link


def _lives(link: ControlLink) -> bool:
    try:
        link.recv(0.2)
    except TimeoutError:
        return True
    except LinkClosedError:
        return False
    return True


def _hit_another(link: ControlLink, guest: GuestWorker) -> None:
    """Give back another's lease, under the own name and under the other's, and send what no debtor sends."""
    name = "liar"
    for message in (
        GiveBack(debtor=name, lease=guest.loan.lease),
        GiveBack(debtor="honest", lease=guest.loan.lease),
        Heartbeat(name="honest", number=1, free=0, cap=0, debtor_cap=0),
    ):
        try:
            link.send(message)
        except LinkClosedError:
            return


def _noise_to_guest(creditor: Place, key: bytes, peer: str) -> bool:
    """Borrow a block, and send random bytes where its guest awaits a control message: the guest ends."""
    with closing(_link(creditor, key, "noisy", peer)) as link:
        link.send(LoanRequest(debtor="noisy", number=1, blocks=1))
        loan = link.recv(SOON_S)
        if not isinstance(loan, LoanGranted):
            return False
        sock = connect(*creditor, key, SOON_S, name=guest_name(loan.lease, "noisy"), peer=peer)
        with sock:
            sock.sendall(secrets.token_bytes(4096))
            told = link.recv(SOON_S)
        return type(told).__name__ == "GuestEnded" and told.lease == loan.lease


def _lie_to_the_ledger(ledger: Place, key: bytes) -> None:
    """Tell of memory that is not there, under the own name and under another's."""
    messages = FromLedger | Heartbeat
    with closing(open_link(ledger, key, messages, name="boaster", peer=LEDGER_NAME, what="ledger")) as link:
        for name in ("boaster", "honest"):
            try:
                link.send(Heartbeat(name=name, number=1, free=MAX_BLOCKS, cap=MAX_BLOCKS, debtor_cap=MAX_BLOCKS))
            except LinkClosedError:
                return
