"""Checksums of stored KV blocks: one that is damaged in memory is seen before a step attends it.

A block has a checksum from the end of the step that wrote it, in all layers, or attended it first (what a prefill
worker, a medium or another memory worker has filled) until something writes it again. A worker that reads another
checksum than the noted one ends: its memory is not to be trusted, and its KV is computed again elsewhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch

from lamina.netstack.checksum import checksum
from lamina.protocol.step_plan import ContextShift, CopyStripes, LoadKv, PrefillGrant, StepPlan, SurvivingKv
from lamina.workers.worker_process import CorruptedMemoryError

if TYPE_CHECKING:
    from .attention_step import AttentionStep
    from .kv_store import KvStore


class StoredBlock(NamedTuple):
    """A KV block of a group of layers."""

    group: int
    number: int


class BlockChecksums:
    """Of one store, on a CPU. One thread uses it."""

    def __init__(self, store: KvStore, share: float, draw: Callable[[], float] = random.random) -> None:
        """``share``: of the blocks, which are looked at before each step that attends them. ``draw``: 0 to 1."""
        self._store, self._share, self._draw = store, share, draw
        self._sums: dict[StoredBlock, bytes] = {}

    def before_other_writes(self, plan: StepPlan) -> None:
        """Of sequences that others than a step's rows are about to write. Looks at what is about to move within one, or
        to be copied to another worker. Raises CorruptedMemoryError.
        """
        there = self._store.tables.sequences
        for op in plan.ops:
            if isinstance(op, ContextShift | CopyStripes):
                whose = op.sequence if isinstance(op, ContextShift) else op.source
                for block in _blocks(self._store, whose) if whose in there else ():
                    self._check(block)
            if isinstance(op, PrefillGrant | LoadKv | ContextShift | CopyStripes) and op.sequence in there:
                for block in _blocks(self._store, op.sequence):
                    self._sums.pop(block, None)

    def before_copies(self, group: int, copies: Sequence[tuple[int, int]], freed: Iterable[int]) -> None:
        """Blocks are about to be copied to others, and ``freed`` to be wiped. Looks at what is copied: its copy would
        have a checksum that is right. Raises CorruptedMemoryError.
        """
        for block, _ in copies:
            self._check(StoredBlock(group, block))
        for number in [*(to for _, to in copies), *freed]:
            self._sums.pop(StoredBlock(group, number), None)

    def verify_surviving(self, keep: Iterable[SurvivingKv]) -> None:
        """At all that is known of what is about to go to other workers, where damage would have a checksum that is
        right. Raises CorruptedMemoryError.
        """
        there = [each.sequence for each in keep if each.sequence in self._store.tables.sequences]
        for block in dict.fromkeys(block for sequence in there for block in _blocks(self._store, sequence)):
            self._check(block)

    def verify_before_step(self, steps: Sequence[AttentionStep]) -> None:
        """Check blocks that ``steps`` attend, before they write: a share of them, and each block that they go on
        filling, whose next checksum would hide the damage. Raises CorruptedMemoryError.
        """
        written = {block for step in steps for block in _written(step)}
        for block in _attended(self._store, steps):
            if block in self._sums and (block in written or self._share >= 1.0 or self._draw() < self._share):
                self._check(block)
        for block in written:
            self._sums.pop(block, None)

    def update_after_step(self, steps: Sequence[AttentionStep]) -> None:
        """``steps`` have written all that they write."""
        for sequence in _sequences(steps):
            for block in _blocks(self._store, sequence):
                if block not in self._sums:
                    self._sums[block] = self._sum(block)

    def _check(self, block: StoredBlock) -> None:
        known = self._sums.get(block)
        if known is not None and self._sum(block) != known:
            raise CorruptedMemoryError(f"KV block {block.number} is not what was written there")

    def _sum(self, block: StoredBlock) -> bytes:
        return b"".join(checksum(memory[block.number]) for memory in self._memory[block.group])

    @cached_property
    def _memory(self) -> list[list[Sequence[memoryview]]]:
        """Group -> its tensors in all layers -> block -> bytes. First used once the store has all of its layers."""
        store = self._store
        groups: list[list[Sequence[memoryview]]] = [[] for _ in store.tables.windows]
        for piece in (piece for layer in store.layers for piece in layer):
            for tensor in piece.kv.tensors:
                flat = tensor.view(torch.uint8).reshape(len(tensor), -1)
                assert flat.data_ptr() == tensor.data_ptr(), "a copy would never change"
                groups[piece.group].append([memoryview(x) for x in flat.numpy()])
        return groups


def flip_bit(store: KvStore, steps: Sequence[AttentionStep]) -> bool:
    """Change a bit of a number that ``steps`` attend, for a drill. Whether there was one."""
    block = next(_attended(store, steps), None)
    if block is None:
        return False
    piece = next(piece for layer in store.layers for piece in layer if piece.group == block.group)
    piece.kv.k[block.number].view(torch.uint8).reshape(-1)[piece.kv.k.element_size() - 1] ^= 1
    return True


def _blocks(store: KvStore, sequence: int) -> Iterator[StoredBlock]:
    """Those of a sequence that are here."""
    for group in range(len(store.tables.windows)):
        for number in store.tables.block_table(group, sequence)[1]:
            yield StoredBlock(group, int(number))


def _attended(store: KvStore, steps: Sequence[AttentionStep]) -> Iterator[StoredBlock]:
    """Blocks with tokens that were there before ``steps``."""
    tables, begun = store.tables, dict[int, int]()  # sequence -> blocks in which it has such tokens
    for row in (row for step in steps for row in step.plan.rows):
        blocks = -(-row.first // tables.block_size)
        begun[row.sequence] = min(begun.get(row.sequence, blocks), blocks)
    for sequence, blocks in begun.items():
        for group in range(len(tables.windows)):
            new = set(tables.blocks_after(group, sequence, blocks * tables.block_size))
            for number in tables.block_table(group, sequence)[1]:
                if number not in new:
                    yield StoredBlock(group, int(number))


def _sequences(steps: Sequence[AttentionStep]) -> Iterator[int]:
    for step in steps:
        for row in step.plan.rows:
            yield row.sequence


def _written(step: AttentionStep) -> Iterator[StoredBlock]:
    for group, places in enumerate(step.write_positions):
        for place in places:
            for number in () if place.slot_mapping is None else place.slot_mapping.blocks.tolist():
                yield StoredBlock(group, number)
