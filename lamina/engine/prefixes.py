"""KV that outlives its request: which sequences are kept for the tokens that they begin with. Pure policy: no torch, no
I/O, no clock.

A *retained* sequence has no more rows. A new sequence that begins with the same tokens is forked from it, in whole
pages: both hold the blocks, and nothing is computed or moved. What is retained gives its blocks back as soon as others
need them, the least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from lamina.protocol.placement import Place
from lamina.protocol.plan import Fork, Free, Keep, New, SequenceOp

from .ledger import Blocks, Ledger
from .sequence import Sequence

Page = tuple[int, ...]  # tokens


class Hit(NamedTuple):
    """The first ``length`` tokens of a new sequence are those of the retained sequence ``source``."""

    source: int
    length: int
    place: Place
    blocks: Blocks  # that it need not take, by layer group


@dataclass
class _Node:
    """Sequences that begin with the pages on the way here."""

    next: dict[Page, _Node] = field(default_factory=dict)
    through: dict[int, None] = field(default_factory=dict)  # the retained ones, in the order in which they came
    last: int | None = None  # the one that has no more pages


class _Retained(NamedTuple):
    pages: list[Page]
    place: Place


class Prefixes:
    """The retained sequences, by their pages. Whoever is asked for ops puts them into the next plan of some batch."""

    def __init__(self, ledger: Ledger, page: int, *, prompts_only: bool = False) -> None:
        """``page``: tokens, a multiple of the block size; 0 = nothing is retained. ``prompts_only``: completions are
        not.
        """
        self._ledger = ledger
        self._page = page
        self._prompts_only = prompts_only
        self._root = _Node()
        self._retained: OrderedDict[int, _Retained] = OrderedDict()  # the least recently used first
        self._pinned = set[int]()  # forked in this round, in the plan of some batch
        self.num_queried = 0  # tokens of admitted sequences
        self.num_hit = 0  # of them, in forks

    @property
    def num_retained(self) -> int:
        return len(self._retained)

    def begin_round(self) -> None:
        """All plans of the round before are applied."""
        self._pinned.clear()

    def match(self, sequence: Sequence) -> Hit | None:
        """The most that a waiting sequence can begin with. Its last token is never part of it: a row has to draw."""
        if not self._page or sequence.params.prompt_logprobs is not None:
            return None
        found, length = None, 0
        for node in self._way(list(self._pages(sequence.tokens, len(sequence.tokens) - 1))):
            found, length = next(reversed(node.through)), length + self._page
        if found is None:
            return None
        place = self._retained[found].place
        blocks = self._ledger.held_of(Keep(found, length, place))
        return None if blocks is None else Hit(found, length, place, blocks)

    def start(self, sequence: Sequence, hit: Hit | None) -> SequenceOp:
        """The op that starts an admitted sequence, which has its id and place."""
        self.num_queried += sequence.num_promised
        if hit is None:
            return New(sequence.id)
        self.num_hit += hit.length
        self._retained.move_to_end(hit.source)
        self._pinned.add(hit.source)
        return Fork(sequence.id, hit.source, hit.length)

    def end(self, sequence: Sequence) -> list[SequenceOp]:
        """Retain a finished sequence, in place of those whose pages it has too; or free it."""
        limit = len(sequence.prompt) if self._prompts_only else len(sequence.tokens)
        pages = list(self._pages(sequence.tokens, min(sequence.num_scheduled, limit))) if self._page else []
        way = list(self._way(pages))
        known = len(way) == len(pages)  # another one has all of them, and perhaps more
        if known or sequence.output.finish_reason == "error":
            return [Free(sequence.id)]
        freed = [node.last for node in way if node.last is not None]
        for number in freed:
            self._forget(number)
        self._retained[sequence.id] = _Retained(pages, sequence.place)
        self._add(sequence.id, pages)
        return [Free(number) for number in freed]

    def evict(self) -> Free | None:
        """Give up the least recently used one; None where there is none that may go in this round."""
        number = next((n for n in self._retained if n not in self._pinned), None)
        if number is None:
            return None
        self._forget(number)
        return Free(number)

    def forget_all(self) -> list[SequenceOp]:
        """Give up all. Between two rounds."""
        ops: list[SequenceOp] = [Free(number) for number in self._retained]
        self._retained.clear()
        self._root = _Node()
        self._pinned.clear()
        return ops

    def _pages(self, tokens: list[int], stop: int) -> Iterator[Page]:
        """Those that are whole in the first ``stop`` tokens."""
        for at in range(self._page, stop + 1, self._page):
            yield tuple(tokens[at - self._page : at])

    def _way(self, pages: list[Page]) -> Iterator[_Node]:
        """The nodes of ``pages``, as far as there are some."""
        node = self._root
        for page in pages:
            found = node.next.get(page)
            if found is None:
                return
            yield found
            node = found

    def _add(self, number: int, pages: list[Page]) -> None:
        node = self._root
        for page in pages:
            node = node.next.setdefault(page, _Node())
            node.through[number] = None
        node.last = number

    def _forget(self, number: int) -> None:
        node = self._root
        for page in self._retained.pop(number).pages:
            child = node.next[page]
            del child.through[number]
            if not child.through:  # nobody goes this way
                del node.next[page]
                return
            node = child
        node.last = None
