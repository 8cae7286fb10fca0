"""The ledger, creditors and debtors over real links, with real memory workers as guests.

Covers: lamina/cli/lending/ledger.py, lamina/cli/lending/lend.py, lamina/executor/lending/borrower_links.py,
lamina/executor/lending/guest_workers.py, lamina/executor/lending/ledger_service.py,
lamina/executor/lending/lender_service.py, lamina/executor/lending/lending_listener.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lamina.cli.launch import main
from lamina.config.flat_options import make_config
from lamina.env import LEASE_BYTES
from lamina.executor.launchers import local
from lamina.executor.lending import borrower, borrower_links, lender_service, lending_listener
from lamina.executor.lending.borrower_links import BorrowerLinks, GuestWorker
from lamina.executor.lending.guest_workers import cpu_seconds
from lamina.executor.lending.ledger_service import LedgerService
from lamina.executor.lending.lender_service import LenderService
from lamina.executor.lending.lending_listener import LendingListener, open_link
from lamina.lending import debtor as lending_debtor
from lamina.lending.creditor import LendingTerms
from lamina.lending.lending_messages import (
    DebtsReply,
    DebtsRequest,
    FromCreditor,
    FromLedger,
    LoanGranted,
    LoanRefused,
    LoanRequest,
    ToLedger,
)
from lamina.protocol.control import ControlLink, LinkClosedError, MemoryReady, StartMemory
from lamina.workers.memory.lease_limits import READ_COUNTER

KEY = b"k" * 32
HERE = "127.0.0.1", 0
SOON_S = 30.0


def until(true: Callable[[], Any], what: str) -> Any:
    deadline, wait = time.monotonic() + SOON_S, threading.Event()
    while not (value := true()):
        assert time.monotonic() < deadline, what
        wait.wait(0.01)
    return value


class Street:
    """A ledger with its creditors and debtors; all end with the test."""

    def __init__(self, stack: ExitStack, silent_s: float = 5.0) -> None:
        self._stack, self._over = stack, threading.Event()
        with socket.create_server(HERE) as free:
            self.place = "127.0.0.1", free.getsockname()[1]
        self.ledger = self.open_ledger(silent_s)

    def open_ledger(self, silent_s: float = 5.0) -> LedgerService:
        service: LedgerService = self._run(LedgerService(self.place, KEY, silent_s))
        return service

    def _run(self, service: Any) -> Any:
        thread = threading.Thread(target=service.serve, args=(self._over,))
        thread.start()
        self._stack.callback(thread.join)
        self._stack.callback(service.close)
        self._stack.callback(self._over.set)
        return service

    def creditor(self, name: str, blocks: int, lease_s: float = 10.0, **budget: Any) -> LenderService:
        own = LendingTerms(blocks, blocks, lease_s)
        service: LenderService = self._run(LenderService(HERE, self.place, KEY, name, blocks, own, threads=1, **budget))
        until(lambda: name in self.shown(), f"{name} is not known")
        return service

    def debtor(self, name: str, own: LenderService | None = None, parts: int = 1) -> BorrowerLinks:
        debtor = BorrowerLinks(self.place, KEY, name, own=own, parts=parts)
        self._stack.callback(debtor.close)
        return debtor

    def shown(self) -> dict[str, Any]:
        link = open_link(self.place, KEY, FromLedger, name="show", peer=lending_listener.LEDGER_NAME, what="ledger")
        link.send(DebtsRequest())
        answer: DebtsReply = link.recv(SOON_S)
        link.close()
        return {row.name: row for row in answer.lenders}


@pytest.fixture
def street(request: pytest.FixtureRequest) -> Iterator[Street]:
    with ExitStack() as stack:
        yield Street(stack, getattr(request, "param", 5.0))


def guest_of(debtor: BorrowerLinks) -> GuestWorker:
    until(lambda: debtor.arrived, "nobody has lent anything")
    return debtor.arrived.popleft()


def address_of(service: LenderService) -> tuple[str, int]:
    return "127.0.0.1", int(service.address.rpartition(":")[2])


def pid_of(service: LenderService) -> int:
    (guest,) = until(service.guests.values, "the guest does not start")
    return guest.process.pid


def test_a_guest_is_a_memory_worker_with_a_key_of_its_own_and_none_of_the_cluster(
    street: Street, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAMINA_CLUSTER_KEY", KEY.hex())
    service, debtor = street.creditor("c", 8), street.debtor("d")
    debtor.request_blocks(5)
    guest = guest_of(debtor)
    assert (guest.nbytes, service.creditor.lent_to("d"), len(guest.key)) == (5 << 20, 5, 32)
    environment = Path(f"/proc/{pid_of(service)}/environ").read_bytes()
    assert KEY.hex().encode() not in environment
    link = ControlLink(guest.sock, MemoryReady)
    link.send(StartMemory(scheme="shm", address="", name="g", key=guest.key, threads=1))
    assert link.recv(SOON_S).url.startswith("shm://")
    debtor.give_back(guest)
    until(lambda: service.creditor.free_blocks == 8, "the blocks do not come back")
    with pytest.raises(LinkClosedError):
        link.recv(SOON_S)


@pytest.mark.parametrize("end", ["one is killed", "it goes back", "a part never comes"])
def test_the_guests_of_a_lease_share_its_memory_and_end_together(
    end: str, street: Street, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for each rank of a debtor. The blocks are free again once all have ended."""
    service, debtor = street.creditor("c", 8), street.debtor("d", parts=3)
    if end == "a part never comes":
        monkeypatch.setattr(lender_service, "CLAIM_S", 0.5)
        monkeypatch.setattr(borrower_links, "guest_name", lambda lease, name, part: f"g{lease}.{part % 2}:{name}")
        debtor.request_blocks(5)
        until(lambda: service.creditor.answered, "it is not asked")
        debtor.request_blocks(0)
        until(lambda: not service.guests and service.creditor.free_blocks == 8, "the blocks do not come back")
        return
    debtor.request_blocks(5)
    guests = [guest_of(debtor) for _ in range(3)]
    assert [guest.nbytes for guest in guests] == [(5 << 20) // 3] * 3
    assert len({guest.key for guest in guests}) == 3
    until(lambda: len(service.guests) == 3, "some do not start")
    pids = [guest.process.pid for guest in service.guests.values()]
    limits = {Path(f"/proc/{pid}/environ").read_bytes().partition(LEASE_BYTES.encode() + b"=")[2][:7] for pid in pids}
    assert limits == {str((5 << 20) // 3).encode()}
    if end == "one is killed":
        os.kill(pids[1], signal.SIGKILL)
        until(lambda: all(guest.exit_reason() for guest in guests), "the debtor does not hear of it")
    else:
        debtor.give_back(guests[2])
    until(lambda: service.creditor.free_blocks == 8, "the blocks do not come back")
    assert not service.guests
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_guests_end_by_themselves_after_one_of_their_lease_has(street: Street, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lender_service, "END_S", 2 * SOON_S)
    service, debtor = street.creditor("c", 8), street.debtor("d", parts=3)
    debtor.request_blocks(5)
    guests = [guest_of(debtor) for _ in range(3)]
    until(lambda: len(service.guests) == 3, "some do not start")
    processes = [guest.process for guest in service.guests.values()]
    tasks = [f"/proc/{process.pid}/task" for process in processes]  # each notices SIGTERM by its third thread
    until(lambda: all(len(os.listdir(path)) >= 3 for path in tasks), "some do not serve")
    guests[0].sock.close()
    until(lambda: service.creditor.free_blocks == 8, "the blocks do not come back")
    assert [process.exit_status for process in processes] == [0, 0, 0], "some were killed"


def test_a_creditor_listens_while_guests_end(street: Street, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their debtor has given them back, and still has their links, so they do not end by themselves."""
    monkeypatch.setattr(lender_service, "END_S", 2 * SOON_S)
    service, debtor = street.creditor("c", 8), street.debtor("d", parts=2)
    debtor.request_blocks(5)
    before = [guest_of(debtor) for _ in range(2)]
    until(lambda: len(service.guests) == 2, "some do not start")
    debtor.give_back(before[0])
    debtor.request_blocks(3)
    assert guest_of(debtor).nbytes == (3 << 20) // 2
    assert service.creditor.free_blocks == 0, "the guests of before have ended"
    assert not any(guest.process.has_ended() for guest in service.guests.values())


PLACED = {"partition": "spill", "memory_workers": 2, "transport": "shm", "lending_place": "z1/r2/h3"}


@pytest.mark.parametrize(("named", "place"), [({}, "z1/r2/h3"), ({"lending_place": ""}, socket.gethostname())])
def test_an_engine_lends_and_borrows_where_its_file_says_that_it_is(
    named: dict[str, str], place: str, street: Street, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAMINA_CLUSTER_KEY", KEY.hex())
    ledger, places = f"{street.place[0]}:{street.place[1]}", list[str]()

    def links(ledger: Any, key: bytes, name: str, place: str, own: Any, parts: int) -> Any:
        assert parts == 1
        places.append(place)
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(borrower, "BorrowerLinks", links)
    options = {**PLACED, "ledger": ledger, "borrow": "8MiB", "lend": 0.5, "kv_memory": "8MiB", **named}
    none: Any = None
    engine = borrower.open_borrower(make_config(options), none, none, none)
    with contextlib.closing(engine):
        assert places == [place]
        (row,) = until(lambda: [*street.shown().values()], "it lends nothing")
        assert row.place == place


def free_port() -> int:
    with socket.create_server(HERE) as free:
        return int(free.getsockname()[1])


def test_a_creditor_that_cannot_be_made_leaves_no_listener(street: Street) -> None:
    at = "127.0.0.1", free_port()
    wrong: Any = "many"
    with pytest.raises(TypeError):
        LenderService(at, street.place, KEY, "c", wrong, LendingTerms(1, 1))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(at, SOON_S)


def test_a_creditor_whose_address_is_taken_leaves_the_ledger(street: Street) -> None:
    ended = threading.Event()

    def attend(name: str, link: ControlLink) -> None:
        with contextlib.suppress(LinkClosedError):
            link.recv(SOON_S)
        ended.set()

    ledger = LendingListener(HERE, KEY, lending_listener.LEDGER_NAME, ToLedger, attend)
    taken = socket.create_server(HERE)
    at = "127.0.0.1", int(ledger.address.rpartition(":")[2])
    with contextlib.closing(ledger), taken, pytest.raises(OSError, match="in use"):
        LenderService(("127.0.0.1", taken.getsockname()[1]), at, KEY, "c", 1, LendingTerms(1, 1))
    assert ended.wait(SOON_S)


@pytest.mark.parametrize("street", [SOON_S], indirect=True)
def test_two_debtors_race_by_old_heartbeats_and_one_is_refused(street: Street, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger has given both debtors the same answer, by a heartbeat ten periods old, and is gone from then on."""
    monkeypatch.setattr(lender_service, "HEARTBEAT_S", 0.05)
    service, first, second = street.creditor("c", 8), street.debtor("d1"), street.debtor("d2")
    ledger = street.ledger.ledger
    ledger.on_heartbeat = lambda message, now: None  # type: ignore[method-assign]
    until(lambda: street.shown()["c"].silent_s > 10 * lender_service.HEARTBEAT_S, "it goes on with heartbeats")
    right = ledger.answer
    ledger.answer = lambda query, now: (setattr(ledger.entries["c"], "promised", 0), right(query, now))[1]  # type: ignore[method-assign]
    for debtor in (first, second):
        debtor.request_blocks(6)
    until(lambda: len(service.creditor.leases) + service.creditor.refusals == 2, "not both ask it")
    street.ledger.close()
    until(lambda: first.refusals + second.refusals, "nobody is refused")
    lent = until(lambda: first.arrived or second.arrived, "nobody gets anything")
    assert service.creditor.lent_blocks == 6
    winner, loser = (first, second) if lent is first.arrived else (second, first)
    winner.give_back(winner.arrived.popleft())
    until(lambda: service.creditor.free_blocks == 8, "the blocks do not come back")
    assert not loser.arrived
    street.open_ledger()
    until(lambda: loser.borrowed_blocks == 6, "the other one gets nothing, at once or in parts")


@pytest.mark.parametrize("end", ["debtor", "guest", "creditor"])
def test_whoever_dies_ends_the_lease_and_no_other(end: str, street: Street) -> None:
    service, other = street.creditor("c", 8), street.creditor("e", 3)
    debtor, beside = street.debtor("d"), street.debtor("b")
    debtor.request_blocks(8)
    guest = guest_of(debtor)
    beside.request_blocks(3)
    kept = guest_of(beside)
    began = time.monotonic()
    if end == "debtor":
        debtor.close()
    elif end == "guest":
        os.kill(pid_of(service), signal.SIGKILL)
    else:
        service.close()
    until(lambda: service.creditor.free_blocks == 8 if end != "creditor" else guest.exit_reason(), "the lease goes on")
    assert time.monotonic() - began < SOON_S
    if end != "debtor":
        assert "on loan from c" in str(until(guest.exit_reason, "the debtor does not know"))
    assert kept.exit_reason() is None
    assert other.creditor.lent_blocks == 3


def test_without_the_ledger_leases_are_renewed_and_new_loans_wait(
    street: Street, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease is long, so that a busy machine does not end it, and is renewed often, so that no test waits
    for its end.
    """
    monkeypatch.setattr(lending_debtor, "RENEWALS", 300)
    service, debtor = street.creditor("c", 8, lease_s=SOON_S), street.debtor("d")
    debtor.request_blocks(3)
    guest = guest_of(debtor)
    street.ledger.close()
    lease = next(iter(service.creditor.leases.values()))
    first, told = lease.until, guest.loan.until
    debtor.request_blocks(2)
    until(lambda: min(lease.until - first, guest.loan.until - told) > 0.5, "it is not renewed again and again")
    assert guest.exit_reason() is None
    assert not debtor.arrived
    street.open_ledger()
    assert guest_of(debtor).nbytes == 2 << 20


def test_a_recall_is_told_and_not_renewed(street: Street) -> None:
    service, debtor = street.creditor("c", 8, lease_s=3.0), street.debtor("d")
    debtor.request_blocks(3)
    guest = guest_of(debtor)
    service.recall(1)
    until(lambda: guest.is_recalled, "the debtor is not told")
    until(lambda: service.creditor.free_blocks == 8, "a debtor that does not heed it keeps the memory")
    assert until(guest.exit_reason, "the debtor does not know")


def test_a_deployment_whose_own_memory_an_earlier_claim_has_knows_that_it_does_not_come(street: Street) -> None:
    service = street.creditor("c", 8, lacks_since=lambda: 50.0)
    debtor, earlier = street.debtor("c", service), street.debtor("d")
    assert debtor.reclaimable == 8
    debtor.reclaim(2)
    guest_of(debtor)
    assert debtor.reclaimable == 6
    earlier.request_blocks(6, 40.0)
    guest_of(earlier)
    assert debtor.reclaimable == 0
    assert street.debtor("e").reclaimable == 0, "it lends nothing"


def test_guests_that_use_too_much_of_the_processors_get_no_company(street: Street) -> None:
    """The limit is one that even idle ones are above."""
    began = cpu_seconds(os.getpid())
    service = street.creditor("c", 8, most_cores=-1.0)
    link = open_link(
        ("127.0.0.1", int(service.address.rpartition(":")[2])), KEY, FromCreditor, name="d", peer="c", what=""
    )
    link.send(LoanRequest(debtor="d", number=1, blocks=2))
    answer = link.recv(SOON_S)
    assert isinstance(answer, LoanRefused)
    assert "cores" in answer.why
    assert street.shown()["c"].free == 0, "and the ledger sends nobody"
    link.close()
    assert 0.0 < began <= cpu_seconds(os.getpid())
    assert cpu_seconds(2**22 + 1) == 0.0


def test_guests_that_read_too_much_get_no_company(street: Street) -> None:
    """A guest says by its meter what it has read; here the test does."""
    service, debtor = street.creditor("c", 8, most_gbps=1.0), street.debtor("d")
    debtor.request_blocks(2)
    guest_of(debtor)
    (guest,) = until(service.guests.values, "the guest does not start")
    assert guest.read_bytes == 0.0
    stop = threading.Event()

    def read() -> None:
        for number in range(1, 10_000):
            os.pwrite(guest.meter, READ_COUNTER.pack(number * 1e9), 0)
            if stop.wait(0.01):
                return

    reading = threading.Thread(target=read)
    reading.start()
    try:
        until(lambda: street.shown()["c"].free == 0, "the ledger sends others")
        answer = service.creditor.answer_request(LoanRequest(debtor="e", number=1, blocks=1), time.monotonic())
        assert isinstance(answer, LoanRefused)
        assert "Gb/s" in answer.why
    finally:
        stop.set()
        reading.join()
    until(lambda: street.shown()["c"].free == 6, "it lends no more once they rest")


def test_nobody_speaks_for_another(street: Street) -> None:
    service = street.creditor("c", 8)
    at = "127.0.0.1", int(service.address.rpartition(":")[2])
    link = open_link(at, KEY, FromCreditor, name="liar", peer="c", what="creditor")
    link.send(LoanRequest(debtor="d", number=1, blocks=2))
    with pytest.raises(LinkClosedError):
        link.recv(SOON_S)
    assert service.creditor.lent_blocks == 0
    honest = open_link(at, KEY, FromCreditor, name="d", peer="c", what="creditor")
    honest.send(LoanRequest(debtor="d", number=1, blocks=2))
    assert isinstance(honest.recv(SOON_S), LoanGranted)
    honest.close()
    until(lambda: service.creditor.free_blocks == 8, "the link's end does not end the lease")


def test_a_debtor_of_the_creditors_own_name_gets_nothing(street: Street) -> None:
    """An instance's requests to itself have no limit."""
    service = street.creditor("c", 8)
    link = open_link(address_of(service), KEY, FromCreditor, name="c", peer="c", what="creditor")
    with contextlib.suppress(LinkClosedError):
        link.send(LoanRequest(debtor="c", number=1, blocks=8))
    with pytest.raises(LinkClosedError):
        link.recv(SOON_S)
    assert service.creditor.free_blocks == 8


@pytest.mark.no_retry
def test_whoever_gives_back_what_is_its_own_waits_for_nobody(street: Street, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the guest still has its link: between two steps of an engine there is no time for its end."""
    monkeypatch.setattr(lender_service, "END_S", 2 * SOON_S)
    service = street.creditor("c", 8)
    debtor = street.debtor("c", service)
    debtor.reclaim(5)
    guest = guest_of(debtor)
    pid_of(service)
    began = time.monotonic()
    debtor.give_back(guest)
    assert time.monotonic() - began < SOON_S
    until(lambda: service.creditor.free_blocks == 8, "the blocks do not come back")


def test_a_guest_that_cannot_start_ends_its_lease_and_no_door(street: Street, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its debtor hears of it, long before it would renew the lease."""
    service, debtor = street.creditor("c", 8, lease_s=1000.0), street.debtor("d")
    before, tries = len(os.listdir("/proc/self/fd")), list[str]()

    def spawn(role: str, *_: Any, **__: Any) -> Any:
        tries.append(role)
        raise BlockingIOError("no more processes")

    with monkeypatch.context() as patch:
        patch.setattr(local, "spawn", spawn)
        debtor.request_blocks(5)
        guest = guest_of(debtor)
        until(lambda: service.creditor.free_blocks == 8, "the lease goes on without a guest")
        until(lambda: not debtor.by_creditor, "the debtor does not hear of it")
        assert "could not be started: no more processes" in str(guest.exit_reason())
    assert tries
    assert len(os.listdir("/proc/self/fd")) <= before + 4, "links of the debtor alone"
    debtor.give_back(guest)
    debtor.request_blocks(3)
    assert until(lambda: service.guests, "the door is closed")


def test_show_tells_who_has_what(
    street: Street, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAMINA_CLUSTER_KEY", KEY.hex())
    street.creditor("c", 8)
    debtor = street.debtor("d")
    debtor.request_blocks(5)
    guest_of(debtor)
    until(lambda: street.shown()["c"].lent, "the ledger does not know")
    assert main(["ledger", "show", street.ledger.address, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    (row,) = told["creditors"]
    assert (row["free"], row["lent"], row["cap"], row["debtors"]) == (3, 5, 8, {"d": 5})
    assert (told["remote_share"], told["cycles"]) == (0.625, [])
    assert main(["ledger", "show", street.ledger.address]) == 0
    assert "d 5" in capsys.readouterr().out


BAD = {
    "--lend must be above 0 and at most 1": ["--lend", "1.5"],
    "--lend-memory": ["--lend-memory", "900000GiB"],
    "HOST:PORT": ["--address", "nowhere"],
    "--lend-cores must be above 0": ["--lend-cores", "0"],
    "--lend-gbps must be above 0": ["--lend-gbps", "-1"],
    "--lease-s": ["--lease-s", "0"],
    "there is no ledger at 127.0.0.1:9": ["--ledger", "127.0.0.1:9", "--lend-memory", "2MiB"],
}


@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_one_line(words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAMINA_CLUSTER_KEY", KEY.hex())
    assert main(["lend", "--ledger", "127.0.0.1:9", *BAD[words]]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_another_key_or_version_is_one_line(
    street: Street, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LAMINA_CLUSTER_KEY", raising=False)
    show = ["ledger", "show", street.ledger.address]
    assert main(show) == 2
    assert "LAMINA_CLUSTER_KEY_FILE" in capsys.readouterr().err
    monkeypatch.setenv("LAMINA_CLUSTER_KEY", "ab" * 32)
    assert main(show) == 2
    assert "refuses this process" in capsys.readouterr().err
    monkeypatch.setenv("LAMINA_CLUSTER_KEY", KEY.hex())
    monkeypatch.setattr(lending_listener, "VERSION", 7)
    with pytest.raises(ValueError, match="uses version 7 .* show version 4: install the same Lamina"):
        open_link(street.place, KEY, FromLedger, name="show", peer=lending_listener.LEDGER_NAME, what="ledger")
