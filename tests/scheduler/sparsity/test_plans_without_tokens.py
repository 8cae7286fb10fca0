"""Random plans for a driver's ledger and for memory workers, compared with dicts of tokens. Sequences begin, fork,
grow, shrink and end. Pages are saved and loaded meanwhile, others grant K and V, and plans come twice.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulation.scenario import Scenario
from simulation.workers import PAGE, PoolShape, SimMemory

from lamina.protocol.blocks.block_tables import BlockTables, NoBlocksError
from lamina.protocol.blocks.held_blocks import BlockPool
from lamina.protocol.kv_placement import KvLocation, StripeRun
from lamina.protocol.step_plan import (
    Fork,
    Free,
    LoadKv,
    New,
    PrefillGrant,
    RowRange,
    SaveKv,
    SequenceOp,
    StepPlan,
    SurvivingKv,
    Truncate,
)

LONGEST = 44  # tokens of a sequence
Transfer = SaveKv | LoadKv


class Lossless(random.Random):
    """No load is lost, unless its page is."""

    def random(self) -> float:
        return 0.99


@dataclass
class Known:
    """The expected KV of a sequence. ``busy``: it is loaded or granted, and has no rows meanwhile."""

    tokens: list[int]
    place: KvLocation
    busy: bool = False


def random_layout(rng: random.Random) -> PoolShape:
    workers, windows = rng.randint(1, 3), rng.choice(((0,), (0,), (6,), (0, 5)))
    partitions = ["head", "request", "token"] + ["spill"] * (workers > 1 and not windows[0])
    options = {"memory_workers": workers}
    return Scenario(0, options, rng.choice(partitions), windows, rng.randint(24, 40)).layout


class World:
    """A ledger, memory workers of a random layout, and what is known of both."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        layout = random_layout(self.rng)
        self.layout = layout
        self.ledger = layout.tables(range(len(layout.windows)))
        self.workers = [SimMemory(w, layout) for w in range(len(layout.weights))]
        self.known: dict[int, Known] = {}
        self.pages: dict[bytes, tuple[list[int], KvLocation]] = {}  # that all workers have, as far as they keep them
        self.coming: list[tuple[Transfer, set[int]]] = []  # with the workers that have not done it
        self.grants: list[tuple[PrefillGrant, list[int], set[int]]] = []
        self.step = self.next_id = self.next_transfer = 0
        self.applied = self.loaded = self.forked = self.copied = 0
        self.saved: dict[bytes, tuple[list[int], KvLocation]] = {}  # what each key stands for
        self.lost: set[int] = set()  # loads of which some worker has not all
        self.shortest = min((w for w in layout.windows if w), default=LONGEST)

    def go_on(self) -> None:
        """One plan, and whatever is done meanwhile."""
        ops, rows, after = list[SequenceOp](), list[RowRange](), dict(self.known)
        for sequence in list(self.known):
            self._touch(sequence, ops, rows, after)
        self._begin(ops, rows, after)
        plan = StepPlan(step=self.step, ops=ops, rows=rows)
        if not self.ledger.can_apply(plan):
            before = self._of(self.ledger)
            with pytest.raises(NoBlocksError):
                self.ledger.apply(plan)
            assert self._of(self.ledger) == before, "nothing has changed"
            self._finish(self.rng.randint(0, 3))
            for sequence in [s for s in self.known if not self._moves(s)][:1]:
                self._apply(StepPlan(step=self.step, ops=[Free(sequence)], rows=[]), ledger=True)
                del self.known[sequence]
            return
        self._apply(plan, ledger=True)
        self._learn(plan, after)
        self._finish(self.rng.randint(0, 4))
        self.check()

    def _touch(self, sequence: int, ops: list[SequenceOp], rows: list[RowRange], after: dict[int, Known]) -> None:
        one = self.known[sequence]
        if one.busy:
            return
        length, saving = len(one.tokens), any(op.sequence == sequence for op, _ in self.coming)
        match self.rng.choice(["grow", "grow", "grow", "free", "truncate", "save", "grant", "rest"]):
            case "free":
                ops.append(Free(sequence))
                del after[sequence]
            case "truncate":
                size = self.layout.block_size
                kept = self.rng.randint(0, length // size) * size
                if self.ledger.surviving_blocks(SurvivingKv(sequence, kept, one.place)) is not None:
                    ops.append(Truncate(sequence, kept))
                    after[sequence] = Known(one.tokens[:kept], one.place)
            case "save" if length and not saving:
                count = min(length, self.shortest, PAGE * self.rng.randint(1, 3))
                whole = not any(self.ledger.block_table(g, sequence)[0] for g in range(len(self.layout.windows)))
                if whole:
                    ops.append(SaveKv(sequence, self._number(), 0, count, self._keys(one, count), b"t" * 16))
            case "grow" if length < LONGEST and not (saving and any(self.layout.windows)):
                rows.append(RowRange(sequence, length, self.rng.randint(1, min(6, LONGEST - length)), one.place))
            case "grant" if length < LONGEST and not saving:
                op = PrefillGrant(
                    sequence, length, self.rng.randint(1, min(6, LONGEST - length)), 0, self.step, one.place
                )
                ops.append(op)

    def _begin(self, ops: list[SequenceOp], rows: list[RowRange], after: dict[int, Known]) -> None:
        place = self._place()
        way, new = self.rng.choice(["new", "fork", "load", "nothing"]), self.next_id
        sources = [s for s, one in self.known.items() if one.tokens and not one.busy]
        if way == "fork" and sources:
            source = self.known[number := self.rng.choice(sources)]
            length = self.rng.randint(1, len(source.tokens))
            if self.ledger.surviving_blocks(SurvivingKv(number, length, source.place)) is not None:
                ops.insert(0, Fork(new, number, length))
                after[new] = Known(source.tokens[:length], source.place)
                self.next_id += 1
        elif way == "load" and self.pages:
            tokens, place = self.pages[self.rng.choice(sorted(self.pages))]
            keys = self._keys(Known(tokens, place), len(tokens))
            if all(k in self.pages for k in keys):
                ops += [New(new), LoadKv(new, self._number(), 0, len(tokens), keys, place)]
                after[new] = Known([], place)
                self.next_id += 1
        elif way == "new":
            ops.append(New(new))
            rows.append(RowRange(new, 0, self.rng.randint(1, 9), place))
            after[new] = Known([], place)
            self.next_id += 1

    def _place(self) -> KvLocation:
        """Chooses the place of a new sequence; some have stripes on loan."""
        lane, num = self.rng.randrange(self.ledger.num_kv_shards), self.ledger.num_kv_shards
        if not self.layout.stays or self.rng.random() < 0.5:
            return KvLocation(lane)
        start = self.rng.randrange(LONGEST // (self.layout.stripe * self.layout.block_size))
        return KvLocation(lane, (StripeRun(start, start + self.rng.randint(1, 3), self.rng.randrange(num)),))

    def _learn(self, plan: StepPlan, after: dict[int, Known]) -> None:
        self.known = after
        everybody = set(range(len(self.workers)))
        for row in plan.rows:
            new = [self.rng.randrange(1, 1000) for _ in range(row.count)]
            self._write(self.workers, row, new)
            one = after[row.sequence]
            after[row.sequence] = Known([*one.tokens, *new], one.place)
        forks = [op for op in plan.ops if isinstance(op, Fork)]
        self.forked += len(forks)
        self.copied += sum(op.length % self.layout.block_size > 0 for op in forks)
        for op in plan.ops:
            if isinstance(op, Transfer):
                self.coming.append((op, set(everybody)))
            elif isinstance(op, PrefillGrant):
                new = [self.rng.randrange(1, 1000) for _ in range(op.count)]
                self.grants.append((op, new, set(everybody)))
            if isinstance(op, LoadKv | PrefillGrant):
                after[op.sequence].busy = True
        if self.rng.random() < 0.3:  # it comes once more, and so do its rows
            self._apply(plan)
            for row in plan.rows:
                tokens = after[row.sequence].tokens
                self._write(self.workers, row, tokens[row.first : row.first + row.count])
        self.step += 1

    def _apply(self, plan: StepPlan, *, ledger: bool = False) -> None:
        if ledger:
            self.ledger.apply(plan)
        for worker in self.workers:
            if worker.tables.is_replay(plan):
                worker.tables.apply(plan)
            else:
                worker.begin(plan)  # who has a ledger knows that it can be
        self.applied += 1

    def _write(self, workers: list[SimMemory], row: RowRange, tokens: list[int]) -> None:
        for worker in workers:
            for position, token in enumerate(tokens, row.first):
                worker.write(row.sequence, row.location, position, token)
            worker.written.commit([row])

    def _finish(self, count: int) -> None:
        """Some worker does some transfer, so many times."""
        for _ in range(count):
            if self.coming and (not self.grants or self.rng.random() < 0.7):
                op, left = self.rng.choice(self.coming)
                if any(o.sequence == op.sequence and o.transfer_id < op.transfer_id for o, _ in self.coming):
                    continue
                self._transfer(op, left)
            elif self.grants:
                grant, tokens, waiting = self.rng.choice(self.grants)
                self._write([self.workers[waiting.pop()]], grant.rows, tokens)
                if not waiting:
                    self.grants.remove((grant, tokens, waiting))
                    one = self.known[grant.sequence]
                    one.tokens, one.busy = [*one.tokens, *tokens], False

    def _transfer(self, op: Transfer, left: set[int]) -> None:
        said = self.workers[left.pop()].transfer(op, Lossless())
        for key in said.evicted:
            self.pages.pop(key, None)
        self.lost |= {op.transfer_id} if said.num_pages < len(op.keys) else set()
        if left:
            return
        self.coming.remove((op, left))
        if isinstance(op, LoadKv):
            one = self.known[op.sequence]
            one.busy = False
            if op.transfer_id in self.lost:  # it has no tokens that can be vouched for
                self._apply(StepPlan(step=self.step, ops=[Free(op.sequence)], rows=[]), ledger=True)
                self.step += 1
                del self.known[op.sequence]
            else:
                self.loaded += 1
                one.tokens = self.saved[op.keys[-1]][0][: op.count]
            return
        tokens, place = self.saved[op.keys[-1]]
        for number, key in enumerate(op.keys):
            there = all(key in w.medium or not self._keeps(w, number, place) for w in self.workers)
            if there:
                self.pages[key] = tokens[: min(len(tokens), (number + 1) * PAGE)], place

    def _keeps(self, worker: SimMemory, number: int, place: KvLocation) -> bool:
        placement, size = worker.tables.placement, worker.size
        blocks = range(number * PAGE // size, (number + 1) * PAGE // size)
        lanes = {
            placement.kv_shard_of(place, b // worker.tables.stripe_blocks if worker.tables.stripe_blocks else 0)
            for b in blocks
        }
        return any(lane in own for lane in lanes for own in worker.tables.kv_shards)

    def _keys(self, one: Known, count: int) -> list[bytes]:
        """Each stands for all tokens up to its page's end, and for where they lie."""
        keys = list[bytes]()
        for stop in range(PAGE, count + PAGE, PAGE):
            tokens = one.tokens[: min(stop, count)]
            keys.append(hashlib.sha256(repr((tokens, one.place)).encode()).digest())
            self.saved[keys[-1]] = tokens, one.place
        return keys

    def _number(self) -> int:
        self.next_transfer += 1
        return self.next_transfer

    def _moves(self, sequence: int) -> bool:
        return self.known[sequence].busy or any(op.sequence == sequence for op, _ in self.coming)

    def _of(self, tables: BlockTables) -> object:
        groups = range(len(tables.windows))
        each = {
            s: [(tables.block_table(g, s)[0], [*tables.block_table(g, s)[1]]) for g in groups] for s in tables.sequences
        }
        return each, {s: tables.length(s) for s in tables.sequences}, tables.free_blocks

    def check(self) -> None:
        """The ledger is what the workers have, and these have the tokens."""
        self.ledger.check_integrity()
        assert set(self.ledger.sequences) == set(self.known)
        for worker in self.workers:
            worker.tables.check_integrity()
            for local, group in enumerate(worker.groups):
                for sequence, one in self.known.items():
                    start, blocks = self.ledger.block_table(group, sequence)
                    assert (start, [*blocks]) == (
                        worker.tables.block_table(local, sequence)[0],
                        [*worker.tables.block_table(local, sequence)[1]],
                    )
                    self._check_tokens(worker, local, start, sequence, one)

    def _check_tokens(self, worker: SimMemory, local: int, start: int, sequence: int, one: Known) -> None:
        size = worker.size
        for number in range(start, -(-len(one.tokens) // size)):
            block = worker.block(local, sequence, one.place, number)
            if block is not None:
                tokens = one.tokens[number * size : (number + 1) * size]
                assert block[: len(tokens)] == [t * worker.weights[local] for t in tokens]


def play(seed: int) -> World:
    world = World(seed)
    for _ in range(20):
        world.go_on()
    return world


def play_all(seeds: int) -> list[World]:
    return [play(seed) for seed in range(seeds)]


@given(seed=st.integers(0, 10**9))
def test_ledger_workers_and_tokens_agree_behind_every_plan(seed: int) -> None:
    play(seed)


def test_all_of_it_happens() -> None:
    worlds = play_all(60)
    assert sum(w.applied for w in worlds) > 700
    assert sum(w.loaded for w in worlds) > 10
    assert sum(w.forked for w in worlds) > sum(w.copied for w in worlds) > 50
    assert {len(w.workers) for w in worlds} == {1, 2, 3}
    assert {w.layout.stripe > 0 for w in worlds} == {w.layout.stays for w in worlds} == {True, False}
    assert any(any(w.layout.windows) for w in worlds)


@pytest.mark.parametrize("mistake", ["share", "copy", "place"])
def test_a_mistake_is_seen(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mistakes: a block is free while another sequence has it, a begun block is not copied, or a fork works in
    another KV shard than its source.
    """
    if mistake == "share":
        monkeypatch.setattr(BlockPool, "share", lambda self, blocks: None)
    elif mistake == "copy":
        apply = BlockTables.apply

        def uncopied(self: BlockTables, plan: StepPlan) -> None:
            apply(self, plan)
            self.pending_copies = [[] for _ in self.windows]

        monkeypatch.setattr(BlockTables, "apply", uncopied)
    else:
        right = SimMemory.begin

        def begin(self: SimMemory, plan: StepPlan) -> None:
            right(self, plan)
            for op in plan.ops:
                if isinstance(op, Fork) and op.sequence in self.tables.sequences:
                    extent = self.tables.sequence_extents[op.sequence]
                    lane = (extent.location.kv_shard + 1) % self.tables.num_kv_shards
                    self.tables.sequence_extents[op.sequence] = type(extent)(
                        extent.length, extent.first, extent.starts, KvLocation(lane), extent.dropped_blocks
                    )

        monkeypatch.setattr(SimMemory, "begin", begin)
    with pytest.raises((AssertionError, RuntimeError, IndexError, NoBlocksError)):
        play_all(60)
