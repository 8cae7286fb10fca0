"""Pages between pools and a medium: the same bits in any other pool, and nothing that a loss or a lie could leave.

Covers: lamina/protocol/offload_messages.py, lamina/workers/memory/kv_store.py,
lamina/workers/memory/offload/kv_load.py, lamina/workers/memory/offload/page_fragments.py,
lamina/workers/memory/offload/prefetch.py.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_peer import bind, shape
from msgspec import structs

from lamina.kv.pages import PAGE, SCALE_BYTES, FragmentFormat, Page, PageFragment
from lamina.kv.storage import (
    STORES_NOTHING,
    Bytes,
    FragmentLostError,
    StorageBackend,
    StorageConfig,
    host,
    open_storage,
)
from lamina.protocol.blocks.block_tables import PlanError
from lamina.protocol.kv_placement import KvLocation
from lamina.protocol.offload_messages import LoadReady, TransferDone
from lamina.protocol.step_plan import (
    MAX_HINTED_PAGES,
    MAX_PAGES_PER_TRANSFER,
    DeletePages,
    DropBlocks,
    Fork,
    Free,
    LoadKv,
    New,
    PrefetchHint,
    PrefillGrant,
    ProtocolError,
    RowRange,
    SaveKv,
    SequenceOp,
    SetRetention,
    StepPlan,
    Truncate,
)
from lamina.workers.memory.kv_store import KvStore
from lamina.workers.memory.offload import kv_load as loads_module
from lamina.workers.memory.offload import page_transfers
from lamina.workers.memory.offload.page_fragments import StoreFragments
from lamina.workers.memory.offload.page_transfers import END_S, LAST_S, PageTransfers
from lamina.workers.memory.worker_counters import Counters
from lamina.workers.worker_process import ORPHAN_EXIT_S

CPU, WAIT_S = torch.device("cpu"), 30.0
LAYERS = [shape(), shape(q_heads=4, kv_heads=2, dim=8, v_dim=24)]
PAGES = 3


def stores(partition: str, weights: Sequence[float], **stored: Any) -> list[KvStore]:
    """One of each memory worker."""
    return [
        KvStore(bind(LAYERS, weights, worker, partition, max_model_len=1024, **stored), CPU)
        for worker in range(len(weights))
    ]


def plan(*parts: SequenceOp | RowRange, step: int = 0) -> StepPlan:
    rows = [p for p in parts if isinstance(p, RowRange)]
    return StepPlan(step=step, ops=[p for p in parts if not isinstance(p, RowRange)], rows=rows)


def fill(store: KvStore, sequence: int, place: KvLocation, seed: int, pages: int = PAGES) -> None:
    """A sequence of random numbers, written in all layers."""
    for number in range(-(-pages * PAGE // 64)):
        rows = RowRange(sequence, number * 64, 64, place)
        store.apply_plan(plan(*([New(sequence)] if not number else []), rows, step=number))
        store.committed.commit([rows])
    fill_blocks(store, seed)


def fill_blocks(store: KvStore, seed: int) -> None:
    """Random numbers in all blocks."""
    generator = torch.Generator().manual_seed(seed)
    for piece in (piece for layer in store.layers for piece in layer):
        for part in (piece.kv.k, piece.kv.v, *(piece.kv.scales or ())):
            flat = part.view(-1).view(torch.uint8)
            flat.copy_(torch.randint(0, 255, flat.shape, generator=generator, dtype=torch.uint8))


def fill_rows(store: KvStore, sequence: int, count: int, step: int) -> None:
    """A sequence whose numbers say whose they are, written in all layers."""
    rows = RowRange(sequence, 0, count)
    store.apply_plan(plan(New(sequence), rows, step=step))
    store.apply_block_copies()
    store.committed.commit([rows])
    for piece in (piece for layer in store.layers for piece in layer):
        for block in store.tables.block_table(piece.group, sequence)[1]:
            for part in (piece.kv.k, piece.kv.v):
                part[block].fill_(sequence)


def rows_of(store: KvStore, sequence: int, count: int = PAGES * PAGE) -> dict[tuple[int, int, int], bytes]:
    """Returns what a store has of each layer, head and position, read without fragments."""
    found, size, place = dict[tuple[int, int, int], bytes](), store.tables.block_size, store.tables.location(sequence)
    for layer, held in enumerate(store.pieces):
        for one, piece in zip(held, store.layers[layer], strict=True):
            for position in range(count):
                stripe = store.placement.stripe
                lane = store.placement.kv_shard_of(place, position // stripe if stripe else 0)
                if lane in store.tables.kv_shards[one.group]:
                    number = position // size
                    (block,) = store.tables.block_ids(one.group, sequence, number, number + 1)
                    parts = [piece.kv.k, piece.kv.v, *(piece.kv.scales or ())]
                    for head in range(one.kv_heads):
                        each = [p[block, head, position % size].reshape(-1).view(torch.uint8) for p in parts]
                        found[layer, one.head_start + head, position] = torch.cat(each).numpy().tobytes()
    return found


def all_rows(among: Sequence[KvStore], sequence: int) -> dict[tuple[int, int, int], bytes]:
    return {key: data for store in among for key, data in rows_of(store, sequence).items()}


def test_an_atom_is_as_its_form_says() -> None:
    (store,) = stores("head", (1.0,), dtype="float16", kv_cache_dtype="int8")
    fill(store, 1, KvLocation(), 3)
    at, rows = StoreFragments(store).locate(1, PAGE, KvLocation()), rows_of(store, 1)
    assert at is not None
    for fragment, data in StoreFragments(store).read(at, store.staging).items():
        layer = LAYERS[fragment.layer]
        form = FragmentFormat(layer.qk_dim, layer.v_dim, SCALE_BYTES)
        assert data.nbytes == form.nbytes(PAGE)
        each = (form.k, form.v, form.scale, form.scale)
        begin = [PAGE * sum(each[:part]) for part in range(4)]
        for token in range(PAGE):
            spans = [(at + token * size, size) for at, size in zip(begin, each, strict=True)]
            row = b"".join(bytes(data[at : at + size]) for at, size in spans)
            assert row == rows[*fragment, PAGE + token]


SPLITS = st.tuples(
    st.sampled_from(["head", "token", "request"]),
    st.sampled_from([(1.0,), (1.0, 1.0), (0.7, 0.3), (1.0, 1.0, 1.0)]),
    st.sampled_from([16, 32, 64, 128]),
    st.integers(0, 2),
)
FORMS = st.sampled_from([("float32", "auto"), ("bfloat16", "auto"), ("float16", "int8"), ("bfloat16", "fp8")])


@pytest.mark.long
@given(source=SPLITS, target=SPLITS, form=FORMS, seed=st.integers(0, 99))
@settings(max_examples=12, deadline=None)
def test_atoms_of_any_pool_fit_any_other(source: Any, target: Any, form: tuple[str, str], seed: int) -> None:
    stored = {"dtype": form[0], "kv_cache_dtype": form[1]}
    before, after, fragments = list[KvStore](), list[KvStore](), list[dict[PageFragment, memoryview]]()
    for split, into in ((source, before), (target, after)):
        into += stores(split[0], split[1], **stored, block_size=split[2])
    places = [
        KvLocation(split[3] % some[0].placement.num_kv_shards) for split, some in ((source, before), (target, after))
    ]
    for number, store in enumerate(before):
        fill(store, 1, places[0], seed * 10 + number)
    for page in range(PAGES):
        fragments.append({})
        for store in before:
            at = StoreFragments(store).locate(1, page * PAGE, places[0])
            assert at is not None
            taken = StoreFragments(store).read(at, store.staging)
            assert not taken.keys() & fragments[page].keys(), "two workers have the same"
            fragments[page] |= taken
    for store in after:
        fill(store, 7, places[1], 5)
        for page in range(PAGES):
            at = StoreFragments(store).locate(7, page * PAGE, places[1])
            assert at is not None
            StoreFragments(store).write(
                at,
                {fragment: fragments[page][fragment] for fragment in StoreFragments(store).buffers(at)},
                store.staging,
            )
    assert all_rows(before, 1) == all_rows(after, 7)
    assert len(fragments[0]) == sum(x.kv_heads for x in LAYERS)


def test_heads_of_ranks_have_numbers_of_the_whole_model() -> None:
    (store,) = stores("head", (1.0,))
    assert StoreFragments(store, 1).whole_page_fragments == {
        PageFragment(a.layer, a.head + LAYERS[a.layer].kv_heads) for a in StoreFragments(store).whole_page_fragments
    }


@dataclass
class Gate:
    """A medium whose calls wait until they may go on."""

    inner: StorageBackend
    may_go: threading.Event = field(default_factory=threading.Event)
    came: threading.Event = field(default_factory=threading.Event)

    def read(self, key: bytes, into: Mapping[PageFragment, Any]) -> None:
        self.came.set()
        assert self.may_go.wait(WAIT_S)
        self.inner.read(key, into)

    def write(self, page: Any, fragments: Mapping[PageFragment, Any]) -> None:
        self.came.set()
        assert self.may_go.wait(WAIT_S)
        self.inner.write(page, fragments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


KEYS = [bytes([number]) * 32 for number in range(PAGES)]


class Bench:
    """A store with transfers, and what these report."""

    def __init__(self, medium: StorageBackend | Gate, **stored: Any) -> None:
        (self.store,) = stores("head", (1.0,), block_size=32, **stored)
        self.said: SimpleQueue[TransferDone | LoadReady] = SimpleQueue()
        self.medium, self.counters, self.step = medium, Counters(), 100
        self.transfers = PageTransfers(medium, self.store, self.said.put, self.counters, epoch=3)

    def do(self, *parts: SequenceOp | RowRange) -> None:
        """Runs ops as a session begins a plan."""
        self.step += 1
        self.again(plan(*parts, step=self.step))

    def again(self, new: StepPlan) -> None:
        self.transfers.collect()
        self.transfers.begin_plan(new)

    def report(self) -> TransferDone:
        said = self.said.get(timeout=WAIT_S)
        assert isinstance(said, TransferDone)
        return said

    def opened(self) -> int:
        """The load whose gate is open now."""
        said = self.said.get(timeout=WAIT_S)
        assert isinstance(said, LoadReady)
        return said.transfer_id


def save(number: int = 0, count: int = PAGES) -> SaveKv:
    return SaveKv(1, number, 0, count * PAGE, KEYS[:count], b"t" * 16)


def load(number: int = 1, count: int = PAGES) -> LoadKv:
    return LoadKv(2, number, 0, count * PAGE, KEYS[:count])


def medium(size: int = 1 << 24) -> StorageBackend:
    return open_storage("host", StorageConfig(size))


@pytest.fixture
def bench() -> Any:
    found = Bench(medium())
    fill(found.store, 1, KvLocation(), 1)
    yield found
    found.transfers.end()


def test_what_was_saved_is_loaded_and_counts_as_written(bench: Bench) -> None:
    bench.do(save())
    assert bench.report() == TransferDone(epoch=3, transfer_id=0, num_pages=PAGES)
    bench.do(New(2), load())
    assert bench.report() == TransferDone(epoch=3, transfer_id=1, num_pages=PAGES)
    assert bench.store.committed.report()[2] == 0, "not before rows may see it"
    bench.do(RowRange(2, PAGES * PAGE, 1))
    assert bench.store.committed.report()[2] == PAGES * PAGE
    assert rows_of(bench.store, 1) == rows_of(bench.store, 2)
    assert bench.transfers.listed_pages(9) == KEYS[::-1], "the beginning was used last"


def test_a_plan_that_comes_again_transfers_once(bench: Bench) -> None:
    bench.do(save())
    bench.report()
    bench.again(plan(save(), step=bench.step))
    bench.do(save(1))
    assert bench.report().transfer_id == 1


@pytest.mark.parametrize("page", range(PAGES))
def test_behind_a_damaged_page_nothing_counts(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = medium()
    bench, write = Bench(kept), kept.write

    def write_damaged(of: Page, fragments: Mapping[PageFragment, Bytes]) -> None:
        with monkeypatch.context() as patch:
            if of.key == KEYS[page]:
                patch.setattr(host, "checksum", bytes)  # of other bytes than those that are there
            write(of, fragments)

    monkeypatch.setattr(kept, "write", write_damaged)
    fill(bench.store, 1, KvLocation(), 1)
    bench.do(save())
    bench.report()
    bench.do(New(2), load())
    said = bench.report()
    assert said.num_pages == page
    assert said.error.startswith(f"page {page} was not loaded: ")
    assert said.evicted == [KEYS[page]]
    assert not said.is_miss
    assert bench.counters.snapshot()["kv_failed_transfers"] == 1
    assert KEYS[page] not in {held.page.key for held in kept.pages()}, "nobody is to meet it again"
    bench.do(RowRange(2, page * PAGE, 1))
    assert bench.store.committed.report()[2] == page * PAGE
    bench.transfers.end()


def test_what_no_medium_has_is_not_loaded(bench: Bench) -> None:
    bench.do(New(2), load())
    said = bench.report()
    assert (said.num_pages, said.is_miss) == (0, True)
    assert "was evicted or has expired" in said.error
    assert not bench.counters.snapshot().get("kv_failed_transfers"), "it is as if nobody had found it"


def test_what_was_not_written_is_not_saved(bench: Bench) -> None:
    bench.do(RowRange(1, 2 * PAGE, 1))  # from there on it is to be written again
    bench.do(Truncate(1, 2 * PAGE), SaveKv(1, 0, 0, 2 * PAGE, KEYS[:2], b"t" * 16))
    assert bench.report().num_pages == 2
    bench.do(New(5), RowRange(5, 0, 40))
    bench.do(RowRange(5, 40, 60))
    bench.do(RowRange(5, 100, 60))
    bench.do(SaveKv(5, 1, 0, PAGE, KEYS[2:], b"t" * 16))
    said = bench.report()
    assert said.num_pages == 0
    assert "were not written" in said.error


def test_pages_that_give_way_are_named() -> None:
    (one,) = stores("head", (1.0,), block_size=32)
    fill(one, 1, KvLocation(), 1)
    at = StoreFragments(one).locate(1, 0, KvLocation())
    assert at is not None
    page = sum(data.nbytes for data in StoreFragments(one).read(at, one.staging).values())
    bench = Bench(medium(2 * page))
    fill(bench.store, 1, KvLocation(), 1)
    bench.do(save())
    assert bench.report() == TransferDone(epoch=3, transfer_id=0, num_pages=PAGES, evicted=[KEYS[2]])
    bench.transfers.end()


def test_a_sequence_that_is_loaded_is_left_alone() -> None:
    gate = Gate(medium())
    bench = Bench(gate)
    fill(bench.store, 1, KvLocation(), 1)
    bench.do(save())
    bench.do(New(2), load())
    refused: list[tuple[SequenceOp | RowRange, str]] = [
        (Free(2), "freed, truncated or shifted"), (Truncate(2, PAGE), "freed, truncated or shifted"),
        (RowRange(1, PAGES * PAGE - 1, 1), "has rows"), (RowRange(2, PAGES * PAGE, 1), "has rows"),
        (Fork(9, 2, PAGE), "forked while it is loaded"), (load(2), "twice"),
        (PrefillGrant(2, PAGES * PAGE, 1, 0, 0), "granted"), (PrefillGrant(1, PAGES * PAGE, 1, 0, 0), "granted"),
        (SaveKv(2, 2, 0, PAGE, KEYS[:1], b"t" * 16), "twice"), (LoadKv(1, 2, PAGES * PAGE, PAGE, KEYS[:1]), "twice"),
    ]  # fmt: skip
    for part, why in refused:
        with pytest.raises(PlanError, match=why):
            bench.do(part)
    bench.do(Fork(9, 1, PAGE), RowRange(9, PAGE, 1))  # to read what is being saved is no harm
    gate.may_go.set()
    assert {bench.report().transfer_id, bench.report().transfer_id} == {0, 1}
    bench.do(Free(1), Free(2))
    bench.transfers.end()


def test_what_was_freed_is_wiped_before_anything_is_loaded_there(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """And after the copy of what is still to be saved."""
    bench.do(save())
    bench.report()
    wiped = list[tuple[int, int]]()
    loads, saves = bench.transfers.loader.sequences, bench.transfers.saves
    monkeypatch.setattr(bench.store, "apply_block_copies", lambda: wiped.append((len(loads), len(saves))))
    bench.do(SaveKv(1, 1, 0, PAGE, KEYS[:1], b"t" * 16), Free(1), New(2), load(2))
    assert wiped == [(0, 1)]
    assert {bench.report().transfer_id, bench.report().transfer_id} == {1, 2}


def test_rows_go_on_behind_what_is_being_saved() -> None:
    gate = Gate(medium())
    bench = Bench(gate)
    fill(bench.store, 1, KvLocation(), 1)
    bench.do(save(0, PAGES - 1), RowRange(1, PAGES * PAGE, 1))
    bench.do(SaveKv(1, 1, (PAGES - 1) * PAGE, PAGE, KEYS[-1:], b"t" * 16), RowRange(1, PAGES * PAGE, 1))
    for first in (0, PAGE, PAGES * PAGE - 1):
        with pytest.raises(PlanError, match="where it is saved"):
            bench.do(RowRange(1, first, 1))
    bench.do(Truncate(1, PAGES * PAGE))
    assert bench.transfers.copied == 0, "its pages stay where they are"
    gate.may_go.set()
    assert [bench.report().num_pages for _ in range(2)] == [PAGES - 1, 1]
    bench.do(New(2), load(2))
    bench.report()
    assert rows_of(bench.store, 1) == rows_of(bench.store, 2)
    bench.transfers.end()


def test_blocks_that_are_dropped_while_they_are_saved_are_copied_first() -> None:
    gate = Gate(medium())
    bench = Bench(gate, kv_sparsity="evict", kv_budget=256)
    fill(bench.store, 1, KvLocation(), 1)
    wanted = rows_of(bench.store, 1)
    bench.do(save(0, PAGES), DropBlocks(1, [1, 2]))
    fill_blocks(bench.store, 99)  # other sequences take the blocks
    gate.may_go.set()
    assert bench.report().num_pages == PAGES
    bench.do(New(2), load(2))
    bench.report()
    assert rows_of(bench.store, 2) == wanted
    bench.transfers.end()


def state(bench: Bench) -> Any:
    tables = bench.store.tables
    each = [(s, tables.length(s), tables.block_table(0, s)[1].tolist()) for s in tables.sequences]
    return each, tables.free_blocks, bench.store.committed.report()


@pytest.mark.parametrize(
    "parts",
    [
        (New(2), load(0), Free(2)),
        (New(2), structs.replace(load(0), page_shift=PAGE // 2)),
        (New(2), structs.replace(load(0), page_shift=-PAGE)),
        (New(2), structs.replace(load(0), page_shift=PAGE)),  # of a model of whose keys nothing is known
        (New(2), load(0), Truncate(2, PAGE)),
        (New(2), load(0), Free(2), New(2)),
        (New(2), load(0), Fork(3, 2, PAGE)),
        (New(2), load(0), PrefillGrant(2, PAGES * PAGE, 1, 0, 0)),
        (Free(1), save(0)),
        (Free(1), New(1), save(0)),
        (Truncate(1, PAGE), save(0)),
        (save(0), save(0)),
        (save(1), SaveKv(1, 0, 0, PAGE, KEYS[:1], b"t" * 16)),
        (SaveKv(7, 0, 0, PAGE, KEYS[:1], b"t" * 16),),
        (Free(1), DeletePages(1, [b"short"])),
        (Free(1), PrefetchHint(0, 0, [b"short"])),
        (Free(1), SetRetention(1, 1.0, [b"short"])),
        (Free(1), SetRetention(1, 0.0, KEYS)),
        (Free(1), SetRetention(1, float("nan"), KEYS)),
        (Free(1), SetRetention(1, 2e6, KEYS)),
        (Free(1), PrefetchHint(0, 0, [KEYS[0]] * (MAX_PAGES_PER_TRANSFER + 1))),
        (Free(1), PrefetchHint(-1, 0, KEYS)),
        (Free(1), PrefetchHint(0, -1, KEYS)),
        (
            Free(1),
            *[PrefetchHint(0, 0, [KEYS[0]] * MAX_PAGES_PER_TRANSFER)] * (MAX_HINTED_PAGES // MAX_PAGES_PER_TRANSFER),
            PrefetchHint(1, 0, KEYS),
        ),
    ],
    ids=lambda parts: " ".join(dict.fromkeys(type(op).__name__ for op in parts)),  # a plan has up to 10 MB of keys
)
def test_a_plan_that_cannot_be_leaves_nothing(bench: Bench, parts: tuple[SequenceOp, ...]) -> None:
    before = state(bench)
    with pytest.raises((PlanError, ProtocolError)):
        bench.do(*parts)
    assert state(bench) == before
    bench.do(save(5))
    assert bench.report() == TransferDone(epoch=3, transfer_id=5, num_pages=PAGES), "it goes on, with the next number"


def test_an_old_number_hides_no_other_op(bench: Bench) -> None:
    """It is a plan that comes again only if all of it does."""
    bench.do(save())
    bench.report()
    bench.do(New(2), load())
    with pytest.raises((PlanError, ProtocolError)):
        bench.do(Free(2), save())
    bench.report()


@pytest.mark.parametrize("ops", [(Free(1),), (Truncate(1, 0), New(3), RowRange(3, 0, 64))], ids=str)
@pytest.mark.parametrize("at_once", [True, False])
def test_what_is_being_saved_may_go_at_any_time(ops: tuple[Any, ...], *, at_once: bool) -> None:
    """However slow the medium is: its pages are copied before others get their blocks."""
    gate = Gate(medium())
    bench = Bench(gate, kv_sparsity="evict", kv_budget=256)
    fill(bench.store, 1, KvLocation(), 1)
    wanted = rows_of(bench.store, 1)
    if at_once:
        bench.do(save(), *ops)
    else:
        bench.do(save())
        assert gate.came.wait(WAIT_S), "the first page waits in the medium"
        bench.do(*ops)
    for piece in (piece for layer in bench.store.layers for piece in layer):
        for part in (piece.kv.k, piece.kv.v):
            part.fill_(7)
    gate.may_go.set()
    assert bench.report() == TransferDone(epoch=3, transfer_id=0, num_pages=PAGES)
    bench.do(New(2), load())
    assert bench.report().num_pages == PAGES
    assert rows_of(bench.store, 2) == wanted
    bench.transfers.end()


def test_a_copy_goes_into_a_block_of_what_is_being_saved() -> None:
    """It is freed in the same plan; the page is taken out of it first."""
    gate = Gate(medium())
    bench = Bench(gate)
    fill(bench.store, 1, KvLocation(), 1)
    bench.do(New(5), RowRange(5, 0, 40))
    bench.store.committed.commit([RowRange(5, 0, 40)])
    wanted, forked = rows_of(bench.store, 1), rows_of(bench.store, 5, 37)
    bench.do(save())
    assert gate.came.wait(WAIT_S), "the first page waits in the medium"
    freed = {*bench.store.tables.block_table(0, 1)[1]}
    bench.do(Fork(6, 5, 37), Free(1))
    assert bench.store.tables.block_table(0, 6)[1][1] in freed
    assert rows_of(bench.store, 6, 37) == forked
    gate.may_go.set()
    assert bench.report() == TransferDone(epoch=3, transfer_id=0, num_pages=PAGES)
    bench.do(New(2), load())
    assert bench.report().num_pages == PAGES
    assert rows_of(bench.store, 2) == wanted
    bench.transfers.end()


@pytest.mark.parametrize("wipes", [True, False])
def test_forks_read_what_others_write_in_the_same_plan(*, wipes: bool) -> None:
    """Two sources are freed, whose begun blocks the copies go into, and are wiped where that is asked."""
    (store,) = stores("head", (1.0,), block_size=32)
    store.bind_request = structs.replace(
        store.bind_request, kv=structs.replace(store.bind_request.kv, zero_on_free=wipes)
    )
    store.tables.take_freed() if wipes else None
    for number, sequence in enumerate((1, 2)):
        fill_rows(store, sequence, 50, step=10 + number)
    wanted = {source: rows_of(store, source, 45) for source in (1, 2)}
    begun = {source: store.tables.block_table(0, source)[1][1] for source in (1, 2)}
    ops = [Fork(3, 1, 45), Fork(4, 2, 45), Fork(5, 1, 40), Free(1), Free(2)]
    store.apply_plan(plan(*ops, step=20))
    store.apply_block_copies()
    assert {store.tables.block_table(0, fork)[1][1] for fork in (3, 4)} & set(begun.values()), "the case that is meant"
    assert (rows_of(store, 3, 45), rows_of(store, 4, 45)) == (wanted[1], wanted[2])
    assert rows_of(store, 5, 40) == {at: data for at, data in wanted[1].items() if at[2] < 40}
    store.tables.check_integrity()


def test_copies_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages above the limit are not saved, and no step waits."""
    (store,), gate = stores("head", (1.0,), block_size=32), Gate(medium())
    fill(store, 1, KvLocation(), 1)
    at = StoreFragments(store).locate(1, 0, KvLocation())
    assert at is not None
    page = sum(data.nbytes for data in StoreFragments(store).read(at, store.staging).values())
    monkeypatch.setattr(page_transfers, "MIN_COPIED_BYTES", page)
    monkeypatch.setattr(page_transfers, "MAX_COPIED_SHARE", 1 << 60)
    bench = Bench(gate)
    fill(bench.store, 1, KvLocation(), 1)
    bench.do(save())
    assert gate.came.wait(WAIT_S)
    bench.do(Free(1))
    gate.may_go.set()
    said = bench.report()
    assert (said.num_pages, said.error) == (1, ""), "the deepest was on its way, the first one was copied"
    assert bench.transfers.copied == 0
    bench.transfers.end()


