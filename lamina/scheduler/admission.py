"""Which waiting sequences join which batch, where they begin, and what gives way to them. Pure policy: no torch, no
I/O, no clock.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence as Several
from dataclasses import dataclass

from lamina.protocol.blocks.extent_after_op import sequences_of_op
from lamina.protocol.kv_placement import KvLocation
from lamina.protocol.step_plan import Fork

from .batch import Batch, ChunkPolicy
from .conductor.decision_log import DecodePlacement
from .feature_table import FeatureTable
from .kv_manager.allocator import Allocation, KvAllocator, subtract
from .kv_manager.block_accounting import BlockAccounting
from .kv_manager.offload_index import OffloadIndex
from .kv_manager.prefetch import LoadableKv
from .kv_manager.prefix_cache import PrefixCache, PrefixHit
from .kv_manager.session_cache import SessionCache
from .kv_manager.swap import SwapPolicy
from .prefill_dispatch import PrefillDispatcher
from .sequence import ReferenceSequence, Sequence
from .sessions.session_table import NOWHERE, POOL

MAX_AFFINITY_KEYS = 1 << 14  # kin whose last place is known
WAIT_FOR_TRANSFER: list[LoadableKv | PrefixHit | None] = [None, None]  # waits for a transfer


@dataclass
class _RoundBudget:
    """What a round has for newcomers: by batch, the prompt tokens that its chunk still takes, and what its attention
    reads; and the blocks that are left.
    """

    batches: Several[Batch]
    budgets: list[int]
    loads: list[int]
    left: list[int]


class Admission:
    """Admits. ``max_num_seqs``: that run at once."""

    def __init__(
        self,
        accounting: BlockAccounting,
        allocator: KvAllocator,
        cuts: ChunkPolicy,
        max_num_seqs: int,
        features: FeatureTable,
    ) -> None:
        self._accounting, self._allocator, self._chunk_policy = accounting, allocator, cuts
        self._max_num_seqs = max_num_seqs
        self._prefill = features.get(PrefillDispatcher) or PrefillDispatcher(0, cuts.chunk, 0)
        self._prefix_cache = features.get(PrefixCache) or PrefixCache(accounting, 0)
        self._offload_index, self._swap = features.get(OffloadIndex), features.get(SwapPolicy)
        self._session_cache = features.get(SessionCache)
        self._next_id = 0
        self._affinity = OrderedDict[
            bytes, KvLocation
        ]()  # where each has begun last, the one that did so first before others

    def next_sequence_id(self) -> int:
        """Of a new sequence: no other one has had it."""
        self._next_id += 1
        return self._next_id - 1

    def admit(self, waiting: deque[Sequence], batches: Several[Batch]) -> None:
        """Deal waiting sequences to the batches while there is room for all of their known tokens; the first sequence
        without room holds up the sequences behind it, so that none starves; a shadow holds up none. Each goes to the
        batch that reads least among the batches whose next chunk has room for its tokens: so all chunks are filled.
        Blocks of sequences that have ended or were preempted count from the next round on.
        """
        running = _running(batches)
        if running and waiting and not waiting[0].is_hidden and self._reject_if_too_long(waiting[0]):
            return
        wanted = [self._chunk_policy.rows_of_batch(batch) for batch in batches]
        budgets = [self._chunk_policy.chunk - sum(c for c in w.values() if c > 1) for w in wanted]
        left = self._allocator.free_after(running, {s: c for w in wanted for s, c in w.items()})
        here = _RoundBudget(batches, budgets, [b.load for b in batches], left)
        aside = list[Sequence]()  # they wait for KV that others load
        while waiting and len(_running(batches)) < self._max_num_seqs:
            begins = self._begin(waiting[0], here)
            if begins is None and not waiting[0].is_hidden:
                break
            sequence = waiting.popleft()
            if not begins:
                aside.append(sequence)
        waiting.extendleft(reversed(aside))

    def _begin(self, sequence: Sequence, here: _RoundBudget) -> bool | None:
        """Have the first of the waiting sequences join a batch, if it can. False: it waits on, and those behind it need
        not wait for it; None: it does not fit.
        """
        if self._prefill.waits_for_own_worker(sequence):
            return False
        ways = self._candidate_starts(sequence, here.batches, alone=not _running(here.batches))
        if not ways:
            return None
        loads_some = isinstance(ways[0], LoadableKv)
        hit = next((way for way in ways if isinstance(way, PrefixHit)), None)
        elsewhere = self._prefill.is_for_prefill_worker(sequence, hit.length if hit else 0)
        if ways == WAIT_FOR_TRANSFER or (elsewhere and self._will_be_cached(sequence, hit)):
            return False
        if elsewhere:
            hit = self._common_hit(sequence, hit)
            ways = [hit, None] if hit else [None]
        begun = hit.length if hit else 0
        counts = [
            self._chunk_policy.next_chunk(sequence.num_tokens_with_placeholders - begun, budget, begun)
            for budget in here.budgets
        ]
        able = [i for i, count in enumerate(counts) if loads_some or count > 0]
        if isinstance(sequence, ReferenceSequence):
            able = [i for i in able if sequence.target in here.batches[i].running]
        if elsewhere and not self._prefill.can_accept(sequence):
            return False if self._prefill.has_free_worker else None
        if not able or sequence.num_output_placeholders:
            return None  # a preempted one whose last token is still being drawn waits
        to = min(able, key=here.loads.__getitem__)
        for way in ways:
            fit, here.left = self._evict_for(here.batches, here.batches[to], sequence, way, here.left)
            if fit is not None:
                break
        else:
            return None
        here.left = subtract(here.left, fit.blocks)
        is_logged = self._prefill.slo_admission.decision_log is not None and not sequence.is_hidden
        seat = (
            DecodePlacement(to, tuple(here.loads), fit.location, self._log_placement(sequence, fit), here.left)
            if is_logged
            else None
        )
        here.loads[to] += sequence.num_tokens_with_placeholders
        self._join(here.batches, here.batches[to], sequence, fit)
        if seat is not None:
            self._prefill.slo_admission.on_placed(sequence, seat, by_prefill_worker=elsewhere)
        if elsewhere:
            self._prefill.assign(sequence)
            return True
        self._prefill.skip(sequence)
        if not sequence.num_loading_tokens:
            missing = sequence.num_tokens_with_placeholders - sequence.num_computed_tokens
            here.budgets[to] -= self._chunk_policy.next_chunk(missing, here.budgets[to], sequence.num_computed_tokens)
        return True

    def _reject_if_too_long(self, first: Sequence) -> bool:
        """Whether the first one that waits, and so all behind it, surely wait on, while others run: a quick look."""
        plain = (
            self._offload_index is None
            and self._swap is None
            and not first.discarded_ranges
            and not self._prefix_cache.num_retained
        )
        return plain and not self._prefix_cache.lookup(first) and self._allocator.can_never_fit(first)

    def _candidate_starts(
        self, sequence: Sequence, batches: Several[Batch], *, alone: bool
    ) -> list[LoadableKv | PrefixHit | None]:
        """The stored tokens that a waiting sequence may begin with, the best first. An empty list: it waits, and so do
        all behind it; WAIT_FOR_TRANSFER: it waits for a transfer, and the others do not. ``alone``: nothing runs.
        """
        if self._swap and self._swap.is_saving(sequence):
            return WAIT_FOR_TRANSFER
        if self._swap and (own := self._swap.find_loadable(sequence)) is not None:
            return [own, None] if alone else [own]
        if sequence.discarded_ranges:
            return self._truncated_starts(sequence, batches)
        beginnings = self._prefix_cache.lookup(sequence)
        hit = self._prefix_cache.longest_cached(beginnings)
        coming = self._prefix_cache.pending_match(beginnings, hit)
        if coming is not None and not self._prefill.is_for_prefill_worker(sequence, beginnings[-1].length):
            return WAIT_FOR_TRANSFER if coming.num_loading_tokens or coming.prefill_worker is not None else []
        load = self._offload_index.find_loadable(sequence, hit.length if hit else 0) if self._offload_index else None
        return [way for way in (load, hit) if way is not None] + [None]

    def _will_be_cached(self, sequence: Sequence, hit: PrefixHit | None) -> bool:
        """Whether one that a prefill worker computes waits for a prompt that begins alike, with which it may begin."""
        return self._prefix_cache.num_shared_tokens(sequence) > 0 and self._prefill.will_be_cached(
            sequence, hit.length if hit else 0
        )

    def _common_hit(self, sequence: Sequence, hit: PrefixHit | None) -> PrefixHit | None:
        """Of a sequence that a prefill worker computes: as much of ``hit`` as this one has too."""
        length = self._prefill.num_cached_tokens(sequence, hit.length) if hit else 0
        if not length:
            return None
        both = self._prefix_cache.longest_cached([x for x in self._prefix_cache.lookup(sequence) if x.length <= length])
        return both if both and both.length == length else None

    def _truncated_starts(self, sequence: Sequence, batches: Several[Batch]) -> list[LoadableKv | PrefixHit | None]:
        """Of a truncated sequence: the leaf of its session alone, or pages that the session had saved. The leaf may
        have to be shifted first, in a round in which no other operation touches it.
        """
        session = sequence.session
        leaf = session.retained_sequence if session is not None else None
        if leaf is not None and any(leaf in sequences_of_op(op) for batch in batches for op in batch.ops):
            return WAIT_FOR_TRANSFER
        shift = self._session_cache.shift_op(sequence) if self._session_cache else None
        if shift is not None:
            batches[0].ops.append(shift)
            return WAIT_FOR_TRANSFER
        alike = session is not None and session.discarded_ranges == sequence.discarded_ranges
        hit = self._prefix_cache.match_session(sequence) if alike else None
        load = (
            self._offload_index.find_shifted(sequence)
            if self._offload_index and session is not None and hit is None
            else None
        )
        return [way for way in (load, hit) if way is not None] + [None]

    def _log_placement(self, sequence: Sequence, fit: Allocation) -> str:
        """Why it begins there."""
        if fit.start is not None:
            return "its beginning lies there" if isinstance(fit.start, PrefixHit) else "its beginning is loaded there"
        near_affinity = bool(sequence.affinity_key) and self._affinity.get(sequence.affinity_key) == fit.location
        return "beside its kin" if near_affinity else "so all have their parts"

    def _join(self, batches: Several[Batch], batch: Batch, sequence: Sequence, fit: Allocation) -> None:
        hit = fit.start if isinstance(fit.start, PrefixHit) else None
        load = fit.start if isinstance(fit.start, LoadableKv) else None
        sequence.id, sequence.location = self.next_sequence_id(), fit.location
        sequence.num_computed_tokens = sequence.num_cached_tokens = hit.length if hit else 0
        self._remember(sequence)
        op = self._prefix_cache.start_op(sequence, hit)
        (batches[0] if hit else batch).ops.append(op)  # before its source may go, in another batch's plan
        batch.running.append(sequence)
        own = load is not None and load.is_swapped
        if sequence.session is not None and not sequence.num_preemptions:
            tier = POOL if hit else self._offload_index.backend if self._offload_index and load else NOWHERE
            self._prefix_cache.sessions.on_turn_began(sequence.session, tier)
        if self._swap and not own:
            batch.ops += self._swap.drop(sequence)
        if self._offload_index and not own:
            self._offload_index.num_queried_tokens += (
                sequence.num_tokens_with_placeholders - sequence.num_computed_tokens
            )
        if self._offload_index and load:
            sequence.num_loading_tokens = load.length
            batch.ops += self._offload_index.begin_load(sequence, load, self._slack_s(sequence, load))

    def _remember(self, sequence: Sequence) -> None:
        """Remember where the next ones of its kin are to begin."""
        if sequence.affinity_key:
            self._affinity[sequence.affinity_key] = sequence.location
            self._affinity.move_to_end(sequence.affinity_key)
            if len(self._affinity) > MAX_AFFINITY_KEYS:
                self._affinity.popitem(last=False)

    def _slack_s(self, sequence: Sequence, load: LoadableKv) -> float:
        """Seconds for which its first rows behind a load will be computed; 0 where they wait for its end: nothing is
        known yet, they are not this batch's, or they score its prompt, and no load that fails may have been scored.
        """
        needs_own_start = sequence.evicts_kv or sequence.prefill_worker is not None
        if self._swap is None or needs_own_start or sequence.params.prompt_logprobs is not None:
            return 0.0
        missing = sequence.num_tokens_with_placeholders - load.length
        return self._swap.prefill_estimate_s(
            self._chunk_policy.next_chunk(missing, self._chunk_policy.chunk, load.length)
        )

    def _evict_for(
        self,
        batches: Several[Batch],
        batch: Batch,
        sequence: Sequence,
        hit: PrefixHit | LoadableKv | None,
        left: list[int],
    ) -> tuple[Allocation | None, list[int]]:
        """Where a waiting sequence of ``batch`` can begin, and the blocks left before it does. Retained ones give way,
        the least recently used first, if they suffice; so all do where nothing runs, since what they share counts as
        free in the next round only. The source of its hit stays, and so do those of this round's forks, which share.
        """
        running, gone, more = _running(batches), list[int](), left
        sources = {op.source for each in batches for op in each.ops if isinstance(op, Fork)}
        sources |= {hit.source} if isinstance(hit, PrefixHit) else set()
        oldest = (n for n in self._prefix_cache.eviction_order if n not in sources)
        affinity = self._affinity.get(sequence.affinity_key) if sequence.affinity_key else None
        while (fit := self._allocator.allocate(sequence, hit, more, batch.running, running, affinity)) is None:
            number = next(oldest, None)
            if number is None:
                break
            more = [n + own for n, own in zip(more, self._accounting.exclusive_blocks(number), strict=True)]
            gone.append(number)
        if fit is None and (running or hit is not None):
            return None, left
        batches[0].ops += [self._prefix_cache.evict(number) for number in gone]
        return fit, more


def _running(batches: Several[Batch]) -> list[Sequence]:
    return [s for b in batches for s in b.running]
