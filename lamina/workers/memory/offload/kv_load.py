"""Loads of pages from storage into a memory worker's pool: transfers whose parts storage reads, in place of a peer.

A part is some layers of a page. Reading a disk is no transfer between processes: it needs no message, and the storage
backend has checksums of its own. Waits, cancelation and giving up are those of all transfers (kv_transfer.transfer).

A sequence may have its first rows while it is loaded, after it is reported as ready (lamina.kv.layerwise_load). Then
layer k + 1 is loaded while rows go through layer k. A round waits for a layer only right before that layer. For all
layers of a load it waits at most LATE_LOAD_S, then continues with whatever the blocks contain. The driver is notified
that the pages were not loaded, and discards the tokens that these rows have drawn.

A prefill worker that needs the KV of such a sequence gets each layer as soon as it is loaded (kv_transfer.prefix_send).
No round waits for that.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue

import torch

from lamina.kv.layerwise_load import can_start, layer_runs
from lamina.kv.pages import PAGE, PageFragment
from lamina.kv.storage import FragmentLostError, PageGoneError, StorageBackend, StorageError
from lamina.observe.trace import Event, Recorder
from lamina.protocol.step_plan import LoadKv, MessageKey, MessageKind, RowRange, StepPlan
from lamina.workers.memory.kv_store import KvStore
from lamina.workers.memory.kv_transfer.transfer import Transfer, TransferPart, TransferTable
from lamina.workers.memory.worker_counters import Counters
from lamina.workers.staging import Staging, open_staging

from .page_fragments import PageBlocks, StoreFragments
from .state_fragments import StateSlot

log = logging.getLogger(__name__)
# Fills buffers with some layers of a page of a load, given its number there.
PageReader = Callable[[LoadKv, int, range, Mapping[PageFragment, memoryview]], None]
# Seconds for all layers of one load together, of waits by rows; or without a further page, of waits by replies.
LATE_LOAD_S = 5.0


class OpLoad:
    """One LoadKv under way, and its result: how many pages, from its first one on, are in the pool, which ones storage
    evicted, and why some are not loaded. ``is_miss``: as in TransferDone. ``layers``: loaded ones, by page.
    """

    def __init__(self, op: LoadKv, blocks: Sequence[PageBlocks | StateSlot | None]) -> None:
        """``blocks``: of its pages, or the slot of its states; None: the plan holds none."""
        self.op, self.blocks = op, blocks
        self.num_pages, self.layers = len(blocks), [0] * len(blocks)
        self.evicted, self.error, self.is_miss = list[bytes](), "", False

    def mark_missing(self, page: int, error: Exception) -> None:
        """Note that there will be no more than ``page`` pages."""
        op = self.op
        name = f"states after {op.first} tokens were" if op.is_of_states else f"page {op.first // PAGE + page} was"
        self.num_pages, self.error = page, f"{name} not loaded: {error}"
        self.is_miss = isinstance(error, PageGoneError)
        if isinstance(error, FragmentLostError):
            self.evicted.append(op.keys[page])


class PageLoad(Transfer):
    """The pages of one sequence that one plan loads. A missing page does not fail it: pages before it are of use."""

    def __init__(
        self,
        ops: Sequence[OpLoad],
        key: MessageKey,
        nbytes: int,
        spare_s: float,
        wait_until_ready: Callable[[], None],
        parts: Callable[[PageLoad], Iterator[TransferPart]],
        on_end: Callable[[PageLoad], None],
    ) -> None:
        """``key``: of the plan. ``nbytes``: of all pages. ``spare_s``: seconds for which the first rows are computed.
        ``wait_until_ready``: waits until the device no longer uses the blocks. ``parts``: yields some layers of pages.
        """
        self.ops, self.key, self.total_bytes, self.wait_until_ready = ops, key, nbytes, wait_until_ready
        self.sequence, self.spare_s = ops[0].op.sequence, spare_s
        self.run_start, self.run_bytes = 0.0, 0  # when the layers under way were begun; loaded bytes of them
        self.is_opening = False
        self.waited_s = 0.0  # seconds that rows waited, for layers that are now loaded
        self.late_since: float | None = None  # when rows began to wait for the next layer; None: they do not
        super().__init__(ops[0].op.transfer_id, parts(self), on_end=on_end)

    @property
    def next_layer(self) -> int:
        """The first layer for which rows wait."""
        return sys.maxsize if self.is_over else super().next_layer

    @property
    def has_failed(self) -> bool:
        """True if some page is known to be missing."""
        return any(each.error for each in self.ops)

    @property
    def is_in_vain(self) -> bool:
        """True if a part is missing of a load with states: without these, pages are of no use, and without a page, so
        are they.
        """
        return self.has_failed and any(each.op.is_of_states for each in self.ops)

    def is_due(self, now: float) -> bool:
        """Return whether rows may begin by now, which they may once."""
        if self.spare_s <= 0 or self.is_opening or self.has_failed or not self.has_layer(0):
            return False
        self.is_opening = can_start(self.total_bytes, self.nbytes, now - self.started_at, self.spare_s)
        return self.is_opening

    def is_past(self, index: int) -> bool:
        """Return whether part ``index`` is loaded, or the load has ended."""
        return self.index > index or self.is_over


class KvLoader:
    """The loads of one epoch. A thread of its own reads; only the thread that serves rounds calls its methods."""

    def __init__(
        self,
        medium: StorageBackend,
        store: KvStore,
        fragments: StoreFragments,
        meter: Counters,
        opened: Callable[[LoadKv], None],
        ended: Callable[[OpLoad], None],
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
        self._changed = threading.Condition()
        self._table = TransferTable(self._changed, "storage")
        self._uncollected: dict[int, PageLoad] = {}  # by sequence
        self._queue: SimpleQueue[PageLoad | None] = SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="lamina-load", daemon=True)
        self.thread.start()

    @property
    def sequences(self) -> Collection[int]:
        """The sequences that are being loaded."""
        return self._uncollected.keys()

    def is_gated(self, sequence: int) -> bool:
        """Return whether a sequence may have no rows yet."""
        load = self._uncollected.get(sequence)
        return load is not None and not load.is_opening

    def add(self, plan: StepPlan) -> None:
        """Begin the loads of a plan; the store has blocks for them."""
        by_sequence: dict[int, list[OpLoad]] = {}
        for op in plan.ops:
            if isinstance(op, LoadKv):
                blocks = [self._locate(op, number) for number in range(len(op.keys))]
                by_sequence.setdefault(op.sequence, []).append(OpLoad(op, blocks))
        for sequence, ops in by_sequence.items():
            nbytes = sum(self._atoms.nbytes(page) for each in ops for page in each.blocks if page is not None)
            spare_s = min(each.op.slack_s for each in ops) if self._gates else 0.0
            key, ready = MessageKey.for_step(MessageKind.PLAN, plan), self._store.staging.record_event()
            load = PageLoad(ops, key, nbytes, spare_s, ready, self._parts, self._report_end)
            self._uncollected[sequence] = load
            self._table.begin(load)
            self._queue.put(load)

    def _locate(self, op: LoadKv, number: int) -> PageBlocks | StateSlot | None:
        if op.is_of_states:
            return self._atoms.states.slot_to_fill(op)
        first = number * PAGE
        return self._atoms.locate(op.sequence, op.first + first, op.location, min(PAGE, op.count - first))

    def load_of(self, sequence: int) -> PageLoad | None:
        """Return the load of a sequence; None if there is none."""
        return self._uncollected.get(sequence)

    def needed_by(self, plan: StepPlan) -> list[PageLoad]:
        """Return the loads whose layers the rows of a plan need."""
        if not self._uncollected:
            return []
        return [self._uncollected[row.sequence] for row in plan.rows if row.sequence in self._uncollected]

    def wait(self, loads: Iterable[PageLoad], layer: int, patience_s: float) -> bool:
        """Wait up to ``patience_s`` seconds for ``layer`` of all loads, and return whether they have it. A load is
        abandoned after rows have waited LATE_LOAD_S seconds for it.
        """
        for load in loads:
            load.late_since = load.late_since or time.monotonic()
            is_there = self._table.wait(load, layer, patience_s)
            late_s = time.monotonic() - load.late_since
            if is_there:
                load.waited_s, load.late_since = load.waited_s + late_s, None
            elif load.waited_s + late_s < LATE_LOAD_S:
                return False
            else:
                self._give_up(load, layer)
        return True

    def wait_for_reply(self, load: PageLoad, layer: int, page: tuple[OpLoad, int] | None = None) -> None:
        """Wait on a thread that replies until ``layer`` is loaded. Abandons the load if LATE_LOAD_S bring no part.
        ``page``: only of this one, or until it is known to be missing.
        """
        op, number = page or (None, 0)
        with self._changed:
            while not load.has_layer(layer) and (op is None or (op.layers[number] <= layer and number < op.num_pages)):
                if not self._changed.wait_for(partial(load.is_past, load.index), LATE_LOAD_S):
                    break
            else:
                return
        self._give_up(load, layer)

    def settle(self, sequence: int) -> None:
        """Collect the load of a sequence, of which all layers were waited for; its end may follow at once."""
        if (load := self._uncollected.get(sequence)) is not None:
            self.wait_for_reply(load, len(self._store.layers) - 1)
            self.collect()

    def _give_up(self, load: PageLoad, layer: int) -> None:
        self._table.fail(load, f"layer {layer} of sequence {load.sequence} was not there after {LATE_LOAD_S:g} s")

    def collect(self) -> None:
        """Commit the tokens of loads that have ended."""
        for load in [x for x in self._uncollected.values() if x.next_part is None or x.error is not None]:
            for each in load.ops if load.error is None and not load.is_in_vain else ():
                if not each.num_pages:
                    continue
                op = each.op
                self._store.committed.commit([RowRange(op.sequence, op.first, min(each.num_pages * PAGE, op.count))])
                if op.is_of_states and self._store.states:
                    self._store.states.versions.commit([op.rows])
            del self._uncollected[load.sequence]

    def stop(self) -> None:
        """Begin no more loads; pages that still arrive are dropped, and no reply waits on."""
        self._queue.put(None)
        self._table.stop()

    def _run(self) -> None:
        staging = open_staging(self._store.device)
        while (load := self._queue.get()) is not None:
            start = time.perf_counter()
            try:
                with torch.inference_mode():  # the store was made in this mode, too
                    self._load(load, staging)
            except Exception as e:  # any error: else a request would wait for ever
                log.exception("a load has failed")
                self._table.fail(load, f"{type(e).__name__}: {e}")
            self._meter.add("load_s", time.perf_counter() - start)

    def _load(self, load: PageLoad, staging: Staging) -> None:
        load.wait_until_ready()
        load.started_at, load.run_start = time.perf_counter(), self._trace.now()
        while (part := load.next_part) is not None and part.read is not None and not load.is_over:
            came = part.read()
            nbytes = 0 if isinstance(came, Exception) else sum(x.nbytes for x in came.values())
            self._table.copy_part(load, nbytes, partial(part.copy, came, staging))
            if not load.is_over:
                self._open_if_due(load)

    def _open_if_due(self, load: PageLoad) -> None:
        with self._changed:  # no other thread reports an end before this
            for each in load.ops if load.error is None and load.is_due(time.perf_counter()) else ():
                self._opened(each.op)

    def _parts(self, load: PageLoad) -> Iterator[TransferPart]:
        """Yield the parts that may be useful, the last page first, so that it is evicted first."""
        ops, layers = load.ops, self._atoms.num_layers
        for run in layer_runs(layers, load.total_bytes) if load.spare_s > 0 else [range(layers)]:
            last = next((n for n, each in enumerate(ops) if each.error), len(ops) - 1)
            pages = [(each, page) for each in ops[last::-1] for page in range(each.num_pages - 1, -1, -1)]
            for number, (each, page) in enumerate(pages, 1):
                if not load.is_in_vain:
                    put = partial(self._put, load, each, page, run, is_last=number == len(pages))
                    yield TransferPart(0, put, run.start, partial(self._read_page, load, each, page, run))

    def _read_page(
        self, load: PageLoad, each: OpLoad, page: int, layers: range
    ) -> dict[PageFragment, memoryview] | Exception:
        """Return what storage has of some layers of a page, or why it lacks some."""
        at, op = each.blocks[page], each.op
        try:
            if at is None:
                raise StorageError("the plan holds no blocks for it")
            room = self._atoms.buffers(at, layers)
            if room:
                self._read(op, page, layers, room)
        except (StorageError, ValueError) as e:
            if isinstance(e, FragmentLostError) and not load.is_over:  # the next request must not fail, too
                with suppress(StorageError):
                    self._medium.delete([op.keys[page]])
            return e
        return room

    def _put(
        self,
        load: PageLoad,
        each: OpLoad,
        page: int,
        layers: range,
        came: dict[PageFragment, memoryview] | Exception,
        staging: Staging,
        *,
        is_last: bool,
    ) -> None:
        """Write what came of a page to the pool, or note that it is missing. ``is_last``: no other has these layers."""
        at = each.blocks[page]
        if isinstance(came, Exception):
            each.mark_missing(page, came)
        elif at is not None and came:
            self._atoms.write(at, came, staging, layers)
            if isinstance(at, PageBlocks):
                if each.op.page_shift:
                    self._store.rotate(at.blocks, -each.op.page_shift, layers)
                self._store.update_bounds(at.blocks, layers)
            staging.record_event()()  # rows use another queue of the device
            nbytes = sum(x.nbytes for x in came.values())
            load.run_bytes += nbytes
            self._meter.add("kv_loaded_bytes", nbytes)
            self._meter.add("state_loaded_bytes", nbytes * each.op.is_of_states)
        each.layers[page] = layers.stop
        if is_last:
            self._trace.add(Event.LOAD, load.run_start, load.key, layers.start, value=load.run_bytes)
            load.run_start, load.run_bytes = self._trace.now(), 0

    def _report_end(self, load: PageLoad) -> None:
        if load.error is None:
            self._open_if_due(load)
        for each in load.ops:
            if load.error is not None:
                each.num_pages, each.error, each.is_miss = 0, str(load.error), False
            self._on_end(each)