def test_a_page_that_is_not_whole_comes_back(bench: Bench) -> None:
    count = 2 * PAGE + 37
    bench.do(Truncate(1, count), SaveKv(1, 0, 0, count, KEYS, b"t" * 16))
    assert bench.report() == TransferDone(epoch=3, transfer_id=0, num_pages=PAGES)
    assert set(bench.transfers.listed_pages(9)) == set(KEYS)
    wanted = rows_of(bench.store, 1, count)
    bench.do(New(2), LoadKv(2, 1, 0, count, KEYS))
    assert bench.report().num_pages == PAGES
    bench.do(RowRange(2, count, 1))
    assert bench.store.committed.report()[2] == count
    assert rows_of(bench.store, 2, count) == wanted


def test_dropped_pages_are_gone(bench: Bench) -> None:
    bench.do(save())
    bench.report()
    bench.do(DeletePages(1, KEYS[1:]))
    bench.do(SaveKv(1, 1, 0, PAGE, [b"z" * 32], b"t" * 16))
    assert bench.report().transfer_id == 1, "behind the drop"
    bench.do(New(2), load(2))
    assert bench.report().num_pages == 1
    assert set(bench.transfers.listed_pages(9)) == {KEYS[0], b"z" * 32}


def test_pages_are_prolonged_behind_their_save(bench: Bench) -> None:
    inner, said = bench.medium, SimpleQueue[tuple[list[bytes], float, int]]()
    vars(inner)["set_retention"] = lambda keys, seconds: said.put((keys, seconds, len(inner.pages())))
    bench.do(save(), SetRetention(1, 60.0, KEYS))
    assert said.get(timeout=WAIT_S) == (KEYS, 60.0, PAGES)


