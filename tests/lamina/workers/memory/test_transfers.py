"""Pages between pools and a medium: the same bits in any other pool, and nothing that a loss or a lie could leave."""

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

from lamina.kv.media import AtomLostError, Medium, MediumPlace, open_medium
from lamina.kv.pages import PAGE, SCALE_BYTES, Atom, AtomForm
from lamina.memory.meter import Meter
from lamina.memory.pages import loads as loads_module
from lamina.memory.pages.atoms import PoolAtoms
from lamina.memory.pages.loads import PageLoad
from lamina.memory.pages.transfers import END_S, LAST_S, Transfers
from lamina.memory.store import Store
from lamina.protocol.blocks.tables import PlanError
from lamina.protocol.placement import Place
from lamina.protocol.plan import (
    MOST_EXPECTED,
    MOST_PAGES,
    Drop,
    Expect,
    Export,
    Fork,
    Free,
    Grant,
    Import,
    Key,
    Kind,
    New,
    Prolong,
    ProtocolError,
    Prune,
    Rows,
    SequenceOp,
    StepPlan,
    Truncate,
)
from lamina.protocol.tiers import GateOpened, Transferred
from lamina.workers.process import ORPHAN_EXIT_S

CPU, WAIT_S = torch.device("cpu"), 30.0
LAYERS = [shape(), shape(q_heads=4, kv_heads=2, dim=8, v_dim=24)]
PAGES = 3


def stores(partition: str, weights: Sequence[float], **stored: Any) -> list[Store]:
    """One of each memory worker."""
    return [
        Store(bind(LAYERS, weights, worker, partition, max_model_len=1024, **stored), CPU)
        for worker in range(len(weights))
    ]


def plan(*parts: SequenceOp | Rows, step: int = 0) -> StepPlan:
    rows = [p for p in parts if isinstance(p, Rows)]
    return StepPlan(step=step, ops=[p for p in parts if not isinstance(p, Rows)], rows=rows)


