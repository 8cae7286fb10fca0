"""Loads of pages from storage into a memory worker's pool, layer by layer.

A sequence may have its first rows while it is loaded, after it is reported as ready (lamina.kv.layerwise_load). Then
layer k + 1 is loaded while rows go through layer k. A round waits for a layer only right before that layer. For all
layers of a load it waits at most LATE_LOAD_S, then continues with whatever the blocks contain. The driver is notified
that the pages were not loaded, and discards the tokens that these rows have drawn.

A prefill worker that needs the KV of such a sequence gets each layer as soon as it is loaded (kv_transfer.prefix_send).
No round waits for that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple

import torch

from lamina.kv.layerwise_load import can_start, layer_runs
from lamina.kv.pages import PAGE, PageFragment
from lamina.kv.storage import FragmentLostError, PageGoneError, StorageBackend, StorageError
from lamina.observe.trace import Event, Recorder
from lamina.protocol.step_plan import LoadKv, MessageKey, MessageKind, RowRange, StepPlan
from lamina.workers.memory.kv_store import KvStore
from lamina.workers.memory.worker_counters import Counters
from lamina.workers.staging import Staging, open_staging

from .page_fragments import PageBlocks, StoreFragments
from .state_fragments import StateSlot

log = logging.getLogger(__name__)
# Fills buffers with some layers of a page of a load, given its number there.
PageReader = Callable[[LoadKv, int, range, Mapping[PageFragment, memoryview]], None]
# Seconds for all layers of one load together, of waits by rows; or without a further page, of waits by replies.
LATE_LOAD_S = 5.0


class LoadResult(NamedTuple):
    """The result of one LoadKv: how many pages, from its first one on, are in the pool, which pages storage evicted,
    and the reason why not all are loaded. ``is_miss``: as in TransferDone.
    """

    op: LoadKv
    num_pages: int
    evicted: list[bytes]
    error: str
    is_miss: bool


class PageLoad:
    """The pages of one sequence that one plan loads."""

    def __init__(
        self,
        ops: Sequence[LoadKv],
        page_blocks: Sequence[Sequence[PageBlocks | StateSlot | None]],
        key: MessageKey,
        nbytes: int,
        wait_until_ready: Callable[[], None],
    ) -> None:
        """``page_blocks``: for each op, the blocks of its pages, or the slot of its states. ``key``: of the plan.
        ``nbytes``: of all of these. ``wait_until_ready``: waits until the device no longer uses the blocks.
        """
        self.wait_until_ready = wait_until_ready
        self.ops, self.page_blocks, self.key, self.nbytes = ops, page_blocks, key, nbytes
        self.sequence, self.spare_s = ops[0].sequence, min(op.slack_s for op in ops)
        self.done = [len(op.keys) for op in ops]  # pages of each op, as far as is known
        self.errors, self.misses = [""] * len(ops), [False] * len(ops)
        self.evicted = [list[bytes]() for _ in ops]
        self.is_opening = self.is_over = False
        self.layers = 0  # the number of loaded layers
        self._layers_of_page = dict[tuple[int, int], int]()  # the same for a page of an op, if more
        self._progress = 0  # rises with each page
        self.changed = threading.Condition()
        self._waited_s = 0.0  # seconds that rows waited, for layers that are now loaded
        self._since: float | None = None  # when rows began to wait for the next layer; None: they do not

    @property
    def failed(self) -> bool:
        """True if some page is known to be missing."""
        return any(self.errors)

    @property
    def is_in_vain(self) -> bool:
        """True if a part is missing of a load with states: without these, pages are of no use, and without a page, so
        are they.
        """
        return self.failed and any(op.is_of_states for op in self.ops)

    def pages(self) -> Iterator[tuple[int, int]]:
        """Yield op and page of all pages that may be useful, the last page first, so that it is evicted first."""
        last = next((n for n, error in enumerate(self.errors) if error), len(self.ops) - 1)
        for number in range(last, -1, -1):
            for page in range(self.done[number] - 1, -1, -1):
                yield number, page

    def mark_missing(self, number: int, page: int, error: str, *, is_miss: bool = False) -> None:
        """Note that op ``number`` will have no more than ``page`` pages. ``is_miss``: as in TransferDone."""
        self.done[number], self.errors[number], self.misses[number] = page, error, is_miss

    def mark_all_missing(self, error: str) -> None:
        """Note that no page will be loaded."""
        for number in range(len(self.ops)):
            self.mark_missing(number, 0, error)

    def on_layers_loaded(self, layers: int, *, ended: bool = False) -> None:
        """Note that ``layers`` layers are loaded now."""
        with self.changed:
            self._waited_s, self._since = self.waited_s, None
            self.layers, self.is_over = max(self.layers, layers), self.is_over or ended
            self._progress += 1
            self.changed.notify_all()

    def on_page_read(self, number: int, page: int, layers: int) -> None:
        """Note that ``layers`` layers of a page of op ``number`` are loaded now, or the page is known to be missing."""
        with self.changed:
            self._layers_of_page[number, page] = layers
            self._progress += 1
            self.changed.notify_all()

    def wait(self, layer: int, patience_s: float) -> bool:
        """Wait up to ``patience_s`` seconds for ``layer``, and return whether it is loaded."""
        with self.changed:
            if self.layers <= layer and self._since is None:
                self._since = time.monotonic()
            return self.changed.wait_for(lambda: self.layers > layer, patience_s)

    def wait_for_progress(self, layer: int, patience_s: float, page: tuple[int, int] | None = None) -> bool:
        """Wait for ``layer`` of all pages, and return whether it is loaded: False after ``patience_s`` seconds in which
        no page was read. ``page``: an op's number and a page's; only of this one, or until it is known to be missing.
        """
        with self.changed:
            while not self._has(layer, page):
                if not self.changed.wait_for(partial(self._is_past, self._progress), patience_s):
                    return False
            return True

    def _has(self, layer: int, page: tuple[int, int] | None) -> bool:
        if self.layers > layer or page is None:
            return self.layers > layer
        return self._layers_of_page.get(page, 0) > layer or page[1] >= self.done[page[0]]

    def _is_past(self, progress: int) -> bool:
        return self._progress > progress

    @property
    def waited_s(self) -> float:
        """The seconds that rows have waited for layers, all waits together."""
        with self.changed:
            return self._waited_s + (0.0 if self._since is None else time.monotonic() - self._since)


class KvLoader:
    """The loads of one epoch. A thread of its own reads; only the thread that serves rounds calls its methods."""

    def __init__(
        self,
        medium: StorageBackend,
        store: KvStore,
        fragments: StoreFragments,
        meter: Counters,
        opened: Callable[[LoadKv], None],
        ended: Callable[[LoadResult], None],
        trace: Recorder,
        read: PageReader,
    ) -> None:
        """``opened``: called when a sequence is ready. ``ended``: called at the end of an op. ``read``: raises
        as StorageBackend.read. Neither callback may wait for storage: if rows abandon a load, the thread that serves
        rounds calls ``ended``.
        """
        self._read = read
        self._medium, self._store, self._atoms, self._meter, self._trace = medium, store, fragments, meter, trace
        self._opened, self._on_end = opened, ended
        self._gates = not any(store.tables.windows)  # with windows, rows free blocks that are being loaded
        self._under_way: dict[int, PageLoad] = {}  # by sequence; not collected yet
        self._settling: deque[PageLoad] = deque()
        self._queue: SimpleQueue[PageLoad | None] = SimpleQueue()
        self._lock = threading.Lock()  # protects the blocks that are filled, and ends of loads
        self._cancelled = False
        self.thread = threading.Thread(target=self._run, name="lamina-load", daemon=True)
        self.thread.start()

    @property
    def sequences(self) -> Collection[int]:
        """The sequences that are being loaded."""
        return self._under_way.keys()

    def is_gated(self, sequence: int) -> bool:
        """Return whether a sequence may have no rows yet."""
        load = self._under_way.get(sequence)
        return load is not None and not load.is_opening

    def add(self, plan: StepPlan) -> None:
        """Begin the loads of a plan; the store has blocks for them."""
        by_sequence: dict[int, list[LoadKv]] = {}
        for op in plan.ops:
            if isinstance(op, LoadKv):
                by_sequence.setdefault(op.sequence, []).append(op)
        for sequence, ops in by_sequence.items():
            at = [[self._locate(op, number) for number in range(len(op.keys))] for op in ops]
            nbytes = sum(self._atoms.nbytes(page) for pages in at for page in pages if page is not None)
            ready = self._store.staging.record_event()
            load = self._under_way[sequence] = PageLoad(
                ops, at, MessageKey.for_step(MessageKind.PLAN, plan), nbytes, ready
            )
            self._queue.put(load)

    def _locate(self, op: LoadKv, number: int) -> PageBlocks | StateSlot | None:
        if op.is_of_states:
            return self._atoms.states.slot_to_fill(op)
        first = number * PAGE
        return self._atoms.locate(op.sequence, op.first + first, op.location, min(PAGE, op.count - first))

    def load_of(self, sequence: int) -> PageLoad | None:
        """Return the load of a sequence; None if there is none."""
        return self._under_way.get(sequence)

    def needed_by(self, plan: StepPlan) -> list[PageLoad]:
        """Return the loads whose layers the rows of a plan need."""
        if not self._under_way:
            return []
        return [self._under_way[row.sequence] for row in plan.rows if row.sequence in self._under_way]

    def wait(self, loads: Iterable[PageLoad], layer: int, patience_s: float) -> bool:
        """Wait up to ``patience_s`` seconds for ``layer`` of all loads, and return whether they have it. A load is
        abandoned after rows have waited LATE_LOAD_S seconds for it.
        """
        for load in loads:
            if not load.wait(layer, patience_s):
                if load.waited_s < LATE_LOAD_S:
                    return False
                self._give_up_load(load, layer)
        return True

    def wait_for_reply(self, load: PageLoad, layer: int, page: tuple[int, int] | None = None) -> None:
        """Wait on a thread that replies until ``layer`` is loaded. Abandons the load if LATE_LOAD_S bring no page.
        ``page``: see PageLoad.wait_for_progress.
        """
        if not load.wait_for_progress(layer, LATE_LOAD_S, page):
            self._give_up_load(load, layer)

    def settle(self, sequence: int) -> None:
        """Collect the load of a sequence, of which all layers were waited for; its end may follow at once."""
        if (load := self._under_way.get(sequence)) is not None:
            self.wait_for_reply(load, len(self._store.layers) - 1)
            self.collect()

    def _give_up_load(self, load: PageLoad, layer: int) -> None:
        with self._lock:
            if load.is_over or self._cancelled:
                return
            load.mark_all_missing(f"layer {layer} of sequence {load.sequence} was not there after {LATE_LOAD_S:g} s")
            ended = self._end(load)
        self._tell(ended)  # evicted pages are left to the other thread, as storage may wait for a disk

    def collect(self) -> None:
        """Commit the tokens of loads that have ended."""
        while self._settling:
            load = self._settling.popleft()
            for op, pages in zip(load.ops, load.done, strict=True):
                if not pages or load.is_in_vain:
                    continue
                self._store.committed.commit([RowRange(op.sequence, op.first, min(pages * PAGE, op.count))])
                if op.is_of_states and self._store.states:
                    self._store.states.versions.commit([op.rows])
            del self._under_way[load.sequence]

    def stop(self) -> None:
        """Begin no more loads; pages that still arrive are dropped."""
        self._queue.put(None)
        with self._lock:
            self._cancelled = True
        for load in self._under_way.values():  # no reply waits on
            load.on_layers_loaded(len(self._store.layers))

    def _run(self) -> None:
        staging = open_staging(self._store.device)
        while (load := self._queue.get()) is not None and not self._cancelled:
            start = time.perf_counter()
            try:
                with torch.inference_mode():  # the store was made in this mode, too
                    self._load(load, start, staging)
            except Exception as e:  # any error: else a request would wait for ever
                log.exception("a load has failed")
                with self._lock:
                    if not load.is_over:
                        load.mark_all_missing(f"{type(e).__name__}: {e}")
            self._meter.add("load_s", time.perf_counter() - start)
            with self._lock:
                ended = [] if self._cancelled or load.is_over else self._end(load)
            with suppress(StorageError):
                self._medium.delete([key for gone in load.evicted for key in gone])
            self._tell(ended)

    def _load(self, load: PageLoad, begun: float, staging: Staging) -> None:
        spare_s, loaded = load.spare_s if self._gates else 0.0, 0
        load.wait_until_ready()
        layers = len(self._store.layers)
        for run in layer_runs(layers, load.nbytes) if spare_s > 0 else [range(layers)]:
            start, before = self._trace.now(), loaded
            for number, page in list(load.pages()):
                loaded += self._bring(load, number, page, run, staging)
                if self._cancelled or load.is_over or load.is_in_vain:
                    return
                load.on_page_read(number, page, run.stop)
            staging.record_event()()  # rows use another queue of the device
            self._trace.add(Event.LOAD, start, load.key, run.start, value=loaded - before)
            now = time.perf_counter()
            if run.stop < layers:
                load.on_layers_loaded(run.stop)
            if (
                spare_s > 0
                and not load.is_opening
                and not load.failed
                and can_start(load.nbytes, loaded, now - begun, spare_s)
            ):
                load.is_opening = True
                for op in load.ops:
                    self._opened(op)

    def _bring(self, load: PageLoad, number: int, page: int, run: range, staging: Staging) -> int:
        """Load some layers of one page, if storage has them. Returns the bytes loaded."""
        op, at, nbytes = load.ops[number], load.page_blocks[number][page], 0
        try:
            if at is None:
                raise StorageError("the plan holds no blocks for it")
            room = self._atoms.buffers(at, run)
            if room:
                self._read(op, page, run, room)
                with self._lock:
                    if self._cancelled or load.is_over:
                        return 0
                    self._atoms.write(at, room, staging, run)
                    if op.page_shift and isinstance(at, PageBlocks):
                        self._store.rotate(at.blocks, -op.page_shift, run)
                nbytes = sum(x.nbytes for x in room.values())
                self._meter.add("kv_loaded_bytes", nbytes)
                self._meter.add("state_loaded_bytes", nbytes * op.is_of_states)
        except (StorageError, ValueError) as e:
            with self._lock:
                if self._cancelled or load.is_over:
                    return 0
                is_miss = isinstance(e, PageGoneError)
                load.mark_missing(number, page, f"{_name(op, page)} not loaded: {e}", is_miss=is_miss)
                if isinstance(e, FragmentLostError):  # the next request must not fail, too
                    load.evicted[number].append(op.keys[page])
        return nbytes

    def _end(self, load: PageLoad) -> list[LoadResult]:
        """End a load, while holding the lock. Rows that wait for the last layer find it collected."""
        self._settling.append(load)
        load.on_layers_loaded(len(self._store.layers), ended=True)
        ended = zip(load.ops, load.done, load.evicted, load.errors, load.misses, strict=True)
        return [LoadResult(*each) for each in ended]

    def _tell(self, ended: list[LoadResult]) -> None:
        for each in ended:
            self._on_end(each)


def _name(op: LoadKv, page: int) -> str:
    return f"states after {op.first} tokens were" if op.is_of_states else f"page {op.first // PAGE + page} was"
