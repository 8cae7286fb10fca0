"""States between slots and storage: the same numbers on other memory workers, and none of another version."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from memory_peer import bind, shape
from recurrent import SPECS
from torch import Tensor

from lamina.config.partition import PARTITIONS
from lamina.kv.pages import PAGE, PageFragment
from lamina.kv.storage import StorageBackend, StorageConfig, open_storage
from lamina.ops.recurrence.parts import Part
from lamina.ops.recurrence.spec import RecurrenceSpec
from lamina.protocol.kv_placement import KvLocation
from lamina.protocol.mixers import MixerShape
from lamina.protocol.offload_messages import LoadReady, TransferDone
from lamina.protocol.step_plan import Free, LoadKv, New, RowRange, SaveKv, SequenceOp, StateRows, StepPlan
from lamina.workers.memory.kv_store import KvStore
from lamina.workers.memory.offload.page_transfers import PageTransfers
from lamina.workers.memory.offload.state_fragments import StateFragments
from lamina.workers.memory.worker_counters import Counters
from lamina.workers.mixer_shares import with_shares

WAIT_S, FEW_S, LENGTH, KEY, TENANT = 30.0, 5.0, PAGE + 64, b"k" * 32, b"t" * 16


class Bench:
    """A memory worker's store of a model with one attention layer and two recurrent ones, with its transfers."""

    def __init__(
        self, spec: RecurrenceSpec, medium: Any, name: str = "head", workers: int = 1, worker: int = 0, rank: int = 0
    ) -> None:
        layers, weights = [shape()], [1.0] * workers
        partition, operands = PARTITIONS[name]([layers[0].kv_heads], weights, 1), ["float32"] * len(spec.static_shapes)
        whole = MixerShape(spec.encode(), ["float32"] * len(spec.input_columns), operands)
        mixer = with_shares(whole, name, partition, weights)
        slots = {"state_slots": 8, "state_versions": 3, "num_sequences": 2}
        wanted = bind(layers, weights, worker, name, mixers=[mixer, mixer], **slots)
        self.store = KvStore(wanted, torch.device("cpu"))
        self.said: SimpleQueue[TransferDone | LoadReady] = SimpleQueue()
        self.counters, self.step = Counters(), 0
        self.transfers = PageTransfers(medium, self.store, self.said.put, self.counters, rank=rank)

    def do(self, *parts: SequenceOp | RowRange) -> None:
        rows = [part for part in parts if isinstance(part, RowRange)]
        ops = [part for part in parts if not isinstance(part, RowRange)]
        self.transfers.collect()
        self.transfers.begin_plan(StepPlan(step=self.step, ops=ops, rows=rows))
        self.step += 1
        self.store.committed.commit(rows)
        assert self.store.states is not None
        self.store.states.versions.commit(rows)

    def fill(self, sequence: int, place: KvLocation) -> None:
        """Begin a sequence of LENGTH tokens."""
        for first in range(0, LENGTH, 64):
            begins = [New(sequence)] if not first else []
            self.do(*begins, StateRows(sequence, first), RowRange(sequence, first, 64, place))

    def states(self, sequence: int) -> list[Tensor]:
        """Return the state of each recurrent layer, in place; none of a sequence that lies elsewhere."""
        states = self.store.states
        assert states is not None
        slot = states.versions.slot_of(sequence, LENGTH)
        return [] if slot is None else [states.states_of(number)[2][slot] for number in range(2)]

    def take(self, whole: Tensor) -> Tensor:
        """Return this worker's part of a state."""
        assert self.store.states is not None
        piece = self.store.states.pieces[0]
        assert piece is not None
        return piece.part.take_state(whole)

    def report(self) -> TransferDone:
        said = self.said.get(timeout=WAIT_S)
        assert isinstance(said, TransferDone)
        return said


def save(number: int = 0) -> SaveKv:
    return SaveKv(1, number, LENGTH, 0, [KEY], TENANT, LENGTH)


def load(sequence: int, number: int, place: KvLocation) -> list[SequenceOp]:
    """Return ops that load the states of a new sequence, after tokens of its own."""
    return [LoadKv(sequence, number, LENGTH, 0, [KEY], place)]


def host() -> StorageBackend:
    return open_storage("host", StorageConfig(1 << 24))