class Nearer:
    """A medium that reports when it was looked into for the next page, and stores all that it gets."""

    def __init__(self) -> None:
        self.inner, self.turns = medium(), dict[int, list[bytes]]()
        self.looked: SimpleQueue[dict[int, list[bytes]]] = SimpleQueue()
        self.give: list[list[bytes]] = []

    def hint(self, turn: int, keys: Sequence[bytes]) -> None:
        self.turns[turn] = [*self.turns.get(turn, []), *keys] if keys else []

    def prefetch_next(self, fragments: frozenset[PageFragment]) -> list[bytes] | None:
        gone = self.give.pop() if self.give else None
        self.looked.put({turn: keys for turn, keys in self.turns.items() if keys})
        return gone

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_pages_that_turns_wait_for() -> None:
    """Pages of a turn come together, and go when it needs nothing more; an eviction is reported with the next end."""
    nearer = Nearer()
    bench = Bench(nearer)
    fill(bench.store, 1, KvLocation(), 1)
    nearer.give = [[b"z" * 32]]
    bench.do(PrefetchHint(4, 0, KEYS[:2]))
    assert nearer.looked.get(timeout=WAIT_S) == {4: KEYS[:2]}
    assert nearer.looked.get(timeout=WAIT_S) == {4: KEYS[:2]}, "until there is nothing to fetch"
    bench.do(PrefetchHint(4, 2, KEYS[2:]), PrefetchHint(5, 0, KEYS))
    while (told := nearer.looked.get(timeout=WAIT_S)) != {4: KEYS, 5: KEYS}:
        assert told[4] == KEYS
    bench.do(save())
    assert bench.report() == TransferDone(epoch=3, transfer_id=0, num_pages=PAGES, evicted=[b"z" * 32])
    bench.do(PrefetchHint(4))
    assert nearer.looked.get(timeout=WAIT_S) == {5: KEYS}
    bench.do(New(2), load())
    assert bench.report().num_pages == PAGES
    assert nearer.looked.get(timeout=WAIT_S) == {5: KEYS}, "what was read may have to follow"
    bench.transfers.end()


