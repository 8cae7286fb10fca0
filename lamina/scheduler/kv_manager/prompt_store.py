"""The prompt caches of prefill workers, as the driver manages them. Pure policy: no torch, no I/O, no clock."""

from __future__ import annotations

from collections.abc import Container, Iterable
from collections.abc import Sequence as Several
from typing import NamedTuple

from lamina.protocol.blocks.block_tables import BlockTables
from lamina.protocol.kv_placement import FIRST_LOCATION
from lamina.protocol.step_plan import MEMORY_WORKERS, FetchPrefix, Fork, Free, New, SequenceOp, StepPlan, SurvivingKv
from lamina.scheduler.prefix_index import PREFILL, Holding, PageKeys, PrefixIndex
from lamina.scheduler.sequence import Sequence


class _CachedPrompt(NamedTuple):
    """The first ``length`` tokens of a kept prompt."""

    number: int
    length: int


NO_PROMPT = _CachedPrompt(-1, 0)


class _ComputingPrompt(NamedTuple):
    """The prompt that is being computed. ``keep``: later prompts may use it."""

    sequence: Sequence
    number: int
    keys: list[bytes]
    keep: bool


def fetch_stored(sequence: Sequence, first: int, stop: int) -> FetchPrefix:
    """Return the op by which a prefill worker gets tokens ``first .. stop`` of a sequence from memory workers."""
    return FetchPrefix(sequence.id, first, stop - first, MEMORY_WORKERS, sequence.id, sequence.location)


