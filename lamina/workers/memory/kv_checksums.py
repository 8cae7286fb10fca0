"""Checksums of stored KV blocks, by which a block that is damaged in memory is noticed before a step attends it.

A block gets a checksum at the end of the step that wrote it in all layers. If a prefill worker, storage or another
memory worker filled it, that is the step that attended it first. It keeps it until it is written again. A worker that
reads another checksum ends: its memory cannot be trusted, and its KV is computed again elsewhere.
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

from .state_checksums import StateChecksums, state_bytes

if TYPE_CHECKING:
    from .attention_step import AttentionStep
    from .kv_store import KvStore


class StoredBlock(NamedTuple):
    """A KV block of a layer group."""

    group: int
    number: int


class BlockChecksums:
    """The checksums of one store, on a CPU. One thread uses it."""

    def __init__(self, store: KvStore, share: float, draw: Callable[[], float] = random.random) -> None:
        """``share``: the share of attended blocks that are checked before each step. ``draw``: returns 0 to 1."""
        self._store, self._share, self._draw = store, share, draw
        self.sums: dict[StoredBlock, bytes] = {}
        self.states = StateChecksums(store.states) if store.states else None

    def before_other_writes(self, plan: StepPlan, *, is_replay: bool = False) -> None:
        """Discard checksums of sequences that writers other than a step's rows are about to fill. First checks blocks
        that are about to move within a sequence, or to be copied to another worker. Raises CorruptedMemoryError.
        """
        if self.states:
            self.states.before_writes(plan, is_replay=is_replay)
        there = self._store.tables.sequences
        for op in plan.ops:
            if isinstance(op, ContextShift | CopyStripes):
                whose = op.sequence if isinstance(op, ContextShift) else op.source
                for block in _blocks(self._store, whose) if whose in there else ():
                    self._check(block)
            if isinstance(op, PrefillGrant | LoadKv | ContextShift | CopyStripes) and op.sequence in there:
                for block in _blocks(self._store, op.sequence):
                    self.sums.pop(block, None)

    def before_copies(self, group: int, copies: Sequence[tuple[int, int]], freed: Iterable[int]) -> None:
        """Check blocks that are about to be copied, and discard the checksums of their targets and of ``freed`` blocks.
        Without the check, a copy of a damaged block would get a valid checksum. Raises CorruptedMemoryError.
        """
        for block, _ in copies:
            self._check(StoredBlock(group, block))
        for number in [*(to for _, to in copies), *freed]:
            self.sums.pop(StoredBlock(group, number), None)

    def verify_surviving(self, keep: Sequence[SurvivingKv]) -> None:
        """Check all blocks and states that are about to go to other workers, where damaged ones would get valid
        checksums. Raises CorruptedMemoryError.
        """
        if self.states:
            self.states.verify_surviving(keep)
        there = [each.sequence for each in keep if each.sequence in self._store.tables.sequences]
        for block in dict.fromkeys(block for sequence in there for block in _blocks(self._store, sequence)):
            self._check(block)

    def verify_before_step(self, steps: Sequence[AttentionStep]) -> None:
        """Check blocks that ``steps`` attend, before these write to any. This is a share of the blocks, and each block
        that they continue to fill, whose next checksum would hide the damage; so are all states that they continue.
        Raises CorruptedMemoryError.
        """
        if self.states:
            self.states.verify(step.plan for step in steps)
        written = {block for step in steps for block in _written(step)}
        for block in _attended(self._store, steps):
            if block in self.sums and (block in written or self._share >= 1.0 or self._draw() < self._share):
                self._check(block)
        for block in written:
            self.sums.pop(block, None)

    def update_after_step(self, steps: Sequence[AttentionStep]) -> None:
        """Add checksums of blocks and states after ``steps`` have written all layers."""
        if self.states:
            self.states.update(step.plan for step in steps)
        for sequence in _sequences(steps):
            for block in _blocks(self._store, sequence):
                if block not in self.sums:
                    self.sums[block] = self._sum(block)

    def _check(self, block: StoredBlock) -> None:
        known = self.sums.get(block)
        if known is not None and self._sum(block) != known:
            raise CorruptedMemoryError(f"KV block {block.number} is not what was written there")

    def _sum(self, block: StoredBlock) -> bytes:
        return b"".join(checksum(memory[block.number]) for memory in self._memory[block.group])

    @cached_property
    def _memory(self) -> list[list[Sequence[memoryview]]]:
        """The bytes of blocks: group -> tensor in all layers -> block. First used after the store has all of its
        layers.
        """
        store = self._store
        groups: list[list[Sequence[memoryview]]] = [[] for _ in store.tables.windows]
        for piece in (piece for layer in store.layers for piece in layer):
            for tensor in piece.kv.tensors:
                flat = tensor.view(torch.uint8).reshape(len(tensor), -1)
                assert flat.data_ptr() == tensor.data_ptr(), "a copy would never change"
                groups[piece.group].append([memoryview(x) for x in flat.numpy()])
        return groups


def flip_bit(store: KvStore, steps: Sequence[AttentionStep]) -> bool:
    """Change a bit of a state that ``steps`` continue, or else of K that they attend, for a drill. Returns False if
    there is none.
    """
    if (states := store.states) and (
        slot := next((s for x in steps for s in states.slots_read(x.plan)), None)
    ) is not None:
        state_bytes(states.of_slot(slot)[0])[3] ^= 1
        return True
    block = next(_attended(store, steps), None)
    if block is None:
        return False
    piece = next(piece for layer in store.layers for piece in layer if piece.group == block.group)
    piece.kv.k[block.number].view(torch.uint8).reshape(-1)[piece.kv.k.element_size() - 1] ^= 1
    return True


def _blocks(store: KvStore, sequence: int) -> Iterator[StoredBlock]:
    """Yield the blocks of a sequence that are here."""
    for group in range(len(store.tables.windows)):
        for number in store.tables.block_table(group, sequence)[1]:
            yield StoredBlock(group, int(number))


def _attended(store: KvStore, steps: Sequence[AttentionStep]) -> Iterator[StoredBlock]:
    """Yield the blocks with tokens that were stored before ``steps``."""
    tables, begun = store.tables, dict[int, int]()  # sequence -> number of blocks with such tokens
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