def test_no_turn_is_waited_for_behind_the_end_of_a_view() -> None:
    nearer = Nearer()
    bench = Bench(nearer)
    nearer.give = [[]]
    bench.do(PrefetchHint(4, 0, KEYS))
    nearer.looked.get(timeout=WAIT_S)
    nearer.looked.get(timeout=WAIT_S)
    bench.transfers.end()
    assert not any(nearer.turns.values())
    nearer.give = [[]] * 9
    bench.do(PrefetchHint(5, 0, KEYS))
    bench.transfers.end()
    assert nearer.looked.empty(), "and nothing is fetched"
    assert not any(nearer.turns.values())


def test_pages_of_other_lanes_are_not_expected() -> None:
    """A sequence lies in one KV shard, or page by page in each in turn."""
    for partition, places in (("request", [[], KEYS]), ("token", [KEYS[1:2], KEYS[0::2]])):
        nearer = Nearer()
        store = stores(partition, (1.0, 1.0), block_size=128)[1]
        transfers = PageTransfers(nearer, store, lambda said: None, Counters())
        for lane, kept in enumerate(places):
            transfers.begin_plan(plan(PrefetchHint(lane, 0, KEYS, KvLocation(lane)), step=lane))
            assert nearer.looked.get(timeout=WAIT_S).get(lane, []) == kept
        transfers.end()


