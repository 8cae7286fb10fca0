"""Transfers under way: each ends once, nothing is copied after its end, and waits see layers and ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import pytest

from lamina.workers.memory.kv_transfer.transfer import (
    ALL_LAYERS,
    Transfer,
    TransferError,
    TransferGoneError,
    TransferPart,
    TransferTable,
)

SOON_S = 30.0


class Bench:
    """A table, with what its transfers have copied, and which have ended."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.table = TransferTable(self.changed, "peer")
        self.copied, self.ended = list[int](), list[int]()

    def begin(self, number: int = 0, layers: tuple[int, ...] = (0, 0, 1)) -> Transfer:
        parts = [TransferPart(8, lambda message, staging: None, layer) for layer in layers]
        transfer = Transfer(number, parts, on_end=lambda transfer: self.ended.append(transfer.number))
        self.table.begin(transfer)
        return transfer

    def copy(self, transfer: Transfer) -> bool:
        return self.table.copy_part(transfer, 8, partial(self.copied.append, transfer.number))


def test_a_transfer_has_a_layer_once_all_parts_up_to_it_are_copied() -> None:
    bench = Bench()
    transfer = bench.begin()
    seen = []
    for _ in range(3):
        assert bench.copy(transfer)
        seen.append([bench.table.wait(transfer, layer, 0.0) for layer in (0, 1, ALL_LAYERS)])
    assert seen == [[False] * 3, [True, False, False], [True] * 3]
    assert (transfer.nbytes, transfer.index, transfer.error) == (24, 3, None)
    assert (bench.ended, bench.table.under_way) == ([0], {})


END: dict[str, tuple[Callable[[Bench, Transfer], object], bool]] = {
    "cancelled": (lambda bench, transfer: bench.table.cancel(transfer.number), False),
    "stopped": (lambda bench, transfer: bench.table.stop(), False),
    "failed": (lambda bench, transfer: bench.table.fail(transfer, "no more"), True),
    "given up": (lambda bench, transfer: bench.table.fail_all("no more"), True),
}


@pytest.mark.parametrize("how", END)
def test_nothing_is_copied_after_an_end_which_comes_once_and_ends_waits(how: str) -> None:
    bench, (end, fails) = Bench(), END[how]
    transfer = bench.begin()
    assert bench.copy(transfer)
    waits = threading.Thread(target=bench.table.wait, args=(transfer, ALL_LAYERS))
    waits.start()
    for _ in range(2):
        end(bench, transfer)
        assert not bench.copy(transfer)
    waits.join(SOON_S)
    assert not waits.is_alive()
    assert (bench.copied, bench.ended) == ([0], [0] * fails)
    assert str(transfer.error or "") == "no more (transfer 0 of peer)" * fails


def test_what_begins_after_all_were_given_up_fails_at_once_and_after_a_stop_nothing_begins() -> None:
    bench = Bench()
    bench.table.fail_all("the cable is cut")
    assert str(bench.begin(3).error) == "the cable is cut (transfer 3 of peer)"
    bench.table.stop()
    assert bench.begin(4).is_over
    assert (bench.ended, bench.table.last) == ([3], 4)


def test_a_transfer_without_parts_has_ended_and_a_refusal_has_its_own_kind() -> None:
    bench = Bench()
    assert bench.begin(1, ()).is_over
    refused = bench.begin(2)
    bench.table.fail(refused, "it was evicted", TransferGoneError)
    assert isinstance(refused.error, TransferGoneError)
    assert issubclass(TransferGoneError, TransferError)
    assert bench.ended == [1, 2]
