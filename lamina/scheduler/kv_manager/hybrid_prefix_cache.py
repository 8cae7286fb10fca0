"""Prefix caching for models with recurrent layers: a prefix needs its pages and a snapshot of the states after it.

Snapshots are taken where a prompt ends, where a turn ends, and where a prompt leaves one that is known. A step ends
there, so a version of the states is written. If the known prompt is still being computed, it takes the snapshot, and
the other waits for that. Snapshots go with the pages of their sequence, also to storage. Pure policy: no torch, no I/O,
no clock.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from typing import Any

from msgspec import structs

from lamina.protocol.blocks.block_tables import BlockTables
from lamina.protocol.step_plan import Free, SequenceOp, StateRows, SurvivingKv, Truncate
from lamina.scheduler.feature import Loss, NewMemory
from lamina.scheduler.sequence import Sequence
from lamina.scheduler.starts import Candidates, KvStart, Verdict
from lamina.scheduler.state_ledger import StateLedger

from .prefix_cache import CommonPrefix, PrefixCache


class HybridPrefixCache(PrefixCache):
    """The running and retained sequences in the pool, of which each can be forked at its snapshots alone."""

    def __init__(self, states: StateLedger, accounting: BlockTables, page: int, **options: Any) -> None:
        super().__init__(accounting, page, **options)
        self.states = states

    def lookup(self, sequence: Sequence) -> list[CommonPrefix]:
        """All snapshots that a waiting sequence may begin with, the shortest first."""
        commons, tokens = list[CommonPrefix](), sequence.tokens
        limit = min(len(tokens) - 1, self._limit(sequence))
        for number, key in enumerate(self._held_pages(sequence), 1):
            first = number * self._page
            for length, source in self.prefix_index.snapshots(self._place, key):
                held = self._held[source].sequence.tokens
                if length <= limit and held[first:length] == tokens[first:length]:
                    commons.append(CommonPrefix(key, length, source))
        return commons

    def longest_cached(self, beginnings: list[CommonPrefix]) -> KvStart | None:
        """The longest of ``beginnings`` whose KV is computed."""
        for _, length, number in reversed(beginnings):
            place = self._held[number].sequence.location
            if self._has(number, length) and self.states.has(number, length):
                blocks = self._accounting.forkable_blocks(SurvivingKv(number, length, place))
                if blocks is not None:
                    return KvStart(length, (place,), source=number, blocks=blocks)
        return None

    def find_starts(self, candidates: Candidates) -> None:
        """Add the longest hit. Where a sequence shares more with another, a snapshot is taken: by that one, if it is
        still to compute these tokens, and this one waits; else by this one.
        """
        if candidates.is_settled:
            return
        sequence = candidates.sequence
        hit = self.longest_cached(self.lookup(sequence))
        shared = super().lookup(sequence)[-1:]
        for key, length, _ in shared if shared and shared[0].length >= (hit.length if hit else 0) + self._page else ():
            held = (self._held[n].sequence for n in self.prefix_index.sequences(self._place, key))
            coming = next((s for s in held if not s.finished and self._is_coming(s, length)), None)
            if length > len(sequence.prompt) and (self._prompts_only or coming is None):
                break  # it was preempted: its answer's tokens are in no index, and their states may differ
            (sequence if coming is None else coming).add_step_end(length)
            if coming is not None:
                candidates.verdict = Verdict.STEPS_ASIDE if coming.transfer.lacks_kv else Verdict.HOLDS_UP
                return
        if hit is not None:
            candidates.starts.append(hit)

    def _is_coming(self, sequence: Sequence, length: int) -> bool:
        """Return whether a running sequence is still to compute a snapshot, or a prefill worker has it."""
        has_planned = sequence.transfer.lacks_kv and length in self.snapshots_of(sequence.id)
        return has_planned or sequence.num_computed_tokens < length

    def on_started(self, candidates: Candidates, start: KvStart | None) -> tuple[SequenceOp, ...]:
        """Index an admitted sequence, with the snapshots that it shares with its source."""
        ops, number = super().on_started(candidates, start), candidates.sequence.id
        if start is not None and start.source is not None and number in self._held:
            for length in self.snapshots_of(start.source):
                if length <= min(start.length, self._held[number].length):
                    self.prefix_index.add_snapshot(self._place, number, length, self._page)
        return ops

    def on_loaded(self, sequence: Sequence) -> tuple[SequenceOp, ...]:
        """Count and index the snapshot that a sequence has loaded; after a failed load there is none."""
        number, length = sequence.id, sequence.num_computed_tokens
        self.states.on_loaded(number, length)
        if number in self._held and self._can_keep(length) and length <= self._held[number].length:
            self.prefix_index.add_snapshot(self._place, number, length, self._page)
        return ()

    def on_scheduled(self, sequence: Sequence, length: int) -> None:
        """Record a snapshot if one is to be taken after ``length`` tokens, where the next step of a sequence ends."""
        due = length == len(sequence.prompt) or length in sequence.step_ends
        if due and sequence.id in self._held and self._can_keep(length):
            self.prefix_index.add_snapshot(self._place, sequence.id, length, self._page)

    def snapshots_of(self, number: int) -> list[int]:
        """Return the lengths after which the states of a sequence are kept for others."""
        return sorted(self._held[number].snapshots) if number in self._held else []

    def drop_running_snapshots(self) -> None:
        """Drop all snapshots of running sequences."""
        for number, held in self._held.items():
            if held.until is None:
                self.prefix_index.drop_snapshots(self._place, number)

    def retain_or_free(self, sequence: Sequence, snapshots: Several[int] = ()) -> list[SequenceOp]:
        """Retain a finished sequence up to its last snapshot, or free it. ``snapshots``: the index has them."""
        limit = self._limit(sequence)
        end = min(sequence.num_computed_tokens, limit)
        known = {*self.snapshots_of(sequence.id), *([end] if self._can_keep(end) else [])}
        kept = [n for n in sorted(known) if n <= limit and self.states.has(sequence.id, n)]
        if not kept or sequence.id not in self._held:
            self.forget_sequence(sequence)
            return [Free(sequence.id)]
        op, *freed = super().retain_or_free(sequence, kept)
        if not isinstance(op, Truncate):
            return [op, *freed]
        for length in kept:
            self.prefix_index.add_snapshot(self._place, sequence.id, length, self._page)
        return [op, StateRows(sequence.id, op.length + 1, 0, kept), *freed]

    def roll_back(self, loss: Loss) -> None:
        """Keep retained sequences with their snapshots."""
        super().roll_back(loss)
        loss.kept[:] = [structs.replace(each, snapshots=self.snapshots_of(each.sequence)) for each in loss.kept]

    def relocate(self, kept: list[SurvivingKv], memory: NewMemory) -> None:
        """Leave out sequences whose states have no room on the new memory workers: each version takes a slot there."""
        self.states.replace(memory.state_shards, memory.state_slots)
        retained = {*self._retained()}
        running = [each for each in kept if each.sequence not in retained][: self.states.max_running]
        kept[:] = self.states.adopt([*running, *(each for each in kept if each.sequence in retained)])
        super().relocate(kept, memory)

    def _limit(self, sequence: Sequence) -> int:
        """Return how many of a sequence's tokens may share states with others."""
        return len(sequence.prompt) if self._prompts_only else len(sequence.tokens)

    def _can_keep(self, length: int) -> bool:
        return bool(self._page) and length >= self._page and (self._exact or length % self._page == 0)
