"""Transfers of pages between a memory worker's pool and a storage backend, while rounds continue.

A plan names the pages to save and to load. Two threads work, so that a load (kv_load.py), which a request waits for,
never waits for a save. A third thread fetches pages that will be loaded into faster memory (prefetch.py).

A load fills blocks that no row reads before; its sequence keeps them until its end is reported. A save reads blocks
that may be freed at any time. The plan that frees them first copies their pages that are still to be saved, so no step
waits for storage. A lock is held for each copy from or to blocks. States are saved and loaded like one page more, but
their slot is read without the lock. A plan that gives it up copies the rest before a row or a load can overwrite it.

At the end of an epoch, transfers that have not begun are cancelled. A storage call that does not return is abandoned;
nothing of it reaches the pool or storage any more.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from lamina.kv.pages import DECODE, PAGE, PROMPT, TENANT_BYTES, Page, PageFragment, Provenance
from lamina.kv.storage import StorageBackend, StorageError
from lamina.observe.trace import NULL_RECORDER, Event, Recorder
from lamina.protocol.blocks.block_tables import PlanError
from lamina.protocol.control import LinkClosedError
from lamina.protocol.kv_placement import KvLocation
from lamina.protocol.offload_messages import LoadReady, PagesExpired, TransferDone
from lamina.protocol.step_plan import (
    KEY_BYTES,
    MAX_PAGES_PER_TRANSFER,
    MAX_RETENTION_S,
    ContextShift,
    DeletePages,
    DropBlocks,
    Fork,
    Free,
    LoadKv,
    MessageKey,
    MessageKind,
    PrefetchHint,
    PrefillGrant,
    ProtocolError,
    SaveKv,
    SetRetention,
    StepPlan,
    StorageOp,
    Truncate,
)
from lamina.workers.memory.kv_store import KvStore
from lamina.workers.memory.worker_counters import Counters
from lamina.workers.staging import Staging, open_staging

from .kv_load import KvLoader, OpLoad
from .page_fragments import PageBlocks, StoreFragments
from .parity_pages import ParityPages, ParityReplies
from .prefetch import Prefetcher
from .rate_limit import SaveRateLimiter
from .state_fragments import StateCopy, StateSlot

log = logging.getLogger(__name__)
LAST_S = 1.0  # seconds for saves that are due after the driver's end
END_S = 0.5  # seconds for storage to return after an epoch's end
EXPIRE_S = 1.0  # seconds between two looks for expired pages
MAX_COPIED_SHARE = 4  # at most the pool's bytes divided by this are copied for saves whose blocks are freed
MIN_COPIED_BYTES = 64 << 20  # bytes
PROMPT_PROVENANCE = Provenance(PROMPT)


@dataclass(eq=False)
class _PageTask:
    op: SaveKv
    key: MessageKey  # the plan's key
    at: list[PageBlocks | StateSlot | None]  # by page
    written: bool = True  # if the pool has all tokens that are to be saved
    ready: Callable[[], None] = lambda: None  # waits until the device has written them
    left: set[int] = field(default_factory=set)  # pages that are still to be read from the pool
    copies: dict[int, dict[PageFragment, memoryview]] = field(default_factory=dict)  # pages whose blocks are freed
    state_copy: StateCopy | None = None  # of states that are being read


class PageTransfers:
    """The transfers of one epoch. Only the thread that serves rounds calls ``begin_plan`` and ``collect``."""

    def __init__(
        self,
        medium: StorageBackend,
        store: KvStore,
        report: Callable[[TransferDone | LoadReady | PagesExpired], None],
        meter: Counters,
        epoch: int = 0,
        rank: int = 0,
        recipe: Provenance = PROMPT_PROVENANCE,
        trace: Recorder = NULL_RECORDER,
        *,
        read: Callable[[bytes, Mapping[PageFragment, memoryview]], None] | None = None,
        parity: ParityReplies | ParityPages | None = None,
        expires: bool = False,
        keeps: bool = True,
    ) -> None:
        """``report``: called from other threads, too; may raise LinkClosedError. ``recipe``: of pages of prompts.
        ``read``: for loads, instead of the storage backend's. ``parity``: for loads of the parity worker, or of those
        whose parity it keeps. ``expires``: whether stored pages have a time to live. ``keeps``: whether pages are
        saved. If not, the parity worker reports each save as done, as others have all pages, and a worker on loan
        reports the pages before the first one that lies there.
        """
        self._medium, self._store, self._report, self._meter, self._view = medium, store, report, meter, epoch
        self.fragments, self._recipe, self._trace = StoreFragments(store, rank), recipe, trace
        self._expire_at = time.monotonic() if expires else math.inf  # when to look for expired pages
        self._prefetcher, self._rate_limiter = Prefetcher(medium, self.fragments, meter), SaveRateLimiter()
        self._last = -1  # the number of the last transfer that was begun
        self._parity, self._keeps = parity, keeps
        of_page = read or medium.read

        def read_page(op: LoadKv, page: int, layers: range, into: Mapping[PageFragment, memoryview]) -> None:
            of_page(op.keys[page], into)

        def read_none(op: LoadKv, page: int, layers: range, into: Mapping[PageFragment, memoryview]) -> None:
            raise StorageError("a worker on loan keeps no pages")

        reader = parity.read if isinstance(parity, ParityPages) else read_page if keeps else read_none
        self.loader = KvLoader(medium, store, self.fragments, meter, self._opened, self._loaded, trace, reader)
        self.saves: list[_PageTask] = []  # saves that are not collected
        self._ended: deque[_PageTask] = deque()  # saves that have ended, and are not collected
        self._queue: SimpleQueue[_PageTask | DeletePages | SetRetention | None] = SimpleQueue()
        self._most_copied, self.copied = (
            max(MIN_COPIED_BYTES, store.bind_reply.kv_bytes // MAX_COPIED_SHARE),
            0,
        )  # bytes
        self._lock = threading.Lock()  # protects the blocks that are saved, the tasks' copies, and the end
        self._gives_back = any(store.tables.windows)  # if rows free blocks
        self._cancelled = False
        self.thread = threading.Thread(target=self._run, name="lamina-save", daemon=True)
        self.thread.start()

    def listed_pages(self, most: int) -> list[bytes]:
        """Return keys of the pages of which storage has all that this worker can need, at most ``most``. These are the
        most recently used ones. Raises StorageError.
        """
        return self._medium.keys(self.fragments.whole_page_fragments, most)

    def listed_states(self, most: int) -> list[bytes]:
        """Return keys of the states of which storage has all that this worker can need. Raises StorageError."""
        return self._medium.keys(own, most) if (own := self.fragments.states.whole) else []

    def begin_plan(self, plan: StepPlan) -> None:
        """Apply ``plan`` to the store, and begin the transfers that it requests. A plan may come twice. Raises as
        KvStore.apply_plan, PlanError if the plan touches a sequence that is being transferred, ProtocolError for an
        invalid transfer; then nothing has changed.
        """
        if plan.rows:
            self._rate_limiter.on_round()
        if self._store.tables.is_replay(plan):
            self._store.apply_plan(plan)
            self._copy_states()
            return
        self._check(plan)
        key = MessageKey.for_step(MessageKind.PLAN, plan)
        wanted = [op for op in plan.ops if isinstance(op, SaveKv)]
        saves = deque(self._save_of(op, key) for op in wanted if self._keeps)
        elsewhere = deque(self._num_elsewhere(op) for op in wanted if not self._keeps)
        for op in plan.ops:
            if isinstance(op, ContextShift):  # overwrites what is being saved
                self._copy(op.sequence)
        self._store.apply_plan(plan)
        for op in plan.ops:
            if isinstance(op, SaveKv):
                if self._keeps:
                    self._add(saves.popleft(), self._store.staging.record_event())
                else:
                    self._tell(op, elsewhere.popleft(), [], "")
            elif isinstance(op, DeletePages | SetRetention):
                self._queue.put(op)
            elif isinstance(op, PrefetchHint):
                self._prefetcher.add(op)
            elif isinstance(op, Free | Truncate | DropBlocks):
                self._copy(op.sequence, op.length if isinstance(op, Truncate) else 0)
        self._copy_states()
        self._store.apply_block_copies()  # before anything is loaded there
        self._last = max([self._last, *(op.transfer_id for op in plan.ops if isinstance(op, LoadKv))])
        self.loader.add(plan)
        if isinstance(self._parity, ParityReplies):
            self._parity.begin(plan, self.loader, self.fragments)

    def _add(self, task: _PageTask, ready: Callable[[], None]) -> None:
        task.ready = ready
        self._last = max(self._last, task.op.transfer_id)
        self.saves.append(task)
        self._queue.put(task)

    def _save_of(self, op: SaveKv, key: MessageKey) -> _PageTask:
        store = self._store
        place = store.tables.location(op.sequence)
        written = store.committed.report().get(op.sequence, 0) >= op.first + op.count
        pages: list[PageBlocks | StateSlot | None] = [self._locate(op, number, place) for number in range(len(op.keys))]
        return _PageTask(op, key, pages, written, left=set(range(len(pages))) if written else set())

    def _num_elsewhere(self, op: SaveKv) -> int:
        """Return the number of the first pages of a save that other workers have, and keep."""
        if isinstance(self._parity, ParityPages):
            return len(op.keys)
        place = self._store.tables.location(op.sequence)
        firsts = (op.first + number * PAGE for number in range(len(op.keys)))
        return sum(1 for _ in itertools.takewhile(lambda first: not self.fragments.owns_page(first, place), firsts))

    def _locate(self, op: SaveKv, number: int, location: KvLocation) -> PageBlocks | StateSlot | None:
        if op.is_of_states:
            return self.fragments.states.locate(op.sequence, op.first, location)
        return self.fragments.locate(
            op.sequence, op.first + number * PAGE, location, min(PAGE, op.count - number * PAGE)
        )

    def _check(self, plan: StepPlan) -> None:
        begun = self.loader.sequences
        loading, closed = set(begun), {sequence for sequence in begun if self.loader.is_gated(sequence)}
        saving = dict[int, int]()  # sequence -> tokens, up to the end of its saves
        for task in self.saves:
            saving[task.op.sequence] = max(saving.get(task.op.sequence, 0), task.op.first + task.op.count)
        last = self._last
        self._prefetcher.check([op for op in plan.ops if isinstance(op, PrefetchHint)])
        for op in plan.ops:
            if isinstance(op, SaveKv | LoadKv | StorageOp):
                _check(op)
            if isinstance(op, SaveKv | LoadKv):
                if op.is_of_states and self._store.states is None:
                    raise ProtocolError(f"transfer {op.transfer_id} is of states, and the model has none")
                if op.transfer_id <= last:
                    raise ProtocolError(f"transfer {op.transfer_id} comes after transfer {last}")
                under_way = {*begun, *saving} if isinstance(op, LoadKv) else loading
                if op.sequence in under_way:
                    raise PlanError(f"sequence {op.sequence} is loaded or saved twice")
                last = op.transfer_id
                if isinstance(op, LoadKv):
                    loading.add(op.sequence)
                    closed.add(op.sequence)
                else:
                    saving[op.sequence] = max(saving.get(op.sequence, 0), op.first + op.count)
            elif isinstance(op, Free | Truncate | ContextShift) and op.sequence in loading:
                raise PlanError(f"sequence {op.sequence} is freed, truncated or shifted while it is loaded")
            elif isinstance(op, Fork) and op.source in loading:
                raise PlanError(f"sequence {op.source} is forked while it is loaded")
            elif isinstance(op, DropBlocks) and op.sequence in loading:
                raise PlanError(f"sequence {op.sequence} loses K and V while it is loaded")
            elif isinstance(op, PrefillGrant) and (op.sequence in closed or op.sequence in saving):
                raise PlanError(f"sequence {op.sequence} is granted K and V while it is loaded or saved")
        for row in plan.rows:
            if row.sequence in closed:
                raise PlanError(f"sequence {row.sequence} has rows in step {plan.step} while it is loaded")
            if row.first < saving.get(row.sequence, 0) or (row.sequence in saving and self._gives_back):
                raise PlanError(f"sequence {row.sequence} has rows in step {plan.step} where it is saved")

    def _copy(self, sequence: int, first: int = 0) -> None:
        """Copy the pages of ``sequence`` after its ``first`` tokens, whose blocks are about to be freed, for saves.
        Pages for which there is no memory are not saved.
        """
        for task in self.saves:
            if task.op.sequence != sequence or not task.left or task.op.is_of_states:
                continue
            with self._lock:
                self._copy_pages(task, {n for n in task.left if task.op.first + (n + 1) * PAGE > first})

    def _copy_states(self) -> None:
        """Copy states that are still to be saved, and whose sequence has just given up their slot."""
        for task in self.saves:
            at = task.at[0]
            if not isinstance(at, StateSlot) or self.fragments.states.is_still_at(task.op.sequence, at):
                continue
            with self._lock:
                if task.state_copy is not None:
                    task.state_copy.take_over()
                else:
                    self._copy_pages(task, {*task.left})

    def _copy_pages(self, task: _PageTask, gone: set[int]) -> None:
        for number in sorted(gone):
            at = task.at[number]
            nbytes = self.fragments.nbytes(at) if at is not None else 0
            if at is not None and self.copied + nbytes <= self._most_copied:
                task.copies[number] = self.fragments.read(at, self._store.staging)
                self.copied += nbytes
        task.left -= gone

    def collect(self) -> None:
        """Collect transfers that have ended: rows may attend what was loaded."""
        self.loader.collect()
        while self._ended:
            self.saves.remove(self._ended.popleft())

    def end(self, *, finish: bool = False) -> None:
        """Cancel transfers that have not begun; takes at most END_S seconds. ``finish``: first continue saves that are
        due, for at most LAST_S seconds.
        """
        self._rate_limiter.stop()
        self.loader.stop()
        self._queue.put(None)
        if finish:
            self.thread.join(LAST_S)
        with self._lock:
            self._cancelled = True
            for task in self.saves:
                if task.state_copy is not None:
                    task.state_copy.stop()
        limit = time.monotonic() + END_S
        for thread in (self.loader.thread, self.thread):
            thread.join(max(0.0, limit - time.monotonic()))
            if thread.is_alive():
                log.warning("storage does not reply: thread %s is abandoned", thread.name)
        self._prefetcher.stop(max(0.0, limit - time.monotonic()))
        self.collect()

    def _run(self) -> None:
        staging = open_staging(self._store.device)
        while (task := self._next_task()) is not None and not self._cancelled:
            self._rate_limiter.begin()
            if isinstance(task, DeletePages | SetRetention):
                with suppress(StorageError):
                    if isinstance(task, DeletePages):
                        self._medium.delete(task.keys)
                    else:
                        self._medium.set_retention(task.keys, task.seconds)
                self._rate_limiter.wait()
                continue
            start = time.perf_counter()
            try:
                done, gone, error = self._save(task, staging)
            except Exception as e:  # any error: else a request would wait for ever
                log.exception("a save has failed")
                done, gone, error = 0, [], f"{type(e).__name__}: {e}"
            self._meter.add("save_s", time.perf_counter() - start)
            self._saved(task, done, gone, error)

    def _next_task(self) -> _PageTask | DeletePages | SetRetention | None:
        """Wait for the next task; meanwhile, and between tasks, delete pages that have expired."""
        while True:
            if time.monotonic() >= self._expire_at:
                self._expire()
            left_s = self._expire_at - time.monotonic()
            with suppress(Empty):
                return self._queue.get(timeout=None if left_s == math.inf else max(0.0, left_s))

    def _expire(self) -> None:
        self._expire_at = time.monotonic() + EXPIRE_S
        with suppress(StorageError, LinkClosedError):
            if keys := self._medium.expire():
                self._report(PagesExpired(epoch=self._view, keys=keys))

    def _saved(self, task: _PageTask, done: int, gone: list[bytes], error: str) -> None:
        with self._lock:
            if self._cancelled:
                return
            self._ended.append(task)
        self._tell(task.op, done, gone, error)

    def _opened(self, op: LoadKv) -> None:
        with suppress(LinkClosedError):
            self._report(LoadReady(epoch=self._view, transfer_id=op.transfer_id))

    def _loaded(self, load: OpLoad) -> None:
        self._prefetcher.on_loaded()
        self._tell(load.op, load.num_pages, load.evicted, load.error, is_miss=load.is_miss)

    def _tell(self, op: SaveKv | LoadKv, done: int, gone: list[bytes], error: str, *, is_miss: bool = False) -> None:
        self._meter.add("kv_failed_transfers", bool(error) and not is_miss)
        gone = gone + self._prefetcher.take_evicted()
        number = op.transfer_id
        report = TransferDone(
            epoch=self._view, transfer_id=number, num_pages=done, evicted=gone, error=error, is_miss=is_miss
        )
        with suppress(LinkClosedError):
            self._report(report)

    def _save(self, task: _PageTask, staging: Staging) -> tuple[int, list[bytes], str]:
        """Save pages, the last one first, so that it is evicted first. Returns how many pages from the first one on are
        in storage now, the keys of pages evicted for them, and the reason why not all are saved.
        """
        op, gone = task.op, list[bytes]()
        if not task.written:
            return 0, gone, f"{op.count} tokens of sequence {op.sequence} are to be saved, and were not written"
        done, error = len(task.at), ""
        task.ready()
        for number, at in reversed(list(enumerate(task.at))):
            start, first = self._trace.now(), op.first + number * PAGE
            if isinstance(at, StateSlot):
                first = at.page * PAGE
            try:
                if at is None:
                    raise StorageError("the pool no longer has it")
                fragments = self._taken(task, number, at, staging)
                if fragments is None:  # its blocks were freed, and there was no memory for a copy
                    done = number
                elif fragments:
                    nbytes = sum(x.nbytes for x in fragments.values())
                    gone += self._medium.reserve(nbytes)
                    source = PROMPT if first + at.tokens <= op.num_prompt_tokens else DECODE
                    recipe = self._recipe._replace(source=source)
                    page = Page(op.keys[number], first // PAGE, at.tokens, op.tenant, recipe)
                    self._medium.write(page, fragments)
                    self._meter.add("kv_saved_bytes", nbytes)
                    self._meter.add("state_saved_bytes", nbytes * op.is_of_states)
                    self._trace.add(Event.SAVE, start, task.key, value=nbytes)
            except (StorageError, ValueError) as e:
                done, error = number, f"page {first // PAGE} was not saved: {e}"
            self._rate_limiter.wait()
        return done, gone, error

    def _taken(
        self, task: _PageTask, number: int, page_blocks: PageBlocks | StateSlot, staging: Staging
    ) -> dict[PageFragment, memoryview] | None:
        """Return the page's fragments; None if they are lost, or no longer wanted."""
        with self._lock:
            if self._cancelled:
                return None
            if number not in task.left:
                if number in task.copies:
                    self.copied -= self.fragments.nbytes(page_blocks)
                return task.copies.pop(number, None)
            task.left.discard(number)
            if not isinstance(page_blocks, StateSlot):
                return self.fragments.read(page_blocks, staging)
            task.state_copy = copy = StateCopy(self.fragments.states, page_blocks)
        copy.run()
        with self._lock:  # held by a thread that copies the rest
            task.state_copy = None
            return None if self._cancelled else copy.fragments