@pytest.mark.parametrize("name", ["head", "request"])
@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 2), (2, 1), (2, 3)])
@pytest.mark.parametrize("kind", ["lfm2", "qwen3_next", "kimi_linear", "bamba", "nemotron_h"])
def test_states_are_the_same_on_other_workers(kind: str, before: int, after: int, name: str) -> None:
    spec, medium, place = SPECS[kind], host(), KvLocation()
    torch.manual_seed(0)
    wholes = [torch.randn(spec.state_size) for _ in range(2)]
    for worker in range(before):
        bench = Bench(spec, medium, name, before, worker)
        bench.fill(1, place)
        for state, whole in zip(bench.states(1), wholes, strict=False):
            state.copy_(bench.take(whole))
        bench.do(save())
        assert bench.report() == TransferDone(epoch=0, transfer_id=0, num_pages=1)
        bench.transfers.end()
    for worker in range(after):
        bench = Bench(spec, medium, name, after, worker)
        assert bench.transfers.listed_states(9) == [KEY]
        assert bench.transfers.listed_pages(9) == []
        bench.fill(2, place)
        for state in bench.states(2):
            state.fill_(torch.nan)
        bench.do(Free(2))
        bench.fill(3, place)
        bench.do(*load(3, 0, place))
        assert bench.report() == TransferDone(epoch=0, transfer_id=0, num_pages=1)
        bench.do()
        is_here = name == "head" or worker == 0
        assert bool(bench.states(3)) == is_here
        for state, whole in zip(bench.states(3), wholes, strict=False):
            expected = bench.take(whole)
            assert torch.equal(torch.where(expected == 0, expected, state), expected), "but for what aligns"
        bench.transfers.end()


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("kind", ["lfm2", "qwen3_next", "bamba"])
def test_ranks_have_the_names_of_their_own_heads(kind: str, workers: int) -> None:
    """They share a directory. Heads and runs of channels have the names that they have without ranks."""
    spec, found = SPECS[kind], list[PageFragment]()
    for rank in range(2):
        own = Part.of(spec, rank * spec.heads // 2, spec.heads // 2).spec
        for worker in range(workers):
            bench = Bench(own, host(), "head", workers, worker)
            found += StateFragments(bench.store.states, 1, rank).whole
            bench.transfers.end()
    whole = Bench(spec, host())
    assert sorted(found) == sorted(StateFragments(whole.store.states, 1).whole)
    whole.transfers.end()


@pytest.mark.parametrize("kind", ["lfm2", "qwen3_next", "bamba"])
def test_ranks_find_states_that_were_stored_without_ranks(kind: str) -> None:
    spec, medium, place = SPECS[kind], host(), KvLocation()
    bench = Bench(spec, medium)
    bench.fill(1, place)
    wholes = [torch.randn(spec.state_size) for _ in range(2)]
    for state, whole in zip(bench.states(1), wholes, strict=True):
        state.copy_(whole)
    bench.do(save())
    assert bench.report().num_pages == 1
    bench.transfers.end()
    for rank in range(2):
        part = Part.of(spec, rank * spec.heads // 2, spec.heads // 2)
        bench = Bench(part.spec, medium, rank=rank)
        assert bench.transfers.listed_states(9) == [KEY]
        bench.fill(2, place)
        bench.do(*load(2, 0, place))
        assert bench.report() == TransferDone(epoch=0, transfer_id=0, num_pages=1)
        bench.do()
        for state, whole in zip(bench.states(2), wholes, strict=True):
            expected = part.take_state(whole)
            assert torch.equal(torch.where(expected == 0, expected, state), expected), "but for what aligns"
        bench.transfers.end()


def test_states_whose_slot_is_given_up_are_copied_before_they_are_saved() -> None:
    inner, may_go = host(), threading.Event()

    class Slow:
        def write(self, page: Any, fragments: Mapping[Any, Any]) -> None:
            assert may_go.wait(WAIT_S)
            inner.write(page, fragments)

        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

    bench = Bench(SPECS["bamba"], Slow())
    bench.fill(1, KvLocation())
    for state in bench.states(1):
        state.fill_(3.0)
    bench.do(SaveKv(1, 0, 0, PAGE, [b"p" * 32], TENANT), save(1))
    bench.do(Free(1))
    bench.fill(2, KvLocation())
    assert bench.store.states is not None
    for number in range(2):
        bench.store.states.states_of(number)[2].fill_(7.0)
    may_go.set()
    assert [bench.report().num_pages for _ in range(2)] == [1, 1]
    _, fragments = inner.read_page(KEY)
    numbers = torch.cat([torch.frombuffer(bytearray(data), dtype=torch.float32) for data in fragments.values()])
    assert set(numbers.tolist()) <= {3.0, 0.0}
    assert 3.0 in numbers
    assert bench.counters.snapshot()["state_saved_bytes"] == 4 * len(numbers)
    bench.transfers.end()


@pytest.mark.parametrize("is_given_up", [False, True])
def test_no_plan_waits_while_states_are_copied(is_given_up: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of saves stops in the middle. A plan that gives the slot up copies the rest, and lets it go on."""
    medium = host()
    bench = Bench(SPECS["bamba"], medium)
    bench.fill(1, KvLocation())
    for state in bench.states(1):
        state.fill_(3.0)
    take, is_begun, may_go, calls = Part.take_state, threading.Event(), threading.Event(), list[int]()
    waited = list[bool]()

    def stopping(self: Part, whole: Tensor) -> Tensor:
        if threading.get_ident() != bench.transfers.thread.ident:
            may_go.set()
        elif not is_begun.is_set():
            is_begun.set()
            waited.append(may_go.wait(FEW_S))
        calls.append(threading.get_ident())
        return take(self, whole)

    monkeypatch.setattr(Part, "take_state", stopping)
    bench.do(save())
    assert is_begun.wait(WAIT_S)
    if is_given_up:
        bench.do(Free(1))
        bench.fill(2, KvLocation())
        assert bench.store.states is not None
        for number in range(2):
            bench.store.states.states_of(number)[2].fill_(7.0)
    else:
        bench.do(StateRows(1, LENGTH), RowRange(1, LENGTH, 1, KvLocation()))
        may_go.set()
    assert bench.report() == TransferDone(epoch=0, transfer_id=0, num_pages=1)
    assert waited == [True]
    _, fragments = medium.read_page(KEY)
    assert len(fragments) == len(calls) == 2 * SPECS["bamba"].heads, "each fragment is copied once"
    numbers = torch.cat([torch.frombuffer(bytearray(data), dtype=torch.float32) for data in fragments.values()])
    assert set(numbers.tolist()) <= {3.0, 0.0}
    bench.transfers.end()


def test_a_version_that_is_not_there_is_not_saved() -> None:
    bench = Bench(SPECS["bamba"], host())
    bench.fill(1, KvLocation())
    bench.do(SaveKv(1, 0, 64, 0, [KEY], TENANT))
    said = bench.report()
    assert (said.num_pages, bool(said.error)) == (0, True)
    bench.transfers.end()


@pytest.mark.parametrize("lost", [KEY, b"q" * 32])
def test_once_a_part_is_lost_nothing_more_of_it_is_read(lost: bytes) -> None:
    """States and the two pages before them are read from the last one on, and one is lost."""
    inner, asked = host(), list[bytes]()

    class Listening:
        def read(self, key: bytes, into: Mapping[Any, memoryview]) -> None:
            asked.append(key)
            inner.read(key, into)

        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

    bench, pages = Bench(SPECS["bamba"], Listening()), [b"p" * 32, b"q" * 32]
    bench.fill(1, KvLocation())
    bench.do(SaveKv(1, 0, 0, LENGTH, pages, TENANT), save(1))
    assert [bench.report().num_pages for _ in range(2)] == [2, 1]
    inner.delete([lost])
    bench.do(New(2), LoadKv(2, 2, 0, LENGTH, pages), *load(2, 3, KvLocation()))
    said = {one.transfer_id: (one.num_pages, bool(one.error)) for one in (bench.report(), bench.report())}
    assert said == ({2: (2, False), 3: (0, True)} if lost == KEY else {2: (1, True), 3: (1, False)})
    assert asked == ([KEY] if lost == KEY else [KEY, lost])
    bench.do()
    assert (bench.states(2), bench.store.committed.report().get(2, 0)) == ([], 0), "no part of it counts"
    bench.transfers.end()
