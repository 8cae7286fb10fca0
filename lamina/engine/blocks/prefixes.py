"""KV that serves more than one request: which sequences begin with which tokens. Pure policy: no torch, no I/O; the
clock comes in.

A sequence that begins with the tokens of another one is forked from it: both hold the blocks, and nothing is computed
or moved. What they have in common is looked up in whole pages, and behind these to the token. The other one may still
run, or it is *retained*: it has no more rows, and gives its blocks back as soon as others need them, the least recently
used first. Sequences of different salts have nothing in common, whatever their tokens.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from lamina.engine.conversations.sessions import Sessions, SessionState
from lamina.engine.sequence import Sequence
from lamina.kv.windows import victims
from lamina.protocol.placement import Place
from lamina.protocol.plan import Fork, Free, Keep, New, SequenceOp, Truncate

from .ledger import Blocks, Ledger

Page = tuple[int, ...]  # tokens
MOST_TRIED = 8  # sequences of one beginning, of which each may have given back what a window has passed


class Hit(NamedTuple):
    """The first ``length`` tokens of a new sequence are those of ``source``."""

    source: int
    length: int
    place: Place
    blocks: Blocks  # that it need not take, by layer group


@dataclass
class Beginning:
    """Pages, of which the last leads here and alone may have fewer tokens, and the sequences that begin with them."""

    next: dict[Page, Beginning] = field(default_factory=dict)
    order: list[Page] = field(default_factory=list)  # the pages of ``next``, sorted
    parts: int = 0  # of these, pages that are not whole
    through: dict[int, None] = field(default_factory=dict)  # in the order in which they came
    last: int | None = None  # a retained one that has no more pages

    def near(self, page: Page) -> list[tuple[int, Beginning]]:
        """What has the most in common with ``page``, the best last: so many tokens, one at least."""
        at = bisect_left(self.order, page)
        alike = [(_alike(other, page), self.next[other]) for other in self.order[max(0, at - 1) : at + 1]]
        return sorted((each for each in alike if each[0]), key=lambda each: each[0])


class Common(NamedTuple):
    """The first ``length`` tokens of a new sequence are those of all that go through ``node``."""

    node: Beginning
    length: int


class _Known(NamedTuple):
    sequence: Sequence
    pages: list[Page]
    shifted: bool = False  # a plan has said so; whether memory workers have done it is not known


class Prefixes:
    """Sequences by their pages. Ops are for the next round; forks go first in its first plan."""

    def __init__(
        self,
        ledger: Ledger,
        page: int,
        *,
        prompts_only: bool = False,
        exact: bool = True,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """``page``: tokens, a multiple of the block size; 0 = nothing is retained. ``prompts_only``: completions are
        not. ``exact``: what is in common goes on behind whole pages, to the token. ``clock``: seconds.
        """
        self._ledger = ledger
        self._page = page
        self._prompts_only, self._exact = prompts_only, exact
        self._roots: dict[bytes, Beginning] = {}  # by salt; one that leads nowhere is not there
        self._known: dict[int, _Known] = {}  # running sequences, with their prompts, and retained ones
        self._retained: OrderedDict[int, float] = OrderedDict()  # the least recently used first; prolonged until then
        self._clock = clock
        self.sessions = Sessions()
        self.awaited: list[SessionState] = []  # of waiting turns, the one that is next first
        self.num_queried = 0  # tokens of admitted sequences
        self.num_hit = 0  # of them, in forks

    @property
    def page(self) -> int:
        """Tokens; 0 = nothing is retained."""
        return self._page

    @property
    def num_retained(self) -> int:
        return len(self._retained)

    def beginnings(self, sequence: Sequence) -> list[Common]:
        """All that a waiting sequence may begin with, one page, two, and so on, and at last what goes on to the token.
        Its last token is in none of them: a row has to draw.
        """
        if not self._page or sequence.discarded or sequence.params.prompt_logprobs is not None:
            return []
        stop = len(sequence.tokens) - 1
        way = list(self._way(sequence.salt, self._pages(sequence.tokens, stop)))
        commons = [Common(node, number * self._page) for number, node in enumerate(way, 1)]
        if way and self._exact:
            first = commons[-1].length
            rest = tuple(sequence.tokens[first : min(stop, first + self._page)])
            commons += [Common(node, first + count) for count, node in way[-1].near(rest)]
        return commons

    def length_of(self, sequence: Sequence) -> int:
        """Of a waiting sequence, the tokens that somebody has already or will have soon: what need not be computed."""
        beginnings = self.beginnings(sequence)
        return beginnings[-1].length if beginnings else 0

    def shared(self, sequence: Sequence) -> int:
        """Tokens that another completion of its request begins with, once this one has them."""
        if not self._page or sequence.discarded or sequence.sparse or sequence.params.prompt_logprobs is not None:
            return 0
        stop = len(sequence.prompt) - 1  # a row has to draw
        return stop if self._exact and stop >= self._page else stop // self._page * self._page

    def match(self, beginnings: list[Common]) -> Hit | None:
        """The most of ``beginnings`` whose KV is there."""
        for node, length in reversed(beginnings):
            for number in islice(reversed(node.through), MOST_TRIED):
                place = self._known[number].sequence.place
                blocks = self._ledger.shared_of(Keep(number, length, place)) if self._has(number, length) else None
                if blocks is not None:
                    return Hit(number, length, place, blocks)
        return None

    def coming(self, beginnings: list[Common], hit: Hit | None) -> Sequence | None:
        """A running sequence that is about to have more pages of ``beginnings``."""
        node, length = next((x for x in reversed(beginnings) if x.length % self._page == 0), (None, 0))
        if node is None or length <= (hit.length if hit else 0):
            return None
        known = (self._known[n].sequence for n in node.through if not self._has(n, length))
        return next((s for s in known if not s.finished), None)

    def start(self, sequence: Sequence, hit: Hit | None) -> SequenceOp:
        """The op that starts an admitted sequence, which has its id and place."""
        self.num_queried += sequence.num_promised
        if self._page and (sequence.discarded or sequence.sparse):
            self._add(sequence, [])
        elif self._page:
            self._add(sequence, self._all_pages(sequence.tokens, len(sequence.prompt)))
        if hit is None:
            return New(sequence.id)
        self.num_hit += hit.length
        if hit.source in self._retained:
            self._retained.move_to_end(hit.source)
        return Fork(sequence.id, hit.source, hit.length)

    def end(self, sequence: Sequence) -> list[SequenceOp]:
        """Retain a finished sequence, in place of those whose pages it has too; or free it."""
        self.drop(sequence)
        if sequence.sparse:
            return [Free(sequence.id)]
        if sequence.discarded:
            return self._end_apart(sequence)
        limit = len(sequence.prompt) if self._prompts_only else len(sequence.tokens)
        pages = self._all_pages(sequence.tokens, min(sequence.num_scheduled, limit)) if self._page else []
        way = list(self._way(sequence.salt, pages))
        known = len(way) == len(pages)  # another one has all of them, and perhaps more
        if len(way) == len(pages) - 1 and way and (near := way[-1].near(pages[-1])):
            known = near[-1][0] == len(pages[-1])
        session = sequence.sleeping
        useless = not pages or (known and session is None)
        failed = sequence.outlived or sequence.output.went_wrong
        until = self._clock() + sequence.retention_s if sequence.retention_s and not failed else 0.0
        if useless or failed:
            for number in way[-1].through if way and known and until else ():
                if number in self._retained:
                    self._retained[number] = max(until, self._retained[number])
            return [Free(sequence.id)]
        length = sum(map(len, pages))
        superseded = {n.last: None for n in (*way, *self._parts(way, pages)) if n.last is not None}
        superseded = {n: None for n in superseded if self.sessions.owner(n) is None}
        if session is not None:
            before = self.sessions.sleep(session, sequence.id, length, sequence.place)
            superseded |= {} if before is None else {before: None}
        until = max([until, *(self._retained.get(number, 0.0) for number in superseded)])
        freed = [self.evict(number) for number in superseded]
        self._retained[sequence.id] = until
        self._add(sequence, pages).last = sequence.id
        return [Truncate(sequence.id, length), *freed]

    def _end_apart(self, sequence: Sequence) -> list[SequenceOp]:
        """Retain it for its session alone: its K and V have seen tokens that a prompt like it has not."""
        session, length = sequence.sleeping, sequence.num_scheduled // self._page * self._page if self._page else 0
        if session is None or not length:
            return [Free(sequence.id)]
        before = self.sessions.sleep(session, sequence.id, length, sequence.place, sequence.discarded)
        freed = [] if before is None else [self.evict(before)]
        self._retained[sequence.id] = 0.0
        self._add(sequence, [])
        return [Truncate(sequence.id, length), *freed]

    def match_leaf(self, sequence: Sequence) -> Hit | None:
        """The most that a turn has in common with the leaf of its session, which is at the same positions."""
        session = sequence.session
        if session is None or session.leaf is None or not self._page:
            return None
        leaf = self._known[session.leaf].sequence
        if leaf.salt != sequence.salt:
            return None
        theirs = leaf.tokens[: session.length]
        both = zip(theirs, sequence.tokens[:-1], strict=False)  # a row has to draw
        alike = next((n for n, (a, b) in enumerate(both) if a != b), min(len(theirs), len(sequence.tokens) - 1))
        length = alike if self._exact and alike > self._page else alike // self._page * self._page
        blocks = self._ledger.shared_of(Keep(session.leaf, length, session.place)) if length else None
        return None if blocks is None else Hit(session.leaf, length, session.place, blocks)

    def set_apart(self, number: int, first: int, count: int) -> None:
        """Have no prompt find a retained sequence any more: it loses tokens, and later ones move to other positions."""
        sequence = self._known[number].sequence
        self._forget(number)
        del sequence.tokens[first : first + count]
        sequence.page_keys.clear()
        sequence.part_keys.clear()
        self._retained[number] = 0.0
        self._known[number] = _Known(sequence, [], shifted=True)

    def drop(self, sequence: Sequence) -> None:
        """A running sequence has no KV any more."""
        if sequence.id in self._known:
            self._forget(sequence.id)

    @property
    def oldest(self) -> list[int]:
        """The retained sequences in the order in which they give way: those without a name that are not prolonged, then
        the others that nobody waits for, each the least recently used first; then those of waiting turns, from the end
        of the queue on.
        """
        named = dict.fromkeys([*self.unasked(), *self._retained])
        queue = [s.leaf for s in self.awaited if s.leaf is not None]
        return victims(queue, len(queue), list(named))  # more than the pool holds are not in it

    def unasked(self) -> Iterator[int]:
        """The retained sequences without a name that are not prolonged, the least recently used first."""
        now = self._clock()
        return (n for n, until in self._retained.items() if self.sessions.owner(n) is None and until <= now)

    def evict(self, number: int) -> Free:
        """Give up a retained sequence."""
        self._forget(number)
        self.sessions.evicted(number)
        return Free(number)

    def evictable(self, free: Blocks) -> list[int]:
        """Blocks with KV of ended sequences among the blocks that sequences can still have, by layer group."""
        return [n - empty for n, empty in zip(free, self._ledger.free_blocks, strict=True)]

    def page_keys(self) -> Iterator[bytes]:
        """Of the pages of sequences that are retained, or run and leave something, as far as they were asked for."""
        for known in self._known.values():
            if not known.sequence.outlived:
                yield from known.sequence.page_keys
                yield from known.sequence.part_keys.values()

    def stay(self, kept: Callable[[Keep], int]) -> list[Keep]:
        """Behind a change of the view nobody runs, and of what is retained that stays which is there whole: it is
        returned; a shifted leaf does not, as nobody can tell whether it lies as before. ``kept``: how many tokens are
        there of what is to be kept.
        """
        keep = list[Keep]()
        for number, (sequence, pages, shifted) in list(self._known.items()):
            owner = self.sessions.owner(number)
            each = Keep(number, sum(map(len, pages)) or (owner.length if owner else 0), sequence.place)
            if number not in self._retained:
                self._forget(number)
            elif each.length and not shifted and kept(each) == each.length:
                keep.append(each)
            else:
                self.evict(number)
        return keep

    def lie(self, kept: Iterable[Keep]) -> None:
        """Behind ``stay``: what is retained lies where ``kept`` says now, or nowhere any more."""
        places = {each.sequence: each.place for each in kept}
        for number in list(self._retained):
            if number not in places:
                self.evict(number)
                continue
            self._known[number].sequence.place = places[number]
            if (owner := self.sessions.owner(number)) is not None:
                owner.place = places[number]

    def forget_all(self) -> list[Free]:
        """Give up all."""
        ops = [self.evict(number) for number in list(self._retained)]
        self._known.clear()
        self._roots.clear()
        return ops

    def _has(self, number: int, length: int) -> bool:
        """Whether KV of so many tokens is there once the plans of this round come."""
        sequence = self._known[number].sequence
        comes = sequence.num_loading or sequence.prefill_worker is not None  # and memory workers have not all of it
        return number in self._retained or (sequence.num_scheduled >= length and not comes)

    def _pages(self, tokens: list[int], stop: int) -> Iterator[Page]:
        """Those that are whole in the first ``stop`` tokens."""
        for at in range(self._page, stop + 1, self._page):
            yield tuple(tokens[at - self._page : at])

    def _all_pages(self, tokens: list[int], stop: int) -> list[Page]:
        """Those in the first ``stop`` tokens, and behind some what is left of these."""
        pages, whole = list(self._pages(tokens, stop)), stop // self._page * self._page
        return [*pages, tuple(tokens[whole:stop])] if pages and self._exact and stop > whole else pages

    def _parts(self, way: list[Beginning], pages: list[Page]) -> Iterator[Beginning]:
        """Those whose last page is not whole, and is the beginning of one of ``pages``."""
        for node, page in zip(way, pages[1:], strict=False):
            for count in range(1, len(page)) if node.parts else ():
                if (part := node.next.get(page[:count])) is not None:
                    yield part

    def _way(self, salt: bytes, pages: Iterable[Page]) -> Iterator[Beginning]:
        """The nodes of ``pages`` below the root of ``salt``, as far as there are some."""
        node = self._roots.get(salt, Beginning())
        for page in pages:
            child = node.next.get(page)
            if child is None:
                return
            yield child
            node = child

    def _add(self, sequence: Sequence, pages: list[Page]) -> Beginning:
        """Put it into the tree; returns its last node."""
        self._known[sequence.id] = _Known(sequence, pages)
        if not pages:
            return Beginning()
        node = self._roots.setdefault(sequence.salt, Beginning())
        for page in pages:
            if page not in node.next:
                node.next[page] = Beginning()
                insort(node.order, page)
                node.parts += len(page) < self._page
            node = node.next[page]
            node.through[sequence.id] = None
        return node

    def _forget(self, number: int) -> None:
        self._retained.pop(number, None)
        sequence, pages, _ = self._known.pop(number)
        if not pages:
            return
        root = node = self._roots[sequence.salt]
        for page in pages:
            child = node.next[page]
            del child.through[number]
            if not child.through:  # nobody goes this way
                del node.next[page], node.order[bisect_left(node.order, page)]
                node.parts -= len(page) < self._page
                if not root.next:
                    del self._roots[sequence.salt]
                return
            node = child
        if node.last == number:
            node.last = None


def _alike(one: Page, other: Page) -> int:
    """Tokens with which both begin."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
