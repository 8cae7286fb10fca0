"""Dispatches prompts to prefill workers, chunk by chunk. Pure policy: no torch, no I/O; the clock is a parameter."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass, field

from lamina.protocol.control import ComputeReady
from lamina.protocol.step_plan import GRANTS_AHEAD, BindReply, Fork, Free, New, PrefillGrant, SequenceOp, StepPlan

from .feature import Feature, Leaving, Loss, PlanDraft, Scheduling
from .kv_manager.allocator import next_rows
from .kv_manager.prompt_store import PromptCache, fetch_stored
from .prefill_grants import GrantBudget, make_room
from .scheduler_output import Round, ScheduledStep
from .sequence import Sequence
from .slo_admission import SloAdmission
from .starts import Candidates, KvStart, Verdict

NO_STEP = -1


@dataclass
class _PrefixFetch:
    """Tokens that another prefill worker sends, and when they were requested. ``source``: None: memory workers."""

    source: PromptCache | None
    tokens: int
    requested_s: float = math.inf
    loaded_s: float = 0.0  # when memory workers had loaded them


@dataclass
class _PrefillWorkerState:
    index: int
    prompts: deque[Sequence] = field(default_factory=deque)  # in order; those with tokens left to schedule
    loading: dict[Sequence, float] = field(default_factory=dict)  # that follow once memory workers have loaded enough
    prompt_cache: PromptCache | None = None  # None: it keeps only the prompt that it computes
    held_sequence: int = NO_STEP  # the sequence whose prompt it then keeps
    next_step: int = 0
    in_flight: list[Sequence] = field(default_factory=list)  # the sequence of each chunk
    computing: Sequence | None = None  # the sequence whose chunks are computed now
    chunk_began_s: float = 0.0  # when these began
    is_waiting_for_prefix: bool = False  # the previous prompt kept all stages busy until it began


class PrefillDispatcher(Feature):
    """Dispatches prompts to the prefill workers that the Conductor chose when they arrived (scheduler.slo_admission).

    Each worker computes its prompts one after the other, in order of arrival. It computes the tokens whose KV neither
    the memory workers nor its own prompt cache have.

    A chunk is a step of the worker's own batch. Memory workers reserve blocks for it by a PrefillGrant, an op in the
    plan of the batch in which the sequence will decode. At most ``ahead`` chunks of a worker are in flight. So a chunk
    is stored before a sliding window frees its blocks, which happens once the next but one is granted.

    A worker may be a pipeline of processes, each with some of the layers (--prefill-pipeline). A chunk passes all of
    them, and more chunks are in flight (protocol.prefill_stages).
    """

    MAX_PROMPTS_PER_WORKER = 2  # the one under way, and one more, so that the worker never waits

    def __init__(
        self,
        num_workers: int,
        chunk: int,
        first_batch: int,
        slo_admission: SloAdmission | None = None,
        stores: Several[PromptCache] = (),
        ahead: int = GRANTS_AHEAD,
        stored_block: int = 0,
        *,
        bound_stores: Several[BindReply] = (),
        caches_of: Callable[[Several[BindReply]], Several[PromptCache]] | None = None,
        recomputes: bool = False,
    ) -> None:
        """``first_batch``: the number of the first worker's batch; the others follow. ``stores``: their prompt caches;
        empty: they have none. ``ahead``: the limit of chunks in flight for each worker. ``stored_block``: the tokens of
        a block, if workers fetch whole blocks of stored KV from memory workers; 0: they fetch none. ``bound_stores``:
        the workers' stores, for which ``caches_of`` makes prompt caches; None: they stay the same. ``recomputes``:
        workers get no beginning of a prompt from anybody.
        """
        self.stored_block = stored_block
        self.workers = [_PrefillWorkerState(i) for i in range(num_workers)]
        self._worker_of = dict[Sequence, _PrefillWorkerState]()  # who computes the prompt
        self._lenders = dict[Sequence, _PrefixFetch]()  # fetches of prefixes
        # Sequences that workers fetch while they are loaded: when the load began, and its tokens.
        self.overlapped = dict[Sequence, tuple[float, int]]()
        self._chunk, self._recomputes = chunk, recomputes
        self._first_batch, self._ahead = first_batch, ahead
        self.slo_admission = slo_admission or SloAdmission(num_workers)
        self._bound_stores, self._caches_of = bound_stores, caches_of
        self.reset_caches(stores)

    def is_for_prefill_worker(self, sequence: Sequence, known: int = 0) -> bool:
        """Return True if a prefill worker should compute a new sequence's prompt.

        ``known``: its tokens with KV on the memory workers. If the rest is at most one chunk, and others keep their
        SLO, compute workers run it, so that no KV is moved. If prefill workers would compute the known tokens again,
        the rest may be as long as these.
        """
        rest = sequence.num_prefill_tokens - known
        most = max(self._chunk, known) if self._recomputes else self._chunk
        here = rest <= 1 or (known > 0 and rest <= most and self.slo_admission.keeps_slo(rest))
        return bool(self.workers) and not here

    def on_arrival(self, sequence: Sequence, *, is_new: bool = True) -> None:
        """Reserve a worker for a new sequence, if prompts need reservations."""
        if self.slo_admission.routes_prompts and (
            not self.workers
            or self.is_for_prefill_worker(sequence, self.slo_admission.known.cached_tokens_of(sequence))
        ):
            self.slo_admission.reserve(sequence)

    def skip(self, sequence: Sequence) -> None:
        """Record that compute workers run the prompt of a new sequence."""
        if self.workers:
            self.slo_admission.on_decode_without_prefill(sequence)

    def waits_for_own_worker(self, sequence: Sequence) -> bool:
        """Return True if a sequence waits only for its own worker, so that it does not hold up later ones."""
        return self.has_free_worker and self.slo_admission.has_reservation(sequence) and not self.can_accept(sequence)

    @property
    def has_free_worker(self) -> bool:
        """True if some worker can take a prompt."""
        return any(map(self._has_room, self.workers))

    def _has_room(self, worker: _PrefillWorkerState) -> bool:
        return len(worker.prompts) + len(worker.loading) < self.MAX_PROMPTS_PER_WORKER

    def can_accept(self, sequence: Sequence) -> bool:
        """Return True if the worker of a sequence can take its prompt."""
        return self._has_room(self.workers[self.slo_admission.reserve(sequence)])

    def takes_stored(self, sequence: Sequence, start: KvStart, otherwise: int) -> bool:
        """Return whether a sequence begins with ``start`` rather than with ``otherwise`` tokens that its worker has."""
        fetched = start.length - min(start.length, self.num_cached_tokens(sequence, start.length))
        loaded = start.length if start.source is None else 0
        return self.slo_admission.stored_pays(sequence, otherwise, start.length, loaded, fetched)

    def num_cached_tokens(self, sequence: Sequence, most: int) -> int:
        """Return how many first tokens its worker has, or gets from another worker; at most ``most``."""
        store = self.workers[self.slo_admission.reserve(sequence)].prompt_cache
        own = store.num_cached_tokens(sequence, most) if store else 0
        lender = self._prefix_source(sequence, most)
        return max(own, lender.num_sendable_tokens(sequence, most)) if lender else own

    def _prefix_source(self, sequence: Sequence, most: int) -> PromptCache | None:
        """Return the prompt cache that sends the prefix of a sequence, if the Conductor chose a transfer.

        It is the chosen worker's cache, unless another one has more by now.
        """
        source = self.slo_admission.prefix_source(sequence)
        if source < 0:
            return None
        order = sorted(self.workers, key=lambda w: w.index != source)
        stores = [
            w.prompt_cache
            for w in order
            if w.prompt_cache is not None and w.index != self.slo_admission.reserve(sequence)
        ]
        return max(stores, key=lambda store: store.num_sendable_tokens(sequence, most), default=None)

    def will_be_cached(self, sequence: Sequence, known: int) -> bool:
        """Return True if an earlier prompt of its worker will give it more than ``known`` cached tokens."""
        worker = self.workers[self.slo_admission.reserve(sequence)]
        before = [*worker.in_flight, *worker.prompts]
        return worker.prompt_cache is not None and worker.prompt_cache.will_cache_more(sequence, known, before)

    def assign(self, sequence: Sequence) -> None:
        """Queue a started sequence at its worker, which has all tokens that have KV on the memory workers."""
        worker = self._begin(sequence)
        worker.prompts.append(sequence)
        cache, begun = worker.prompt_cache, sequence.num_computed_tokens
        moved = begun
        lender: PromptCache | None = None
        if cache:
            moved = begun - cache.num_cached_tokens(sequence, begun)
            lender = self._prefix_source(sequence, begun) if moved else None
            if lender is not None and lender.num_sendable_tokens(sequence, begun) < begun:
                lender = None  # memory workers have more
            cache.reserve(sequence, begun, lender)
        if moved:
            self._lenders[sequence] = _PrefixFetch(lender, moved)

    def assign_when_loaded(self, sequence: Sequence) -> None:
        """Let a started sequence wait until enough of its stored tokens is loaded, and then queue it at its worker."""
        self._begin(sequence).loading[sequence] = self.slo_admission.now_s()

    def _begin(self, sequence: Sequence) -> _PrefillWorkerState:
        """Let no compute worker run the sequence. Returns its worker."""
        sequence.set_transfer(on_side_worker=True)
        worker = self._worker_of[sequence] = self.workers[self.slo_admission.reserve(sequence)]
        return worker

    def begin_round(self, scheduling: Scheduling) -> None:
        """Queue sequences at their workers of which enough is loaded: the rest follows, layer by layer."""
        for worker in self.workers:
            for sequence in [s for s in worker.loading if 0 < s.num_computed_tokens == s.transfer.loading_tokens]:
                self.overlapped[sequence] = worker.loading.pop(sequence), sequence.transfer.loading_tokens
                self.assign(sequence)

    def on_loaded(self, sequence: Sequence) -> tuple[()]:
        """Queue a sequence whose stored tokens are loaded at its worker, unless it is there already."""
        if (early := self.overlapped.pop(sequence, None)) is not None:
            self._on_rest_loaded(sequence, *early)
            return ()
        worker = self._worker_of.get(sequence)
        if worker is not None and (began := worker.loading.pop(sequence, None)) is not None:
            if sequence.num_computed_tokens:
                self.slo_admission.on_stored_loaded(sequence.num_computed_tokens, self.slo_admission.now_s() - began)
            if not sequence.finished:
                self.assign(sequence)
        return ()

    def _on_rest_loaded(self, sequence: Sequence, began_s: float, tokens: int) -> None:
        """End an overlapped load. If that has failed, compute workers run the rest, after the chunks in flight."""
        now_s = self.slo_admission.now_s()
        if sequence.num_cached_tokens >= tokens:
            self.slo_admission.on_stored_loaded(tokens, now_s - began_s)
            if (lent := self._lenders.get(sequence)) is not None:
                lent.loaded_s = now_s
        elif (worker := self._worker_of.get(sequence)) is not None and sequence.transfer.unstored_chunks:
            self._withdraw(sequence, worker)
        elif worker is not None:
            self.leave_to_compute_workers(sequence)

    def _withdraw(self, sequence: Sequence, worker: _PrefillWorkerState) -> None:
        """Start no more chunks of a sequence, and let no other one use what is computed of it."""
        self._return(sequence)
        if sequence in worker.prompts:
            worker.prompts.remove(sequence)
        if worker.prompt_cache:
            worker.prompt_cache.on_dropped(sequence)

    def leave_to_compute_workers(self, sequence: Sequence) -> None:
        """Let compute workers run the rest of a prompt."""
        self.remove(sequence)
        if not sequence.finished:
            self.skip(sequence)

    def find_starts(self, candidates: Candidates) -> None:
        """Let a sequence wait for its own worker, without holding up others."""
        sequence = candidates.sequence
        if self.workers:
            cached = self.slo_admission.known.cached_tokens_of(sequence)
            candidates.rows.prefers_prefill_worker = self.is_for_prefill_worker(sequence, cached)
        if self.waits_for_own_worker(sequence):
            candidates.verdict = Verdict.STEPS_ASIDE

    def on_leave(self, leaving: Leaving) -> None:
        """Remove the sequence from its worker, if it has one."""
        self.remove(leaving.sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that has no chunk in flight."""
        self.slo_admission.remove(sequence)
        self._return(sequence)
        self.overlapped.pop(sequence, None)
        if (worker := self._worker_of.pop(sequence, None)) is not None:
            worker.loading.pop(sequence, None)
            self._withdraw(sequence, worker)
            if worker.computing is sequence:
                self._start_next(worker)
            sequence.set_transfer(on_side_worker=False)

    def roll_back(self, loss: Loss) -> None:
        """Remove all prompts from the workers, and those of finished sequences for good. Step numbers only grow."""
        self._worker_of.clear()
        self._lenders.clear()
        self.overlapped.clear()
        for worker in self.workers:
            worker.prompts.clear()
            worker.loading.clear()
            worker.in_flight.clear()
            worker.held_sequence, worker.computing = NO_STEP, None
            if worker.prompt_cache:
                worker.prompt_cache.reset()
        for sequence in (s for s in loss.sequences if s.finished):
            self.slo_admission.remove(sequence)
        self.slo_admission.reset_prefill()

    def reset_caches(self, stores: Several[PromptCache]) -> None:
        """Set new, empty prompt caches after ``roll_back``; empty: workers have none."""
        for worker in self.workers:
            worker.prompt_cache = stores[worker.index] if stores else None
        self.slo_admission.keeps_prompts = bool(stores)

    def resume(self, ready: ComputeReady) -> None:
        """Set new prompt caches if stores have changed: the replacement of a lost worker may have another size."""
        self.slo_admission.begin_epoch(ready)
        if self._caches_of is not None and ready.prefill_stores != self._bound_stores:
            self._bound_stores = ready.prefill_stores
            self.reset_caches(self._caches_of(self._bound_stores))

    def extend_plan(self, draft: PlanDraft) -> None:
        """Start chunks of the batch's sequences, unless a running sequence waits for blocks.

        The plan gets a grant for each chunk, as far as there are blocks; retained KV is evicted for them.
        """
        for sequence in draft.picked:
            if sequence.num_computed_tokens == sequence.num_cached_tokens:
                self.slo_admission.on_inline_prefill_started(sequence)
        running, ops = draft.batch.running, draft.batch.ops
        if not self.workers or any(s.is_schedulable and s not in draft.picked for s in running):
            return
        budget, epoch = None, 0
        forked = {op.sequence for op in ops if isinstance(op, Fork)}  # their sources must exist first
        for sequence in (s for s in running if s.id not in forked):
            while (grant := self.next_grant(sequence)) is not None and not sequence.finished:
                if budget is None:
                    budget, epoch = GrantBudget(draft.accounting, ops, next_rows(draft.picked)), draft.build().epoch
                at = len(ops)
                ops.append(grant)
                if not budget.try_reserve(grant) and not make_room(draft):
                    del ops[at]
                    return
                draft.side_steps.append(self.begin_chunk(sequence, grant, epoch))

    def next_grant(self, sequence: Sequence) -> PrefillGrant | None:
        """Return a grant for the next chunk of ``sequence``, if its worker can take one."""
        if (worker := self._worker_of.get(sequence)) is None:
            return None
        if len(worker.in_flight) >= self._ahead or not worker.prompts or worker.prompts[0] is not sequence:
            return None
        stop = min(sequence.num_prefill_tokens, sequence.next_step_end)
        lent = self._lenders.get(sequence)
        begins = lent is not None and lent.source is None and lent.requested_s == math.inf
        return PrefillGrant(
            sequence.id,
            sequence.num_computed_tokens,
            min(self._chunk, stop - sequence.num_computed_tokens),
            worker.index,
            worker.next_step,
            sequence.location,
            lent.tokens if lent is not None and begins else 0,
        )

    def begin_chunk(self, sequence: Sequence, grant: PrefillGrant, epoch: int = 0) -> ScheduledStep:
        """Return the worker's step for a grant, in ``epoch``."""
        worker = self.workers[grant.worker]
        batch, ops = self._first_batch + worker.index, self._ops(worker, sequence)
        plan = StepPlan(epoch=epoch, batch=batch, step=grant.step, ops=ops, rows=[grant.rows])
        if worker.prompt_cache:
            worker.prompt_cache.apply(plan)
        if (lent := self._lenders.get(sequence)) is not None and lent.requested_s == math.inf:  # with its first chunk
            lent.requested_s = self.slo_admission.now_s()
        stop = grant.first + grant.count
        is_last, draws = stop == sequence.num_prefill_tokens, list[Sequence]()
        if stop == sequence.num_tokens_with_placeholders:
            draws.append(sequence)
        step = ScheduledStep(plan, [sequence], draws, worker.index)
        worker.next_step += 1
        worker.in_flight.append(sequence)
        if worker.computing is None:
            self._start_next(worker)
        sequence.num_computed_tokens += grant.count
        sequence.set_transfer(unstored_chunks=sequence.transfer.unstored_chunks + 1)
        sequence.num_output_placeholders += len(draws)
        if is_last:
            worker.prompts.popleft()
        return step

    def _ops(self, worker: _PrefillWorkerState, sequence: Sequence) -> list[SequenceOp]:
        """Return the ops of the worker's next plan, for a chunk of a sequence."""
        if worker.prompt_cache:
            return worker.prompt_cache.begin_ops(sequence)
        before, worker.held_sequence = worker.held_sequence, sequence.id
        if before == sequence.id:
            return []
        begun = sequence.num_computed_tokens
        fetch = [fetch_stored(sequence, 0, begun)] if begun else []
        return [*([] if before == NO_STEP else [Free(before)]), New(sequence.id), *fetch]

    def reset(self, era: bytes, sequences: Several[Sequence]) -> tuple[SequenceOp, ...]:
        """Drop the KV of earlier prompts on prefill workers, so that no later prompt uses it."""
        for worker in self.workers:
            if worker.prompt_cache:
                worker.prompt_cache.invalidate()
        return ()

    def on_step_done(self, step: ScheduledStep, done: Round | None = None) -> None:
        """A worker's chunk is stored, or a step of compute workers has sampled tokens."""
        if step.side_worker is not None:
            self.on_chunk_stored(step, step.side_worker)
        else:
            self.slo_admission.on_inline_sampled(step.sampled_sequences)

    def on_chunk_stored(self, step: ScheduledStep, worker: int) -> None:
        """Record that the memory workers have stored the K and V of ``step`` from ``worker``."""
        load = self.workers[worker]
        load.in_flight.pop(0)  # chunks complete in order
        (sequence,) = step.sequences
        if lent := self._return(sequence):
            ahead_s = max(0.0, load.chunk_began_s - lent.requested_s)
            loaded_s = math.inf if sequence in self.overlapped else lent.loaded_s
            loading_s = min(step.fetch_s, max(0.0, loaded_s - load.chunk_began_s)) if lent.source is None else None
            self.slo_admission.on_prefix_fetched(sequence, lent.tokens, step.fetch_s, ahead_s, loading_s)
        sequence.set_transfer(unstored_chunks=sequence.transfer.unstored_chunks - 1)
        ends = not sequence.transfer.unstored_chunks and sequence not in load.prompts
        if step.sampled_sequences or (ends and sequence.kept.drops_blocks):
            part = 1.0 if load.is_waiting_for_prefix else self.slo_admission.stage_share(sequence)
            self.slo_admission.on_prefill_done(sequence, load.chunk_began_s, part)
            if load.prompt_cache:
                load.prompt_cache.on_computed(sequence)
            self._start_next(load, follows=True)
            self._worker_of.pop(sequence)
            sequence.set_transfer(on_side_worker=False)
        elif ends:  # its load has failed
            self.leave_to_compute_workers(sequence)

    def _return(self, sequence: Sequence) -> _PrefixFetch | None:
        """End the fetch of a sequence's prefix. Returns it, if there was one."""
        lent = self._lenders.pop(sequence, None)
        if lent is not None and lent.source is not None:
            lent.source.on_sent(sequence)
        return lent

    def _start_next(self, worker: _PrefillWorkerState, *, follows: bool = False) -> None:
        """Let the worker continue with the next chunk in flight, if there is one."""
        worker.computing, worker.is_waiting_for_prefix = worker.in_flight[0] if worker.in_flight else None, follows
        if worker.computing is not None:
            worker.chunk_began_s = self.slo_admission.on_prefill_started(worker.computing)
