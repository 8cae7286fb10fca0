"""Pages of a pool in a device's own memory: in which order they go to the host and come back. A stand-in does what it
is given when a caller waits for it, and not before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from queue import SimpleQueue

import pytest
import torch
from stand_in_device import StandIn, stand_in_for_cpu
from test_page_transfers import PAGES, WAIT_S, fill, fill_blocks, load, medium, plan, rows_of, save, stores

from lamina.kv.storage import StorageBackend
from lamina.protocol.kv_placement import KvLocation
from lamina.protocol.offload_messages import LoadReady, TransferDone
from lamina.protocol.step_plan import Free, New, SequenceOp
from lamina.workers.memory.kv_store import KvStore
from lamina.workers.memory.offload.page_transfers import PageTransfers
from lamina.workers.memory.worker_counters import Counters


class LateDevice(StandIn):
    """Has kernels that are queued."""

    def __init__(self, device: torch.device, graphs: bool = False) -> None:
        super().__init__(device, graphs)
        self.kernels: list[Callable[[], None]] = []
        self._begun = 0

    def record_event(self) -> Callable[[], None]:
        count, copied = len(self.kernels), super().record_event()

        def wait() -> None:
            while self._begun < count:
                self._begun += 1
                self.kernels[self._begun - 1]()
            copied()

        return wait


class DeviceBench:
    """A store on a device, with transfers, and the stagings of the threads."""

    def __init__(self, made: list[StandIn]) -> None:
        self.medium: StorageBackend = medium()
        (self.store,) = stores("head", (1.0,), block_size=32, kv_cache_dtype="int8", dtype="float16")
        self.made, self.said = made, SimpleQueue[TransferDone | LoadReady]()
        self.transfers = PageTransfers(self.medium, self.store, self._report, Counters())
        self.undone = list[StandIn]()  # stagings with work that was not waited for at a report
        self._step = 100
        fill(self.store, 1, KvLocation(), 1)

    def _report(self, said: TransferDone | LoadReady) -> None:
        self.undone += [device for device in self.made if not device.is_done]
        self.said.put(said)

    def give(self, kernel: Callable[[], None]) -> None:
        """Gives work as the thread that serves rounds does."""
        assert isinstance(self.store.staging, LateDevice)
        self.store.staging.kernels.append(kernel)

    def do(self, *ops: SequenceOp) -> TransferDone:
        self._step += 1
        self.transfers.collect()
        self.transfers.begin_plan(plan(*ops, step=self._step))
        said = self.said.get(timeout=WAIT_S)
        assert isinstance(said, TransferDone)
        assert (said.num_pages, said.error) == (PAGES, "")
        return said


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceBench]:
    with stand_in_for_cpu(monkeypatch, kind=LateDevice) as made:
        found = DeviceBench(made)
        yield found
        found.transfers.end()
    assert not found.undone
    assert len(made) == 3, "each thread has its own"


def test_what_is_saved_is_what_kernels_have_written_before(bench: DeviceBench) -> None:
    """And what is loaded is what was saved, by way of pinned memory, at the report."""
    before = rows_of(bench.store, 1)
    bench.give(lambda: fill_blocks(bench.store, 5))
    bench.do(save())
    wanted = rows_of(bench.store, 1)
    assert wanted != before
    fill_blocks(bench.store, 6)
    assert rows_of(bench.store, 1) != wanted
    bench.do(New(2), load())
    assert rows_of(bench.store, 2) == wanted


def test_what_is_loaded_comes_behind_kernels_that_read_its_blocks(bench: DeviceBench) -> None:
    """A sequence has gone, and attention over its blocks is still under way."""
    bench.do(save())
    wanted, read = rows_of(bench.store, 1), list[list[torch.Tensor]]()
    (ids,) = bench.store.tables.block_table(0, 1)[1:]
    before = blocks(bench.store, ids)
    bench.give(lambda: read.append(blocks(bench.store, ids)))
    bench.do(Free(1), New(2), load())
    assert set(bench.store.tables.block_table(0, 2)[1]) & set(ids), "some are those of the one that went"
    assert rows_of(bench.store, 2) == wanted
    assert all(torch.equal(a, b) for a, b in zip(read[0], before, strict=True))


def blocks(store: KvStore, ids: list[int]) -> list[torch.Tensor]:
    """Copies of blocks of all layers."""
    return [piece.kv.k[list(ids)].clone() for layer in store.layers for piece in layer]