@pytest.mark.parametrize(
    ("partition", "lane", "elsewhere"), [("request", 0, PAGES), ("request", 1, 0), ("token", 0, 1)]
)
def test_one_on_loan_saves_nothing_and_tells_which_pages_others_keep(partition: str, lane: int, elsewhere: int) -> None:
    store, said, kept = stores(partition, (1.0, 1.0), block_size=128)[1], SimpleQueue[TransferDone](), medium()
    fill(store, 1, KvLocation(lane), 1)
    transfers = PageTransfers(kept, store, said.put, Counters(), epoch=3, keeps=False)  # type: ignore[arg-type]
    transfers.begin_plan(plan(save(), Free(1), step=100))
    assert said.get(timeout=WAIT_S) == TransferDone(epoch=3, transfer_id=0, num_pages=elsewhere)
    transfers.end()
    assert not kept.pages()


def test_one_on_loan_loads_nothing() -> None:
    """Its storage would give zeros for K and V."""
    (store,), said = stores("head", (1.0,)), SimpleQueue[TransferDone]()
    nothing = open_storage(STORES_NOTHING, StorageConfig(0))
    transfers = PageTransfers(nothing, store, said.put, Counters(), epoch=3, keeps=False)  # type: ignore[arg-type]
    transfers.begin_plan(plan(New(2), LoadKv(2, 1, 0, PAGE, KEYS[:1])))
    done = said.get(timeout=WAIT_S)
    transfers.end()
    assert (done.num_pages, done.evicted) == (0, [])
    assert "a worker on loan keeps no pages" in done.error


