"""Pages that waiting turns need, on their way to where a medium is faster, before anybody asks for them.

A thread of its own does it, a page at a time. It ends with the view: no turn of an older one is waited for any more.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from queue import SimpleQueue

from lamina.kv.media import Medium, MediumError
from lamina.kv.pages import PAGE
from lamina.memory.meter import Meter
from lamina.protocol.plan import MOST_EXPECTED, MOST_PAGES, Expect, ProtocolError

from .atoms import PoolAtoms


class Fetches:
    """The fetches of one view. ``check``, ``add`` and ``end`` are for the thread that serves rounds."""

    def __init__(self, medium: Medium, atoms: PoolAtoms, meter: Meter) -> None:
        self._medium, self._atoms, self._meter, self._share = medium, atoms, meter, atoms.share
        self._turns = Counter[int]()  # pages that are expected, by turn
        self._queue: SimpleQueue[Expect | None] = SimpleQueue()  # None: look again
        self._lock = threading.Lock()  # of the keys that have given way, and the end
        self._gone: list[bytes] = []
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="lamina-fetch", daemon=True)
        self._thread.start()

    def check(self, ops: Sequence[Expect]) -> None:
        """Raises ProtocolError for what no plan may have."""
        turns = self._turns.copy()
        for op in ops:
            if op.turn < 0 or op.first < 0 or len(op.keys) > MOST_PAGES:
                raise ProtocolError(f"turn {op.turn} expects {len(op.keys)} pages from page {op.first} on")
            self._count(turns, op)
        if turns.total() > MOST_EXPECTED:
            raise ProtocolError(f"{turns.total()} pages are expected, and may be {MOST_EXPECTED}")

    def add(self, op: Expect) -> None:
        """An op that was checked."""
        self._count(self._turns, op)
        self._queue.put(op)

    def go_on(self) -> None:
        """Pages were loaded: look whether something is to follow them."""
        self._queue.put(None)

    def gone(self) -> list[bytes]:
        """Keys of the pages that have given way, since this was asked last."""
        with self._lock:
            gone, self._gone = self._gone, []
            return gone

    def end(self, wait_s: float) -> None:
        """Begin no other fetch, and expect nothing. Waits ``wait_s`` at most for the one that is under way."""
        with self._lock:
            self._ended = True
        self._queue.put(None)
        self._thread.join(wait_s)
        with suppress(MediumError):
            for turn in self._turns:
                self._medium.expect(turn, [])
        self._turns.clear()

    def _count(self, turns: Counter[int], op: Expect) -> None:
        if op.keys:
            turns[op.turn] += len(op.keys)
        else:
            del turns[op.turn]

    def _run(self) -> None:
        while True:
            op = self._queue.get()
            with self._lock:
                if self._ended:
                    return
                if op is not None:
                    self._expect(op)
            while self._queue.empty() and self._fetch():
                pass

    def _expect(self, op: Expect) -> None:
        pages = enumerate(op.keys, op.first)
        kept = [key for number, key in pages if self._atoms.keeps(number * PAGE, op.place)]
        if kept or not op.keys:
            with suppress(MediumError):
                self._medium.expect(op.turn, kept)

    def _fetch(self) -> bool:
        """One page; whether another one may follow."""
        try:
            with self._meter.time("fetch_s"):
                gone = self._medium.fetch(self._share)
        except MediumError:
            return False
        if gone is None:
            return False
        self._meter.add("kv_fetched_pages", 1)
        with self._lock:
            self._gone += gone
            return not self._ended
