"""KV that serves more than one request: which sequences begin with which tokens. Pure policy: no torch, no I/O; the
clock comes in.

A sequence that begins with the tokens of another one is forked from it: both hold the blocks, and nothing is computed
or moved. Common tokens are looked up in whole pages, then to the token. The other one may still run, or it is
*retained*: it has no more rows, and gives its blocks back as soon as others need them. The least recently used goes
first.
Sequences of different salts have nothing in common, whatever their tokens.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from lamina.kv.fetch_window import eviction_order
from lamina.protocol.kv_placement import KvLocation
from lamina.protocol.step_plan import Free, SequenceOp, SurvivingKv, Truncate
from lamina.scheduler.feature import Feature, Leaving, Loss
from lamina.scheduler.sequence import Sequence
from lamina.scheduler.sessions.session_table import Sessions, SessionState
from lamina.scheduler.starts import Candidates, KvStart, Verdict

from .block_accounting import BlockAccounting, Blocks

Page = tuple[int, ...]  # tokens
MAX_SEQUENCES_TRIED = 8  # sequences of one beginning, of which each may have given back what a window has passed


class PrefixHit(NamedTuple):
    """The first ``length`` tokens of a new sequence are those of ``source``."""

    source: int
    length: int
    location: KvLocation
    blocks: Blocks  # that it need not take, by layer group

    @property
    def locations(self) -> tuple[KvLocation, ...]:
        """The only place where the sequence may begin."""
        return (self.location,)

    @property
    def is_swapped(self) -> bool:
        """False: it is another sequence's."""
        return False


@dataclass
class PrefixNode:
    """Pages, of which the last leads here and alone may have fewer tokens, and the sequences that begin with them."""

    children: dict[Page, PrefixNode] = field(default_factory=dict)
    child_order: list[Page] = field(default_factory=list)  # the pages of ``children``, sorted
    num_partial_children: int = 0  # of these, pages that are not whole
    sequences: dict[int, None] = field(default_factory=dict)  # in the order in which they came
    last_sequence: int | None = None  # a retained one that has no more pages

    def partial_matches(self, page: Page) -> list[tuple[int, PrefixNode]]:
        """Return the children that have most tokens in common with ``page``, one at least; the best last."""
        at = bisect_left(self.child_order, page)
        alike = [
            (_common_length(other, page), self.children[other]) for other in self.child_order[max(0, at - 1) : at + 1]
        ]
        return sorted((each for each in alike if each[0]), key=lambda each: each[0])


class CommonPrefix(NamedTuple):
    """The first ``length`` tokens of a new sequence are those of all that go through ``node``."""

    node: PrefixNode
    length: int


class _IndexedSequence(NamedTuple):
    sequence: Sequence
    pages: list[Page]
    shifted: bool = False  # by a plan; memory workers may have applied it or not