def test_nothing_is_written_behind_the_end_of_a_view() -> None:
    kept = medium()
    first = Bench(kept)
    fill(first.store, 1, KvLocation(), 1)
    first.do(save())
    first.report()
    first.transfers.end()
    gate = Gate(kept)
    bench = Bench(gate)
    fill(bench.store, 1, KvLocation(), 2)
    bench.do(New(2), load())
    assert gate.came.wait(WAIT_S)
    before = rows_of(bench.store, 2)
    bench.transfers.end()
    gate.may_go.set()
    for thread in (bench.transfers.loader.thread, bench.transfers.thread):
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert bench.said.empty(), "of an epoch that is over nothing is told"
    assert rows_of(bench.store, 2) == before
    assert bench.store.committed.report().get(2, 0) == 0


@pytest.mark.parametrize("finish", [True, False])
def test_no_medium_holds_up_the_end(*, finish: bool) -> None:
    """A disk that does not answer, as an epoch or the driver ends: within the time that an orphan has."""
    gate = Gate(medium())
    bench = Bench(gate)
    fill(bench.store, 1, KvLocation(), 1)
    bench.do(save())
    bench.do(New(2), load())
    assert gate.came.wait(WAIT_S)
    ending = threading.Thread(target=bench.transfers.end, kwargs={"finish": finish})
    ending.start()
    ending.join(WAIT_S)
    ended = not ending.is_alive()
    gate.may_go.set()
    assert ended
    assert LAST_S + END_S < ORPHAN_EXIT_S


