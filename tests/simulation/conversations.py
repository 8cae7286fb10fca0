"""Conversations whose turns wait in one line, and whose KV sleeps in memory and on a disk: the experiment of
CachedAttention's section 4 (arXiv 2403.19708) on a virtual clock.

The policy is the product's: scheduler.kv_manager.prefetch announces the queue, and pages move as kv.storage.layered
moves them. What is modelled is the world: when sessions come, how long their turns are, how fast turns are served and
the disk is read. A byte stands for a megabyte, and a page has 512 tokens.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from lamina.kv.pages import Page, PageFragment, Provenance
from lamina.kv.storage import StorageConfig
from lamina.kv.storage.host import HostStorage
from lamina.kv.storage.layered import TieredStorage
from lamina.protocol.kv_placement import FIRST_LOCATION
from lamina.request import CompletionOutput, SamplingParams
from lamina.scheduler.kv_manager.prefetch import PrefetchHints
from lamina.scheduler.sequence import Sequence
from lamina.scheduler.starts import KvStart
from lamina.tools.plan.simulator.clock import VirtualClock

TOKENS = 512  # of a page
ATOM = PageFragment(0, 0)
SHARE = frozenset({ATOM})
ONE_TURN = 0.27  # of all sessions, one in so many has one turn only
AHEAD, LRU, FIFO = "ahead", "lru", "fifo"


@dataclass(frozen=True)
class ConversationWorld:
    """Sizes in megabytes. ``served``: turns in a second, one after the other. ``window``: tokens that a conversation
    keeps at most. ``warm``: turns that are not counted. ``question``, ``answer``: mean tokens of each. ``deep``: of so
    many turns the line is long.
    """

    kv_of_token: float
    memory: int
    disk: int
    served: float
    sessions: int = 9_000
    turns: float = 5.75
    warm: int = 10_000
    arrivals: float = 1.0  # sessions in a second
    thinks_s: float = 60.0
    question: float = 100.0
    answer: float = 330.0
    window: int = 4_096
    disk_rate: float = 10_000.0  # read in a second
    deep: int = 1_000
    seed: int = 1

    def scaled(self, part: float) -> ConversationWorld:
        """A part of all of it, so that as much is there and used for each session."""
        return replace(
            self, memory=int(self.memory * part), disk=int(self.disk * part), served=self.served * part,
            sessions=int(self.sessions * part), warm=int(self.warm * part), arrivals=self.arrivals * part,
            disk_rate=self.disk_rate * part, deep=int(self.deep * part),
        )  # fmt: skip


class TierHits(NamedTuple):
    """The hits of all turns after the first one of a session. ``hit``: the share of their pages that were there,
    counted from the first page on. ``in_memory``: of these, those that were in memory; ``in_memory_deep``: those where
    the queue was long. ``waiting``: turns in the queue.
    """

    turns: int
    hit: float
    in_memory: float
    in_memory_deep: float
    waiting: float


@dataclass(eq=False)
class _Talk:
    number: int
    lengths: list[int]  # of the turns to come
    history: int = 0

    def keys(self) -> tuple[bytes, ...]:
        return tuple(f"{self.number}.{page}".encode() for page in range(self.history // TOKENS))


@dataclass(eq=False)
class _Count:
    turns: int = 0
    pages: Counter[str] = field(default_factory=Counter)
    waiting: int = 0


class Conversations:
    """One run. ``policy``: AHEAD, or LRU or FIFO, which know of no line."""

    def __init__(self, world: ConversationWorld, policy: str) -> None:
        self._world, self._clock, self._rng = world, VirtualClock(), random.Random(world.seed)
        self._page_bytes = round(world.kv_of_token * TOKENS)
        place = StorageConfig(world.memory, policy=LRU if policy == AHEAD else policy)
        self._memory = HostStorage(place)
        self._medium = TieredStorage(self._memory, HostStorage(place._replace(total_bytes=world.disk)))
        self._ahead = PrefetchHints((world.memory + world.disk) // self._page_bytes) if policy == AHEAD else None
        self._line = deque[Sequence]()
        self._talks: dict[int, _Talk] = {}  # by the request of the turn that waits
        self._busy = False
        self._disk_free_s = 0.0
        self._served = self._asked = 0
        self._count = _Count()

    def run(self) -> TierHits:
        """All turns of all sessions."""
        comes_s, rng = 0.0, self._rng
        for number in range(self._world.sessions):
            comes_s += rng.expovariate(self._world.arrivals)
            talk = _Talk(number, [self._length() for _ in range(self._turns())])
            self._clock.later(comes_s, lambda talk=talk: self._ask(talk))  # type: ignore[misc]
        while self._clock.advance():
            pass
        pages, turns = self._count.pages, max(1, self._count.turns)
        near, far = pages["memory"], pages["disk"]
        near_deep, far_deep = pages["memory deep"], pages["disk deep"]
        return TierHits(
            self._count.turns,
            (near + far) / max(1, pages["needed"]),
            near / max(1, near + far),
            near_deep / max(1, near_deep + far_deep),
            self._count.waiting / turns,
        )

    def _turns(self) -> int:
        if self._rng.random() < ONE_TURN:
            return 1
        mean = (self._world.turns - ONE_TURN) / (1 - ONE_TURN) - 1  # of those after the first
        turns = 2
        while self._rng.random() > 1 / mean:
            turns += 1
        return turns

    def _length(self) -> int:
        def tokens(mean: float) -> float:  # lognormal: a few are long
            return mean * self._rng.lognormvariate(-0.5, 1.0)

        return 1 + int(tokens(self._world.question) + tokens(self._world.answer))

    def _ask(self, talk: _Talk) -> None:
        sequence = Sequence(self._asked, SamplingParams(), 0, [0], CompletionOutput(0), 2, frozenset())
        self._asked += 1
        self._talks[sequence.request_id] = talk
        self._line.append(sequence)
        self._go_on()

    def _go_on(self) -> None:
        """Serves the next turn, if none is served; the queue is announced as a plan announces it."""
        self._fetch()
        if self._busy or not self._line:
            return
        self._busy = True
        talk = self._talks.pop(self._line.popleft().request_id)
        self._load(talk)
        if self._ahead is not None:
            for op in self._ahead.next_ops(list(self._line), self._to_load):
                self._medium.hint(op.order, op.keys)
        self._clock.later(1 / self._world.served, lambda: self._end(talk))

    def _there(self, keys: tuple[bytes, ...]) -> int:
        return next((n for n, key in enumerate(keys) if self._medium.lookup(key) is None), len(keys))

    def _to_load(self, sequence: Sequence) -> KvStart | None:
        keys = self._talks[sequence.request_id].keys()
        pages = self._there(keys)
        return KvStart(pages * TOKENS, (FIRST_LOCATION,), keys[:pages]) if pages else None

    def _load(self, talk: _Talk) -> None:
        """The first page last, as transfers do."""
        keys = talk.keys()
        pages, counts = self._there(keys), Counter[str](needed=len(keys))
        for key in reversed(keys[:pages]):
            where = "memory" if key in self._memory else "disk"
            counts[where] += 1
            counts[f"{where} deep"] += len(self._line) >= self._world.deep
            self._medium.read(key, {ATOM: bytearray(self._page_bytes)})
        if talk.history and self._served >= self._world.warm:
            self._count.turns += 1
            self._count.pages += counts
            self._count.waiting += len(self._line)

    def _end(self, talk: _Talk) -> None:
        """A turn has ended: its new pages are saved, and the session thinks."""
        self._served += 1
        talk.history = min(self._world.window, talk.history + talk.lengths.pop())
        keys = talk.keys()
        for number in reversed(range(len(keys))):
            if self._medium.lookup(keys[number]) is None:
                self._medium.reserve(self._page_bytes)
                page = Page(keys[number], number, TOKENS, b"", Provenance("prompt"))
                self._medium.write(page, {ATOM: bytes(self._page_bytes)})
        if talk.lengths:
            self._clock.later(self._rng.expovariate(1 / self._world.thinks_s), lambda: self._ask(talk))
        self._busy = False
        self._go_on()

    def _fetch(self) -> None:
        """Returns what the disk was read for by now."""
        while self._disk_free_s <= self._clock.now:
            if self._medium.prefetch_next(SHARE) is None:
                self._disk_free_s = self._clock.now
                return
            self._disk_free_s += self._page_bytes / self._world.disk_rate
