"""The loans that an engine asks others for, and those that it takes.

Covers: lamina/executor/lending/colocated_lender.py.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from engine_api import make_engine
from fake_executor import FakeWire

from lamina.config.flat_options import make_config
from lamina.executor.lending.borrower import SPARE, Borrower
from lamina.executor.lending.guest_workers import GuestBudget
from lamina.executor.lending.lender_service import BLOCK_BYTES
from lamina.lending.lending_messages import NEVER
from lamina.request import SamplingParams

OPTIONS = {"partition": "spill", "memory_workers": 2, "transport": "shm", "borrow": "64MiB", "ledger": "a:1"}


class Links(SimpleNamespace):
    """A fake of a creditor's links: it records what is asked."""

    def __init__(self, reclaimable: int = 0, of_others: int = 0, guests: Sequence[Any] = ()) -> None:
        self.reclaimable, self.borrowed_from_others, self.is_seeking = reclaimable, of_others, of_others > 0
        self.borrowed_blocks, self.arrived, self.told = 0, deque(guests), list[int]()
        self.reclaim, self.since, self.least = self.told.append, list[float](), 0

    def request_blocks(self, blocks: int, since: float, *, is_waiting: bool, least: int) -> None:
        self.told.append(blocks)
        self.since.append(since)
        self.least = least


class Elastic:
    """``least``: bytes of a memory worker that is of use."""

    begun: list[list[int]]
    in_progress = False

    def __init__(self, least: int = 0) -> None:
        self._least = least

    def reap(self) -> None: ...

    def plan_borrowed(self, coming: list[int], leaving: list[int]) -> list[int]:
        if min(coming) < self._least:
            raise ValueError("it is too small for a stripe")
        return coming

    def begin(self, change: list[int], coming: list[Any], reason: str) -> None:
        self.begun = [change, [m.nbytes for m in coming]]


def engine_with(free: tuple[int, int] = (32, 32), *max_lens: int) -> Any:
    """``max_lens``: of the sequences that wait."""
    info = SimpleNamespace(num_blocks=[[32], [32]], windows=[0, 0], stripe_blocks=8, block_size=16)
    scheduler = SimpleNamespace(waiting=[SimpleNamespace(finished=False, max_len=max_len) for max_len in max_lens])
    promises = SimpleNamespace(counts=lambda: None)
    times = SimpleNamespace(times=SimpleNamespace(arrival_s=time.monotonic()))
    requests = [SimpleNamespace(output=times) for _ in max_lens]
    return SimpleNamespace(
        worker_info=info, free_blocks=list(free), scheduler=scheduler, slo_admission=promises, requests=requests
    )


def borrower(
    links: Any, elastic: Elastic | None = None, own: Any = None, options: dict[str, Any] | None = None, **way_in: Any
) -> Borrower:
    """An engine with two memory workers of 8 MiB, each with four stripes of 8 blocks. ``way_in``: how guests come."""
    cohort: Any = SimpleNamespace(kv_bytes=[[8 << 20, 8 << 20]], start_borrowed=lambda guest, key: guest.nbytes)
    members: Any = SimpleNamespace(memory=[SimpleNamespace(handle=None)] * 2, **way_in)
    config = make_config({**OPTIONS, **(options or {})})
    return Borrower(config, members, cohort, elastic or Elastic(), links, own)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("max_len", "free", "stripes"),
    [
        (1024, (32, 32), 0),
        (1025, (32, 32), 1),
        (1024, (31, 32), 1),
        (1024, (15, 15), 6),
        (1, (7, 7), 1),
        (1, (0, 8), 0),
    ],
)
def test_it_asks_for_whole_stripes(max_len: int, free: tuple[int, int], stripes: int) -> None:
    """Blocks of a part of a stripe are no room for one."""
    links = Links()
    borrower(links).between_rounds(engine_with(free, max_len))
    lacking = links.told[-1] * BLOCK_BYTES
    of_block = (16 << 20) / 64
    assert bool(lacking) == bool(stripes)
    if stripes:
        assert (stripes * 8 + 1) * of_block * SPARE <= lacking <= (stripes * 8 + 1) * of_block * SPARE + 2 * BLOCK_BYTES


@pytest.mark.parametrize(
    ("stripes", "own_left", "of_others", "reclaimed", "wanted"),
    [
        (1, 0, 0, [], 4),
        (1, 3, 0, [3], 0),
        (1, 2, 0, [], 4),
        (1, 8, 0, [4], 0),
        (45, 0, 4, [], 60),
        (0, 8, 4, [], 0),
    ],
)
def test_its_own_is_asked_for_before_that_of_others(
    stripes: int, own_left: int, of_others: int, reclaimed: list[int], wanted: int
) -> None:
    """An engine asks only when its own memory is large enough to help, here from 3 blocks on: less would be asked for
    again and again. Of others it takes borrow.max at most, 64 blocks. While it borrows it has a claim.
    """
    links, own = Links(own_left, of_others), SimpleNamespace(local_need="", lacks_since=NEVER)
    lengths = [stripes * 8 * 16] * bool(stripes)
    borrower(links, Elastic(3 * BLOCK_BYTES), own).between_rounds(engine_with((0, 0), *lengths))
    assert links.told == [*reclaimed, wanted]
    assert own.local_need == ""
    assert (own.lacks_since < NEVER) == bool(stripes)


