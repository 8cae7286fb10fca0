"""Pages on their way between a memory worker's pool and the medium beside it, while rounds go on.

A plan names the pages to save and to load. Two threads do it, so that a load (loads.py), for which a request waits,
never waits for what is being saved; a third one brings pages nearer that will be loaded (fetches.py). A load fills
blocks that nobody reads before: until its end is reported, its sequence keeps them. A save reads blocks that may go at
any time: the plan that frees them has the pages copied first that still lie there, so that no step waits for a medium.
Blocks are touched under a lock, for the time of a copy. The end of a view takes back what has not begun, and leaves a
call that the medium does not answer to itself; nothing of it comes into the pool or into the medium any more.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue

from lamina.kv.media import Medium, MediumError
from lamina.kv.pages import DECODE, PAGE, PROMPT, TENANT_BYTES, Atom, Page, Recipe
from lamina.memory.meter import Meter
from lamina.memory.store import Store
from lamina.observe.trace import OFF, Event, Recorder
from lamina.protocol.blocks.tables import PlanError
from lamina.protocol.control import LinkClosedError
from lamina.protocol.placement import Place
from lamina.protocol.plan import (
    KEY_BYTES,
    MOST_PAGES,
    MOST_PROLONGED_S,
    Drop,
    Expect,
    Export,
    Fork,
    Free,
    Grant,
    Import,
    Key,
    Kind,
    MediumOp,
    Prolong,
    ProtocolError,
    Prune,
    Shift,
    StepPlan,
    Truncate,
)
from lamina.protocol.tiers import GateOpened, Transferred
from lamina.workers.staging import Staging, open_staging

from .atoms import Located, PoolAtoms
from .fetches import Fetches
from .loads import EndedImport, Loads, PageReader
from .pace import SavePace

log = logging.getLogger(__name__)
LAST_S = 1.0  # for what is still to be saved, once the driver ends
END_S = 0.5  # for a medium to answer, once a view ends
COPY_SHARE = 4  # of the pool's bytes one in so many may be copied for saves whose blocks have gone
LEAST_COPIED = 64 << 20  # bytes
OF_PROMPTS = Recipe(PROMPT)


@dataclass(eq=False)
class _Task:
    op: Export
    key: Key  # of the plan
    at: list[Located | None]  # by page
    written: bool = True  # whether the pool has all tokens that are to be saved
    ready: Callable[[], None] = lambda: None  # wait until the device has done what fills them
    left: set[int] = field(default_factory=set)  # pages that are to be read from the pool
    copies: dict[int, dict[Atom, memoryview]] = field(default_factory=dict)  # pages whose blocks have gone


class Transfers:
    """Of one view. ``begin`` and ``settle`` are for the thread that serves rounds."""

    def __init__(
        self,
        medium: Medium,
        store: Store,
        report: Callable[[Transferred | GateOpened], None],
        meter: Meter,
        view: int = 0,
        rank: int = 0,
        recipe: Recipe = OF_PROMPTS,
        trace: Recorder = OFF,
        *,
        read: PageReader | None = None,
    ) -> None:
        """``report`` is called from threads of its own, too, and may raise what says that nobody listens any more.
        ``recipe``: of pages of prompts. ``read``: in place of the medium's, for loads.
        """
        self._medium, self._store, self._report, self._meter, self._view = medium, store, report, meter, view
        self._atoms, self._recipe, self._trace = PoolAtoms(store, rank), recipe, trace
        self._fetches, self._pace = Fetches(medium, self._atoms, meter), SavePace()
        self._last = -1  # the number of the last transfer that was begun
        self.loads = Loads(medium, store, self._atoms, meter, self._opened, self._loaded, trace, read or medium.read)
        self._open: list[_Task] = []  # saves that are not settled
        self._ended: deque[_Task] = deque()  # the same
        self._queue: SimpleQueue[_Task | Drop | Prolong | None] = SimpleQueue()
        self._most_copied, self._copied = max(LEAST_COPIED, store.bound.kv_bytes // COPY_SHARE), 0  # bytes
        self._lock = threading.Lock()  # of the blocks that are saved, the tasks' copies, and the end
        self._gives_back = any(store.tables.windows)  # blocks, as rows go on
        self._cancelled = False
        self._thread = threading.Thread(target=self._run, name="lamina-save", daemon=True)
        self._thread.start()

    def pages(self, most: int) -> list[bytes]:
        """Keys of the pages of which the medium has all that this worker can need, ``most`` at most: those that were
        used last. Raises MediumError.
        """
        return self._medium.keys(self._atoms.share, most)

    @property
    def share(self) -> frozenset[Atom]:
        """The atoms of a page that lies wholly here."""
        return self._atoms.share

    def begin(self, plan: StepPlan) -> None:
        """Have the store begin ``plan``, and begin the transfers that it asks for. Raises as Store.begin, PlanError
        where the plan touches a sequence with a transfer under way, ProtocolError for one that cannot be: then nothing
        has changed. A plan may come twice.
        """
        if plan.rows:
            self._pace.served()
        if self._store.tables.comes_again(plan):
            self._store.begin(plan)
            return
        self._check(plan)
        key = Key.of(Kind.PLAN, plan)
        saves = [self._save_of(op, key) for op in plan.ops if isinstance(op, Export)]
        for op in plan.ops:
            if isinstance(op, Shift):  # which writes over what is being saved
                self._copy(op.sequence)
        self._store.begin(plan)
        for op in plan.ops:
            if isinstance(op, Export):
                self._add(saves.pop(0), self._store.staging.mark())
            elif isinstance(op, Drop | Prolong):
                self._queue.put(op)
            elif isinstance(op, Expect):
                self._fetches.add(op)
            elif isinstance(op, Free | Truncate):
                self._copy(op.sequence, op.length if isinstance(op, Truncate) else 0)
        self._store.make_ready()  # before anything is loaded there
        self._last = max([self._last, *(op.id for op in plan.ops if isinstance(op, Import))])
        self.loads.add(plan)

    def _add(self, task: _Task, ready: Callable[[], None]) -> None:
        task.ready = ready
        self._last = max(self._last, task.op.id)
        self._open.append(task)
        self._queue.put(task)

    def _save_of(self, op: Export, key: Key) -> _Task:
        store = self._store
        place = store.tables.place(op.sequence)
        written = store.written.report().get(op.sequence, 0) >= op.first + op.count
        pages = [self._locate(op, number, place) for number in range(len(op.keys))]
        return _Task(op, key, pages, written, left=set(range(len(pages))) if written else set())

    def _locate(self, op: Export, number: int, place: Place) -> Located | None:
        return self._atoms.locate(op.sequence, op.first + number * PAGE, place, min(PAGE, op.count - number * PAGE))

    def _check(self, plan: StepPlan) -> None:
        begun = self.loads.sequences
        loading = set(begun)
        saving = dict[int, int]()  # sequence -> tokens, up to the end of what is saved
        for task in self._open:
            saving[task.op.sequence] = max(saving.get(task.op.sequence, 0), task.op.first + task.op.count)
        last = self._last
        self._fetches.check([op for op in plan.ops if isinstance(op, Expect)])
        for op in plan.ops:
            if isinstance(op, Export | Import | MediumOp):
                _check(op)
            if isinstance(op, Export | Import):
                if op.id <= last:
                    raise ProtocolError(f"transfer {op.id} comes behind transfer {last}")
                under_way = {*begun, *saving} if isinstance(op, Import) else loading
                if op.sequence in under_way:
                    raise PlanError(f"sequence {op.sequence} is loaded or saved twice")
                last = op.id
                if isinstance(op, Import):
                    loading.add(op.sequence)
                else:
                    saving[op.sequence] = max(saving.get(op.sequence, 0), op.first + op.count)
            elif isinstance(op, Free | Truncate | Shift) and op.sequence in loading:
                raise PlanError(f"sequence {op.sequence} is freed, truncated or shifted while it is loaded")
            elif isinstance(op, Fork) and op.source in loading:
                raise PlanError(f"sequence {op.source} is forked while it is loaded")
            elif isinstance(op, Grant | Prune) and (op.sequence in loading or op.sequence in saving):
                raise PlanError(
                    f"sequence {op.sequence} is granted K and V, or loses some, while it is loaded or saved"
                )
        for row in plan.rows:
            if row.sequence in loading and (row.sequence not in begun or self.loads.is_shut(row.sequence)):
                raise PlanError(f"sequence {row.sequence} has rows in step {plan.step} while it is loaded")
            if row.first < saving.get(row.sequence, 0) or (row.sequence in saving and self._gives_back):
                raise PlanError(f"sequence {row.sequence} has rows in step {plan.step} where it is saved")

    def _copy(self, sequence: int, first: int = 0) -> None:
        """Take the pages of ``sequence`` out of its blocks, of which those behind its ``first`` tokens go, as far as
        there is memory for them.
        """
        for task in self._open:
            if task.op.sequence != sequence or not task.left:
                continue
            with self._lock:
                gone = {number for number in task.left if task.op.first + (number + 1) * PAGE > first}
                for number in sorted(gone):
                    at = task.at[number]
                    nbytes = self._atoms.nbytes(at) if at is not None else 0
                    if at is not None and self._copied + nbytes <= self._most_copied:
                        task.copies[number] = self._atoms.take(at, self._store.staging)
                        self._copied += nbytes
                task.left -= gone

    def settle(self) -> None:
        """Take in what has ended: rows may see what was loaded."""
        self.loads.settle()
        while self._ended:
            self._open.remove(self._ended.popleft())

    def end(self, *, finish: bool = False) -> None:
        """Take back what has not begun; END_S at most. ``finish``: save first what is to be saved, for LAST_S at
        most.
        """
        self._pace.end()
        self.loads.cancel()
        self._queue.put(None)
        if finish:
            self._thread.join(LAST_S)
        with self._lock:
            self._cancelled = True
        limit = time.monotonic() + END_S
        for thread in (self.loads.thread, self._thread):
            thread.join(max(0.0, limit - time.monotonic()))
            if thread.is_alive():
                log.warning("a medium does not answer: %s is left to itself", thread.name)
        self._fetches.end(max(0.0, limit - time.monotonic()))
        self.settle()

    def _run(self) -> None:
        staging = open_staging(self._store.device)
        while (task := self._queue.get()) is not None and not self._cancelled:
            self._pace.begin()
            if isinstance(task, Drop | Prolong):
                with suppress(MediumError):
                    if isinstance(task, Drop):
                        self._medium.drop(task.keys)
                    else:
                        self._medium.prolong(task.keys, task.seconds)
                self._pace.rest()
                continue
            start = time.perf_counter()
            try:
                done, gone, error = self._save(task, staging)
            except Exception as e:  # any error: else a request waits for ever
                log.exception("a save has failed")
                done, gone, error = 0, [], f"{type(e).__name__}: {e}"
            self._meter.add("save_s", time.perf_counter() - start)
            self._saved(task, done, gone, error)

    def _saved(self, task: _Task, done: int, gone: list[bytes], error: str) -> None:
        with self._lock:
            if self._cancelled:
                return
            self._ended.append(task)
        self._tell(task.op, done, gone, error)

    def _opened(self, op: Import) -> None:
        with suppress(LinkClosedError):
            self._report(GateOpened(view=self._view, id=op.id))

    def _loaded(self, load: EndedImport) -> None:
        self._fetches.go_on()
        self._tell(load.op, load.pages, load.gone, load.error)

    def _tell(self, op: Export | Import, done: int, gone: list[bytes], error: str) -> None:
        self._meter.add("kv_failed_transfers", bool(error))
        gone = gone + self._fetches.gone()
        with suppress(LinkClosedError):
            self._report(Transferred(view=self._view, id=op.id, pages=done, gone=gone, error=error))

    def _save(self, task: _Task, staging: Staging) -> tuple[int, list[bytes], str]:
        """Pages from the first one on that are in the medium now, who has given way for them, and why not all are. The
        deepest is written first: so it is the first that gives way.
        """
        op, gone = task.op, list[bytes]()
        if not task.written:
            return 0, gone, f"{op.count} tokens of sequence {op.sequence} are to be saved, and were not written"
        done, error = len(task.at), ""
        task.ready()
        for number, at in reversed(list(enumerate(task.at))):
            start, first = self._trace.now(), op.first + number * PAGE
            try:
                if at is None:
                    raise MediumError("the pool has it not any more")
                atoms = self._taken(task, number, at, staging)
                if atoms is None:  # its blocks were needed, and there was no memory for a copy
                    done = number
                elif atoms:
                    nbytes = sum(x.nbytes for x in atoms.values())
                    gone += self._medium.reserve(nbytes)
                    source = PROMPT if first + at.tokens <= op.prompt else DECODE
                    recipe = self._recipe._replace(source=source)
                    page = Page(op.keys[number], first // PAGE, at.tokens, op.tenant, recipe)
                    self._medium.write(page, atoms)
                    self._meter.add("kv_saved_bytes", nbytes)
                    self._trace.add(Event.SAVE, start, task.key, value=nbytes)
            except (MediumError, ValueError) as e:
                done, error = number, f"page {first // PAGE} was not saved: {e}"
            self._pace.rest()
        return done, gone, error

    def _taken(self, task: _Task, number: int, at: Located, staging: Staging) -> dict[Atom, memoryview] | None:
        """The page's atoms; None where they are lost, and for nobody any more."""
        with self._lock:
            if self._cancelled:
                return None
            if number in task.left:
                task.left.discard(number)
                return self._atoms.take(at, staging)
            if number in task.copies:
                self._copied -= self._atoms.nbytes(at)
            return task.copies.pop(number, None)