def fill(store: Store, sequence: int, place: Place, seed: int, pages: int = PAGES) -> None:
    """A sequence of random numbers, written in all layers."""
    for number in range(-(-pages * PAGE // 64)):
        rows = Rows(sequence, number * 64, 64, place)
        store.begin(plan(*([New(sequence)] if not number else []), rows, step=number))
        store.written.done([rows])
    fill_blocks(store, seed)


def fill_blocks(store: Store, seed: int) -> None:
    """Random numbers in all blocks."""
    generator = torch.Generator().manual_seed(seed)
    for piece in (piece for layer in store.layers for piece in layer):
        for part in (piece.kv.k, piece.kv.v, *(piece.kv.scales or ())):
            flat = part.view(-1).view(torch.uint8)
            flat.copy_(torch.randint(0, 255, flat.shape, generator=generator, dtype=torch.uint8))


def fill_rows(store: Store, sequence: int, count: int, step: int) -> None:
    """A sequence whose numbers say whose they are, written in all layers."""
    rows = Rows(sequence, 0, count)
    store.begin(plan(New(sequence), rows, step=step))
    store.make_ready()
    store.written.done([rows])
    for piece in (piece for layer in store.layers for piece in layer):
        for block in store.tables.table(piece.group, sequence)[1]:
            for part in (piece.kv.k, piece.kv.v):
                part[block].fill_(sequence)


def rows_of(store: Store, sequence: int, count: int = PAGES * PAGE) -> dict[tuple[int, int, int], bytes]:
    """What a store has of each layer, head and position, read without atoms."""
    found, size, place = dict[tuple[int, int, int], bytes](), store.tables.block_size, store.tables.place(sequence)
    for layer, held in enumerate(store.pieces):
        for one, piece in zip(held, store.layers[layer], strict=True):
            for position in range(count):
                stripe = store.placement.stripe
                lane = store.placement.lane(place, position // stripe if stripe else 0)
                if lane in store.tables.lanes[one.group]:
                    number = position // size
                    (block,) = store.tables.block_ids(one.group, sequence, number, number + 1)
                    parts = [piece.kv.k, piece.kv.v, *(piece.kv.scales or ())]
                    for head in range(one.kv_heads):
                        each = [p[block, head, position % size].reshape(-1).view(torch.uint8) for p in parts]
                        found[layer, one.head_start + head, position] = torch.cat(each).numpy().tobytes()
    return found


def all_rows(among: Sequence[Store], sequence: int) -> dict[tuple[int, int, int], bytes]:
    return {key: data for store in among for key, data in rows_of(store, sequence).items()}


def test_an_atom_is_as_its_form_says() -> None:
    (store,) = stores("head", (1.0,), dtype="float16", kv_cache_dtype="int8")
    fill(store, 1, Place(), 3)
    at, rows = PoolAtoms(store).locate(1, PAGE, Place()), rows_of(store, 1)
    assert at is not None
    for atom, data in PoolAtoms(store).take(at, store.staging).items():
        layer = LAYERS[atom.layer]
        form = AtomForm(layer.qk_dim, layer.v_dim, SCALE_BYTES)
        assert data.nbytes == form.nbytes(PAGE)
        each = (form.k, form.v, form.scale, form.scale)
        begin = [PAGE * sum(each[:part]) for part in range(4)]
        for token in range(PAGE):
            spans = [(at + token * size, size) for at, size in zip(begin, each, strict=True)]
            row = b"".join(bytes(data[at : at + size]) for at, size in spans)
            assert row == rows[*atom, PAGE + token]


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
    before, after, atoms = list[Store](), list[Store](), list[dict[Atom, memoryview]]()
    for split, into in ((source, before), (target, after)):
        into += stores(split[0], split[1], **stored, block_size=split[2])
    places = [Place(split[3] % some[0].placement.num_lanes) for split, some in ((source, before), (target, after))]
    for number, store in enumerate(before):
        fill(store, 1, places[0], seed * 10 + number)
    for page in range(PAGES):
        atoms.append({})
        for store in before:
            at = PoolAtoms(store).locate(1, page * PAGE, places[0])
            assert at is not None
            taken = PoolAtoms(store).take(at, store.staging)
            assert not taken.keys() & atoms[page].keys(), "two workers have the same"
            atoms[page] |= taken
    for store in after:
        fill(store, 7, places[1], 5)
        for page in range(PAGES):
            at = PoolAtoms(store).locate(7, page * PAGE, places[1])
            assert at is not None
            PoolAtoms(store).put(at, {atom: atoms[page][atom] for atom in PoolAtoms(store).room(at)}, store.staging)
    assert all_rows(before, 1) == all_rows(after, 7)
    assert len(atoms[0]) == sum(x.kv_heads for x in LAYERS)


def test_heads_of_ranks_have_numbers_of_the_whole_model() -> None:
    (store,) = stores("head", (1.0,))
    assert PoolAtoms(store, 1).share == {
        Atom(a.layer, a.head + LAYERS[a.layer].kv_heads) for a in PoolAtoms(store).share
    }


@dataclass
class Gate:
    """A medium whose calls wait until they may go on."""

    inner: Medium
    may_go: threading.Event = field(default_factory=threading.Event)
    came: threading.Event = field(default_factory=threading.Event)

    def read(self, key: bytes, into: Mapping[Atom, Any]) -> None:
        self.came.set()
        assert self.may_go.wait(WAIT_S)
        self.inner.read(key, into)

    def write(self, page: Any, atoms: Mapping[Atom, Any]) -> None:
        self.came.set()
        assert self.may_go.wait(WAIT_S)
        self.inner.write(page, atoms)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


KEYS = [bytes([number]) * 32 for number in range(PAGES)]


class Bench:
    """A store with transfers, and what these report."""

    def __init__(self, medium: Medium | Gate) -> None:
        (self.store,) = stores("head", (1.0,), block_size=32)
        self.said: SimpleQueue[Transferred | GateOpened] = SimpleQueue()
        self.transfers = Transfers(medium, self.store, self.said.put, Meter(), view=3)
        self._step = 100

    def do(self, *parts: SequenceOp | Rows) -> None:
        """As a session begins a plan."""
        self._step += 1
        self.again(plan(*parts, step=self._step))

    def again(self, new: StepPlan) -> None:
        self.transfers.settle()
        self.transfers.begin(new)

    def report(self) -> Transferred:
        said = self.said.get(timeout=WAIT_S)
        assert isinstance(said, Transferred)
        return said

    def opened(self) -> int:
        """The load whose gate is open now."""
        said = self.said.get(timeout=WAIT_S)
        assert isinstance(said, GateOpened)
        return said.id


def save(number: int = 0, count: int = PAGES) -> Export:
    return Export(1, number, 0, count * PAGE, KEYS[:count], b"t" * 16)


def load(number: int = 1, count: int = PAGES) -> Import:
    return Import(2, number, 0, count * PAGE, KEYS[:count])


def medium(size: int = 1 << 24) -> Medium:
    return open_medium("host", MediumPlace(size))


@pytest.fixture
def bench() -> Any:
    found = Bench(medium())
    fill(found.store, 1, Place(), 1)
    yield found
    found.transfers.end()


def test_what_was_saved_is_loaded_and_counts_as_written(bench: Bench) -> None:
    bench.do(save())
    assert bench.report() == Transferred(view=3, id=0, pages=PAGES)
    bench.do(New(2), load())
    assert bench.report() == Transferred(view=3, id=1, pages=PAGES)
    assert bench.store.written.report()[2] == 0, "not before rows may see it"
    bench.do(Rows(2, PAGES * PAGE, 1))
    assert bench.store.written.report()[2] == PAGES * PAGE
    assert rows_of(bench.store, 1) == rows_of(bench.store, 2)
    assert bench.transfers.pages(9) == KEYS[::-1], "the beginning was used last"


def test_a_plan_that_comes_again_transfers_once(bench: Bench) -> None:
    bench.do(save())
    bench.report()
    bench.again(plan(save(), step=bench._step))
    bench.do(save(1))
    assert bench.report().id == 1


@pytest.mark.parametrize("page", range(PAGES))
def test_behind_a_damaged_page_nothing_counts(page: int) -> None:
    kept = medium()
    bench = Bench(kept)
    fill(bench.store, 1, Place(), 1)
    bench.do(save())
    bench.report()
    copies = kept._lying[KEYS[page]].atoms  # type: ignore[attr-defined]
    atom, copy = next(iter(copies.items()))
    copies[atom] = copy._replace(data=bytes([copy.data[0] ^ 1, *copy.data[1:]]))
    bench.do(New(2), load())
    said = bench.report()
    assert said.pages == page
    assert said.error.startswith(f"page {page} was not loaded: ")
    assert said.gone == [KEYS[page]]
    assert bench.transfers._meter.read()["kv_failed_transfers"] == 1
    assert KEYS[page] not in {held.page.key for held in kept.pages()}, "nobody is to meet it again"
    bench.do(Rows(2, page * PAGE, 1))
    assert bench.store.written.report()[2] == page * PAGE
    bench.transfers.end()


def test_what_no_medium_has_is_not_loaded(bench: Bench) -> None:
    bench.do(New(2), load())
    assert bench.report().pages == 0


def test_what_was_not_written_is_not_saved(bench: Bench) -> None:
    bench.do(Rows(1, 2 * PAGE, 1))  # from there on it is to be written again
    bench.do(Truncate(1, 2 * PAGE), Export(1, 0, 0, 2 * PAGE, KEYS[:2], b"t" * 16))
    assert bench.report().pages == 2
    bench.do(New(5), Rows(5, 0, 40))
    bench.do(Rows(5, 40, 60))
    bench.do(Rows(5, 100, 60))
    bench.do(Export(5, 1, 0, PAGE, KEYS[2:], b"t" * 16))
    said = bench.report()
    assert said.pages == 0
    assert "were not written" in said.error


def test_pages_that_give_way_are_named() -> None:
    (one,) = stores("head", (1.0,), block_size=32)
    fill(one, 1, Place(), 1)
    at = PoolAtoms(one).locate(1, 0, Place())
    assert at is not None
    page = sum(data.nbytes for data in PoolAtoms(one).take(at, one.staging).values())
    bench = Bench(medium(2 * page))
    fill(bench.store, 1, Place(), 1)
    bench.do(save())
    assert bench.report() == Transferred(view=3, id=0, pages=PAGES, gone=[KEYS[2]])
    bench.transfers.end()


def test_a_sequence_that_is_loaded_is_left_alone() -> None:
    gate = Gate(medium())
    bench = Bench(gate)
    fill(bench.store, 1, Place(), 1)
    bench.do(save())
    bench.do(New(2), load())
    refused: list[tuple[SequenceOp | Rows, str]] = [
        (Free(2), "freed, truncated or shifted"), (Truncate(2, PAGE), "freed, truncated or shifted"),
        (Rows(1, PAGES * PAGE - 1, 1), "has rows"), (Rows(2, PAGES * PAGE, 1), "has rows"),
        (Fork(9, 2, PAGE), "forked while it is loaded"), (load(2), "twice"),
        (Grant(2, PAGES * PAGE, 1, 0, 0), "granted"), (Grant(1, PAGES * PAGE, 1, 0, 0), "granted"),
        (Export(2, 2, 0, PAGE, KEYS[:1], b"t" * 16), "twice"), (Import(1, 2, PAGES * PAGE, PAGE, KEYS[:1]), "twice"),
    ]  # fmt: skip
    for part, why in refused:
        with pytest.raises(PlanError, match=why):
            bench.do(part)
    bench.do(Fork(9, 1, PAGE), Rows(9, PAGE, 1))  # to read what is being saved is no harm
    gate.may_go.set()
    assert {bench.report().id, bench.report().id} == {0, 1}
    bench.do(Free(1), Free(2))
    bench.transfers.end()


def test_what_was_freed_is_wiped_before_anything_is_loaded_there(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """And behind the copy of what is still to be saved."""
    bench.do(save())
    bench.report()
    wiped = list[tuple[int, int]]()
    loads, saves = bench.transfers.loads.sequences, bench.transfers._open
    monkeypatch.setattr(bench.store, "make_ready", lambda: wiped.append((len(loads), len(saves))))
    bench.do(Export(1, 1, 0, PAGE, KEYS[:1], b"t" * 16), Free(1), New(2), load(2))
    assert wiped == [(0, 1)]
    assert {bench.report().id, bench.report().id} == {1, 2}


def test_rows_go_on_behind_what_is_being_saved() -> None:
    gate = Gate(medium())
    bench = Bench(gate)
    fill(bench.store, 1, Place(), 1)
    bench.do(save(0, PAGES - 1), Rows(1, PAGES * PAGE, 1))
    bench.do(Export(1, 1, (PAGES - 1) * PAGE, PAGE, KEYS[-1:], b"t" * 16), Rows(1, PAGES * PAGE, 1))
    for first in (0, PAGE, PAGES * PAGE - 1):
        with pytest.raises(PlanError, match="where it is saved"):
            bench.do(Rows(1, first, 1))
    with pytest.raises(PlanError, match="loses some"):
        bench.do(Prune(1, [0]))
    bench.do(Truncate(1, PAGES * PAGE))
    assert bench.transfers._copied == 0, "its pages stay where they are"
    gate.may_go.set()
    assert [bench.report().pages for _ in range(2)] == [PAGES - 1, 1]
    bench.do(New(2), load(2))
    bench.report()
    assert rows_of(bench.store, 1) == rows_of(bench.store, 2)
    bench.transfers.end()


def state(bench: Bench) -> Any:
    tables = bench.store.tables
    each = [(s, tables.length(s), tables.table(0, s)[1].tolist()) for s in tables.sequences]
    return each, tables.free_blocks, bench.store.written.report()


@pytest.mark.parametrize(
    "parts",
    [
        (New(2), load(0), Free(2)),
        (New(2), structs.replace(load(0), moved=PAGE // 2)),
        (New(2), structs.replace(load(0), moved=-PAGE)),
        (New(2), structs.replace(load(0), moved=PAGE)),  # of a model of whose keys nothing is known
        (New(2), load(0), Truncate(2, PAGE)),
        (New(2), load(0), Free(2), New(2)),
        (New(2), load(0), Fork(3, 2, PAGE)),
        (New(2), load(0), Grant(2, PAGES * PAGE, 1, 0, 0)),
        (Free(1), save(0)),
        (Free(1), New(1), save(0)),
        (Truncate(1, PAGE), save(0)),
        (save(0), save(0)),
        (save(1), Export(1, 0, 0, PAGE, KEYS[:1], b"t" * 16)),
        (Export(7, 0, 0, PAGE, KEYS[:1], b"t" * 16),),
        (Free(1), Drop(1, [b"short"])),
        (Free(1), Expect(0, 0, [b"short"])),
        (Free(1), Prolong(1, 1.0, [b"short"])),
        (Free(1), Prolong(1, 0.0, KEYS)),
        (Free(1), Prolong(1, float("nan"), KEYS)),
        (Free(1), Prolong(1, 2e6, KEYS)),
        (Free(1), Expect(0, 0, [KEYS[0]] * (MOST_PAGES + 1))),
        (Free(1), Expect(-1, 0, KEYS)),
        (Free(1), Expect(0, -1, KEYS)),
        (Free(1), *[Expect(0, 0, [KEYS[0]] * MOST_PAGES)] * (MOST_EXPECTED // MOST_PAGES), Expect(1, 0, KEYS)),
    ],
    ids=lambda parts: " ".join(dict.fromkeys(type(op).__name__ for op in parts)),  # a plan has up to 10 MB of keys
)
def test_a_plan_that_cannot_be_leaves_nothing(bench: Bench, parts: tuple[SequenceOp, ...]) -> None:
    before = state(bench)
    with pytest.raises((PlanError, ProtocolError)):
        bench.do(*parts)
    assert state(bench) == before
    bench.do(save(5))
    assert bench.report() == Transferred(view=3, id=5, pages=PAGES), "it goes on, with the next number"


def test_an_old_number_hides_no_other_op(bench: Bench) -> None:
    """It is a plan that comes again only if all of it does."""
    bench.do(save())
    bench.report()
    bench.do(New(2), load())
    with pytest.raises((PlanError, ProtocolError)):
        bench.do(Free(2), save())
    bench.report()


@pytest.mark.parametrize("ops", [(Free(1),), (Truncate(1, 0), New(3), Rows(3, 0, 64))], ids=str)
@pytest.mark.parametrize("at_once", [True, False])
def test_what_is_being_saved_may_go_at_any_time(ops: tuple[Any, ...], *, at_once: bool) -> None:
    """However slow the medium is: its pages are copied before others get their blocks."""
    gate = Gate(medium())
    bench = Bench(gate)
    fill(bench.store, 1, Place(), 1)
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
    assert bench.report() == Transferred(view=3, id=0, pages=PAGES)
    bench.do(New(2), load())
    assert bench.report().pages == PAGES
    assert rows_of(bench.store, 2) == wanted
    bench.transfers.end()


def test_a_copy_goes_into_a_block_of_what_is_being_saved() -> None:
    """It is freed in the same plan; the page is taken out of it first."""
    gate = Gate(medium())
    bench = Bench(gate)
    fill(bench.store, 1, Place(), 1)
    bench.do(New(5), Rows(5, 0, 40))
    bench.store.written.done([Rows(5, 0, 40)])
    wanted, forked = rows_of(bench.store, 1), rows_of(bench.store, 5, 37)
    bench.do(save())
    assert gate.came.wait(WAIT_S), "the first page waits in the medium"
    freed = {*bench.store.tables.table(0, 1)[1]}
    bench.do(Fork(6, 5, 37), Free(1))
    assert bench.store.tables.table(0, 6)[1][1] in freed
    assert rows_of(bench.store, 6, 37) == forked
    gate.may_go.set()
    assert bench.report() == Transferred(view=3, id=0, pages=PAGES)
    bench.do(New(2), load())
    assert bench.report().pages == PAGES
    assert rows_of(bench.store, 2) == wanted
    bench.transfers.end()


@pytest.mark.parametrize("wipes", [True, False])
def test_forks_read_what_others_write_in_the_same_plan(*, wipes: bool) -> None:
    """Two sources are freed, whose begun blocks the copies go into, and are wiped where that is asked."""
    (store,) = stores("head", (1.0,), block_size=32)
    store.bind = structs.replace(store.bind, kv=structs.replace(store.bind.kv, zero_on_free=wipes))
    store.tables.freed() if wipes else None
    for number, sequence in enumerate((1, 2)):
        fill_rows(store, sequence, 50, step=10 + number)
    wanted = {source: rows_of(store, source, 45) for source in (1, 2)}
    begun = {source: store.tables.table(0, source)[1][1] for source in (1, 2)}
    ops = [Fork(3, 1, 45), Fork(4, 2, 45), Fork(5, 1, 40), Free(1), Free(2)]
    store.begin(plan(*ops, step=20))
    store.make_ready()
    assert {store.tables.table(0, fork)[1][1] for fork in (3, 4)} & set(begun.values()), "the case that is meant"
    assert (rows_of(store, 3, 45), rows_of(store, 4, 45)) == (wanted[1], wanted[2])
    assert rows_of(store, 5, 40) == {at: data for at, data in wanted[1].items() if at[2] < 40}
    store.tables.check_integrity()


def test_copies_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind it pages are not saved, and nobody waits."""
    gate = Gate(medium())
    bench = Bench(gate)
    fill(bench.store, 1, Place(), 1)
    at = PoolAtoms(bench.store).locate(1, 0, Place())
    assert at is not None
    page = sum(data.nbytes for data in PoolAtoms(bench.store).take(at, bench.store.staging).values())
    monkeypatch.setattr(bench.transfers, "_most_copied", page)
    bench.do(save())
    assert gate.came.wait(WAIT_S)
    bench.do(Free(1))
    gate.may_go.set()
    said = bench.report()
    assert (said.pages, said.error) == (1, ""), "the deepest was on its way, the first one was copied"
    assert bench.transfers._copied == 0
    bench.transfers.end()


def test_a_page_that_is_not_whole_comes_back(bench: Bench) -> None:
    count = 2 * PAGE + 37
    bench.do(Truncate(1, count), Export(1, 0, 0, count, KEYS, b"t" * 16))
    assert bench.report() == Transferred(view=3, id=0, pages=PAGES)
    assert set(bench.transfers.pages(9)) == set(KEYS)
    wanted = rows_of(bench.store, 1, count)
    bench.do(New(2), Import(2, 1, 0, count, KEYS))
    assert bench.report().pages == PAGES
    bench.do(Rows(2, count, 1))
    assert bench.store.written.report()[2] == count
    assert rows_of(bench.store, 2, count) == wanted


def test_dropped_pages_are_gone(bench: Bench) -> None:
    bench.do(save())
    bench.report()
    bench.do(Drop(1, KEYS[1:]))
    bench.do(Export(1, 1, 0, PAGE, [b"z" * 32], b"t" * 16))
    assert bench.report().id == 1, "behind the drop"
    bench.do(New(2), load(2))
    assert bench.report().pages == 1
    assert set(bench.transfers.pages(9)) == {KEYS[0], b"z" * 32}


def test_pages_are_prolonged_behind_their_save(bench: Bench) -> None:
    inner, said = bench.transfers._medium, SimpleQueue[tuple[list[bytes], float, int]]()
    vars(inner)["prolong"] = lambda keys, seconds: said.put((keys, seconds, len(inner.pages())))
    bench.do(save(), Prolong(1, 60.0, KEYS))
    assert said.get(timeout=WAIT_S) == (KEYS, 60.0, PAGES)


class Nearer:
    """A medium that says when it was looked into for the next page, and has all that it is told."""

    def __init__(self) -> None:
        self.inner, self.turns = medium(), dict[int, list[bytes]]()
        self.looked: SimpleQueue[dict[int, list[bytes]]] = SimpleQueue()
        self.give: list[list[bytes]] = []

    def expect(self, turn: int, keys: Sequence[bytes]) -> None:
        self.turns[turn] = [*self.turns.get(turn, []), *keys] if keys else []

    def fetch(self, atoms: frozenset[Atom]) -> list[bytes] | None:
        gone = self.give.pop() if self.give else None
        self.looked.put({turn: keys for turn, keys in self.turns.items() if keys})
        return gone

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_pages_that_turns_wait_for() -> None:
    """Those of a turn come together, and go when it needs nothing more; what gave way is told with the next end."""
    nearer = Nearer()
    bench = Bench(nearer)
    fill(bench.store, 1, Place(), 1)
    nearer.give = [[b"z" * 32]]
    bench.do(Expect(4, 0, KEYS[:2]))
    assert nearer.looked.get(timeout=WAIT_S) == {4: KEYS[:2]}
    assert nearer.looked.get(timeout=WAIT_S) == {4: KEYS[:2]}, "until there is nothing to fetch"
    bench.do(Expect(4, 2, KEYS[2:]), Expect(5, 0, KEYS))
    while (told := nearer.looked.get(timeout=WAIT_S)) != {4: KEYS, 5: KEYS}:
        assert told[4] == KEYS
    bench.do(save())
    assert bench.report() == Transferred(view=3, id=0, pages=PAGES, gone=[b"z" * 32])
    bench.do(Expect(4))
    assert nearer.looked.get(timeout=WAIT_S) == {5: KEYS}
    bench.do(New(2), load())
    assert bench.report().pages == PAGES
    assert nearer.looked.get(timeout=WAIT_S) == {5: KEYS}, "what was read may have to follow"
    bench.transfers.end()


def test_no_turn_is_waited_for_behind_the_end_of_a_view() -> None:
    nearer = Nearer()
    bench = Bench(nearer)
    nearer.give = [[]]
    bench.do(Expect(4, 0, KEYS))
    nearer.looked.get(timeout=WAIT_S)
    nearer.looked.get(timeout=WAIT_S)
    bench.transfers.end()
    assert not any(nearer.turns.values())
    nearer.give = [[]] * 9
    bench.do(Expect(5, 0, KEYS))
    bench.transfers.end()
    assert nearer.looked.empty(), "and nothing is fetched"
    assert not any(nearer.turns.values())


def test_pages_of_other_lanes_are_not_expected() -> None:
    """A sequence lies in one lane, or page by page in each in turn."""
    for partition, places in (("request", [[], KEYS]), ("token", [KEYS[1:2], KEYS[0::2]])):
        nearer = Nearer()
        store = stores(partition, (1.0, 1.0), block_size=128)[1]
        transfers = Transfers(nearer, store, lambda said: None, Meter())
        for lane, kept in enumerate(places):
            transfers.begin(plan(Expect(lane, 0, KEYS, Place(lane)), step=lane))
            assert nearer.looked.get(timeout=WAIT_S).get(lane, []) == kept
        transfers.end()


def test_nothing_is_written_behind_the_end_of_a_view() -> None:
    kept = medium()
    first = Bench(kept)
    fill(first.store, 1, Place(), 1)
    first.do(save())
    first.report()
    first.transfers.end()
    gate = Gate(kept)
    bench = Bench(gate)
    fill(bench.store, 1, Place(), 2)
    bench.do(New(2), load())
    assert gate.came.wait(WAIT_S)
    before = rows_of(bench.store, 2)
    bench.transfers.end()
    gate.may_go.set()
    for thread in (bench.transfers.loads.thread, bench.transfers._thread):
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert bench.said.empty(), "of a view that is over nothing is told"
    assert rows_of(bench.store, 2) == before
    assert bench.store.written.report().get(2, 0) == 0


@pytest.mark.parametrize("finish", [True, False])
def test_no_medium_holds_up_the_end(*, finish: bool) -> None:
    """A disk that does not answer, as a view or the driver ends: within the time that an orphan has."""
    gate = Gate(medium())
    bench = Bench(gate)
    fill(bench.store, 1, Place(), 1)
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
    assert len(bench.transfers.pages(9)) == PAGES


@pytest.mark.parametrize(
    "wrong",
    [
        Export(1, 0, 0, PAGE, [], b"t" * 16),
        Export(1, 0, 0, PAGE, KEYS, b"t" * 16),
        Export(1, 0, 7, PAGE, KEYS[:1], b"t" * 16),
        Export(1, 0, 0, PAGE, [b"short"], b"t" * 16),
        Export(1, 0, 0, PAGE, KEYS[:1], b"t"),
        Import(2, 0, 0, PAGE * 65, [KEYS[0]] * 65),
        Import(2, 0, -PAGE, PAGE, KEYS[:1]),
    ],
)
def test_what_cannot_be_is_refused(bench: Bench, wrong: Export | Import) -> None:
    with pytest.raises(ProtocolError):
        bench.do(*([New(2)] if isinstance(wrong, Import) else []), wrong)


def test_tokens_that_a_sequence_has_not_are_not_saved(bench: Bench) -> None:
    with pytest.raises(PlanError, match="cannot save"):
        bench.do(Export(1, 0, PAGES * PAGE, PAGE, KEYS[:1], b"t" * 16))


def early(number: int = 1, spare_s: float = 1e6) -> Import:
    """A load whose first rows are computed for so long that its gate opens behind one layer."""
    return Import(2, number, 0, PAGES * PAGE, KEYS, spare_s=spare_s)


class LayerGate:
    """A medium whose reads of layers from ``stop`` on wait until they may go on, or raise."""

    def __init__(self, inner: Medium, stop: int = 1) -> None:
        self.inner, self.stop, self.may_go = inner, stop, threading.Event()
        self.lost = b""

    def read(self, key: bytes, into: Mapping[Atom, Any]) -> None:
        if any(atom.layer >= self.stop for atom in into):
            assert self.may_go.wait(WAIT_S)
            if key == self.lost:
                raise AtomLostError("gone")
        self.inner.read(key, into)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.fixture
def by_layer() -> Any:
    """Three pages are saved, and the first layer of them can be read."""
    gate = LayerGate(medium())
    bench = Bench(gate)
    fill(bench.store, 1, Place(), 1)
    bench.do(save())
    bench.report()
    yield bench, gate
    gate.may_go.set()
    bench.transfers.end()


ROW = Rows(2, PAGES * PAGE, 1)


def test_rows_may_come_once_the_gate_is_open(by_layer: tuple[Bench, LayerGate]) -> None:
    bench, gate = by_layer
    loads = bench.transfers.loads
    bench.do(New(2), early())
    assert bench.opened() == 1
    with pytest.raises(PlanError, match="forked while it is loaded"):
        bench.do(Fork(9, 2, PAGE))
    bench.do(ROW)
    (load,) = needed = loads.needed_by(plan(ROW))
    assert loads.wait(needed, 0, 0.0), "the first layer is there"
    assert not loads.wait(needed, 1, 0.0), "the second one is not"
    assert (load.layers, bench.store.written.report()[2]) == (1, 0)
    gate.may_go.set()
    assert loads.wait(needed, 1, WAIT_S)
    loads.settle()
    bench.store.written.done([ROW])
    assert bench.store.written.report()[2] == PAGES * PAGE + 1
    assert bench.report() == Transferred(view=3, id=1, pages=PAGES)
    assert loads.needed_by(plan(ROW)) == []
    assert rows_of(bench.store, 1) == rows_of(bench.store, 2)


@pytest.mark.parametrize("spare_s", [0.0, 1e-9])
def test_no_rows_before(by_layer: tuple[Bench, LayerGate], spare_s: float) -> None:
    """Where rows take no time, or nobody knows it, all is there before them."""
    bench, gate = by_layer
    bench.do(New(2), early(spare_s=spare_s))
    with pytest.raises(PlanError, match="has rows in step"):
        bench.do(ROW)
    gate.may_go.set()
    if spare_s:
        assert bench.opened() == 1
    assert bench.report().pages == PAGES
    bench.do(ROW)


@pytest.mark.parametrize("spare_s", [-1.0, float("inf"), float("nan")])
def test_rows_take_a_time(bench: Bench, spare_s: float) -> None:
    with pytest.raises(ProtocolError, match="rows that are computed for"):
        bench.do(New(2), early(spare_s=spare_s))


def test_what_fails_behind_an_open_gate(by_layer: tuple[Bench, LayerGate]) -> None:
    """Nobody waits for it, and it counts for nothing."""
    bench, gate = by_layer
    bench.do(New(2), early())
    assert bench.opened() == 1
    bench.do(ROW)
    gate.lost = KEYS[1]
    gate.may_go.set()
    loads = bench.transfers.loads
    assert loads.wait(loads.needed_by(plan(ROW)), 1, WAIT_S)
    said = bench.report()
    assert (said.pages, said.gone) == (1, [KEYS[1]])
    loads.settle()
    bench.store.written.done([ROW])
    assert bench.store.written.report()[2] == PAGE
    bench.do(Rows(2, PAGE, 5))


def test_a_layer_that_does_not_come_is_given_up(
    by_layer: tuple[Bench, LayerGate], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows go on, the driver hears of it, and what comes later is put nowhere."""
    monkeypatch.setattr(loads_module, "LATE_S", 0.0)
    bench, gate = by_layer
    bench.do(New(2), early())
    assert bench.opened() == 1
    bench.do(ROW)
    before, loads = rows_of(bench.store, 2), bench.transfers.loads
    assert loads.wait(loads.needed_by(plan(ROW)), 1, 0.0)
    said = bench.report()
    assert (said.pages, said.error) == (0, "layer 1 of sequence 2 was not there when rows had waited 0 s")
    gate.may_go.set()
    bench.do(New(3), Import(3, 2, 0, PAGE, KEYS[:1]))
    assert bench.report() == Transferred(view=3, id=2, pages=1), "the next load goes on behind it"
    assert rows_of(bench.store, 2) == before


def test_rows_wait_for_all_layers_of_a_load_together() -> None:
    """Time in which they go on does not count; and what was there once stays there."""
    waiting = PageLoad([early()], [[None] * PAGES], Key.of(Kind.PLAN, plan()), 0, lambda: None)
    assert not waiting.wait(0, 0.02)
    waiting.arrive(1)
    assert waiting.wait(0, 0.0)
    so_far = waiting.waited_s
    assert so_far == waiting.waited_s >= 0.02, "nobody waits now"
    assert not waiting.wait(1, 0.02)
    assert waiting.waited_s >= 0.04
    waiting.arrive(2, ended=True)
    waiting.arrive(1)
    assert waiting.wait(1, 0.0)


def test_a_read_that_fails_behind_the_end_of_its_load_changes_nothing(
    by_layer: tuple[Bench, LayerGate], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And whoever serves rounds calls no medium, which may wait for a disk."""
    monkeypatch.setattr(loads_module, "LATE_S", 0.0)
    bench, gate = by_layer
    callers, drop = list[threading.Thread](), gate.inner.drop
    gate.drop = lambda keys: (callers.append(threading.current_thread()), drop(keys))  # type: ignore[attr-defined]
    bench.do(New(2), early())
    assert bench.opened() == 1
    bench.do(ROW)
    (load,) = needed = bench.transfers.loads.needed_by(plan(ROW))
    assert bench.transfers.loads.wait(needed, 1, 0.0)
    assert callers == []
    assert bench.report().pages == 0
    gate.lost = KEYS[1]
    gate.may_go.set()
    bench.do(New(3), Import(3, 2, 0, PAGE, KEYS[:1]))
    assert bench.report() == Transferred(view=3, id=2, pages=1)
    assert (load.done, load.gone) == ([0], [[]])
    assert set(callers) == {bench.transfers.loads.thread}


def test_a_long_load_comes_in_several_ops(by_layer: tuple[Bench, LayerGate]) -> None:
    """Of all of them one layer comes before the next one."""
    bench, gate = by_layer
    ops = [Import(2, 1 + n, n * PAGE, PAGE, KEYS[n : n + 1], spare_s=1e6) for n in range(PAGES)]
    bench.do(New(2), *ops)
    assert [bench.opened() for _ in ops] == [1, 2, 3]
    gate.may_go.set()
    assert [bench.report() for _ in ops] == [Transferred(view=3, id=1 + n, pages=1) for n in range(PAGES)]
    bench.do(ROW)
    assert rows_of(bench.store, 1) == rows_of(bench.store, 2)


def test_layers_with_a_window_are_loaded_first() -> None:
    """Rows give back blocks behind a window, where others would be loaded into them."""
    kept = medium()
    store = Store(bind([shape(window=400)] * 2, max_model_len=1024), CPU)
    said: SimpleQueue[Transferred | GateOpened] = SimpleQueue()
    transfers = Transfers(kept, store, said.put, Meter())
    fill(store, 1, Place(), 1)
    transfers.begin(plan(save(), step=100))
    transfers.settle()
    assert isinstance(said.get(timeout=WAIT_S), Transferred)
    transfers.begin(plan(New(2), early(), step=101))
    assert isinstance(said.get(timeout=WAIT_S), Transferred), "without a gate"
    transfers.end()
