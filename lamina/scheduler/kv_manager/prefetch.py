"""Prefetch hints: pages that waiting sequences will load, so that storage fetches them to memory and evicts others.

The first waiting sequences whose pages fit into memory and disk get hints: the eviction window of CachedAttention
(section 3.3, arXiv 2403.19708). Storage knows its memory, and chooses which of them to fetch (kv.fetch_window). Pure
policy: no torch, no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Several
from typing import NamedTuple

from lamina.protocol.step_plan import MAX_HINTED_PAGES, MAX_PAGES_PER_TRANSFER, PrefetchHint
from lamina.scheduler.sequence import Sequence
from lamina.scheduler.starts import KvStart

MAX_HINTED_PAGES_PER_PLAN = 1024  # pages in one plan, unless one turn has more


class _HintedSequence(NamedTuple):
    number: int
    pages: int


class PrefetchHints:
    """The hints that memory workers have. Each epoch has a new object."""

    def __init__(self, room: int) -> None:
        """``room``: the capacity of memory and disk, in pages."""
        self._num_pages_that_fit = min(room, MAX_HINTED_PAGES)
        self._next = 0
        self._hinted: dict[Sequence, _HintedSequence] = {}
        self._queue: tuple[object, ...] = ()  # the ends of the queue, as it was last

    def __len__(self) -> int:
        """The number of waiting and loading sequences with hints."""
        return len(self._hinted)

    def next_ops(self, waiting: Several[Sequence], find: Callable[[Sequence], KvStart | None]) -> list[PrefetchHint]:
        """Return the next plan's hints. ``waiting``: in queue order. ``find``: returns what a sequence can load."""
        loading = [s for s in self._hinted if s.transfer.loading_tokens]
        line = (len(waiting), waiting[:1], waiting[-1:], len(loading))
        if line == self._queue:
            return []
        self._queue = line
        new, ahead, room = list[PrefetchHint](), dict.fromkeys(loading), self._num_pages_that_fit
        for sequence in waiting:
            hinted = self._hinted.get(sequence)
            if hinted is None:
                if sum(len(op.keys) for op in new) >= MAX_HINTED_PAGES_PER_PLAN:
                    self._queue = ()  # the rest of them comes with the next plan
                    break
                ops = self._ops_of(sequence, find(sequence))
                hinted = _HintedSequence(self._next, sum(len(op.keys) for op in ops))
                if hinted.pages > room:
                    break
                new += ops
                self._next += 1
                self._hinted[sequence] = hinted
            room -= hinted.pages
            if room < 0:
                break
            ahead[sequence] = None
        gone = [s for s in self._hinted if s not in ahead]
        return [PrefetchHint(number) for number, pages in map(self._hinted.pop, gone) if pages] + new

    def _ops_of(self, sequence: Sequence, load: KvStart | None) -> list[PrefetchHint]:
        if load is None:
            return []
        session = sequence.turn.session
        place = session.location if session is not None and session.location in load.locations else load.locations[0]
        keys = [*load.keys, *load.state_keys]
        return [
            PrefetchHint(self._next, low, keys[low : low + MAX_PAGES_PER_TRANSFER], place)
            for low in range(0, len(keys), MAX_PAGES_PER_TRANSFER)
        ]
