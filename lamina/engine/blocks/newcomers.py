"""Which waiting sequences join which batch, where they begin, and what gives way to them. Pure policy: no torch, no
I/O, no clock.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from lamina.engine.conductor.reasons import Seat
from lamina.engine.conversations.sessions import NOWHERE, POOL
from lamina.engine.prefill import Prefill
from lamina.engine.sequence import Sequence, Shadow
from lamina.protocol.blocks.after_op import touched
from lamina.protocol.placement import Place
from lamina.protocol.plan import Fork, Keep, SequenceOp

from .ahead import Load
from .leaves import Leaves
from .ledger import Ledger
from .prefixes import Hit, Prefixes
from .room import Fit, Room, less
from .swaps import Swaps
from .tier import Tier

MOST_KIN = 1 << 14  # kin whose last place is known
ASIDE: list[Load | Hit | None] = [None, None]  # waits for a transfer


@dataclass
class Batch:
    """Sequences that take their steps together."""

    index: int
    running: list[Sequence] = field(default_factory=list)
    ops: list[SequenceOp] = field(default_factory=list)  # of its next plan

    @property
    def load(self) -> int:
        """Tokens that its attention reads: what a batch costs the memory workers."""
        return sum(s.num_promised for s in self.running)


class Cuts(NamedTuple):
    """Where prompts are cut: into chunks of at most ``chunk`` tokens; ``aligned``: at multiples of it only."""

    chunk: int
    aligned: bool

    def piece(self, missing: int, budget: int, scheduled: int) -> int:
        """Number of tokens to schedule in this step: at most ``budget`` of the ``missing`` ones behind ``scheduled``
        ones; 0 = none yet.
        """
        if not self.aligned:
            return min(missing, budget)
        count = min(missing, self.chunk - scheduled % self.chunk)
        return count if count <= budget else 0

    def wanted(self, batch: Batch) -> dict[Sequence, int]:
        """Rows of each sequence in the batch's next step, as far as its chunk of prompt tokens goes."""
        budget = self.chunk
        wanted: dict[Sequence, int] = {}
        for sequence in batch.running:
            if sequence.wants_rows:
                due = sequence.rows_due(wanted)
                prefilling = due > 1
                count = self.piece(due, budget, sequence.num_scheduled) if prefilling else due
                if prefilling:
                    budget -= count
                if count:
                    wanted[sequence] = count
        return wanted


@dataclass
class _Offer:
    """What a round has for newcomers: by batch, the prompt tokens that its chunk still takes, and what its attention
    reads; and the blocks that are left.
    """

    batches: Several[Batch]
    budgets: list[int]
    loads: list[int]
    left: list[int]


def deal(running: Iterable[Sequence], num_batches: int) -> list[Batch]:
    """The longest sequences first, each to the batch whose attention reads least. No round is in flight, so no batch
    has operations left, and those that decode know all their tokens; prefill workers go on meanwhile.
    """
    batches = [Batch(i) for i in range(num_batches)]
    for sequence in sorted(running, key=lambda s: -s.num_promised):
        min(batches, key=lambda b: (b.load, len(b.running))).running.append(sequence)
    for batch in batches:
        batch.running.sort(key=lambda s: s.request_id)  # the newest is preempted first
    return batches


def line_up(waiting: deque[Sequence], sequence: Sequence) -> None:
    """Have a new sequence wait, behind the sequences of its priority."""
    at = len(waiting)
    while at and waiting[at - 1].priority > sequence.priority:
        at -= 1
    waiting.insert(at, sequence)


def come_back(waiting: deque[Sequence], sequence: Sequence) -> None:
    """Have a preempted sequence wait again, before the sequences of its priority."""
    before = takewhile(lambda s: s.priority < sequence.priority, waiting)
    waiting.insert(sum(1 for _ in before), sequence)


def settle(batches: Several[Batch], kept: Iterable[Keep]) -> list[Sequence]:
    """Running sequences lie elsewhere now. Those that are not among ``kept`` leave their batches, and are returned."""
    places, gone = {each.sequence: each.place for each in kept}, list[Sequence]()
    for batch in batches:
        gone += [s for s in batch.running if s.id not in places]
        batch.running = [s for s in batch.running if s.id in places]
        for sequence in batch.running:
            sequence.place = places[sequence.id]
    return gone


