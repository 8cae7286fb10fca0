"""Batches of running sequences, and the queue of waiting ones. Pure policy: no torch, no I/O, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from lamina.protocol.blocks.block_tables import BlockTables
from lamina.protocol.step_plan import SequenceOp, SurvivingKv

from .sequence import Sequence


@dataclass
class Batch:
    """Running sequences that share their steps."""

    index: int
    running: list[Sequence] = field(default_factory=list)
    ops: list[SequenceOp] = field(default_factory=list)  # of its next plan

    @property
    def load(self) -> int:
        """The number of tokens that its attention reads, which is its load on the memory workers."""
        return sum([len(s.tokens) + s.num_output_placeholders for s in self.running])


class ChunkPolicy(NamedTuple):
    """Cuts prompts into chunks of at most ``chunk`` tokens; with ``aligned``, at its multiples only."""

    chunk: int
    aligned: bool

    def next_chunk(self, missing: int, budget: int, scheduled: int) -> int:
        """Return how many of the ``missing`` tokens after ``scheduled`` ones a step computes; at most ``budget``."""
        if not self.aligned:
            return min(missing, budget)
        count = min(missing, self.chunk - scheduled % self.chunk)
        return count if count <= budget else 0

    def rows_of_batch(self, batch: Batch) -> dict[Sequence, int]:
        """The rows of each sequence in the batch's next step, within the chunk size."""
        budget = self.chunk
        wanted: dict[Sequence, int] = {}
        for sequence in batch.running:
            if sequence.is_schedulable:
                due = sequence.num_schedulable_tokens(wanted)
                prefilling = due > 1
                count = self.next_chunk(due, budget, sequence.num_computed_tokens) if prefilling else due
                if prefilling:
                    budget -= count
                if count:
                    wanted[sequence] = count
        return wanted


def balance_batches(running: Iterable[Sequence], num_batches: int) -> list[Batch]:
    """Distribute running sequences over ``num_batches``: the longest first, each to the batch with the least load.

    No round may be in flight, so batches have no ops left, and decoding sequences know all their tokens. Prefill
    workers may continue.
    """
    batches = [Batch(i) for i in range(num_batches)]
    for sequence in sorted(running, key=lambda s: -s.num_tokens_with_placeholders):
        min(batches, key=lambda b: (b.load, len(b.running))).running.append(sequence)
    for batch in batches:
        batch.running.sort(key=lambda s: s.request_id)  # the newest is preempted first
    return batches


def enqueue(waiting: deque[Sequence], sequence: Sequence) -> None:
    """Queue a new sequence after the sequences of its priority with the same or a lower stamp."""
    at, key = len(waiting), (sequence.priority, sequence.fair_stamp)
    while at and (waiting[at - 1].priority, waiting[at - 1].fair_stamp) > key:
        at -= 1
    waiting.insert(at, sequence)


def requeue(waiting: deque[Sequence], sequence: Sequence) -> None:
    """Queue a preempted sequence before the others of its priority."""
    before = takewhile(lambda s: s.priority < sequence.priority, waiting)
    waiting.insert(sum(1 for _ in before), sequence)


def apply_locations(batches: Several[Batch], surviving: Iterable[SurvivingKv]) -> list[Sequence]:
    """Set the new places of running sequences. Removes and returns those that are not in ``surviving``."""
    places, gone = {each.sequence: each.location for each in surviving}, list[Sequence]()
    for batch in batches:
        gone += [s for s in batch.running if s.id not in places]
        batch.running = [s for s in batch.running if s.id in places]
        for sequence in batch.running:
            sequence.location = places[sequence.id]
    return gone


def roll_back_batches(
    batches: Several[Batch], surviving: Callable[[SurvivingKv], int], forget: Callable[[Sequence], None]
) -> tuple[list[SurvivingKv], list[Sequence]]:
    """Take running sequences back to the tokens that ``surviving`` counts.

    Returns the KV to keep of sequences that go on, and the sequences without any KV. The latter leave their batches.
    So do finished ones, for which ``forget`` is called.
    """
    keep, gone = list[SurvivingKv](), list[Sequence]()
    for batch in batches:
        for sequence in batch.running:
            sequence.roll_back(surviving(SurvivingKv(sequence.id, sequence.num_computed_tokens, sequence.location)))
            if sequence.finished:
                forget(sequence)
        left = [s for s in batch.running if not s.finished]
        gone += [s for s in left if not s.num_computed_tokens]
        batch.running = [s for s in left if s.num_computed_tokens]
        keep += [SurvivingKv(s.id, s.num_computed_tokens, s.location) for s in batch.running]
    return keep, gone


def find_overwritten(accounting: BlockTables, batches: Iterable[Batch], keep: list[SurvivingKv]) -> list[Sequence]:
    """Remove and return sequences that would write into a shared block after a loss.

    Another sequence was forked from them by a step that was done but not reported. They leave ``batches``, ``keep`` and
    the block tables, and are recomputed.
    """
    gone = list[Sequence]()
    for batch in batches:
        for sequence in list(batch.running):
            if not accounting.holds_exclusively(sequence.id, sequence.num_computed_tokens):
                gone.append(sequence)
                batch.running.remove(sequence)
                keep[:] = [each for each in keep if each.sequence != sequence.id]
                accounting.reconcile(keep)
    return gone
