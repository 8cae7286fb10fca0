"""How many KV blocks sequences take, and where new ones fit. Pure policy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Several
from typing import NamedTuple

from msgspec import structs

from lamina.engine.sequence import Sequence
from lamina.protocol.placement import Place
from lamina.protocol.plan import Keep, Rows

from .ahead import Load
from .ledger import Ledger
from .loans import Loans
from .prefixes import Hit

MOST_LANES = 1 << 20
NOBODY: Mapping[int, int] = {}
KIN_MORE, KIN_BESIDE = 1.5, 2  # where kin lies may lie so many times the average of sequences, and so many


class Fit(NamedTuple):
    """Where a new sequence finds room. ``blocks``: that it takes besides those of the hit, by layer group."""

    place: Place
    blocks: list[int]
    hit: Hit | Load | None


class Room:
    """The ledger's blocks, by layer group, as sequences will take them: what is promised counts as taken."""

    def __init__(self, ledger: Ledger, max_rows: int, homes: int = 0) -> None:
        """``max_rows``: of a step. ``homes``: lanes in which sequences begin, the first ones; 0 = all."""
        self._ledger, self._homes = ledger, homes
        self.loans = Loans(ledger, homes) if ledger.placement.stays else None
        self._max_rows = max_rows
        self.closed: set[int] = set()  # groups in which no sequence begins
        self._num_groups = len(ledger.lanes)

    @property
    def _places(self) -> list[Place]:
        """Where sequences may begin."""
        return [Place(lane) for lane in range(min(self._homes or MOST_LANES, self._ledger.num_lanes))]

    def blocks_of(self, place: Place, length: int) -> list[int]:
        """That a sequence at ``place``, of ``length`` tokens, takes at most."""
        return self._ledger.most_blocks(place, length, self._max_rows)

    def times(self, length: int, most_kept: int = 0) -> float:
        """How many sequences of ``length`` tokens all blocks hold at once, if each place has as many of them.
        ``most_kept``: tokens that one has in sparse layers once it has lost blocks; the last one to come has not yet.
        """
        each = [self.blocks_of(place, length) for place in self._places]
        whole: list[int] = [sum(n) for n in zip(*each, strict=True)]
        room = list(self._ledger.num_blocks)
        if most_kept:
            kept = -(-most_kept // self._ledger.block_size) * len(each)
            needed = [min(n, kept) if sparse else n for n, sparse in zip(whole, self._ledger.sparse, strict=True)]
            room, whole = [n - a + b for n, a, b in zip(room, whole, needed, strict=True)], needed
        return min(n * len(each) / needed for n, needed in zip(room, whole, strict=True) if needed)

    def fit(
        self,
        sequence: Sequence,
        hit: Hit | Load | None,
        left: list[int],
        beside: Iterable[Sequence],
        running: Several[Sequence],
        kin: Place | None = None,
    ) -> Fit | None:
        """Of a new sequence that begins with ``hit``, if there is one, in ``left`` blocks; see ``place``. One that was
        preempted goes back to its KV, also where no other begins.
        """
        place: Place | None
        if self.closed and not (isinstance(hit, Load) and hit.own):
            left = [0 if group in self.closed else n for group, n in enumerate(left)]
        if isinstance(hit, Hit):
            place = self.loans.settled(hit.place, hit.length) if self.loans else hit.place
        else:
            place = self.place(sequence, left, beside, running, hit.places if hit else self._places, kin)
        fit = self._fit_at(place, sequence, hit, left)
        if fit is None and self.loans and not isinstance(hit, Load):
            place = self.loans.place(place, sequence.num_promised, hit.length if hit else 0, left)
            fit = self._fit_at(place, sequence, hit, left)
        return fit

    def _fit_at(self, place: Place | None, sequence: Sequence, hit: Hit | Load | None, left: list[int]) -> Fit | None:
        if place is None:
            return None
        blocks = self.blocks_of(place, sequence.num_promised)
        if isinstance(hit, Hit):
            blocks = [max(0, n) for n in less(blocks, list(hit.blocks))]
        return Fit(place, blocks, hit) if min(less(left, blocks)) >= 0 else None

    def lacks(self, sequence: Sequence) -> bool:
        """Whether a new sequence without stored tokens finds no room even if running sequences take none: a quick look.
        False: look closer.
        """
        if self.loans or any(self._ledger.windows):
            return False
        free, length = self._ledger.free_blocks, sequence.num_promised
        return all(min(less(list(free), self.blocks_of(place, length))) < 0 for place in self._places)

    def held(self, sequences: Iterable[Sequence]) -> list[int]:
        """Blocks of all ``sequences``, by group."""
        each = [self.blocks_of(s.place, s.num_promised) for s in sequences]
        return [sum(n) for n in zip(*each, strict=True)] if each else [0] * len(self._ledger.lanes)

    def left(self, running: Iterable[Sequence], wanted: Mapping[Sequence, int]) -> list[int]:
        """Free blocks less those of the rows ``wanted`` in this round, and of what running prefills will still take."""
        left = less(list(self._ledger.free_blocks), list(self._ledger.blocks_needed(rows_of(wanted))))
        for sequence in running:
            there = max(sequence.num_scheduled, sequence.num_loading)
            missing = sequence.num_promised - there - wanted.get(sequence, 0)
            if missing > 0 and (sequence.wants_rows or sequence.prefill_worker is not None or sequence.num_loading):
                whole, part = (self.blocks_of(sequence.place, sequence.num_promised - n) for n in (0, missing))
                left = [n - a + b for n, a, b in zip(left, whole, part, strict=True)]
        return left

    def spare(self, running: Iterable[Sequence], retained: Iterable[int]) -> list[int]:
        """Blocks that are free, or are once ``retained`` gives way, less those of prompts on their way."""
        own = (self._ledger.own_blocks(number) for number in retained)
        left = self.left([s for s in running if not s.decodes], {})
        return [sum(n) for n in zip(left, *own, strict=True)]

    def lacking(self, other: Ledger, running: Iterable[Sequence]) -> int:
        """How many of the ``running`` sequences would have no room in the blocks of ``other``."""
        keep = [Keep(s.id, s.num_promised, s.place) for s in running]
        return len(keep) - len(Room(other, self._max_rows, self._homes).deal(keep))

    def deal(self, keep: Iterable[Keep], last: Several[int] = (), stays: Mapping[int, int] = NOBODY) -> list[Keep]:
        """Places for sequences if all blocks are free, the longest first, so that each group holds its portion as far
        as possible. Sequences for which no room is left are left out. ``last``: sequences that come behind all others,
        in this order, and borrow nothing. ``stays``: lanes whose sequences come first, and the lanes where these are to
        lie if they can. Where the groups have changed, a closed group stays closed if its worker stays.
        """
        if len(self._ledger.lanes) != self._num_groups:
            closed = {stays[group] for group in self.closed if group in stays}
            self.closed.clear()
            self.closed.update(closed)
            self._num_groups = len(self._ledger.lanes)
        self.loans = Loans(self._ledger, self._homes) if self._ledger.placement.stays else None
        total = self._ledger.num_blocks
        left, kept = list(total), list[Keep]()

        def unevenness(rest: list[int]) -> float:
            return sum((n - r) ** 2 / g.portion for n, r, g in zip(total, rest, self._ledger.lanes, strict=True))

        order = {number: place for place, number in enumerate(last)}
        for each in sorted(keep, key=lambda k: (order.get(k.sequence, -1), k.place.lane not in stays, -k.length)):
            loans = None if each.sequence in order else self.loans
            places = loans.places(each.length + 1, left) if loans else self._places
            rests = {x: less(left, self.blocks_of(x, each.length + 1)) for x in places}
            fitting = [x for x, rest in rests.items() if min(rest) >= 0]
            if fitting:
                stayed = Place(stays.get(each.place.lane, -1))
                place = stayed if stayed in fitting else min(fitting, key=lambda x: unevenness(rests[x]))
                left = rests[place]
                kept.append(structs.replace(each, place=place, was=each.place))
        return kept

    def place(
        self,
        sequence: Sequence,
        left: list[int],
        beside: Iterable[Sequence],
        running: Several[Sequence],
        among: Iterable[Place],
        kin: Place | None = None,
    ) -> Place | None:
        """Where a new sequence begins: at the place ``among`` those with enough of the ``left`` blocks by which each
        layer group's share of the KV comes closest to its portion; shares of the sequences ``beside`` it in its batch
        count first, then shares of all ``running`` ones. The place of its ``kin`` comes before that, unless many more
        sequences lie there than elsewhere. None: no place has enough.
        """
        places = {x: self.blocks_of(x, sequence.num_promised) for x in among}
        places = {x: blocks for x, blocks in places.items() if min(less(left, blocks)) >= 0}
        if len(places) < 2:
            return next(iter(places), None)
        if kin in places:
            there = sum(s.place == kin for s in running)
            if there < KIN_MORE * len(running) / len(self._places) + KIN_BESIDE:
                return kin
        held, of_all = self.held(beside), self.held(running)

        def unevenness(blocks: list[int], more: list[int]) -> float:
            parts = zip(blocks, more, self._ledger.lanes, strict=True)
            return sum(float((n + m) ** 2) / g.portion for n, m, g in parts)

        return min(places, key=lambda x: (unevenness(held, places[x]), unevenness(of_all, places[x])))


def rows_of(picked: Mapping[Sequence, int]) -> list[Rows]:
    """The next rows of each sequence, so many."""
    return [Rows(s.id, s.num_scheduled, count, s.place) for s, count in picked.items()]


def less(blocks: list[int], taken: list[int]) -> list[int]:
    """By group."""
    return [b - t for b, t in zip(blocks, taken, strict=True)]