def test_at_the_drivers_end_what_is_to_be_saved_is_saved(bench: Bench) -> None:
    bench.do(save())
    bench.transfers.end(finish=True)
    assert len(bench.transfers.listed_pages(9)) == PAGES


@pytest.mark.parametrize(
    "wrong",
    [
        SaveKv(1, 0, 0, PAGE, [], b"t" * 16),
        SaveKv(1, 0, 0, PAGE, KEYS, b"t" * 16),
        SaveKv(1, 0, 7, PAGE, KEYS[:1], b"t" * 16),
        SaveKv(1, 0, 0, PAGE, [b"short"], b"t" * 16),
        SaveKv(1, 0, 0, PAGE, KEYS[:1], b"t"),
        SaveKv(1, 0, PAGE, 0, KEYS[:1], b"t" * 16),  # of states, which the model has not
        SaveKv(1, 0, PAGE, 0, KEYS[:2], b"t" * 16),
        LoadKv(2, 0, 0, 0, KEYS[:1]),
        LoadKv(2, 0, 0, PAGE * 65, [KEYS[0]] * 65),
        LoadKv(2, 0, -PAGE, PAGE, KEYS[:1]),
    ],
)
def test_what_cannot_be_is_refused(bench: Bench, wrong: SaveKv | LoadKv) -> None:
    with pytest.raises(ProtocolError):
        bench.do(*([New(2)] if isinstance(wrong, LoadKv) else []), wrong)


def test_tokens_that_a_sequence_has_not_are_not_saved(bench: Bench) -> None:
    with pytest.raises(PlanError, match="cannot save"):
        bench.do(SaveKv(1, 0, PAGES * PAGE, PAGE, KEYS[:1], b"t" * 16))


def early(number: int = 1, spare_s: float = 1e6) -> LoadKv:
    """Makes a load whose first rows are computed for so long that its gate opens after one layer."""
    return LoadKv(2, number, 0, PAGES * PAGE, KEYS, slack_s=spare_s)


class LayerGate:
    """A medium whose reads of layers from ``stop`` on wait until they may go on, or raise."""

    def __init__(self, inner: StorageBackend, stop: int = 1) -> None:
        self.inner, self.stop, self.may_go = inner, stop, threading.Event()
        self.lost = b""

    def read(self, key: bytes, into: Mapping[PageFragment, Any]) -> None:
        if any(fragment.layer >= self.stop for fragment in into):
            assert self.may_go.wait(WAIT_S)
            if key == self.lost:
                raise FragmentLostError("gone")
        self.inner.read(key, into)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.fixture
def by_layer() -> Any:
    """Three pages are saved, and the first layer of them can be read."""
    gate = LayerGate(medium())
    bench = Bench(gate)
    fill(bench.store, 1, KvLocation(), 1)
    bench.do(save())
    bench.report()
    yield bench, gate
    gate.may_go.set()
    bench.transfers.end()


ROW = RowRange(2, PAGES * PAGE, 1)


def test_rows_may_come_once_the_gate_is_open(by_layer: tuple[Bench, LayerGate]) -> None:
    bench, gate = by_layer
    loads = bench.transfers.loader
    bench.do(New(2), early())
    assert bench.opened() == 1
    with pytest.raises(PlanError, match="forked while it is loaded"):
        bench.do(Fork(9, 2, PAGE))
    bench.do(ROW)
    (load,) = needed = loads.needed_by(plan(ROW))
    assert loads.wait(needed, 0, 0.0), "the first layer is there"
    assert not loads.wait(needed, 1, 0.0), "the second one is not"
    assert (load.next_layer, bench.store.committed.report()[2]) == (1, 0)
    gate.may_go.set()
    assert loads.wait(needed, 1, WAIT_S)
    loads.collect()
    bench.store.committed.commit([ROW])
    assert bench.store.committed.report()[2] == PAGES * PAGE + 1
    assert bench.report() == TransferDone(epoch=3, transfer_id=1, num_pages=PAGES)
    assert loads.needed_by(plan(ROW)) == []
    assert rows_of(bench.store, 1) == rows_of(bench.store, 2)


@pytest.mark.parametrize("spare_s", [0.0, 1e-9])
def test_no_rows_before(by_layer: tuple[Bench, LayerGate], spare_s: float) -> None:
    """All is there before the rows, where rows take no time or their time is unknown."""
    bench, gate = by_layer
    bench.do(New(2), early(spare_s=spare_s))
    with pytest.raises(PlanError, match="has rows in step"):
        bench.do(ROW)
    gate.may_go.set()
    if spare_s:
        assert bench.opened() == 1
    assert bench.report().num_pages == PAGES
    bench.do(ROW)


@pytest.mark.parametrize("spare_s", [-1.0, float("inf"), float("nan")])
def test_rows_take_a_time(bench: Bench, spare_s: float) -> None:
    with pytest.raises(ProtocolError, match="rows that are computed for"):
        bench.do(New(2), early(spare_s=spare_s))


def test_what_fails_behind_an_open_gate(by_layer: tuple[Bench, LayerGate]) -> None:
    """No step waits for it, and it counts for nothing."""
    bench, gate = by_layer
    bench.do(New(2), early())
    assert bench.opened() == 1
    bench.do(ROW)
    gate.lost = KEYS[1]
    gate.may_go.set()
    loads = bench.transfers.loader
    assert loads.wait(loads.needed_by(plan(ROW)), 1, WAIT_S)
    said = bench.report()
    assert (said.num_pages, said.evicted) == (1, [KEYS[1]])
    loads.collect()
    bench.store.committed.commit([ROW])
    assert bench.store.committed.report()[2] == PAGE
    bench.do(RowRange(2, PAGE, 5))


