"""What an engine asks others for, and which of them it takes."""

from __future__ import annotations

import math
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from lamina.config.flat_options import make_config
from lamina.executor.lending.borrower import SPARE, Borrower
from lamina.executor.lending.guest_workers import GuestBudget
from lamina.executor.lending.lender_service import BLOCK_BYTES

OPTIONS = {"partition": "spill", "memory_workers": 2, "transport": "shm", "borrow": "64MiB", "ledger": "a:1"}


class Elastic:
    """``least``: bytes of a memory worker that is of use."""

    begun: list[list[int]]

    def __init__(self, least: int) -> None:
        self._least = least

    def plan_borrowed(self, coming: list[int], leaving: list[int]) -> list[int]:
        if min(coming) < self._least:
            raise ValueError("it is too small for a stripe")
        return coming

    def begin(self, change: list[int], coming: list[Any], reason: str) -> None:
        self.begun = [change, [m.nbytes for m in coming]]


def engine_with(free: tuple[int, int] = (32, 32), *max_lens: int) -> Any:
    """``max_lens``: of the sequences that wait."""
    info = SimpleNamespace(num_blocks=[[32], [32]], windows=[0, 0], stripe=8, block_size=16)
    scheduler = SimpleNamespace(waiting=[SimpleNamespace(finished=False, max_len=max_len) for max_len in max_lens])
    promises = SimpleNamespace(counts=lambda: None)
    return SimpleNamespace(worker_info=info, free_blocks=list(free), scheduler=scheduler, slo_admission=promises)


def borrower(elastic: Any = None) -> Borrower:
    """Of two memory workers of 8 MiB, each with four stripes of 8 blocks of 16 tokens."""
    cohort: Any = SimpleNamespace(kv_bytes=[[8 << 20, 8 << 20]])
    members: Any = SimpleNamespace(memory=[1, 2])
    return Borrower(make_config(OPTIONS), members, cohort, elastic, SimpleNamespace(arrived=deque()))  # type: ignore[arg-type]


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
    lacking = borrower()._lacking(engine_with(free, max_len)) * BLOCK_BYTES
    of_block = (16 << 20) / 64
    assert bool(lacking) == bool(stripes)
    if stripes:
        assert (stripes * 8 + 1) * of_block * SPARE <= lacking <= (stripes * 8 + 1) * of_block * SPARE + 2 * BLOCK_BYTES


@pytest.mark.parametrize(
    ("lacking", "own_left", "of_others", "reclaimed", "wanted"),
    [
        (5, 0, 0, [], 5),
        (5, 3, 0, [3], 0),
        (5, 2, 0, [], 5),
        (5, 8, 0, [5], 0),
        (100, 0, 4, [], 60),
        (0, 8, 4, [], 0),
    ],
)
def test_its_own_is_asked_for_before_that_of_others(
    lacking: int, own_left: int, of_others: int, reclaimed: list[int], wanted: int
) -> None:
    """Where that is of use, here from 3 blocks on: a scrap would be asked for again and again. Of others it takes
    borrow.max at most, 64 blocks. While it borrows it lends nothing.
    """
    one, told, own = borrower(Elastic(3 * BLOCK_BYTES)), list[int](), SimpleNamespace(local_need="")
    links: Any = one._links
    links.own_unrequested, links.borrowed_from_others, links.borrowed_blocks, links.reclaim = (
        own_left,
        of_others,
        0,
        told.append,
    )
    links.request_blocks, links.is_seeking = told.append, of_others > 0
    one._own, one._lacking = own, lambda engine: lacking  # type: ignore[method-assign,assignment]
    one._ask(engine_with(), 0.0)
    assert told == [*reclaimed, wanted]
    assert own.local_need == ("it borrows itself" if lacking or of_others else "")


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


def test_a_guest_that_is_too_small_goes_back_and_the_others_stay() -> None:
    """Its link ends first: so nobody waits until it ends."""

    class Guest(SimpleNamespace):
        def join(self, timeout_s: float) -> None:
            back.append(self.nbytes)

        def close(self) -> None:
            back.append(-self.nbytes)

    elastic, back, sent = Elastic(4), list[int](), list[int]()
    one = borrower(elastic)
    guests = [Guest(nbytes=n, key=b"", loan=SimpleNamespace(creditor=f"c{n}")) for n in (3, 5, 2, 6)]
    for guest in guests:
        guest.sock = guest

    def prepare(guest: Any, *, on_loan: bool) -> Any:
        assert on_loan
        return SimpleNamespace(nbytes=guest.nbytes, link=SimpleNamespace(send=sent.append))

    one._registry.prepare = prepare  # type: ignore[method-assign]
    one._workers.start_borrowed = lambda guest, key: guest.nbytes  # type: ignore[method-assign,return-value,assignment]
    one._add_guests(guests)  # type: ignore[arg-type]
    assert back == [-3, 3, -2, 2]
    assert elastic.begun == [[5, 6], [5, 6]]
    assert sent == [5, 6]