def rolled_back(
    batches: Several[Batch], kept: Callable[[Keep], int], forget: Callable[[Sequence], None]
) -> tuple[list[Keep], list[Sequence]]:
    """Take running sequences back to the tokens that ``kept`` counts. Returns the KV to keep of sequences that go on,
    and the sequences without any KV. The latter leave their batches; so do finished ones, of which ``forget`` is told.
    """
    keep, gone = list[Keep](), list[Sequence]()
    for batch in batches:
        for sequence in batch.running:
            sequence.roll_back(kept(Keep(sequence.id, sequence.num_scheduled, sequence.place)))
            if sequence.finished:
                forget(sequence)
        left = [s for s in batch.running if not s.finished]
        gone += [s for s in left if not s.num_scheduled]
        batch.running = [s for s in left if s.num_scheduled]
        keep += [Keep(s.id, s.num_scheduled, s.place) for s in batch.running]
    return keep, gone


class Newcomers:
    """Admits. ``max_num_seqs``: that run at once."""

    def __init__(
        self,
        ledger: Ledger,
        room: Room,
        cuts: Cuts,
        prefill: Prefill,
        prefixes: Prefixes,
        tier: Tier | None,
        swaps: Swaps | None,
        max_num_seqs: int,
        leaves: Leaves,
    ) -> None:
        self._ledger, self._room, self._cuts = ledger, room, cuts
        self._prefill, self._prefixes, self._tier, self._swaps = prefill, prefixes, tier, swaps
        self._max_num_seqs, self._leaves = max_num_seqs, leaves
        self._next_id = 0
        self._kin = OrderedDict[bytes, Place]()  # where each has begun last, the one that did so first before others

    def number(self) -> int:
        """Of a new sequence: no other one has had it."""
        self._next_id += 1
        return self._next_id - 1

    def admit(self, waiting: deque[Sequence], batches: Several[Batch]) -> None:
        """Deal waiting sequences to the batches while there is room for all of their known tokens; the first sequence
        without room holds up the sequences behind it, so that none starves; a shadow holds up none. Each goes to the
        batch that reads least among the batches whose next chunk has room for its tokens: so all chunks are filled.
        Blocks of sequences that have ended or were preempted count from the next round on.
        """
        self._prefixes.awaited = [s.session for s in waiting if s.session is not None]
        running = _running(batches)
        if running and waiting and not isinstance(waiting[0], Shadow) and self._nobody_fits(waiting[0]):
            return
        wanted = [self._cuts.wanted(batch) for batch in batches]
        budgets = [self._cuts.chunk - sum(c for c in w.values() if c > 1) for w in wanted]
        left = self._room.left(running, {s: c for w in wanted for s, c in w.items()})
        here = _Offer(batches, budgets, [b.load for b in batches], left)
        aside = list[Sequence]()  # they wait for KV that others load
        while waiting and len(_running(batches)) < self._max_num_seqs:
            begins = self._begin(waiting[0], here)
            if begins is None and not isinstance(waiting[0], Shadow):
                break
            sequence = waiting.popleft()
            if not begins:
                aside.append(sequence)
        waiting.extendleft(reversed(aside))
        if self._tier:
            batches[0].ops += self._tier.ahead.tell([*waiting], self._to_load)

    def _begin(self, sequence: Sequence, here: _Offer) -> bool | None:
        """Have the first of the waiting sequences join a batch, if it can. False: it waits on, and those behind it need
        not wait for it; None: it does not fit.
        """
        if self._prefill.holds_back(sequence):
            return False
        ways = self._ways(sequence, here.batches, alone=not _running(here.batches))
        if not ways:
            return None
        loads_some = isinstance(ways[0], Load)
        hit = next((way for way in ways if isinstance(way, Hit)), None)
        elsewhere = self._prefill.wants(sequence, hit.length if hit else 0)
        if ways == ASIDE or (elsewhere and self._follows(sequence, hit)):
            return False
        if elsewhere:
            hit = self._hit_of_both(sequence, hit)
            ways = [hit, None] if hit else [None]
        begun = hit.length if hit else 0
        counts = [self._cuts.piece(sequence.num_promised - begun, budget, begun) for budget in here.budgets]
        able = [i for i, count in enumerate(counts) if loads_some or count > 0]
        if isinstance(sequence, Shadow):
            able = [i for i in able if sequence.of in here.batches[i].running]
        if elsewhere and not self._prefill.has_room_for(sequence):
            return False if self._prefill.has_room else None
        if not able or sequence.num_drawing:
            return None  # a preempted one whose last token is still being drawn waits
        to = min(able, key=here.loads.__getitem__)
        for way in ways:
            fit, here.left = self._make_way(here.batches, here.batches[to], sequence, way, here.left)
            if fit is not None:
                break
        else:
            return None
        here.left = less(here.left, fit.blocks)
        told = self._prefill.promises.reasons is not None and not isinstance(sequence, Shadow)
        seat = Seat(to, tuple(here.loads), fit.place, self._why(sequence, fit), here.left) if told else None
        here.loads[to] += sequence.num_promised
        self._join(here.batches, here.batches[to], sequence, fit)
        if seat is not None:
            self._prefill.promises.seated(sequence, seat, apart=elsewhere)
        if elsewhere:
            self._prefill.add(sequence)
            return True
        self._prefill.pass_over(sequence)
        if not sequence.num_loading:
            missing = sequence.num_promised - sequence.num_scheduled
            here.budgets[to] -= self._cuts.piece(missing, here.budgets[to], sequence.num_scheduled)
        return True

    def _nobody_fits(self, first: Sequence) -> bool:
        """Whether the first one that waits, and so all behind it, surely wait on, while others run: a quick look."""
        plain = self._tier is None and self._swaps is None and not first.discarded and not self._prefixes.num_retained
        return plain and not self._prefixes.beginnings(first) and self._room.lacks(first)

    def _ways(self, sequence: Sequence, batches: Several[Batch], *, alone: bool) -> list[Load | Hit | None]:
        """The stored tokens that a waiting sequence may begin with, the best first. An empty list: it waits, and so do
        all behind it; ASIDE: it waits for a transfer, and the others do not. ``alone``: nothing runs.
        """
        if self._swaps and self._swaps.waits(sequence):
            return ASIDE
        if self._swaps and (own := self._swaps.find(sequence)) is not None:
            return [own, None] if alone else [own]
        if sequence.discarded:
            return self._ways_of_truncated(sequence, batches)
        beginnings = self._prefixes.beginnings(sequence)
        hit = self._prefixes.match(beginnings)
        coming = self._prefixes.coming(beginnings, hit)
        if coming is not None and not self._prefill.wants(sequence, beginnings[-1].length):
            return ASIDE if coming.num_loading or coming.prefill_worker is not None else []
        load = self._tier.find(sequence, hit.length if hit else 0) if self._tier else None
        return [way for way in (load, hit) if way is not None] + [None]

    def _follows(self, sequence: Sequence, hit: Hit | None) -> bool:
        """Whether one that a prefill worker computes waits for a prompt that begins alike, with which it may begin."""
        return self._prefixes.shared(sequence) > 0 and self._prefill.follows(sequence, hit.length if hit else 0)

    def _hit_of_both(self, sequence: Sequence, hit: Hit | None) -> Hit | None:
        """Of a sequence that a prefill worker computes: as much of ``hit`` as this one has too."""
        length = self._prefill.match(sequence, hit.length) if hit else 0
        if not length:
            return None
        both = self._prefixes.match([x for x in self._prefixes.beginnings(sequence) if x.length <= length])
        return both if both and both.length == length else None

    def _to_load(self, sequence: Sequence) -> Load | None:
        """Beside the pool, of one that waits for its turn; preempted ones come back soon, and truncated ones from their
        leaf alone.
        """
        if self._tier is None or sequence.discarded or sequence.num_preemptions:
            return None
        hit = self._prefixes.match(self._prefixes.beginnings(sequence))
        return self._tier.find(sequence, hit.length if hit else 0)

    def _ways_of_truncated(self, sequence: Sequence, batches: Several[Batch]) -> list[Load | Hit | None]:
        """Of a truncated sequence: the leaf of its session alone, or pages that the session had saved. The leaf may
        have to be shifted first, in a round in which no other operation touches it.
        """
        session = sequence.session
        leaf = session.leaf if session is not None else None
        if leaf is not None and any(leaf in touched(op) for batch in batches for op in batch.ops):
            return ASIDE
        shift = self._leaves.shift(sequence)
        if shift is not None:
            batches[0].ops.append(shift)
            return ASIDE
        alike = session is not None and session.discarded == sequence.discarded
        hit = self._prefixes.match_leaf(sequence) if alike else None
        load = self._tier.find_moved(sequence) if self._tier and session is not None and hit is None else None
        return [way for way in (load, hit) if way is not None] + [None]

    def _why(self, sequence: Sequence, fit: Fit) -> str:
        """Why it begins there."""
        if fit.hit is not None:
            return "its beginning lies there" if isinstance(fit.hit, Hit) else "its beginning is loaded there"
        beside = bool(sequence.kin) and self._kin.get(sequence.kin) == fit.place
        return "beside its kin" if beside else "so all have their parts"

    def _join(self, batches: Several[Batch], batch: Batch, sequence: Sequence, fit: Fit) -> None:
        hit = fit.hit if isinstance(fit.hit, Hit) else None
        load = fit.hit if isinstance(fit.hit, Load) else None
        sequence.id, sequence.place = self.number(), fit.place
        sequence.num_scheduled = sequence.num_cached = hit.length if hit else 0
        self._remember(sequence)
        op = self._prefixes.start(sequence, hit)
        (batches[0] if hit else batch).ops.append(op)  # before its source may go, in another batch's plan
        batch.running.append(sequence)
        own = load is not None and load.own
        if sequence.session is not None and not sequence.num_preemptions:
            tier = POOL if hit else self._tier.medium if self._tier and load else NOWHERE
            self._prefixes.sessions.woke(sequence.session, tier)
        if self._swaps and not own:
            batch.ops += self._swaps.forget(sequence)
        if self._tier and not own:
            self._tier.num_queried += sequence.num_promised - sequence.num_scheduled
        if self._tier and load:
            sequence.num_loading = load.length
            batch.ops += self._tier.load(sequence, load, self._spare_s(sequence, load))

    def _remember(self, sequence: Sequence) -> None:
        """Remember where the next ones of its kin are to begin."""
        if sequence.kin:
            self._kin[sequence.kin] = sequence.place
            self._kin.move_to_end(sequence.kin)
            if len(self._kin) > MOST_KIN:
                self._kin.popitem(last=False)

    def _spare_s(self, sequence: Sequence, load: Load) -> float:
        """Seconds for which its first rows behind a load will be computed; 0 where they wait for its end: nothing is
        known yet, they are not this batch's, or they score its prompt, and no load that fails may have been scored.
        """
        apart = sequence.sparse or sequence.prefill_worker is not None
        if self._swaps is None or apart or sequence.params.prompt_logprobs is not None:
            return 0.0
        missing = sequence.num_promised - load.length
        return self._swaps.compute_s(self._cuts.piece(missing, self._cuts.chunk, load.length))

    def _make_way(
        self, batches: Several[Batch], batch: Batch, sequence: Sequence, hit: Hit | Load | None, left: list[int]
    ) -> tuple[Fit | None, list[int]]:
        """Where a waiting sequence of ``batch`` can begin, and the blocks left before it does. Retained ones give way,
        the least recently used first, if they suffice; so all do where nothing runs, since what they share counts as
        free in the next round only. The source of its hit stays, and so do those of this round's forks, which share.
        """
        running, gone, more = _running(batches), list[int](), left
        sources = {op.source for each in batches for op in each.ops if isinstance(op, Fork)}
        sources |= {hit.source} if isinstance(hit, Hit) else set()
        oldest = (n for n in self._prefixes.oldest if n not in sources)
        kin = self._kin.get(sequence.kin) if sequence.kin else None
        while (fit := self._room.fit(sequence, hit, more, batch.running, running, kin)) is None:
            number = next(oldest, None)
            if number is None:
                break
            more = [n + own for n, own in zip(more, self._ledger.own_blocks(number), strict=True)]
            gone.append(number)
        if fit is None and (running or hit is not None):
            return None, left
        batches[0].ops += [self._prefixes.evict(number) for number in gone]
        return fit, more


def _running(batches: Several[Batch]) -> list[Sequence]:
    return [s for b in batches for s in b.running]


def overtaken(ledger: Ledger, batches: Iterable[Batch], keep: list[Keep]) -> list[Sequence]:
    """Behind a loss: who would write into a block that another one holds, which was forked from it by steps that were
    done, and not told. They leave ``batches``, ``keep`` and the ledger, and are to begin anew.
    """
    gone = list[Sequence]()
    for batch in batches:
        for sequence in list(batch.running):
            if not ledger.has_alone(sequence.id, sequence.num_scheduled):
                gone.append(sequence)
                batch.running.remove(sequence)
                keep[:] = [each for each in keep if each.sequence != sequence.id]
                ledger.reconcile(keep)
    return gone