def test_a_layer_that_does_not_come_is_given_up(
    by_layer: tuple[Bench, LayerGate], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows go on, the driver hears of it, and what comes later is put nowhere."""
    monkeypatch.setattr(loads_module, "LATE_LOAD_S", 0.0)
    bench, gate = by_layer
    bench.do(New(2), early())
    assert bench.opened() == 1
    bench.do(ROW)
    before, loads = rows_of(bench.store, 2), bench.transfers.loader
    assert loads.wait(loads.needed_by(plan(ROW)), 1, 0.0)
    said = bench.report()
    assert (said.num_pages, said.error) == (0, "layer 1 of sequence 2 was not there after 0 s (transfer 1 of storage)")
    gate.may_go.set()
    bench.do(New(3), LoadKv(3, 2, 0, PAGE, KEYS[:1]))
    assert bench.report() == TransferDone(epoch=3, transfer_id=2, num_pages=1), "the next load goes on behind it"
    assert rows_of(bench.store, 2) == before


def test_a_load_that_is_given_up_while_rows_may_begin_is_ready_before_it_ends(
    by_layer: tuple[Bench, LayerGate], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler knows nothing of a load that has ended."""
    bench, _ = by_layer
    monkeypatch.setattr(loads_module, "LATE_LOAD_S", 0.0)
    loads, others = bench.transfers.loader, list[threading.Thread]()

    def start_while_another_gives_up(*of: float) -> bool:
        (load,) = loads.needed_by(plan(ROW))
        others.append(threading.Thread(target=loads.wait_for_reply, args=(load, 1)))
        others[-1].start()
        others[-1].join(0.2)
        return True

    monkeypatch.setattr(loads_module, "can_start", start_while_another_gives_up)
    bench.do(New(2), early())
    assert [type(bench.said.get(timeout=WAIT_S)) for _ in range(2)] == [LoadReady, TransferDone]
    others[0].join(WAIT_S)


def test_rows_wait_for_all_layers_of_a_load_together(by_layer: tuple[Bench, LayerGate]) -> None:
    """Time in which they go on does not count."""
    bench, gate = by_layer
    loads = bench.transfers.loader
    bench.do(New(2), early())
    assert bench.opened() == 1
    bench.do(ROW)
    (load,) = needed = loads.needed_by(plan(ROW))
    assert loads.wait(needed, 0, 0.0)
    assert (load.late_since, load.waited_s < 0.02) == (None, True), "nobody waits now"
    for _ in range(2):
        assert not loads.wait(needed, 1, 0.02)
    gate.may_go.set()
    assert loads.wait(needed, 1, WAIT_S)
    assert load.waited_s >= 0.04
    assert load.late_since is None


def test_a_read_that_fails_behind_the_end_of_its_load_changes_nothing(
    by_layer: tuple[Bench, LayerGate], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the thread that serves rounds calls no medium, which may wait for a disk."""
    monkeypatch.setattr(loads_module, "LATE_LOAD_S", 0.0)
    bench, gate = by_layer
    callers, drop = list[threading.Thread](), gate.inner.delete
    gate.delete = lambda keys: (callers.append(threading.current_thread()), drop(keys))  # type: ignore[attr-defined]
    bench.do(New(2), early())
    assert bench.opened() == 1
    bench.do(ROW)
    (load,) = needed = bench.transfers.loader.needed_by(plan(ROW))
    assert bench.transfers.loader.wait(needed, 1, 0.0)
    assert callers == []
    assert bench.report().num_pages == 0
    gate.lost = KEYS[1]
    gate.may_go.set()
    bench.do(New(3), LoadKv(3, 2, 0, PAGE, KEYS[:1]))
    assert bench.report() == TransferDone(epoch=3, transfer_id=2, num_pages=1)
    assert [(each.num_pages, each.evicted) for each in load.ops] == [(0, [])]
    assert callers == []


def test_a_long_load_comes_in_several_ops(by_layer: tuple[Bench, LayerGate]) -> None:
    """One layer of all ops comes before the next one."""
    bench, gate = by_layer
    ops = [LoadKv(2, 1 + n, n * PAGE, PAGE, KEYS[n : n + 1], slack_s=1e6) for n in range(PAGES)]
    bench.do(New(2), *ops)
    assert [bench.opened() for _ in ops] == [1, 2, 3]
    gate.may_go.set()
    assert [bench.report() for _ in ops] == [
        TransferDone(epoch=3, transfer_id=1 + n, num_pages=1) for n in range(PAGES)
    ]
    bench.do(ROW)
    assert rows_of(bench.store, 1) == rows_of(bench.store, 2)


def test_layers_with_a_window_are_loaded_first() -> None:
    """Rows give back blocks outside a window, where others would be loaded into them."""
    kept = medium()
    store = KvStore(bind([shape(window=400)] * 2, max_model_len=1024), CPU)
    said: SimpleQueue[TransferDone | LoadReady] = SimpleQueue()
    transfers = PageTransfers(kept, store, said.put, Counters())
    fill(store, 1, KvLocation(), 1)
    transfers.begin_plan(plan(save(), step=100))
    transfers.collect()
    assert isinstance(said.get(timeout=WAIT_S), TransferDone)
    transfers.begin_plan(plan(New(2), early(), step=101))
    assert isinstance(said.get(timeout=WAIT_S), TransferDone), "without a gate"
    transfers.end()