def _check(op: Export | Import | MediumOp) -> None:
    if any(len(key) != KEY_BYTES for key in op.keys) or (isinstance(op, Export) and len(op.tenant) != TENANT_BYTES):
        raise ProtocolError(f"{op}: a key has {KEY_BYTES} bytes, the tag of a tenant {TENANT_BYTES}")
    if isinstance(op, Prolong) and not 0 < op.seconds <= MOST_PROLONGED_S:
        raise ProtocolError(f"pages are kept for {op.seconds} s, and may be for {MOST_PROLONGED_S}")
    if isinstance(op, MediumOp):
        return
    pages = -(-op.count // PAGE)
    if not 1 <= len(op.keys) <= MOST_PAGES or len(op.keys) != pages or op.first < 0 or op.first % PAGE:
        raise ProtocolError(f"transfer {op.id}: {len(op.keys)} pages of {op.count} tokens from position {op.first} on")
    if isinstance(op, Import) and (op.moved < 0 or op.moved % PAGE or (op.moved and op.count % PAGE)):
        raise ProtocolError(f"transfer {op.id}: {op.count} tokens are moved by {op.moved}, and whole pages can be")
    if isinstance(op, Import) and not 0 <= op.spare_s < float("inf"):
        raise ProtocolError(f"transfer {op.id}: rows that are computed for {op.spare_s} s")