def _check(op: SaveKv | LoadKv | StorageOp) -> None:
    if any(len(key) != KEY_BYTES for key in op.keys) or (isinstance(op, SaveKv) and len(op.tenant) != TENANT_BYTES):
        raise ProtocolError(f"{op}: a key has {KEY_BYTES} bytes, the tag of a tenant {TENANT_BYTES}")
    if isinstance(op, SetRetention) and not 0 < op.seconds <= MAX_RETENTION_S:
        raise ProtocolError(f"a retention of {op.seconds} s is not between 0 and {MAX_RETENTION_S}")
    if isinstance(op, StorageOp):
        return
    if op.is_of_states:
        if len(op.keys) != 1 or op.first < 1:
            raise ProtocolError(f"transfer {op.transfer_id}: {len(op.keys)} keys of states after {op.first} tokens")
        return
    pages = -(-op.count // PAGE)
    if not 1 <= len(op.keys) <= MAX_PAGES_PER_TRANSFER or len(op.keys) != pages or op.first < 0 or op.first % PAGE:
        raise ProtocolError(
            f"transfer {op.transfer_id}: {len(op.keys)} pages of {op.count} tokens from position {op.first} on"
        )
    if isinstance(op, LoadKv) and (op.page_shift < 0 or op.page_shift % PAGE or (op.page_shift and op.count % PAGE)):
        raise ProtocolError(
            f"transfer {op.transfer_id}: {op.count} tokens are moved by {op.page_shift}, but only whole pages can be"
        )
    if isinstance(op, LoadKv) and not 0 <= op.slack_s < float("inf"):
        raise ProtocolError(f"transfer {op.transfer_id}: rows that are computed for {op.slack_s} s")