@pytest.mark.parametrize(
    ("smallest", "ranks", "wanted", "least"), [(3, 1, 4, 3), (2, 2, 4, 4), (9, 1, 9, 9), (64, 1, 64, 64), (65, 1, 0, 1)]
)
def test_it_asks_for_no_loan_that_is_too_small_for_its_ranks(
    smallest: int, ranks: int, wanted: int, least: int
) -> None:
    """``smallest``: blocks of a memory worker that is of use. It would give less back, and get it again, for ever. It
    lacks 4, so it takes more if need be, up to borrow.max, 64 blocks.
    """
    links, own = Links(), {"memory_workers": 2 * ranks, "tensor_parallel_size": ranks}
    borrower(links, Elastic(smallest * BLOCK_BYTES), options=own).between_rounds(engine_with((0, 0), 8 * 16))
    assert (links.told, links.least) == ([wanted], least)


def test_it_takes_more_of_its_own_than_it_lacks_if_less_is_of_no_use() -> None:
    links, own = Links(16), SimpleNamespace(local_need="", lacks_since=NEVER)
    borrower(links, Elastic(9 * BLOCK_BYTES), own).between_rounds(engine_with((0, 0), 8 * 16))
    assert links.told == [9, 0]


def test_its_claim_is_that_of_its_oldest_request_and_grows_as_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine says when requests come, and looks for memory later."""
    links, own, now = Links(), SimpleNamespace(local_need="", lacks_since=NEVER), 1000.0
    monkeypatch.setattr(
        "lamina.executor.lending.borrower.time", SimpleNamespace(time=lambda: now, monotonic=lambda: now)
    )
    one = borrower(links, own=own)
    engine = make_engine(FakeWire(8), [one], lambda: now)
    numbers = list[int]()
    for _ in range(2):
        numbers.append(engine.add([1] * 60, SamplingParams(max_tokens=6)))  # no room in 8 blocks of 4 tokens
        now += 10.0
    one.between_rounds(engine)
    assert (links.since[-1], own.lacks_since) == (1000.0, 1000.0)
    engine.cancel(numbers[0])
    now += 10.0
    one.between_rounds(engine)
    assert (links.since[-1], own.lacks_since) == (1010.0, 1010.0)
    engine.cancel(numbers[1])
    now += 10.0
    one.between_rounds(engine)
    assert own.lacks_since == NEVER


def test_a_guest_that_has_ended_hides_nothing_of_what_the_others_read() -> None:
    def guest(number: int, read_bytes: float) -> Any:
        return SimpleNamespace(process=SimpleNamespace(pid=(1 << 30) + number), read_bytes=read_bytes)

    budget = GuestBudget(math.inf, 1.0, 0.0)
    budget.measure([guest(0, 1e9), guest(1, 0.0)], 1.0)
    assert budget.exceeded() == "guests read 8.0 of 1 Gb/s"
    budget.measure([guest(1, 1e9)], 2.0)
    assert budget.exceeded() == "guests read 8.0 of 1 Gb/s"
    budget.measure([guest(1, 1e9)], 3.0)
    assert budget.exceeded() == ""


def test_guests_of_ranks_come_and_go_together() -> None:
    """Two ranks: a loan is a row of two guests. One whose row is not whole yet waits for it."""
    guests = [SimpleNamespace(nbytes=n, key=b"", loan=None, index=-1) for n in (5, 5, 6)]
    asked = list[tuple[list[int], list[int]]]()

    class Rows(Elastic):
        def plan_borrowed(self, coming: list[int], leaving: list[int]) -> list[int]:
            asked.append((coming, leaving))
            return coming or leaving

        def begin(self, change: list[int], *moved: Any, coming: Any = (), reason: str = "") -> None:
            self.begun = [change, *moved, [m.nbytes for m in coming]]

    rows, config = Rows(), make_config({**OPTIONS, "memory_workers": 4, "tensor_parallel_size": 2})
    cohort: Any = SimpleNamespace(kv_bytes=[[1, 1], [1, 1]], start_borrowed=lambda guest, key: None)
    link = SimpleNamespace(send=lambda message: None)
    stay = [SimpleNamespace(handle=None)] * 4
    members: Any = SimpleNamespace(
        memory=stay, prepare=lambda guest, on_loan: SimpleNamespace(nbytes=guest.nbytes, link=link)
    )
    links = Links(guests=guests)
    one = Borrower(config, members, cohort, rows, links)  # type: ignore[arg-type]
    one.between_rounds(engine_with())
    assert asked == [([5, 5], []), ([5, 5], [])]
    assert rows.begun == [[5, 5], [5, 5]]
    assert [guest.index for guest in guests] == [4, 5, -1]
    assert [guest.nbytes for guest in links.arrived] == [6]
    members.memory = [*stay, *[SimpleNamespace(handle=None)] * 4]  # stand-ins of lost ones
    other = Borrower(config, members, cohort, rows, Links())  # type: ignore[arg-type]
    other.between_rounds(engine_with())
    assert rows.begun[:2] == [[4, 5], [4, 5]]


def test_a_guest_that_is_too_small_goes_back_and_the_others_stay() -> None:
    """Its link ends first, so that no worker waits until it ends."""

    class Guest(SimpleNamespace):
        def join(self, timeout_s: float) -> None:
            back.append(self.nbytes)

        def close(self) -> None:
            back.append(-self.nbytes)

    elastic, back, sent = Elastic(4), list[int](), list[int]()
    guests = [Guest(nbytes=n, key=b"", loan=SimpleNamespace(creditor=f"c{n}")) for n in (3, 5, 2, 6)]
    for guest in guests:
        guest.sock = guest

    def prepare(guest: Any, *, on_loan: bool) -> Any:
        assert on_loan
        return SimpleNamespace(nbytes=guest.nbytes, link=SimpleNamespace(send=sent.append))

    borrower(Links(guests=guests), elastic, prepare=prepare).between_rounds(engine_with())
    assert back == [-3, 3, -2, 2]
    assert elastic.begun == [[5, 6], [5, 6]]
    assert sent == [5, 6]
