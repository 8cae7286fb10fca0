"""KV beside the memory workers' pools, by pages: the pages that exist, and the pages on their way. Pure policy: no
torch, no I/O, no clock.

A sequence is saved as its pages fill. Once it is retained, the rest is saved: pages that no medium has yet, the last
one in part. A prompt that begins with existing pages is loaded, if that brings at least a page more than the pool has.
Memory workers report the end of each transfer; a page exists once all of them have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Several
from itertools import groupby

from msgspec import structs

from lamina.engine.conversations.ranges import count_of
from lamina.engine.sequence import Sequence
from lamina.kv.keys import page_key
from lamina.protocol.blocks.tables import BlockTables
from lamina.protocol.placement import Place
from lamina.protocol.plan import MOST_PAGES, MOST_PROLONGED_S, Drop, Export, Import, Prolong, SequenceOp, Transfer
from lamina.protocol.tiers import GateOpened, TierFacts, Transferred

from .ahead import Ahead, Load
from .drops import PageDrops
from .page_keys import PageKeys
from .under_way import LoadingSequence, Moved, MovingPages, SavingSequence

UNNUMBERED = 0  # a transfer whose plan is not made yet
MOST_SAVED = 8  # pages of one Export, so that a worker whose disk is slow is heard of now and then


class Tier:
    """The driver's index of all media. Transfers of one sequence are loads or saves."""

    def __init__(
        self,
        facts: TierFacts,
        ledger: BlockTables,
        holders: Several[Several[int]],
        *,
        whole: int = 1,
        prompts_only: bool = False,
    ) -> None:
        """``holders``: group -> memory workers. A prompt is loaded up to a multiple of ``whole`` tokens; of sequences
        nothing but their prompts is saved with ``prompts_only``.
        """
        self.page, self.whole, self._prompts_only = facts.page, whole, prompts_only
        self.medium, self.complete = facts.medium, facts.complete
        self._exact = not prompts_only  # whether a page is kept, too, that is not whole
        self._keys = PageKeys(facts)
        self.identity = facts.identity
        self._ledger = ledger
        windows = [w for w in ledger.windows if w]
        self._most = min(windows) if windows else 0  # tokens of which a pool holds all, if they are loaded at once
        self._next_id = 0
        self._moving: dict[int, MovingPages] = {}
        self._saving: dict[int, SavingSequence] = {}  # by retained sequence
        self._loading: dict[int, LoadingSequence] = {}  # by sequence
        self._gone: set[bytes] = set()  # pages that some worker has given up while others may still save them
        self._drops = PageDrops()
        self._found: tuple[Sequence, int, int, Load | None] | None = None  # what was asked for last, and the answer
        self.num_queried = 0  # tokens of admitted sequences that the pool has not
        self.num_hit = 0  # how many of them were loaded
        self.learn(facts, holders)

    @property
    def moving(self) -> bool:
        """Whether some transfer is under way."""
        return bool(self._moving)

    def learn(self, facts: TierFacts, holders: Several[Several[int]]) -> None:
        """Workers have met, perhaps other ones than before: the pages that they have told of exist, and no others."""
        ledger = self._ledger
        self._owners = [
            {w for lanes, group in zip(ledger.lanes, holders, strict=True) if lane in lanes for w in group}
            for lane in range(ledger.num_lanes)
        ]
        self._num_workers = 1 + max(w for group in holders for w in group)
        self.ahead = Ahead(
            0 if self.complete else self._room(facts.rooms)
        )  # workers have been told of no waiting turn yet
        self._lanes: dict[bytes, set[int]] = {}  # page -> lanes whose workers can load it
        told = [self._drops.without(keys) for keys in facts.pages]
        self._keys.era = facts.era
        for lane, owners in enumerate(self._owners):
            for key in set.intersection(*(told[w] for w in owners)):
                self._lanes.setdefault(key, set()).add(lane)
        self._found = None

    def _room(self, rooms: Several[int]) -> int:
        """Pages of all lanes, where each has as many. ``rooms``: pages of which each worker can keep its part."""
        if not rooms:
            return 0
        lanes_of = Counter(worker for owners in self._owners for worker in owners)
        return len(self._owners) * min(rooms[w] // lanes_of[w] for owners in self._owners for w in owners)

    def find(self, sequence: Sequence, beyond: int) -> Load | None:
        """What can be loaded of a waiting sequence, more than ``beyond`` tokens. Its last token has to be computed: a
        row has to draw.
        """
        tokens = len(sequence.tokens)
        if self._found is None or self._found[:3] != (sequence, beyond, tokens):
            self._found = sequence, beyond, tokens, self._find(sequence, beyond)
        return self._found[3]

    def _find(self, sequence: Sequence, beyond: int) -> Load | None:
        stop = len(sequence.tokens) - 1
        stop = min(stop, self._most) if self._most else stop
        if sequence.params.prompt_logprobs is not None or stop <= beyond:
            return None
        if not self._lanes and not self.complete:
            return None
        keys = self.keys_of(sequence, stop)
        lengths = {x: self.num_there(keys, x) * self.page // self.whole * self.whole for x in self.places()}
        lengths = {place: self._with_part(sequence, n, place, stop) for place, n in lengths.items()}
        length = max(lengths.values())
        if length < beyond + (self.page if beyond and not self.complete else 1):  # to go on from the pool costs less
            return None
        able = tuple(place for place, n in lengths.items() if n == length)
        return Load(length, able, tuple(self.keys_of(sequence, length, parts=True)))

    def find_moved(self, sequence: Sequence) -> Load | None:
        """What can be loaded of a turn that has lost tokens: pages of its whole conversation, which were saved before,
        and whose K is rotated as they come. What has been computed behind the loss was never saved.
        """
        beyond, tokens = -1, len(sequence.given)
        if self._found is None or self._found[:3] != (sequence, beyond, tokens):
            self._found = sequence, beyond, tokens, self._find_moved(sequence)
        return self._found[3]

    def _find_moved(self, sequence: Sequence) -> Load | None:
        stop, page = len(sequence.tokens) - 1, self.page
        stop = min(stop, self._most) if self._most else stop
        numbers = range(len(sequence.given) // page)
        left = [n for n in numbers if not count_of(sequence.discarded, (n + 1) * page, n * page)][: stop // page]
        if not left or not self._lanes:
            return None
        every = self.keys_behind(sequence.salt, sequence.given[: (left[-1] + 1) * page])
        keys = [every[n] for n in left]
        pages = {place: self._num_moved(keys, left, place) for place in self.places()}
        most = max(pages.values()) * page // self.whole * self.whole // page
        if not most:
            return None
        able = tuple(place for place, n in pages.items() if n >= most)
        moved = tuple((n - m) * page for m, n in enumerate(left[:most]))
        return Load(most * page, able, tuple(keys[:most]), moved=moved)

    def _num_moved(self, keys: Several[bytes], numbers: Several[int], place: Place) -> int:
        """Pages, from the first on, that are there, in the lane where they will lie."""
        lanes = [(self._lane(place, now), self._lane(place, was)) for now, was in enumerate(numbers)]
        there = [now == was and now in self._lanes.get(key, ()) for (now, was), key in zip(lanes, keys, strict=True)]
        return there.index(False) if False in there else len(there)

    def _with_part(self, sequence: Sequence, whole: int, place: Place, stop: int) -> int:
        """Behind its ``whole`` tokens that are there, how far a page goes that is there and not whole."""
        lane, most = self._lane(place, whole // self.page), min(stop, whole + self.page - 1)
        lengths = range(most, whole, -1) if self._exact and (whole or self.complete) else ()
        keys = ((n, self._keys.part(sequence, n)) for n in lengths)
        return next((n for n, key in keys if key and self._has(key[0], lane)), whole)

    def num_there(self, keys: Several[bytes], place: Place) -> int:
        """Pages, from the first of ``keys`` on, that a sequence at ``place`` can load."""
        there = (self._has(key, self._lane(place, number)) for number, key in enumerate(keys))
        return next((number for number, has in enumerate(there) if not has), len(keys))

    def places(self, *others: Place) -> list[Place]:
        """Places where a sequence can begin: ``others`` whose lanes still exist, then the start of each lane."""
        num = self._ledger.num_lanes
        there = [x for x in others if all(lane < num for lane in (x.lane, *(run.lane for run in x.moved)))]
        return list(dict.fromkeys([*there, *map(Place, range(num))]))

    def _has(self, key: bytes, lane: int) -> bool:
        return self.complete or lane in self._lanes.get(key, ())

    @property
    def owes(self) -> bool:
        """Whether the media are to be told of pages that nobody will find any more."""
        return bool(self._drops.due)

    def is_saving(self, number: int) -> bool:
        """Whether some page of a sequence is on its way to a medium."""
        return number in self._saving

    def load(self, sequence: Sequence, wanted: Load, spare_s: float = 0.0) -> list[Import]:
        """Begin: the sequence has its number and its place. ``spare_s``: for which its first rows will be computed."""
        keys, ops, low = list(wanted.keys), list[Import](), 0
        for moved, alike in groupby(wanted.moved or (0,) * len(keys)):
            stop = low + len(list(alike))
            while low < stop:
                some, first = keys[low : min(stop, low + MOST_PAGES)], low * self.page
                count = min(len(some) * self.page, wanted.length - first)
                ops.append(Import(sequence.id, UNNUMBERED, first, count, some, sequence.place, spare_s, moved))
                low += len(some)
        self._loading[sequence.id] = LoadingSequence(
            sequence, wanted, len(ops), len(ops) * self._num_workers, wanted.length
        )
        return ops

    def fill(self, running: Iterable[Sequence]) -> list[Export]:
        """Of pages that sequences have filled since they were offered: rows behind these go on meanwhile. Where some
        layers have a window nothing is saved before the end, as its blocks may go at any time.
        """
        ops = list[Export]()
        for sequence in running:
            length = min(sequence.num_scheduled, len(sequence.tokens)) // self.page * self.page
            if length > sequence.num_offered and self._may_fill(sequence):
                sequence.num_offered = length
                ops += self.save(sequence, length)
        return ops

    def _may_fill(self, sequence: Sequence) -> bool:
        alone = sequence.sparse or sequence.discarded or sequence.outlived  # no other sequence may find its KV
        return not (self._most or alone or sequence.finished or sequence.num_loading)

    def save(self, sequence: Sequence, length: int) -> list[Export]:
        """What is not there yet of the first ``length`` tokens of a sequence, which have been scheduled."""
        if self._prompts_only:
            length = min(length, len(sequence.prompt))
        if self._most:
            length = min(length, self._most)
            if any(self._ledger.table(group, sequence.id)[0] for group in range(len(self._ledger.windows))):
                return []  # its beginning was given back behind a window
        coming = set[bytes]().union(*(x.keys for x in self._saving.values()))
        keys = self.keys_of(sequence, length, parts=True)
        lanes = [self._lane(sequence.place, number) for number in range(len(keys))]
        missing = [n for n, key in enumerate(keys) if key not in coming and not self._has(key, lanes[n])]
        return self._export(sequence, keys, missing, length)

    def save_own(self, sequence: Sequence, length: int, root: bytes) -> tuple[list[bytes], list[Export]]:
        """All of ``length`` tokens of a running sequence that is preempted, the last page as far as it goes, under keys
        that nobody else has: ``root`` tells apart. No keys where a window has passed some of it.
        """
        here = all(self._ledger.table(group, sequence.id)[0] == 0 for group in range(len(self._ledger.windows)))
        if not here or length > (self._most or length):
            return [], []
        keys, parent = list[bytes](), self._keys.root(sequence.salt, root)
        for number in range(-(-length // self.page)):
            parent = page_key(parent, number, [number])
            keys.append(parent)
        return keys, self._export(sequence, keys, range(len(keys)), length)

    def _export(self, sequence: Sequence, keys: Several[bytes], numbers: Iterable[int], length: int) -> list[Export]:
        ops, prompt, tag = list[Export](), len(sequence.prompt), self._keys.tag(sequence.salt)
        for run in _runs(numbers):
            some, first = [keys[n] for n in run], run[0] * self.page
            count = min(len(some) * self.page, length - first)
            ops.append(Export(sequence.id, UNNUMBERED, first, count, some, tag, prompt))
        if ops:
            page_keys = {key for op in ops for key in op.keys}
            saving = self._saving.setdefault(sequence.id, SavingSequence(sequence.place, set(), 0))
            saving.keys |= page_keys
            saving.left += len(ops)
            saving.place = sequence.place  # which may know more runs by now
            self._gone -= page_keys
            self._drops.given(page_keys)
        return ops

    def open(self, said: GateOpened) -> None:
        """A memory worker has enough of a load. Once all have, the sequence may have its first rows; those behind them
        wait for the load's end.
        """
        loading = self._loading[self._moving[said.id].op.sequence]
        loading.shut -= 1
        if not loading.shut:
            loading.sequence.num_scheduled = loading.sequence.num_cached = loading.wanted.length

    def report(self, said: Transferred) -> Moved | None:
        """A memory worker has ended a transfer; None while others of its sequence are under way."""
        self.drop(said.gone)
        self._gone.update(said.gone)
        moving = self._moving[said.id]
        moving.left -= 1
        moving.pages = min(moving.pages, max(0, said.pages))
        moving.error = moving.error or said.error
        if moving.left:
            return None
        del self._moving[said.id]
        return self._loaded(moving) if isinstance(moving.op, Import) else self._saved(moving)

    def drop(self, keys: Iterable[bytes]) -> None:
        """Pages that are to be found no more."""
        for key in keys:
            self._lanes.pop(key, None)
            self._found = None

    def delete(self, sequence: int, keys: Several[bytes]) -> list[Drop]:
        """Have the media forget pages, those too that are on their way there. ``sequence``: whose they were."""
        self.drop(keys)
        if self._saving:
            self._gone.update(keys)
        return self._drops.of(sequence, keys)

    def prolong(self, sequence: Sequence, length: int) -> list[Prolong]:
        """Have the media keep the pages of its first ``length`` tokens for as long as it asks for."""
        if not (seconds := min(sequence.retention_s, MOST_PROLONGED_S)):
            return []
        keys = self.keys_of(sequence, min(length, len(sequence.prompt)) if self._prompts_only else length, parts=True)
        return [Prolong(sequence.id, seconds, keys[low : low + MOST_PAGES]) for low in range(0, len(keys), MOST_PAGES)]

    def cancel(self) -> None:
        """Behind a loss: no transfer under way will be done."""
        self._drops.again()
        self._moving.clear()
        self._saving.clear()
        self._loading.clear()
        self._gone.clear()

    def forget(self, era: bytes, sequences: Iterable[Sequence]) -> None:
        """Find none of the present pages again, nor those on their way: later pages are of another ``era``, pages of
        ``sequences`` too. The media give the old pages up bit by bit, but for pages that are being loaded.
        """
        for sequence in sequences:
            self._keys.forget(sequence)
        loading = set[bytes]().union(*(x.wanted.keys for x in self._loading.values()))
        saving = set[bytes]().union(*(x.keys for x in self._saving.values()))
        self._drops.due += sorted((self._lanes.keys() | saving) - loading)
        self._gone |= saving
        self._lanes.clear()
        self._found, self._keys.era = None, era

    def drops(self) -> list[Drop]:
        """For the next plan, of pages that nobody will find any more."""
        return self._drops.next()

    def _loaded(self, moving: MovingPages) -> Moved | None:
        op, loading = moving.op, self._loading[moving.op.sequence]
        if moving.pages < len(op.keys):
            loading.valid = min(loading.valid, op.first + moving.pages * self.page)
            loading.error = loading.error or moving.error
            self.drop([op.keys[moving.pages]])
        loading.left -= 1
        if loading.left:
            return None
        del self._loading[op.sequence]
        sequence, valid = loading.sequence, loading.valid
        if loading.shut or valid < loading.wanted.length:
            valid = valid if valid == loading.wanted.length else valid // self.whole * self.whole
            sequence.begin_at(valid)
        sequence.num_loading = 0
        self.num_hit += 0 if loading.wanted.own else valid
        return Moved(sequence, op.sequence, loading.error)

    def _saved(self, moving: MovingPages) -> Moved | None:
        op, saving = moving.op, self._saving[moving.op.sequence]
        for number, key in enumerate(op.keys[: moving.pages], op.first // self.page):
            if key not in self._gone:
                self._lanes.setdefault(key, set()).add(self._lane(saving.place, number))
                self._found = None
        saving.error = saving.error or moving.error
        saving.left -= 1
        if saving.left:
            return None
        del self._saving[op.sequence]
        if not self._saving:
            self._gone.clear()
        return Moved(None, op.sequence, saving.error)

    def numbered(self, ops: Iterable[SequenceOp]) -> list[SequenceOp]:
        """The ops of the next plan, whose transfers begin with it: they get their numbers, as these follow the order of
        the plans.
        """
        return [self._begin(op) if isinstance(op, Transfer) else op for op in ops]

    def _begin(self, op: Transfer) -> Transfer:
        self._next_id += 1
        op = structs.replace(op, id=self._next_id)
        self._moving[op.id] = MovingPages(op, self._num_workers, len(op.keys))
        return op

    def keys_of(self, sequence: Sequence, length: int, *, parts: bool = False) -> list[bytes]:
        """Of the whole pages of its first ``length`` tokens; ``parts``: and of one with which they end."""
        return [*self._keys.of(sequence, length), *(self._keys.part(sequence, length) if parts and self._exact else ())]

    def keys_behind(self, salt: bytes, tokens: Several[int]) -> list[bytes]:
        """Of the whole pages of ``tokens``, of a prompt with ``salt``."""
        return self._keys.behind(salt, tokens)

    def _lane(self, place: Place, number: int) -> int:
        """Of a page."""
        return self._ledger.placement.lane_at(place, number * self.page // self._ledger.block_size)


def _runs(numbers: Iterable[int]) -> list[list[int]]:
    """Of numbers that follow one another, at most MOST_SAVED each."""
    runs = list[list[int]]()
    for number in numbers:
        if not runs or number != runs[-1][-1] + 1 or len(runs[-1]) == MOST_SAVED:
            runs.append([])
        runs[-1].append(number)
    return runs
