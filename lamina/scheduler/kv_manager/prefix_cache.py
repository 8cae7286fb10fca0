"""Prefix caching in the pool: finds running and retained sequences that begin like a new prompt.

The new sequence is forked from one of them: they share blocks, and nothing is computed or moved. Prefixes are matched
by whole pages, then by single tokens. The other sequence may still run. Or it is *retained*: it has finished, and its
blocks are freed when others need them, the least recently used first. Sequences of different salts never match. Pure
policy: no torch, no I/O; the clock is a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Several
from itertools import islice
from typing import NamedTuple

from lamina.kv.fetch_window import eviction_order
from lamina.protocol.blocks.block_tables import BlockTables
from lamina.protocol.step_plan import Free, SequenceOp, SurvivingKv, Truncate
from lamina.scheduler.feature import Feature, Leaving, Loss, NewMemory, Scheduling
from lamina.scheduler.prefix_index import POOL, Holding, PageKeys, PrefixIndex, common_length
from lamina.scheduler.sequence import Sequence
from lamina.scheduler.sessions.session_table import Sessions, SessionState
from lamina.scheduler.starts import Candidates, KvStart, Verdict

MAX_SEQUENCES_TRIED = 8  # sequences of one beginning, of which each may have given back what a window has passed


class CommonPrefix(NamedTuple):
    """The first ``length`` tokens of a new sequence are those of all that begin with the page of ``key``. ``source``:
    the one of these that has a snapshot of its states there, in a model with recurrent layers.
    """

    key: bytes
    length: int
    source: int = -1


NO_PREFIX = CommonPrefix(b"", 0)


class PrefixCache(Feature):
    """The running and retained sequences in the pool. Returned ops are for the next round; forks come first there."""

    def __init__(
        self,
        accounting: BlockTables,
        page: int,
        *,
        prompts_only: bool = False,
        exact: bool = True,
        clock: Callable[[], float] = lambda: 0.0,
        prefix_index: PrefixIndex | None = None,
    ) -> None:
        """``page``: tokens, a multiple of the block size; 0: nothing is retained. ``prompts_only``: completions are not
        retained. ``exact``: prefixes may end within a page. ``clock``: returns seconds.
        """
        self._accounting = accounting
        self.prefix_index = prefix_index or PrefixIndex()
        self._page, self.keys = page, PageKeys(page, self.prefix_index.root)
        self._prompts_only, self._exact = prompts_only, exact
        self._place = self.prefix_index.place(POOL)
        self._held = self.prefix_index.holdings(self._place)
        self._shifted = set[int]()  # by a plan; memory workers may have applied it or not
        self._clock = clock
        self.sessions = Sessions(self.prefix_index)
        self._pinned: list[SessionState] = []  # of waiting turns, the one that is next first
        self.num_queried_tokens = 0  # tokens of admitted sequences
        self.num_hit_tokens = 0  # of them, in forks

    @property
    def num_retained(self) -> int:
        return sum(1 for _ in self._retained())

    def _retained(self) -> Iterator[int]:
        """Yield the retained sequences, the least recently used first."""
        return (number for number, held in self._held.items() if held.until is not None)

    def held_sequence(self, number: int) -> Sequence:
        """Return the running or retained sequence with this id."""
        return self._held[number].sequence

    def lookup(self, sequence: Sequence) -> list[CommonPrefix]:
        """All prefixes that a waiting sequence may begin with: one page, two, and so on, then those within a page.

        None contains its last token, since its logits are needed.
        """
        stop, way = len(sequence.tokens) - 1, self._held_pages(sequence)
        commons = [CommonPrefix(key, number * self._page) for number, key in enumerate(way, 1)]
        if way and self._exact:
            first = commons[-1].length
            rest = sequence.tokens[first : min(stop, first + self._page)]
            nearest = self.prefix_index.nearest(self._place, way[-1], rest)
            commons += [CommonPrefix(key, first + count) for count, key in nearest]
        return commons

    def _held_pages(self, sequence: Sequence) -> list[bytes]:
        """Return the keys of the whole pages that a waiting sequence may begin with."""
        if not self._page or sequence.turn.discarded_ranges or sequence.params.prompt_logprobs is not None:
            return []
        keys = self.keys.whole(sequence, len(sequence.tokens) - 1)
        return keys[: self.prefix_index.match([self._place], keys)[0]]

    def num_cached_or_pending(self, sequence: Sequence) -> int:
        """Return how many tokens of a waiting sequence are cached, or will be soon."""
        beginnings = self.lookup(sequence)
        return beginnings[-1].length if beginnings else 0

    def num_shared_tokens(self, sequence: Sequence) -> int:
        """The number of tokens that other completions of the request can share with this one."""
        if (
            not self._page
            or sequence.turn.discarded_ranges
            or sequence.kept.drops_blocks
            or sequence.params.prompt_logprobs is not None
        ):
            return 0
        stop = len(sequence.prompt) - 1  # a row has to draw
        return stop if self._exact and stop >= self._page else stop // self._page * self._page

    def longest_cached(self, beginnings: list[CommonPrefix]) -> KvStart | None:
        """The longest of ``beginnings`` whose KV is computed."""
        for key, length, _ in reversed(beginnings):
            for number in islice(reversed(self.prefix_index.sequences(self._place, key)), MAX_SEQUENCES_TRIED):
                place = self._held[number].sequence.location
                blocks = (
                    self._accounting.forkable_blocks(SurvivingKv(number, length, place))
                    if self._has(number, length)
                    else None
                )
                if blocks is not None:
                    return KvStart(length, (place,), source=number, blocks=blocks)
        return None

    def num_cached_tokens(self, sequence: Sequence) -> int:
        """Return how many tokens of a waiting sequence have KV in the pool."""
        hit = self.longest_cached(self.lookup(sequence))
        return hit.length if hit else 0

    def pending_match(self, beginnings: list[CommonPrefix], hit: KvStart | None) -> Sequence | None:
        """A running sequence that will soon have more pages of ``beginnings``."""
        key, length, _ = next((x for x in reversed(beginnings) if x.length % self._page == 0), NO_PREFIX)
        if length <= (hit.length if hit else 0):
            return None
        sequences = self.prefix_index.sequences(self._place, key)
        known = (self._held[n].sequence for n in sequences if not self._has(n, length))
        return next((s for s in known if not s.finished), None)

    def begin_round(self, scheduling: Scheduling) -> None:
        """Let the sessions of waiting turns be evicted last."""
        self._pinned = [s.turn.session for s in scheduling.waiting if s.turn.session is not None and not s.finished]

    def may_start(self, sequence: Sequence) -> bool:
        """True if there may be a hit, now or after evictions."""
        return next(self._retained(), None) is not None or bool(self.lookup(sequence))

    def find_starts(self, candidates: Candidates) -> None:
        """Add the longest hit. A sequence waits if another one will soon have more of its prompt."""
        if candidates.is_settled:
            return
        beginnings = self.lookup(candidates.sequence)
        hit = self.longest_cached(beginnings)
        coming = self.pending_match(beginnings, hit)
        if coming is not None and not candidates.rows.prefers_prefill_worker:
            soon = not coming.transfer.lacks_kv
            candidates.verdict = Verdict.HOLDS_UP if soon else Verdict.STEPS_ASIDE
        elif hit is not None:
            candidates.starts.append(hit)

    def on_started(self, candidates: Candidates, start: KvStart | None) -> tuple[SequenceOp, ...]:
        """Index an admitted sequence, so that later prompts can match it."""
        sequence = candidates.sequence
        self.num_queried_tokens += sequence.num_tokens_with_placeholders
        if self._page:
            alone = sequence.turn.discarded_ranges or sequence.kept.drops_blocks
            self._hold(sequence, 0 if alone else len(sequence.prompt))
        if start is not None and start.source is not None:
            self.num_hit_tokens += start.length
            if start.source in self._held:
                self._held.move_to_end(start.source)
        return ()

    def on_leave(self, leaving: Leaving) -> None:
        """Retain a finished sequence, and drop those whose pages it contains; or leave it to be freed."""
        if leaving.is_preempted:
            self.forget_sequence(leaving.sequence)
        elif leaving.op is not None:
            leaving.op, *freed = self.retain_or_free(leaving.sequence)
            leaving.own += freed

    def reset(self, era: bytes, sequences: Several[Sequence]) -> list[Free]:
        """Drop all retained sequences."""
        return self.clear()

    def retain_or_free(self, sequence: Sequence, snapshots: Several[int] = ()) -> list[SequenceOp]:
        """Retain a finished sequence, and drop those whose pages it contains; or free it. ``snapshots``: of its states;
        pages after the last one are of no use.
        """
        self.forget_sequence(sequence)
        if sequence.kept.drops_blocks:
            return [Free(sequence.id)]
        if sequence.turn.discarded_ranges:
            return self._end_detached(sequence)
        limit = len(sequence.prompt) if self._prompts_only else len(sequence.tokens)
        length, keys = self._chain(sequence, min(sequence.num_computed_tokens, *(snapshots[-1:] or [limit])))
        if not keys or sequence.do_not_cache or sequence.output.went_wrong:
            return [Free(sequence.id)]
        retention_s = sequence.options.retention_s
        until = self._clock() + retention_s if retention_s else 0.0
        held_keys = keys[: self.prefix_index.match([self._place], keys)[0]]
        session = self.session_to_retain(sequence)
        if session is None and self._is_retained(sequence, length, keys, held_keys, snapshots):
            for number in self.prefix_index.sequences(self._place, held_keys[-1]) if until else ():
                if (held := self._held[number]).until is not None:
                    held.until = max(until, held.until)
            return [Free(sequence.id)]
        parts = self._parts(sequence, held_keys, length)
        ends = [self.prefix_index.end(self._place, key) for key in (*held_keys, *parts)]
        superseded = {n: None for n in ends if n is not None and self._held[n].session is None}
        if session is not None and session.retained_sequence is not None:
            superseded[session.retained_sequence] = None
        until = max([until, *(self._held[number].until or 0.0 for number in superseded)])
        freed = [self.evict(number) for number in superseded]
        held = self._hold(sequence, length, until)
        if session is not None:
            self.sessions.on_turn_ended(session, held, length)
        return [Truncate(sequence.id, length), *freed]

    def _is_retained(
        self, sequence: Sequence, length: int, keys: Several[bytes], held_keys: Several[bytes], snapshots: Several[int]
    ) -> bool:
        """Return whether other sequences have all pages, ``keys``, and snapshots of one. They have ``held_keys``."""
        if not held_keys or len(held_keys) < len(keys) - 1:
            return False
        if len(held_keys) < len(keys):
            last = sequence.tokens[len(held_keys) * self._page : length]  # of the last page, which may be begun
            if all(count != len(last) for count, _ in self.prefix_index.nearest(self._place, held_keys[-1], last)):
                return False
        others = self.prefix_index.sequences(self._place, held_keys[-1]) if snapshots else ()
        return not snapshots or any(self._held[n].snapshots.keys() >= {*snapshots} for n in others)

    def session_to_retain(self, sequence: Sequence) -> SessionState | None:
        """Return the session of a sequence, if it is a turn that has ended by itself."""
        ended = sequence.output.finish_reason in ("stop", "length")
        return sequence.turn.session if ended and not sequence.do_not_cache else None

    def _end_detached(self, sequence: Sequence) -> list[SequenceOp]:
        """Retain it for its session alone, since its K and V attended tokens that were dropped from its context."""
        session = self.session_to_retain(sequence)
        length = sequence.num_computed_tokens // self._page * self._page if self._page else 0
        if session is None or not length:
            return [Free(sequence.id)]
        freed = [] if session.retained_sequence is None else [self.evict(session.retained_sequence)]
        self.sessions.on_turn_ended(session, self._hold(sequence, 0, 0.0), length, sequence.turn.discarded_ranges)
        return [Truncate(sequence.id, length), *freed]

    def match_session(self, sequence: Sequence) -> KvStart | None:
        """The longest prefix that a turn shares with its session's retained sequence, at the same positions."""
        session = sequence.turn.session
        if session is None or session.leaf is None or not self._page:
            return None
        leaf = session.leaf.sequence
        if leaf.salt != sequence.salt:
            return None
        alike = common_length(leaf.tokens[: session.length], sequence.tokens[:-1])  # a row has to draw
        length = alike if self._exact and alike > self._page else alike // self._page * self._page
        blocks = self._accounting.forkable_blocks(SurvivingKv(leaf.id, length, session.location)) if length else None
        return None if blocks is None else KvStart(length, (session.location,), source=leaf.id, blocks=blocks)

    def detach(self, number: int, first: int, count: int) -> None:
        """Make a retained sequence unfindable, since it drops tokens and later ones move to other positions."""
        held = self.prefix_index.release(self._place, number)
        del held.sequence.tokens[first : first + count]
        held.sequence.known_keys.forget()
        held.keys, held.length, held.until = [], 0, 0.0
        self.prefix_index.hold(self._place, number, held)
        self._shifted.add(number)

    def forget_sequence(self, sequence: Sequence) -> None:
        """Remove a running sequence that has lost its KV."""
        if sequence.id in self._held:
            self.prefix_index.release(self._place, sequence.id)

    @property
    def eviction_order(self) -> list[int]:
        """The retained sequences in the order of eviction.

        First come those without a session and lease, then others for which no turn waits, both the least recently used
        first. Last come those of waiting turns, from the end of the queue.
        """
        order = list(dict.fromkeys([*self.evictable_first(), *self._retained()]))
        queue = [s.retained_sequence for s in self._pinned if s.retained_sequence is not None]
        return eviction_order(queue, len(queue), order) if queue else order  # more than the pool holds are not in it

    def evictable_first(self) -> Iterator[int]:
        """The retained sequences without a session and lease, the least recently used first."""
        now = self._clock()
        return (n for n, h in self._held.items() if h.until is not None and h.until <= now and h.session is None)

    def evict(self, number: int) -> Free:
        """Evict a retained sequence."""
        held = self.prefix_index.release(self._place, number)
        self._shifted.discard(number)
        if held.session is not None:
            held.session.forget_leaf()
        return Free(number)

    def evictable(self, free: tuple[int, ...]) -> list[int]:
        """The available blocks that hold KV of ended sequences, by layer group."""
        return [n - empty for n, empty in zip(free, self._accounting.free_blocks, strict=True)]

    def has_page(self, key: bytes) -> bool:
        """Return True if a page is one of a sequence that is retained or will be."""
        return next(self.sequences_with(key), None) is not None

    def sequences_with(self, key: bytes) -> Iterator[Sequence]:
        """Yield the sequences with a page that are retained or will be."""
        held = (self._held[number].sequence for number in self.prefix_index.sequences(self._place, key))
        return (sequence for sequence in held if not sequence.do_not_cache)

    def roll_back(self, loss: Loss) -> None:
        """Keep retained sequences without a lost token, except shifted ones, whose shift may not have been applied."""
        for number, held in list(self._held.items()):
            length = held.length or (held.session.length if held.session else 0)
            each = SurvivingKv(number, length, held.sequence.location)
            if held.until is None:
                self.prefix_index.release(self._place, number)
            elif each.length and number not in self._shifted and loss.count(each) == each.length:
                loss.kept.append(each)
            else:
                self.evict(number)

    def relocate(self, kept: list[SurvivingKv], memory: NewMemory) -> None:
        """After ``roll_back``: set the new places of retained sequences; those not in ``kept`` are dropped."""
        places = {each.sequence: each.location for each in kept}
        for number in list(self._retained()):
            if number not in places:
                self.evict(number)
                continue
            held = self._held[number]
            held.sequence.location = places[number]
            if held.session is not None:
                held.session.location = places[number]

    def retained(self) -> list[SurvivingKv]:
        """Return the KV of all retained sequences, with the snapshots of their states."""
        each = ((number, self._held[number]) for number in self._retained())
        return [SurvivingKv(n, h.length, h.sequence.location, snapshots=sorted(h.snapshots)) for n, h in each]

    def clear(self) -> list[Free]:
        """Drop all retained sequences."""
        ops = [self.evict(number) for number in list(self._retained())]
        self.prefix_index.clear(self._place)
        return ops

    def _has(self, number: int, length: int) -> bool:
        """Return True if KV of ``length`` tokens exists before the plans of this round."""
        held = self._held[number]
        sequence = held.sequence
        return held.until is not None or (sequence.num_computed_tokens >= length and not sequence.transfer.lacks_kv)

    def _chain(self, sequence: Sequence, length: int) -> tuple[int, list[bytes]]:
        """Return the tokens of the pages of the first ``length`` tokens, and their keys. The last page may be partial,
        but not the first one.
        """
        keys = self.keys.whole(sequence, length)
        if keys and self._exact and length > len(keys) * self._page:
            return length, [*keys, self.keys.partial(sequence, length)]
        return len(keys) * self._page, keys

    def _parts(self, sequence: Sequence, way: list[bytes], length: int) -> Iterator[bytes]:
        """Yield the partial pages after ``way`` that match the first ``length`` tokens."""
        for number, key in enumerate(way, 1):
            page = sequence.tokens[number * self._page : min(length, (number + 1) * self._page)]
            yield from self.prefix_index.parts(self._place, key, page)

    def _hold(self, sequence: Sequence, length: int, until: float | None = None) -> Holding:
        length, keys = self._chain(sequence, length)
        held = Holding(sequence, keys, length, until, self._page if self._exact else 0)
        self.prefix_index.hold(self._place, sequence.id, held)
        return held