class PrefixCache(Feature):
    """Sequences by their pages. Ops are for the next round; forks go first in its first plan."""

    def __init__(
        self,
        accounting: BlockAccounting,
        page: int,
        *,
        prompts_only: bool = False,
        exact: bool = True,
        clock: Callable[[], float] = lambda: 0.0,
        sessions: Sessions | None = None,
    ) -> None:
        """``page``: tokens, a multiple of the block size; 0 = nothing is retained. ``prompts_only``: completions
        are not. ``exact``: common tokens are counted beyond whole pages. ``clock``: seconds.
        """
        self._accounting = accounting
        self._page = page
        self._prompts_only, self._exact = prompts_only, exact
        self._roots: dict[bytes, PrefixNode] = {}  # by salt; one that leads nowhere is not there
        self._indexed: dict[int, _IndexedSequence] = {}  # running sequences, with their prompts, and retained ones
        self._retained: OrderedDict[int, float] = OrderedDict()  # the least recently used first; prolonged until then
        self._clock = clock
        self.sessions = Sessions() if sessions is None else sessions
        self.pinned: list[SessionState] = []  # of waiting turns, the one that is next first
        self.num_queried_tokens = 0  # tokens of admitted sequences
        self.num_hit_tokens = 0  # of them, in forks

    @property
    def page_size(self) -> int:
        """Tokens; 0 = nothing is retained."""
        return self._page

    @property
    def num_retained(self) -> int:
        return len(self._retained)

    def lookup(self, sequence: Sequence) -> list[CommonPrefix]:
        """All that a waiting sequence may begin with, one page, two, and so on, and at last what goes on to the token.
        Its last token is in none of them: a row has to draw.
        """
        if not self._page or sequence.discarded_ranges or sequence.params.prompt_logprobs is not None:
            return []
        stop = len(sequence.tokens) - 1
        way = list(self._path(sequence.salt, self._pages(sequence.tokens, stop)))
        commons = [CommonPrefix(node, number * self._page) for number, node in enumerate(way, 1)]
        if way and self._exact:
            first = commons[-1].length
            rest = tuple(sequence.tokens[first : min(stop, first + self._page)])
            commons += [CommonPrefix(node, first + count) for count, node in way[-1].partial_matches(rest)]
        return commons

    def num_cached_or_pending(self, sequence: Sequence) -> int:
        """Return the tokens of a waiting sequence that need not be computed: KV of them is there, or will be soon."""
        beginnings = self.lookup(sequence)
        return beginnings[-1].length if beginnings else 0

    def num_shared_tokens(self, sequence: Sequence) -> int:
        """Tokens that another completion of its request begins with, once this one has them."""
        if (
            not self._page
            or sequence.discarded_ranges
            or sequence.evicts_kv
            or sequence.params.prompt_logprobs is not None
        ):
            return 0
        stop = len(sequence.prompt) - 1  # a row has to draw
        return stop if self._exact and stop >= self._page else stop // self._page * self._page

    def longest_cached(self, beginnings: list[CommonPrefix]) -> PrefixHit | None:
        """The most of ``beginnings`` whose KV is there."""
        for node, length in reversed(beginnings):
            for number in islice(reversed(node.sequences), MAX_SEQUENCES_TRIED):
                place = self._indexed[number].sequence.location
                blocks = (
                    self._accounting.forkable_blocks(SurvivingKv(number, length, place))
                    if self._has(number, length)
                    else None
                )
                if blocks is not None:
                    return PrefixHit(number, length, place, blocks)
        return None

    def num_cached_tokens(self, sequence: Sequence) -> int:
        """Return the tokens of a waiting sequence whose KV is in the pool."""
        hit = self.longest_cached(self.lookup(sequence))
        return hit.length if hit else 0

    def pending_match(self, beginnings: list[CommonPrefix], hit: PrefixHit | None) -> Sequence | None:
        """A running sequence that is about to have more pages of ``beginnings``."""
        node, length = next((x for x in reversed(beginnings) if x.length % self._page == 0), (None, 0))
        if node is None or length <= (hit.length if hit else 0):
            return None
        known = (self._indexed[n].sequence for n in node.sequences if not self._has(n, length))
        return next((s for s in known if not s.finished), None)

    def may_start(self, sequence: Sequence) -> bool:
        """True if there may be a hit, now or once what is retained gives way."""
        return bool(self.num_retained or self.lookup(sequence))

    def find_starts(self, candidates: Candidates) -> None:
        """Add the longest hit. A sequence whose prompt another one is about to have waits for that."""
        if candidates.is_settled:
            return
        beginnings = self.lookup(candidates.sequence)
        hit = self.longest_cached(beginnings)
        coming = self.pending_match(beginnings, hit)
        if coming is not None and not candidates.is_for_prefill_worker(beginnings[-1].length):
            soon = not coming.num_loading_tokens and coming.prefill_worker is None
            candidates.verdict = Verdict.HOLDS_UP if soon else Verdict.STEPS_ASIDE
        elif hit is not None:
            candidates.starts.append(hit)

    def on_started(self, candidates: Candidates, start: KvStart | None) -> tuple[SequenceOp, ...]:
        """Index an admitted sequence: later prompts may begin with its tokens."""
        sequence = candidates.sequence
        self.num_queried_tokens += sequence.num_tokens_with_placeholders
        if self._page and (sequence.discarded_ranges or sequence.evicts_kv):
            self._add(sequence, [])
        elif self._page:
            self._add(sequence, self._all_pages(sequence.tokens, len(sequence.prompt)))
        if start is not None and start.source is not None:
            self.num_hit_tokens += start.length
            if start.source in self._retained:
                self._retained.move_to_end(start.source)
        return ()

    def on_leave(self, leaving: Leaving) -> None:
        """Retain a finished sequence, in place of those whose pages it has too; or have it freed."""
        if leaving.is_preempted:
            self.forget_sequence(leaving.sequence)
        elif leaving.op is not None:
            leaving.op, *freed = self.retain_or_free(leaving.sequence)
            leaving.own += freed

    def reset(self, era: bytes, sequences: Several[Sequence]) -> list[Free]:
        """Give up all that is retained."""
        return self.clear()

    def retain_or_free(self, sequence: Sequence) -> list[SequenceOp]:
        """Retain a finished sequence, in place of those whose pages it has too; or free it."""
        self.forget_sequence(sequence)
        if sequence.evicts_kv:
            return [Free(sequence.id)]
        if sequence.discarded_ranges:
            return self._end_detached(sequence)
        limit = len(sequence.prompt) if self._prompts_only else len(sequence.tokens)
        pages = self._all_pages(sequence.tokens, min(sequence.num_computed_tokens, limit)) if self._page else []
        way = list(self._path(sequence.salt, pages))
        known = len(way) == len(pages)  # another one has all of them, and perhaps more
        if len(way) == len(pages) - 1 and way and (near := way[-1].partial_matches(pages[-1])):
            known = near[-1][0] == len(pages[-1])
        session = sequence.session_to_retain
        useless = not pages or (known and session is None)
        failed = sequence.do_not_cache or sequence.output.went_wrong
        until = self._clock() + sequence.retention_s if sequence.retention_s and not failed else 0.0
        if useless or failed:
            for number in way[-1].sequences if way and known and until else ():
                if number in self._retained:
                    self._retained[number] = max(until, self._retained[number])
            return [Free(sequence.id)]
        length = sum(map(len, pages))
        superseded = {n.last_sequence: None for n in (*way, *self._parts(way, pages)) if n.last_sequence is not None}
        superseded = {n: None for n in superseded if self.sessions.session_of_sequence(n) is None}
        if session is not None:
            before = self.sessions.on_turn_ended(session, sequence.id, length, sequence.location)
            superseded |= {} if before is None else {before: None}
        until = max([until, *(self._retained.get(number, 0.0) for number in superseded)])
        freed = [self.evict(number) for number in superseded]
        self._retained[sequence.id] = until
        self._add(sequence, pages).last_sequence = sequence.id
        return [Truncate(sequence.id, length), *freed]

    def _end_detached(self, sequence: Sequence) -> list[SequenceOp]:
        """Retain it for its session alone: its K and V have seen tokens that a prompt like it has not."""
        session, length = (
            sequence.session_to_retain,
            sequence.num_computed_tokens // self._page * self._page if self._page else 0,
        )
        if session is None or not length:
            return [Free(sequence.id)]
        before = self.sessions.on_turn_ended(session, sequence.id, length, sequence.location, sequence.discarded_ranges)
        freed = [] if before is None else [self.evict(before)]
        self._retained[sequence.id] = 0.0
        self._add(sequence, [])
        return [Truncate(sequence.id, length), *freed]

    def match_session(self, sequence: Sequence) -> PrefixHit | None:
        """The most that a turn has in common with the leaf of its session, which is at the same positions."""
        session = sequence.session
        if session is None or session.retained_sequence is None or not self._page:
            return None
        leaf = self._indexed[session.retained_sequence].sequence
        if leaf.salt != sequence.salt:
            return None
        theirs = leaf.tokens[: session.length]
        both = zip(theirs, sequence.tokens[:-1], strict=False)  # a row has to draw
        alike = next((n for n, (a, b) in enumerate(both) if a != b), min(len(theirs), len(sequence.tokens) - 1))
        length = alike if self._exact and alike > self._page else alike // self._page * self._page
        blocks = (
            self._accounting.forkable_blocks(SurvivingKv(session.retained_sequence, length, session.location))
            if length
            else None
        )
        return None if blocks is None else PrefixHit(session.retained_sequence, length, session.location, blocks)

    def detach(self, number: int, first: int, count: int) -> None:
        """Have no prompt find a retained sequence any more: it loses tokens, and later ones move to other positions."""
        sequence = self._indexed[number].sequence
        self._forget(number)
        del sequence.tokens[first : first + count]
        sequence.page_keys.clear()
        sequence.partial_page_keys.clear()
        self._retained[number] = 0.0
        self._indexed[number] = _IndexedSequence(sequence, [], shifted=True)

    def forget_sequence(self, sequence: Sequence) -> None:
        """A running sequence has no KV any more."""
        if sequence.id in self._indexed:
            self._forget(sequence.id)

    @property
    def eviction_order(self) -> list[int]:
        """The retained sequences in the order in which they give way. First come those without a name that are not
        prolonged, then the others that no turn waits for, each the least recently used first. Last come those of
        waiting turns, from the end of the queue on.
        """
        named = dict.fromkeys([*self.evictable_first(), *self._retained])
        queue = [s.retained_sequence for s in self.pinned if s.retained_sequence is not None]
        return eviction_order(queue, len(queue), list(named))  # more than the pool holds are not in it

    def evictable_first(self) -> Iterator[int]:
        """The retained sequences without a name that are not prolonged, the least recently used first."""
        now = self._clock()
        return (
            n for n, until in self._retained.items() if self.sessions.session_of_sequence(n) is None and until <= now
        )

    def evict(self, number: int) -> Free:
        """Give up a retained sequence."""
        self._forget(number)
        self.sessions.on_evicted(number)
        return Free(number)

    def evictable(self, free: Blocks) -> list[int]:
        """Blocks with KV of ended sequences among the blocks that sequences can still have, by layer group."""
        return [n - empty for n, empty in zip(free, self._accounting.free_blocks, strict=True)]

    def retained_page_keys(self) -> Iterator[bytes]:
        """Yield the keys of stored pages of sequences that are retained, or will be, as far as keys are known."""
        for known in self._indexed.values():
            if not known.sequence.do_not_cache:
                yield from known.sequence.page_keys
                yield from known.sequence.partial_page_keys.values()

    def roll_back(self, loss: Loss) -> None:
        """Keep the retained sequences that are there whole, but no shifted one: it may lie as before its shift."""
        for number, (sequence, pages, shifted) in list(self._indexed.items()):
            owner = self.sessions.session_of_sequence(number)
            each = SurvivingKv(number, sum(map(len, pages)) or (owner.length if owner else 0), sequence.location)
            if number not in self._retained:
                self._forget(number)
            elif each.length and not shifted and loss.count(each) == each.length:
                loss.kept.append(each)
            else:
                self.evict(number)

    def relocate(self, surviving: Iterable[SurvivingKv]) -> None:
        """After ``roll_back``: what is retained lies where ``surviving`` says now, or nowhere any more."""
        places = {each.sequence: each.location for each in surviving}
        for number in list(self._retained):
            if number not in places:
                self.evict(number)
                continue
            self._indexed[number].sequence.location = places[number]
            if (owner := self.sessions.session_of_sequence(number)) is not None:
                owner.location = places[number]

    def clear(self) -> list[Free]:
        """Give up all."""
        ops = [self.evict(number) for number in list(self._retained)]
        self._indexed.clear()
        self._roots.clear()
        return ops

    def _has(self, number: int, length: int) -> bool:
        """Return whether KV of so many tokens is there once the plans of this round come."""
        sequence = self._indexed[number].sequence
        # And memory workers have not all of it.
        comes = sequence.num_loading_tokens or sequence.prefill_worker is not None
        return number in self._retained or (sequence.num_computed_tokens >= length and not comes)

    def _pages(self, tokens: list[int], stop: int) -> Iterator[Page]:
        """Yield the whole pages of the first ``stop`` tokens."""
        for at in range(self._page, stop + 1, self._page):
            yield tuple(tokens[at - self._page : at])

    def _all_pages(self, tokens: list[int], stop: int) -> list[Page]:
        """Return the pages of the first ``stop`` tokens, the last of which may be partial."""
        pages, whole = list(self._pages(tokens, stop)), stop // self._page * self._page
        return [*pages, tuple(tokens[whole:stop])] if pages and self._exact and stop > whole else pages

    def _parts(self, way: list[PrefixNode], pages: list[Page]) -> Iterator[PrefixNode]:
        """Yield the nodes of partial pages with which one of ``pages`` begins."""
        for node, page in zip(way, pages[1:], strict=False):
            for count in range(1, len(page)) if node.num_partial_children else ():
                if (part := node.children.get(page[:count])) is not None:
                    yield part

    def _path(self, salt: bytes, pages: Iterable[Page]) -> Iterator[PrefixNode]:
        """The nodes of ``pages`` below the root of ``salt``, as far as there are some."""
        node = self._roots.get(salt, PrefixNode())
        for page in pages:
            child = node.children.get(page)
            if child is None:
                return
            yield child
            node = child

    def _add(self, sequence: Sequence, pages: list[Page]) -> PrefixNode:
        """Put it into the tree; returns its last node."""
        self._indexed[sequence.id] = _IndexedSequence(sequence, pages)
        if not pages:
            return PrefixNode()
        node = self._roots.setdefault(sequence.salt, PrefixNode())
        for page in pages:
            if page not in node.children:
                node.children[page] = PrefixNode()
                insort(node.child_order, page)
                node.num_partial_children += len(page) < self._page
            node = node.children[page]
            node.sequences[sequence.id] = None
        return node

    def _forget(self, number: int) -> None:
        self._retained.pop(number, None)
        sequence, pages, _ = self._indexed.pop(number)
        if not pages:
            return
        root = node = self._roots[sequence.salt]
        for page in pages:
            child = node.children[page]
            del child.sequences[number]
            if not child.sequences:
                del node.children[page], node.child_order[bisect_left(node.child_order, page)]
                node.num_partial_children -= len(page) < self._page
                if not root.children:
                    del self._roots[sequence.salt]
                return
            node = child
        if node.last_sequence == number:
            node.last_sequence = None


def _common_length(one: Page, other: Page) -> int:
    """Tokens with which both begin."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
