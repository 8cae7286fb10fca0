"""Memory and prefill workers of the simulation: real block tables over blocks of integers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from lamina.config.partition import KvShards
from lamina.protocol.blocks.block_tables import BlockTables
from lamina.protocol.kv_placement import KvLocation, KvPlacement
from lamina.protocol.offload_messages import TransferDone
from lamina.protocol.step_plan import (
    DeletePages,
    Fork,
    Free,
    LoadKv,
    New,
    PrefetchHint,
    RowRange,
    SaveKv,
    StepPlan,
    SurvivingKv,
)
from lamina.workers.memory.committed_tokens import CommittedTokens

from .model import value

MOST_KEPT = 12  # pages outside a pool
PAGE = 8  # tokens, of these
TORN = -(10**9)  # stored by a step that ended half way


class PoolShape(NamedTuple):
    """The groups of all memory workers, and who holds them; see ComputeReady."""

    windows: list[int]
    lanes: list[KvShards]
    holders: list[list[int]]
    stripe: int  # in blocks
    stays: bool
    num_blocks: int
    block_size: int
    weights: tuple[int, ...]  # of what the holders of a group store, by their number: each has heads of its own
    sparse: tuple[bool, ...] = ()  # groups that may drop blocks; where some may, no values are stored

    def weight(self, group: int, worker: int) -> int:
        """Returns the weight of what ``worker`` stores."""
        return self.weights[self.holders[group].index(worker)]

    def tables(self, groups: Sequence[int]) -> BlockTables:
        """Returns the tables of some groups."""
        windows, lanes = [self.windows[g] for g in groups], [self.lanes[g] for g in groups]
        sparse = [self.sparse[g] for g in groups] if self.sparse else []
        counts = [self.num_blocks] * len(groups)
        return BlockTables(windows, counts, self.block_size, lanes, self.stripe, self.stays, sparse)


class SimMemory:
    """A memory worker. It gets positions, and finds them by its tables. ``counts``: of what it has done. ``on_loan``:
    whether it stores no pages.
    """

    def __init__(
        self, number: int, layout: PoolShape, counts: Counter[str] | None = None, *, on_loan: bool = False
    ) -> None:
        self.number, self.counts, self.on_loan = number, Counter[str]() if counts is None else counts, on_loan
        self.groups = [g for g, holders in enumerate(layout.holders) if number in holders]
        self.tables = layout.tables(self.groups)
        self.written = CommittedTokens()
        self.medium: dict[bytes, list[list[int]]] = {}  # by page
        self.last_transfer = -1
        self.expected: dict[int, int] = {}  # turns, and how many pages each needs
        self._saves: dict[int, list[tuple[bytes, list[list[int]]]]] = {}  # by transfer: pages, as they were
        self.weights = [layout.weight(g, number) for g in self.groups]
        self.size = layout.block_size
        self._blocks = [[[0] * layout.block_size for _ in range(layout.num_blocks)] for _ in self.groups]

    def begin(self, plan: StepPlan) -> None:
        """Apply a plan; it must be one that can be."""
        for op in plan.ops:
            if isinstance(op, SaveKv):
                pages = enumerate(op.keys)
                self._saves[op.transfer_id] = [
                    (key, [list(b) for b in self._page(op, number)]) for number, key in pages
                ]
            elif isinstance(op, PrefetchHint):
                self._expect(op)
        for fork in (op for op in plan.ops if isinstance(op, Fork) and op.length % self.size):
            assert self.written.tokens_of(fork.source) >= fork.length, f"{fork}: its last tokens are still on their way"
        self.tables.apply(plan)
        for blocks, copies in zip(self._blocks, self.tables.pending_copies, strict=True):
            for _, target, stored in [(s, t, list(blocks[s])) for s, t in copies]:
                blocks[target][:] = stored
        self.written.begin(plan)

    def _expect(self, op: PrefetchHint) -> None:
        """Expects the turns that a driver announces, in their order; and reports what the driver takes back."""
        if not op.keys:
            assert self.expected.pop(op.order, 0), f"turn {op.order} was never expected, or in an older epoch"
            return
        assert self.expected.get(op.order, 0) == op.first, f"turn {op.order} has a gap"
        assert op.order >= max(self.expected, default=0), f"turn {op.order} comes behind later ones"
        self.expected[op.order] = op.first + len(op.keys)

    def write(self, sequence: int, place: KvLocation, position: int, stored: int) -> None:
        """Writes what is kept here."""
        if any(self.tables.sparse):
            return
        number, at = divmod(position, self.size)
        for group, weight in enumerate(self.weights):
            if (block := self.block(group, sequence, place, number)) is not None:
                block[at] = stored * weight
                self.counts["written on loan"] += self.on_loan

    def total(self, sequence: int, place: KvLocation, position: int, span: range) -> int:
        """Returns the sum of what a query at ``position`` sees of the positions ``span`` and is kept here."""
        total, size, stop = 0, self.size, span.stop
        for group, window in enumerate(self.tables.windows):
            low = max(span.start, position - window + 1) if window else span.start
            numbers = range(low // size, -(-stop // size))
            for start, block in self._stored(group, sequence, place, numbers):
                total += sum(block if low <= start <= stop - size else block[max(0, low - start) : stop - start])
        return total

    def _stored(self, group: int, sequence: int, place: KvLocation, numbers: range) -> list[tuple[int, list[int]]]:
        """Returns these blocks, without those that others keep: the first position, and what is stored."""
        lanes, blocks = self.tables.kv_shards[group], self._blocks[group]
        if self.tables.stripe_blocks and not lanes.has_all:
            each = ((n, self.block(group, sequence, place, n)) for n in numbers)
            return [(n * self.size, block) for n, block in each if block is not None]
        if place.kv_shard not in lanes:
            return []
        start, ids = self.tables.block_table(group, sequence)
        if numbers and numbers.start < start:
            raise AssertionError(f"memory worker {self.number} has given back block {numbers.start} of {sequence}")
        return [(n * self.size, blocks[ids[n - start]]) for n in numbers]

    def transfer(self, op: SaveKv | LoadKv, rng: random.Random) -> TransferDone:
        """Save pages into a medium of MOST_KEPT, or load them, of which some are lost."""
        done, gone = len(op.keys), list[bytes]()
        if isinstance(op, SaveKv) and self.on_loan:
            return TransferDone(epoch=0, transfer_id=op.transfer_id, num_pages=self.num_elsewhere(op))
        if isinstance(op, SaveKv):
            for key, blocks in reversed(self._saves.pop(op.transfer_id)):
                if not blocks:  # others keep it
                    continue
                self.medium[key] = blocks
                while len(self.medium) > MOST_KEPT:
                    gone.append(next(iter(self.medium)))
                    del self.medium[gone[-1]]
        else:
            assert op.sequence in self.tables.sequences, "a sequence has gone while it was loaded"
            for number in reversed(range(len(op.keys))):
                key, blocks = op.keys[number], self._page(op, number)
                assert not (blocks and self.on_loan), "a worker on loan is to load a page"
                self.counts["loaded pages"] += bool(blocks)
                if blocks and (rng.random() < 0.1 or key not in self.medium):
                    done = number
                for block, stored in zip(blocks, self.medium.get(key, []), strict=False):
                    block[:] = stored
            self.written.commit([RowRange(op.sequence, op.first, min(op.count, done * PAGE))])
        return TransferDone(
            epoch=0,
            transfer_id=op.transfer_id,
            num_pages=done,
            evicted=gone,
            error="" if done == len(op.keys) else "lost",
        )

    def num_elsewhere(self, op: SaveKv) -> int:
        """The number of first pages that others have."""
        saved = self._saves.pop(op.transfer_id)
        return next((n for n, (_, blocks) in enumerate(saved) if blocks), len(saved))

    def drop(self, op: DeletePages) -> None:
        """Drops pages after those that are saved."""
        for key in op.keys:
            self.medium.pop(key, None)

    def _page(self, op: SaveKv | LoadKv, number: int) -> list[list[int]]:
        """The blocks of one that are kept here."""
        first = op.first + number * PAGE
        place = op.location if isinstance(op, LoadKv) else self.tables.location(op.sequence)
        numbers = range(first // self.size, -(-min(first + PAGE, op.first + op.count) // self.size))
        blocks = (self.block(group, op.sequence, place, n) for group in range(len(self.groups)) for n in numbers)
        return [block for block in blocks if block is not None]

    def reconcile(self, keep: Sequence[SurvivingKv]) -> None:
        """Hold what ``keep`` says, and nothing else."""
        had = self.written.report()
        for each in keep:
            held = self.tables.surviving_blocks(each)
            assert held is not None, f"memory worker {self.number} has not {each}"
            assert not any(held) or had.get(each.sequence, 0) >= each.length, f"{each} was never written"
        self.tables.reconcile(keep)
        self.written.reconcile(keep)
        self.expected.clear()

    def given(self, window: int, sequence: int, place: KvLocation, number: int) -> list[list[int]]:
        """Block ``number`` of a sequence, of the layers of a window, without weights; nothing where others keep it."""
        blocks = list[list[int]]()
        for group in (g for g, own in enumerate(self.tables.windows) if own == window):
            if (block := self.block(group, sequence, place, number)) is not None:
                blocks.append([stored // self.weights[group] for stored in block])
        return blocks

    def block(self, group: int, sequence: int, place: KvLocation, number: int) -> list[int] | None:
        """Returns what is stored of it; None where others keep it."""
        tables = self.tables
        lane = tables.placement.kv_shard_at(place, number)
        if lane not in tables.kv_shards[group]:
            return None
        start, ids = tables.block_table(group, sequence)
        if number < start:
            raise AssertionError(f"memory worker {self.number} has given back block {number} of sequence {sequence}")
        at = (
            ids[number - start]
            if not tables.stripe_blocks
            else tables.block_ids(group, sequence, number, number + 1)[0]
        )
        return self._blocks[group][at]


class SimPrefill:
    """A prefill worker: the values of the prompts that it computes."""

    def __init__(self, layout: PoolShape) -> None:
        self._layout = layout
        self._placement = KvPlacement(max(len(x.pattern) for x in layout.lanes), layout.stripe, layout.stays)
        each = zip(layout.windows, layout.lanes, layout.holders, strict=True)
        self._groups = [(w, x, sum(layout.weight(g, h) for h in of)) for g, (w, x, of) in enumerate(each)]
        self._stored: dict[int, list[int]] = {}

    def begin(self, plan: StepPlan) -> None:
        """Start and forget sequences."""
        for op in plan.ops:
            if isinstance(op, New):
                assert op.sequence not in self._stored
                self._stored[op.sequence] = []
            elif isinstance(op, Free):
                del self._stored[op.sequence]

    def add(self, row: RowRange, tokens: Sequence[int]) -> tuple[list[int], int]:
        """The values of more rows, and what the last one sees."""
        values, before = self._stored[row.sequence], row.first
        assert len(values) == before, "a chunk before the one before it"
        for position, token in enumerate(tokens, before):
            values.append(value(token, position, self._total(values, row.location, position)))
        return values[before:], self._total(values, row.location, len(values) - 1)

    def _total(self, values: Sequence[int], place: KvLocation, position: int) -> int:
        """Returns the sum of what a query there sees of ``values``, as all memory workers would have it."""
        total, size = 0, self._layout.block_size
        lanes = [self._placement.kv_shard_at(place, number) for number in range(-(-len(values) // size))]
        for window, own, weight in self._groups:
            low = max(0, position - window + 1) if window else 0
            for number in range(low // size, len(lanes)):
                if lanes[number] in own:
                    total += sum(values[max(low, number * size) : (number + 1) * size]) * weight
        return total
