"""What turns that wait will load, told before they do: so memory workers have it in memory by then, and give up other
pages first (CachedAttention section 3.3, arXiv 2403.19708). Pure policy: no torch, no I/O, no clock.

Told are the turns whose pages memory and disk hold together, the eviction window: who is behind it has no claim yet.
Which of them are fetched is the medium's affair, which knows how large its memory is (kv.windows).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Several
from typing import NamedTuple

from lamina.engine.sequence import Sequence
from lamina.protocol.placement import Place
from lamina.protocol.plan import MOST_EXPECTED, MOST_PAGES, Expect

MOST_TOLD = 1024  # pages in one plan, unless one turn has more


class Load(NamedTuple):
    """The first ``length`` tokens of a new sequence can be loaded, where it begins at one of ``places``. ``own``: it is
    its own KV, of before it was preempted.
    """

    length: int
    places: tuple[Place, ...]
    keys: tuple[bytes, ...]  # of its pages
    own: bool = False
    moved: tuple[int, ...] = ()  # of each page, from how many positions further on; empty: none is moved


class _ToldTurn(NamedTuple):
    number: int
    pages: int


class Ahead:
    """The pages that memory workers were told to expect in one view. In the next view they expect nothing, and another
    Ahead tells them.
    """

    def __init__(self, room: int) -> None:
        """``room``: pages that memory and disk hold."""
        self._room = min(room, MOST_EXPECTED)
        self._next = 0
        self._told: dict[Sequence, _ToldTurn] = {}
        self._line: tuple[object, ...] = ()  # the ends of the queue, as it was last

    def __len__(self) -> int:
        """Turns that were told, and still wait or load."""
        return len(self._told)

    def tell(self, waiting: Several[Sequence], find: Callable[[Sequence], Load | None]) -> list[Expect]:
        """For the next plan. ``waiting``: the first one is next. ``find``: what can be loaded of one."""
        loading = [s for s in self._told if s.num_loading]
        line = (len(waiting), waiting[:1], waiting[-1:], len(loading))
        if line == self._line:
            return []
        self._line = line
        new, ahead, room = list[Expect](), dict.fromkeys(loading), self._room
        for sequence in waiting:
            told = self._told.get(sequence)
            if told is None:
                if sum(len(op.keys) for op in new) >= MOST_TOLD:
                    self._line = ()  # the rest of them comes with the next plan
                    break
                ops = self._ops_of(sequence, find(sequence))
                told = _ToldTurn(self._next, sum(len(op.keys) for op in ops))
                if told.pages > room:
                    break
                new += ops
                self._next += 1
                self._told[sequence] = told
            room -= told.pages
            if room < 0:
                break
            ahead[sequence] = None
        gone = [s for s in self._told if s not in ahead]
        return [Expect(number) for number, pages in map(self._told.pop, gone) if pages] + new

    def _ops_of(self, sequence: Sequence, load: Load | None) -> list[Expect]:
        if load is None:
            return []
        session = sequence.session
        place = session.place if session is not None and session.place in load.places else load.places[0]
        return [
            Expect(self._next, low, list(load.keys[low : low + MOST_PAGES]), place)
            for low in range(0, len(load.keys), MOST_PAGES)
        ]
