"""Offloaded KV: the pages in host memory and on disk, and their loads and saves.

Pages of a sequence are saved as they fill. Once the sequence is retained, its last pages are saved, too, also a partial
one. A prompt loads stored pages, if they are at least one more than the pool has. Memory workers report the end of each
transfer. A page exists once all of them have reported. Pure policy: no torch, no I/O, no clock.

Of a model with recurrent layers, each snapshot is saved once it is taken, with a page that ends where it does. A prompt
loads pages up to a snapshot, and that. If any part of these proves to be lost, all is computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Several
from itertools import groupby

from msgspec import structs

from lamina.kv.page_keys import page_key
from lamina.protocol.blocks.block_tables import BlockTables
from lamina.protocol.control import ComputeReady
from lamina.protocol.executor import Report
from lamina.protocol.kv_placement import KvLocation
from lamina.protocol.offload_messages import LoadReady, OffloadFacts, PagesExpired, TransferDone
from lamina.protocol.step_plan import (
    MAX_PAGES_PER_TRANSFER,
    MAX_RETENTION_S,
    DeletePages,
    LoadKv,
    SaveKv,
    SequenceOp,
    SetRetention,
    Transfer,
)
from lamina.scheduler.feature import Feature, Leaving, Loss, PlanDraft, Scheduling
from lamina.scheduler.prefix_index import KeyedTokens, PageKeys, Place, PrefixIndex
from lamina.scheduler.scheduler_output import TransferResult
from lamina.scheduler.sequence import Sequence
from lamina.scheduler.sessions.token_ranges import count_tokens
from lamina.scheduler.starts import Candidates, KvStart

from .pending_deletes import PendingDeletes
from .prefetch import PrefetchHints
from .stored_states import StoredStates
from .transfers_in_flight import PageTransfer, SequenceLoad, SequenceSave, runs_of

NO_TRANSFER_ID = 0  # the transfer's plan is not made yet


class OffloadIndex(Feature):
    """Tracks offloaded pages in the prefix index, at the KV shards whose workers can load them.

    A sequence has either loads or saves in flight, not both.
    """

    def __init__(
        self,
        facts: OffloadFacts,
        tables: BlockTables,
        holders: Several[Several[int]],
        prefix_index: PrefixIndex,
        *,
        whole: int = 1,
        prompts_only: bool = False,
        exact: bool = True,
        num_parity: int = 0,
        cached_tokens_of: Callable[[Sequence], int] = lambda sequence: 0,
        states: Callable[[PageKeys, PrefixIndex, int], StoredStates] = StoredStates,
        recomputes: bool = True,
    ) -> None:
        """``holders``: the memory workers of each layer group. ``prefix_index``: of keys with the store's root.
        A prompt is loaded up to a multiple of ``whole`` tokens.

        ``prompts_only``: completions are not saved. ``exact``: partial pages are. ``num_parity``: other memory workers,
        which keep the parity of what is loaded; they report as all do. ``cached_tokens_of``: returns how many tokens of
        a waiting sequence the pool has. ``states``: makes the index of states that are stored with these pages.
        ``recomputes``: tokens that cannot be loaded are computed, else their sequence ends.
        """
        self._cached_tokens_of, self._recomputes = cached_tokens_of, recomputes
        self.page_size, self.whole_page_tokens, self._prompts_only = facts.page_size, whole, prompts_only
        self.backend, self.is_complete = facts.backend, facts.is_complete
        self._num_parity, self._exact = num_parity, exact
        self.keys = PageKeys(facts.page_size, prefix_index.root)
        self.states = states(self.keys, prefix_index, 1 if self._exact else whole)
        self.identity, self._index, self._places = facts.identity, prefix_index, list[Place]()  # of KV shards
        self._ledger = tables
        windows = [w for w in tables.windows if w]
        self._most = min(windows) if windows else 0  # tokens of which a pool holds all, if they are loaded at once
        self._next_id = 0
        self._moving: dict[int, PageTransfer] = {}
        self._saving: dict[int, SequenceSave] = {}  # by retained sequence
        self._loading: dict[int, SequenceLoad] = {}  # by sequence
        self._filled: dict[Sequence, int] = {}  # see num_filled_tokens
        self._drops = PendingDeletes()
        # The arguments of the last query, and its result; and those of the last prompt that may take a snapshot.
        self._found: tuple[Sequence, int, int, KvStart | None] | None = None
        self._parted: tuple[Sequence, int, int] | None = None
        self.num_queried_tokens = 0  # tokens of admitted sequences that the pool lacked
        self.num_hit_tokens = 0  # how many of them were loaded
        self.sync(facts, holders)

    @property
    def has_transfers(self) -> bool:
        """True while a transfer is in flight."""
        return bool(self._moving)

    def sync(self, facts: OffloadFacts, holders: Several[Several[int]]) -> None:
        """Replace the known pages and states by those that workers list when they connect."""
        ledger = self._ledger
        self._holders = [
            {w for lanes, group in zip(ledger.kv_shards, holders, strict=True) if lane in lanes for w in group}
            for lane in range(ledger.num_kv_shards)
        ]
        self._num_workers = 1 + max(w for group in holders for w in group) + self._num_parity
        # Workers have no prefetch hint yet.
        self.hints = PrefetchHints(0 if self.is_complete else self._room(facts.capacities))
        self._index.clear(sum(self._places))
        self._places = [self._index.place(self.backend, lane) for lane in range(ledger.num_kv_shards)]
        page_keys = [self._drops.exclude_deleted(keys) for keys in facts.pages]
        for place, owners in zip(self._places, self._holders, strict=True):
            self._index.add(place, list(set.intersection(*(page_keys[w] for w in owners))))
        listed = [self._drops.exclude_deleted(keys) for keys in facts.states] if self.states.are_needed else []
        for kv_shard, place in enumerate(self._places):
            self._index.add(place, common := self.states.common(kv_shard, listed))
            self._index.add_states(common)
        self._index.root.era = facts.era
        self._forget_queries()

    def _room(self, rooms: Several[int]) -> int:
        """The capacity in pages over all KV shards. ``rooms``: the pages of which each worker can store its part; 0 for
        a worker on loan.
        """
        if not rooms:
            return 0
        lanes_of = Counter(worker for owners in self._holders for worker in owners)
        lanes = [
            min(rooms[w] // lanes_of[w] for w in owners) for owners in self._holders if all(rooms[w] for w in owners)
        ]
        return len(lanes) * min(lanes, default=0)

    def find_loadable(self, sequence: Sequence, beyond: int) -> KvStart | None:
        """Return what a waiting sequence can load, if that is more than ``beyond`` tokens; else None.

        Its last token is always computed, since its logits are needed.
        """
        tokens = len(sequence.tokens)
        if self._found is None or self._found[:3] != (sequence, beyond, tokens):
            self._found = sequence, beyond, tokens, self.find(sequence, beyond)
        return self._found[3]

    def find(self, sequence: Sequence, beyond: int) -> KvStart | None:
        stop = len(sequence.tokens) - 1
        stop = min(stop, self._most) if self._most else stop
        if self._prompts_only and self.states.are_needed:  # states after an answer's tokens differ
            stop = min(stop, len(sequence.prompt))
        if sequence.params.prompt_logprobs is not None or stop <= beyond:
            return None
        if not self.has_pages and not self.is_complete:
            return None
        keys = self.keys_of(sequence, stop)
        lengths = {
            x: self.num_loadable_pages(keys, x) * self.page_size // self.whole_page_tokens * self.whole_page_tokens
            for x in self.locations()
        }
        end_of = self._with_states if self.states.are_needed else self._with_part
        lengths = {place: end_of(sequence, n, place, stop) for place, n in lengths.items()}
        length = max(lengths.values())
        if length < beyond + (
            self.page_size if beyond and not self.is_complete else 1
        ):  # continuing from the pool is cheaper
            return None
        able = tuple(place for place, n in lengths.items() if n == length)
        page_keys = tuple(self.keys_of(sequence, length, parts=True))
        states = (self.states.key_of(sequence, length),) if self.states.are_needed else ()
        return KvStart(length, able, page_keys, state_keys=states)

    def find_shifted(self, sequence: Sequence) -> KvStart | None:
        """Return what a truncated turn can load: pages of its whole conversation, whose K is rotated when loaded.

        Pages that were computed after a truncation are never saved.
        """
        beyond, tokens = -1, len(sequence.turn.original_prompt)
        if self._found is None or self._found[:3] != (sequence, beyond, tokens):
            self._found = sequence, beyond, tokens, self._find_moved(sequence)
        return self._found[3]

    def _find_moved(self, sequence: Sequence) -> KvStart | None:
        stop, page = len(sequence.tokens) - 1, self.page_size
        stop = min(stop, self._most) if self._most else stop
        numbers = range(len(sequence.turn.original_prompt) // page)
        left = [n for n in numbers if not count_tokens(sequence.turn.discarded_ranges, (n + 1) * page, n * page)][
            : stop // page
        ]
        if not left or not self.has_pages:
            return None
        every = self.keys.whole(KeyedTokens(sequence.salt, sequence.turn.original_prompt), (left[-1] + 1) * page)
        keys = [every[n] for n in left]
        pages = {place: self._num_moved(keys, left, place) for place in self.locations()}
        most = max(pages.values()) * page // self.whole_page_tokens * self.whole_page_tokens // page
        if not most:
            return None
        able = tuple(place for place, n in pages.items() if n >= most)
        moved = tuple((n - m) * page for m, n in enumerate(left[:most]))
        return KvStart(most * page, able, tuple(keys[:most]), page_shifts=moved)

    def _num_moved(self, keys: Several[bytes], numbers: Several[int], location: KvLocation) -> int:
        """The number of first pages that are stored for the KV shard of ``location``."""
        both = ((self._kv_shard(location, now), self._kv_shard(location, was)) for now, was in enumerate(numbers))
        return self._index.match_along((self._place_of(now) if now == was else 0 for now, was in both), keys)

    def _with_part(self, sequence: Sequence, whole: int, location: KvLocation, stop: int) -> int:
        """Return the end of the longest stored partial page after its ``whole`` stored tokens."""
        lane, most = self._kv_shard(location, whole // self.page_size), min(stop, whole + self.page_size - 1)
        lengths = range(most, whole, -1) if self._exact and (whole or self.is_complete) else ()
        return next((n for n in lengths if self._has(self.keys.partial(sequence, n), lane)), whole)

    def _with_states(self, sequence: Sequence, whole: int, location: KvLocation, stop: int) -> int:
        """Return the most tokens after which states are stored, and the pages up to there; 0 if there are none."""
        for length in self.states.lengths_up_to(sequence, whole, stop):
            lane, key = self._kv_shard(location, length // self.page_size), self.states.key_of(sequence, length)
            has_part = not length % self.page_size or self._has(self.keys.partial(sequence, length), lane)
            if has_part and self._has(key, location.kv_shard):
                return length
        return 0

    def num_loadable_pages(self, keys: Several[bytes], location: KvLocation) -> int:
        """The number of first pages of ``keys`` that a sequence at ``location`` can load."""
        places = (self._place_of(self._kv_shard(location, number)) for number in range(len(keys)))
        return len(keys) if self.is_complete else self._index.match_along(places, keys)

    def most_loadable(self, keys: Several[bytes], *others: KvLocation) -> tuple[int, tuple[KvLocation, ...]]:
        """Return the most first pages of ``keys`` that a sequence can load, and where; see ``locations``."""
        pages = {location: self.num_loadable_pages(keys, location) for location in self.locations(*others)}
        most = max(pages.values())
        return most, tuple(location for location, n in pages.items() if n == most)

    def locations(self, *others: KvLocation) -> list[KvLocation]:
        """The places where a sequence can begin: ``others`` whose KV shards exist, then the start of each KV shard."""
        num = self._ledger.num_kv_shards
        there = [x for x in others if all(lane < num for lane in (x.kv_shard, *(run.kv_shard for run in x.moved_runs)))]
        return list(dict.fromkeys([*there, *map(KvLocation, range(num))]))

    def _has(self, key: bytes, kv_shard: int) -> bool:
        return self.is_complete or self._index.has(self._place_of(kv_shard), key)

    def _place_of(self, kv_shard: int) -> Place:
        return self._places[kv_shard] if kv_shard < len(self._places) else 0  # a session's may have been removed

    @property
    def has_pages(self) -> bool:
        """True if storage has a page."""
        return any(map(self._index.num_pages, self._places))

    @property
    def stored_keys(self) -> set[bytes]:
        """The keys of all pages that storage has."""
        return self._index.keys(sum(self._places))

    def is_saving(self, number: int) -> bool:
        """Return True while a page of a sequence is being saved."""
        return number in self._saving

    def begin_load(self, sequence: Sequence, wanted: KvStart, spare_s: float = 0.0) -> list[LoadKv]:
        """Begin the load of an admitted sequence. ``spare_s``: seconds for which its first rows will be computed."""
        keys, ops, low = list(wanted.keys), list[LoadKv](), 0
        for moved, alike in groupby(wanted.page_shifts or (0,) * len(keys)):
            stop = low + len(list(alike))
            while low < stop:
                some, first = keys[low : min(stop, low + MAX_PAGES_PER_TRANSFER)], low * self.page_size
                count = min(len(some) * self.page_size, wanted.length - first)
                ops.append(LoadKv(sequence.id, NO_TRANSFER_ID, first, count, some, sequence.location, spare_s, moved))
                low += len(some)
        for key in wanted.state_keys:
            ops.append(LoadKv(sequence.id, NO_TRANSFER_ID, wanted.length, 0, [key], sequence.location))
        self._loading[sequence.id] = SequenceLoad(
            sequence, wanted, len(ops), len(ops) * self._num_workers, wanted.length
        )
        return ops

    def batch_ops(self, running: Several[Sequence]) -> list[SaveKv]:
        """Save pages that running sequences have filled, and snapshots of their states, while they decode.

        With sliding windows nothing is saved before the end, since blocks may be freed at any time. A sequence that
        drops blocks saves its prompt before: later K and V depend on what it has dropped.
        """
        ops = list[SaveKv]()
        for sequence in running:
            if self.states.are_needed and self._may_fill(sequence) and self.states.has_new_snapshots(sequence):
                ops += self.save_states_ops(sequence)
            stop = len(sequence.prompt if sequence.kept.drops_blocks else sequence.tokens)
            length = min(sequence.num_computed_tokens, stop) // self.page_size * self.page_size
            if length > self.num_filled_tokens(sequence) and self._may_fill(sequence):
                self._filled[sequence] = length
                ops += self.save_ops(sequence, length)
        return ops

    def on_leave(self, leaving: Leaving) -> None:
        """Forget which pages and snapshots of a sequence are saved."""
        self.states.forget(leaving.sequence.id)
        self._filled.pop(leaving.sequence, None)

    def on_arrival(self, sequence: Sequence, *, is_new: bool = True) -> None:
        """Forget which pages of a sequence were saved, since it begins anew."""
        self._filled.pop(sequence, None)

    def num_filled_tokens(self, sequence: Sequence) -> int:
        """The number of tokens of a running sequence in pages that are saved as they fill."""
        return self._filled.get(sequence, 0)

    def _may_fill(self, sequence: Sequence) -> bool:
        alone = sequence.turn.discarded_ranges or sequence.do_not_cache  # no other sequence may find its KV
        lacks_kv = sequence.kept.lacks_blocks or sequence.transfer.lacks_kv
        return not (self._most or alone or lacks_kv or sequence.finished)

    def save_ops(self, sequence: Sequence, length: int) -> list[SaveKv]:
        """Save the pages of a sequence's first ``length`` tokens that are not stored. The tokens must be scheduled."""
        if self._prompts_only:
            length = min(length, len(sequence.prompt))
        if self._most:
            length = min(length, self._most)
            if any(self._ledger.block_table(group, sequence.id)[0] for group in range(len(self._ledger.windows))):
                return []  # a window has freed its first blocks
        coming = set[bytes]().union(*(x.keys for x in self._saving.values()))
        keys = self.keys_of(sequence, length, parts=True)
        lanes = [self._kv_shard(sequence.location, number) for number in range(len(keys))]
        missing = [n for n, key in enumerate(keys) if key not in coming and not self._has(key, lanes[n])]
        return self._export(sequence, keys, missing, length)

    def save_states_ops(self, sequence: Sequence) -> list[SaveKv]:
        """Save the snapshots of a sequence that are not stored, each with the page that ends where it does."""
        ops = list[SaveKv]()
        for length in self.states.lengths_of(sequence):
            if self._most and length > self._most:
                continue
            ops += self.save_ops(sequence, length)
            key, lane = self.states.key_of(sequence, length), sequence.location.kv_shard
            coming = set[bytes]().union(*(x.keys for x in self._saving.values()))
            if key not in coming and not self._has(key, lane):
                tag, prompt = self._index.root.tenant_tag(sequence.salt), len(sequence.prompt)
                op = SaveKv(sequence.id, NO_TRANSFER_ID, length, 0, [key], tag, prompt)
                self._begin_saves(sequence, [op], {key: lane})
                self._index.add_states([key])
                ops.append(op)
        return ops

    def save_all_ops(self, sequence: Sequence, length: int, root: bytes) -> tuple[list[bytes], list[SaveKv]]:
        """Save all ``length`` tokens of a preempted sequence, also a partial page, under keys of its own ``root``.

        Returns no keys if a sliding window has freed blocks of it.
        """
        here = all(self._ledger.block_table(group, sequence.id)[0] == 0 for group in range(len(self._ledger.windows)))
        if not here or length > (self._most or length):
            return [], []
        keys, parent = list[bytes](), self._index.root(root, sequence.salt)
        for number in range(-(-length // self.page_size)):
            parent = page_key(parent, number, [number])
            keys.append(parent)
        return keys, self._export(sequence, keys, range(len(keys)), length)

    def _export(self, sequence: Sequence, keys: Several[bytes], numbers: Iterable[int], length: int) -> list[SaveKv]:
        ops, prompt, tag = list[SaveKv](), len(sequence.prompt), self._index.root.tenant_tag(sequence.salt)
        for run in runs_of(numbers):
            some, first = [keys[n] for n in run], run[0] * self.page_size
            count = min(len(some) * self.page_size, length - first)
            ops.append(SaveKv(sequence.id, NO_TRANSFER_ID, first, count, some, tag, prompt))
        self._begin_saves(sequence, ops, {k: self._kv_shard(sequence.location, n) for n, k in enumerate(keys)})
        return ops

    def _begin_saves(self, sequence: Sequence, ops: Several[SaveKv], kv_shards: Mapping[bytes, int]) -> None:
        """Note that ``ops`` save what will be found. ``kv_shards``: where each of their keys is."""
        if not ops:
            return
        keys = {key for op in ops for key in op.keys}
        saving = self._saving.setdefault(sequence.id, SequenceSave(set(), 0))
        saving.keys |= keys
        saving.num_waiting += len(ops)
        for key, kv_shard in kv_shards.items():
            if key in keys:
                self._index.promise(self._places[kv_shard], [key])
        self._drops.on_saved(keys)

    def on_report(self, report: Report) -> TransferResult | None:
        """Process a memory worker's report: it has loaded enough for first rows, or ended a transfer, or pages have
        expired.

        Once all have loaded enough, the sequence may have its first rows; later rows wait for the load's end.
        """
        if isinstance(report, PagesExpired):
            self.remove(report.keys)
        if isinstance(report, LoadReady):
            loading = self._loading[self._moving[report.transfer_id].op.sequence]
            loading.num_not_ready -= 1
            if not loading.num_not_ready:
                loading.sequence.num_computed_tokens = loading.sequence.num_cached_tokens = loading.loadable.length
        return self.on_transfer_done(report) if isinstance(report, TransferDone) else None

    def on_transfer_done(self, report: TransferDone) -> TransferResult | None:
        """Process the end of a transfer. Returns None while others of its sequence are in flight."""
        self.remove(report.evicted)
        moving = self._moving[report.transfer_id]
        moving.num_waiting -= 1
        # A page that one worker misses and another one fails to load is a miss.
        result = max(0, report.num_pages), bool(report.error) and not report.is_miss
        moving.pages, moving.has_failed = min((moving.pages, moving.has_failed), result)
        moving.error = moving.error or report.error
        if moving.num_waiting:
            return None
        del self._moving[report.transfer_id]
        return self._loaded(moving) if isinstance(moving.op, LoadKv) else self._saved(moving)

    def remove(self, keys: Iterable[bytes]) -> None:
        """Make pages unfindable."""
        self._index.drop(sum(self._places), keys)
        self._forget_queries()

    def _forget_queries(self) -> None:
        self._found = self._parted = None

    def delete_ops(self, sequence: int, keys: Several[bytes]) -> list[DeletePages]:
        """Delete pages of ``sequence`` from storage, also those that are being saved."""
        self.remove(keys)
        return self._drops.delete_ops(sequence, keys)

    def retention_ops(self, sequence: Sequence, length: int) -> list[SetRetention]:
        """Set the retention of the pages of a sequence's first ``length`` tokens, and of the states after these."""
        if not (seconds := min(sequence.options.retention_s, MAX_RETENTION_S)):
            return []
        length = min(length, len(sequence.prompt)) if self._prompts_only else length
        states = [key for _, own in self.states.along(sequence, length) for key in own]
        keys = [*dict.fromkeys([*self.keys_of(sequence, length, parts=True), *states])]
        return [
            SetRetention(sequence.id, seconds, keys[low : low + MAX_PAGES_PER_TRANSFER])
            for low in range(0, len(keys), MAX_PAGES_PER_TRANSFER)
        ]

    def roll_back(self, loss: Loss) -> None:
        """Forget all transfers in flight, which will not complete."""
        self._drops.restart()
        self._moving.clear()
        self._saving.clear()
        self._loading.clear()
        self.states.forget_sequences()
        self._index.clear(sum(self._places), ready=False)
        self._forget_queries()

    def reset(self, era: bytes, sequences: Several[Sequence]) -> tuple[SequenceOp, ...]:
        """Make all pages unfindable, also those in flight. Later pages, also of ``sequences``, belong to ``era``.

        Old pages are deleted from storage over several plans, except pages that are being loaded.
        """
        for sequence in sequences:
            sequence.known_keys.forget()
        loading = set[bytes]().union(*((*x.loadable.keys, *x.loadable.state_keys) for x in self._loading.values()))
        saving = set[bytes]().union(*(x.keys for x in self._saving.values()))
        self._drops.pending += sorted((self.stored_keys | saving) - loading)
        self._index.clear(sum(self._places))
        self._index.root.era = era
        self._forget_queries()
        return ()

    def resume(self, ready: ComputeReady) -> None:
        """Replace the known pages, since workers have connected again."""
        self.states.shards = ready.state_shards
        if ready.storage is not None:
            self.sync(ready.storage, ready.holders)

    def begin_round(self, scheduling: Scheduling) -> None:
        """Add ops that delete unfindable pages from storage."""
        scheduling.add_pending_ops(self._drops.next_ops())

    def after_admission(self, scheduling: Scheduling) -> None:
        """Send prefetch hints for pages that waiting sequences will load."""
        if scheduling.waiting or self.hints:
            scheduling.batches[0].ops += self.hints.next_ops([*scheduling.waiting], self._to_load)

    def _to_load(self, sequence: Sequence) -> KvStart | None:
        """Return what a sequence will load. Preempted ones come back soon, and truncated ones begin with their
        session's KV alone.
        """
        if sequence.turn.discarded_ranges or sequence.num_preemptions:
            return None
        return self.find_loadable(sequence, self._cached_tokens_of(sequence))

    def _loaded(self, moving: PageTransfer) -> TransferResult | None:
        op, loading = moving.op, self._loading[moving.op.sequence]
        if moving.pages < len(op.keys):
            valid = 0 if loading.loadable.state_keys else op.first + moving.pages * self.page_size
            had = loading.num_valid_tokens, loading.has_failed
            loading.num_valid_tokens, loading.has_failed = min(had, (valid, moving.has_failed))
            loading.error = loading.error or moving.error
            self.remove([op.keys[moving.pages]])
        loading.num_waiting -= 1
        if loading.num_waiting:
            return None
        del self._loading[op.sequence]
        sequence, valid = loading.sequence, loading.num_valid_tokens
        if loading.num_not_ready or valid < loading.loadable.length:
            if valid != loading.loadable.length:
                valid -= valid % self.whole_page_tokens
            sequence.start_after_load(valid)
        sequence.set_transfer(loading_tokens=0)
        self.num_hit_tokens += 0 if loading.loadable.is_swapped else valid
        return TransferResult(sequence, loading.error, loading.has_failed and not self._recomputes)

    def _saved(self, moving: PageTransfer) -> TransferResult | None:
        op, saving = moving.op, self._saving[moving.op.sequence]
        self._index.confirm(sum(self._places), op.keys[: moving.pages])  # those that were not given up since then
        self._index.drop(sum(self._places), op.keys[moving.pages :], ready=False)
        self._forget_queries()
        saving.error = saving.error or moving.error
        saving.num_waiting -= 1
        if saving.num_waiting:
            return None
        del self._saving[op.sequence]
        return TransferResult(None, saving.error)

    def may_start(self, sequence: Sequence) -> bool:
        """True for every prompt while storage has pages."""
        return True

    def find_starts(self, candidates: Candidates) -> None:
        """Add what can be loaded before hits in the pool, since it is longer."""
        if not candidates.is_settled:
            load = self.find_loadable(candidates.sequence, candidates.num_stored_tokens)
            if load is not None:
                candidates.starts.insert(0, load)
            if self.states.are_needed:
                self._take_snapshot(candidates, load)

    def _take_snapshot(self, candidates: Candidates, load: KvStart | None) -> None:
        """Let a prompt take a snapshot where it leaves stored pages, unless it was asked in an earlier round."""
        sequence = candidates.sequence
        query = sequence, candidates.num_stored_tokens, sequence.num_preemptions
        if query == self._parted:
            return
        self._parted = query
        if self._most or sequence.params.prompt_logprobs is not None or not self.has_pages:
            return
        keys = self.keys_of(sequence, min(len(sequence.tokens) - 1, len(sequence.prompt)))
        pages, _ = self.most_loadable(keys)
        length = pages * self.page_size // self.whole_page_tokens * self.whole_page_tokens
        self.states.take_snapshot(candidates, load, length)

    def on_started(self, candidates: Candidates, start: KvStart | None) -> list[LoadKv]:
        """Begin the load, if the sequence begins with stored pages."""
        sequence = candidates.sequence
        if start is None or not start.is_swapped:
            self.num_queried_tokens += sequence.num_tokens_with_placeholders - sequence.num_computed_tokens
        if start is None or start.source is not None:
            return []
        sequence.set_transfer(loading_tokens=start.length)
        return self.begin_load(sequence, start, self._spare_s(candidates, start))

    @staticmethod
    def _spare_s(candidates: Candidates, load: KvStart) -> float:
        """The seconds for which its first rows after the loaded tokens will be computed.

        0 if they must wait for the load's end: a failed load must not have been scored by sparse attention, and rows
        need the states of all layers.
        """
        sequence = candidates.sequence
        if load.state_keys or sequence.kept.drops_blocks or sequence.params.prompt_logprobs is not None:
            return 0.0
        if candidates.rows.on_prefill_worker:
            return candidates.rows.first_chunk_s
        return candidates.next_chunk_after(load.length) * candidates.rows.token_s

    def extend_plan(self, draft: PlanDraft) -> None:
        """Number the transfers of the plan."""
        draft.batch.ops = self.assign_ids(draft.batch.ops)

    def assign_ids(self, ops: Iterable[SequenceOp]) -> list[SequenceOp]:
        """Return the ops of the next plan with ids for their transfers, in the order of plans."""
        return [self._begin(op) if isinstance(op, Transfer) else op for op in ops]

    def _begin(self, op: Transfer) -> Transfer:
        self._next_id += 1
        op = structs.replace(op, transfer_id=self._next_id)
        self._moving[op.transfer_id] = PageTransfer(op, self._num_workers, len(op.keys))
        return op

    def keys_of(self, sequence: Sequence, length: int, *, parts: bool = False) -> list[bytes]:
        """Return the keys of the whole pages of its first ``length`` tokens; ``parts``: and of a partial last one."""
        keys = self.keys.whole(sequence, length)
        if parts and self._exact and length % self.page_size and (keys or self.is_complete):
            keys.append(self.keys.partial(sequence, length))
        return keys

    def _kv_shard(self, location: KvLocation, number: int) -> int:
        """Return the KV shard of a page."""
        return self._ledger.placement.kv_shard_at(location, number * self.page_size // self._ledger.block_size)