class PromptCache:
    """The K and V of a prefill worker's current prompt, and of earlier prompts while there is room.

    A prefix that two prompts share is computed once. Prompts whose pages other workers have, too, are evicted first,
    then the least recently used. Returned ops are for the worker's next plan.
    """

    def __init__(
        self,
        worker: int,
        index: PrefixIndex,
        keys: PageKeys,
        accounting: BlockTables,
        room: Several[int],
    ) -> None:
        """``accounting``: the worker's block tables. ``room``: blocks, by layer group, that cached prompts never take.

        They are for the current prompt, and for the first chunk of the next one, whose plan evicts others.
        """
        self._worker, self._place, self._index, self._keys = worker, index.place(PREFILL, worker), index, keys
        self._accounting = accounting
        self._max_cached = [n - r for n, r in zip(accounting.num_blocks, room, strict=True)]
        self._cached = index.holdings(self._place)  # those that are whole, the least recently used first
        self._sources = dict[int, int]()  # prompt -> the kept one with whose KV it is to begin
        self._fetches = dict[int, FetchPrefix]()  # of prompts that are to begin with KV of other workers
        self._under_way = set[int]()  # begun, and not whole yet, although some are kept by what is planned
        self._computing: _ComputingPrompt | None = None
        self._ops: list[SequenceOp] = []

    def num_cached_tokens(self, sequence: Sequence, most: int) -> int:
        """The number of cached tokens of a sequence, at most ``most``."""
        return self._match(sequence, most).length

    def will_cache_more(self, sequence: Sequence, most: int, others: Iterable[Sequence]) -> bool:
        """Return True if one of ``others``, which will be computed, shares more pages than are cached of ``most``."""
        keys, kept = self._prompt_keys(sequence), self.num_cached_tokens(sequence, most) // self._keys.page_size
        return kept < min(len(keys), (sequence.num_tokens_with_placeholders - 1) // self._keys.page_size) and any(
            self._prompt_keys(other)[kept : kept + 1] == keys[kept : kept + 1] for other in others
        )

    def num_sendable_tokens(self, sequence: Sequence, most: int) -> int:
        """Return how many cached tokens can be sent to another worker now."""
        return 0 if any(self._accounting.windows) else self._match(sequence, most, self._under_way).length

    def _prompt_keys(self, sequence: Sequence) -> list[bytes]:
        if sequence.turn.discarded_ranges:
            return []  # others with these tokens have other KV
        return self._keys.whole(sequence, min(len(sequence.prompt), sequence.num_prefill_tokens))

    def reserve(self, sequence: Sequence, length: int, lender: PromptCache | None = None) -> None:
        """Reserve the first ``length`` tokens for a started sequence.

        If they are more than ``num_cached_tokens`` of this cache, ``lender`` sends the rest, which has
        ``num_sendable_tokens``; None: memory workers send it, from the sequence itself.
        """
        own = self._match(sequence, length)
        if own.length:
            self._sources[sequence.id] = own.number
        if lender is None and own.length < length:
            self._fetches[sequence.id] = fetch_stored(sequence, own.length, length)
        if lender is not None:
            source = lender._reserve_for_send(sequence, length)
            self._fetches[sequence.id] = FetchPrefix(
                sequence.id, own.length, length - own.length, lender._worker, source
            )

    def _reserve_for_send(self, sequence: Sequence, length: int) -> int:
        """Return the sequence that has these first tokens. They stay until ``on_sent``."""
        self._sources[sequence.id] = self._match(sequence, length, self._under_way).number
        return self._sources[sequence.id]

    def on_sent(self, sequence: Sequence) -> None:
        """Release what was reserved for another worker: it has received it, or does not need it any more."""
        if (source := self._sources.pop(sequence.id, None)) is not None:
            self._ops += self._touch(source)

    def begin_ops(self, sequence: Sequence) -> list[SequenceOp]:
        """The ops before the first chunk of a sequence; none before later chunks."""
        if self._computing is not None and self._computing.number == sequence.id:
            return []
        self._cache_or_free_computed()
        ops, self._ops = self._ops, []
        source, fetch = self._sources.pop(sequence.id, None), self._fetches.pop(sequence.id, None)
        if source is None:
            ops.append(New(sequence.id))
        else:
            ops.append(Fork(sequence.id, source, fetch.first if fetch else sequence.num_computed_tokens))
        if fetch is not None:
            ops.append(fetch)
        if source is not None:
            ops += self._touch(source)
        self._computing = _ComputingPrompt(
            sequence, sequence.id, self._prompt_keys(sequence), keep=not sequence.do_not_cache
        )
        self._under_way.add(sequence.id)
        return ops

    def apply(self, plan: StepPlan) -> None:
        """Apply the worker's next plan."""
        self._accounting.apply(plan)

    def on_computed(self, sequence: Sequence) -> None:
        """Record that a prompt is computed."""
        self._under_way.discard(sequence.id)
        if self._computing is not None and self._computing.number == sequence.id:
            self._cache_or_free_computed()

    def on_dropped(self, sequence: Sequence) -> None:
        """Record that a prompt is cancelled."""
        self.on_sent(sequence)
        self._fetches.pop(sequence.id, None)
        self._under_way.discard(sequence.id)
        if self._computing is not None and self._computing.number == sequence.id:
            self._computing = None
            self._ops.append(Free(sequence.id))

    def invalidate(self) -> None:
        """Make all cached prompts unfindable."""
        if self._computing is not None:
            self._computing = self._computing._replace(keep=False)
        for number in list(self._cached):
            self._evict(number)

    def reset(self) -> None:
        """Forget everything, since the worker has dropped it."""
        self._index.clear(self._place)
        self._sources.clear()
        self._fetches.clear()
        self._under_way.clear()
        self._computing, self._ops = None, []
        self._accounting.reconcile([])

    def _match(self, sequence: Sequence, most: int, but: Container[int] = ()) -> _CachedPrompt:
        """The longest match in whole pages, except ``but``. It never has the last token, whose logits are needed."""
        most, page = min(most, sequence.num_tokens_with_placeholders - 1, len(sequence.prompt)), self._keys.page_size
        keys = [] if sequence.turn.discarded_ranges else self._keys.whole(sequence, most)
        for count in range(self._index.match([self._place], keys)[0], 0, -1):
            for number in self._index.sequences(self._place, keys[count - 1]):
                keep = SurvivingKv(number, count * page, FIRST_LOCATION)
                if number not in but and self._accounting.forkable_blocks(keep) is not None:
                    return _CachedPrompt(number, count * page)
        return NO_PROMPT

    def _cache_or_free_computed(self) -> None:
        """Cache the computed prompt if there is room, else free it."""
        if self._computing is None:
            return
        (sequence, number, keys, keep), self._computing = self._computing, None
        others = list(self._index.sequences(self._place, keys[-1])) if keys else []
        for other in others:  # they have all of it
            self._cached.move_to_end(other)
        loads = sequence.transfer.loading_tokens > 0  # a load that fails would have spoilt it
        if others or not keys or not keep or loads or not self._make_room():
            self._ops.append(Free(number))
            self._index.drop(self._place, keys)
            return
        beginnings = [self._index.end(self._place, key) for key in keys]
        self._index.hold(self._place, number, Holding(sequence, keys, len(keys) * self._keys.page_size, 0.0))
        for other in (each for each in beginnings if each is not None):
            self._evict(other)

    def _make_room(self) -> bool:
        """Evict other prompts. Returns True if all held blocks can stay."""
        held = [n - free for n, free in zip(self._accounting.num_blocks, self._accounting.free_blocks, strict=True)]
        while any(n > spare for n, spare in zip(held, self._max_cached, strict=True)):
            victims = [n for n in self._cached if n not in self._sources.values()]
            if not victims:
                return False
            victim = min(victims, key=lambda n: not self._index.is_replicated(PREFILL, self._cached[n].keys[-1]))
            own = self._accounting.exclusive_blocks(
                victim
            )  # less than it makes free, where another victim has the others
            held = [n - m for n, m in zip(held, own, strict=True)]
            self._evict(victim)
        return True

    def _evict(self, number: int) -> None:
        self._index.release(self._place, number)
        if number not in self._sources.values():  # else it goes as soon as it was used
            self._ops.append(Free(number))

    def _touch(self, source: int) -> list[SequenceOp]:
        """Release a source prompt, since the prompt that reserved it has begun or is cancelled."""
        if source in self._cached:
            self._cached.move_to_end(source)
        elif source not in self._sources.values():
            return [Free(source)]
        return []
