"""Prefetches of pages that waiting requests need, to faster memory of the storage backend.

A thread of its own fetches one page at a time. It ends with the epoch, as no request of an older one waits any more.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from queue import SimpleQueue

from lamina.kv.pages import PAGE
from lamina.kv.storage import StorageBackend, StorageError
from lamina.protocol.step_plan import MAX_HINTED_PAGES, MAX_PAGES_PER_TRANSFER, PrefetchHint, ProtocolError
from lamina.workers.memory.worker_counters import Counters

from .page_fragments import StoreFragments


class Prefetcher:
    """The fetches of one epoch. Only the thread that serves rounds calls ``check``, ``add`` and ``stop``."""

    def __init__(self, medium: StorageBackend, fragments: StoreFragments, meter: Counters) -> None:
        self._medium, self._atoms, self._meter = medium, fragments, meter
        self._share = fragments.whole_page_fragments | fragments.states.whole
        self._turns = Counter[int]()  # number of expected pages, by order of the waiting request
        self._queue: SimpleQueue[PrefetchHint | None] = SimpleQueue()  # None: check again
        self._lock = threading.Lock()  # protects the evicted keys, and the end
        self._gone: list[bytes] = []
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="lamina-fetch", daemon=True)
        self._thread.start()

    def check(self, ops: Sequence[PrefetchHint]) -> None:
        """Raise ProtocolError for hints that no plan may have."""
        turns = self._turns.copy()
        for op in ops:
            if op.order < 0 or op.first < 0 or len(op.keys) > MAX_PAGES_PER_TRANSFER:
                raise ProtocolError(f"request {op.order} expects {len(op.keys)} pages from page {op.first} on")
            self._count(turns, op)
        if turns.total() > MAX_HINTED_PAGES:
            raise ProtocolError(f"{turns.total()} pages are expected, at most {MAX_HINTED_PAGES} are allowed")

    def add(self, op: PrefetchHint) -> None:
        """Expect the pages of a checked op."""
        self._count(self._turns, op)
        self._queue.put(op)

    def on_loaded(self) -> None:
        """Check if further pages are to be fetched, as pages were loaded."""
        self._queue.put(None)

    def take_evicted(self) -> list[bytes]:
        """Return the keys of pages evicted since the last call."""
        with self._lock:
            gone, self._gone = self._gone, []
            return gone

    def stop(self, wait_s: float) -> None:
        """Stop fetching and expect no pages. Waits at most ``wait_s`` seconds for the fetch that is under way."""
        with self._lock:
            self._ended = True
        self._queue.put(None)
        self._thread.join(wait_s)
        with suppress(StorageError):
            for turn in self._turns:
                self._medium.hint(turn, [])
        self._turns.clear()

    def _count(self, turns: Counter[int], op: PrefetchHint) -> None:
        if op.keys:
            turns[op.order] += len(op.keys)
        else:
            del turns[op.order]

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

    def _expect(self, op: PrefetchHint) -> None:
        pages = enumerate(op.keys, op.first)
        kept = [key for number, key in pages if self._atoms.owns_page(number * PAGE, op.location)]
        if kept or not op.keys:
            with suppress(StorageError):
                self._medium.hint(op.order, kept)

    def _fetch(self) -> bool:
        """Fetch one page, and return whether another one may follow."""
        try:
            with self._meter.time("fetch_s"):
                gone = self._medium.prefetch_next(self._share)
        except StorageError:
            return False
        if gone is None:
            return False
        self._meter.add("kv_fetched_pages", 1)
        with self._lock:
            self._gone += gone
            return not self._ended
