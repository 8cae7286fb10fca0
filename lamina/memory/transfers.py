"""Pages on their way between a memory worker's pool and the medium beside it, while rounds go on.

A plan says what is saved and what is loaded. Two threads do it, so that a load, for which a request waits, never waits
for what is being saved. They read blocks that nobody writes, and write blocks that nobody reads, since until the end of
a transfer is reported its sequence has no rows and keeps its blocks. The end of a view takes back what has not begun,
and waits for the page that is on its way; so nothing is written into the pool behind it.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import NamedTuple

from lamina.background import NICENESS
from lamina.kv.media import AtomLostError, Medium, MediumError
from lamina.kv.pages import PAGE, TENANT_BYTES, Page, Recipe
from lamina.protocol.control import LinkClosedError
from lamina.protocol.plan import (
    KEY_BYTES,
    MOST_PAGES,
    Export,
    Fork,
    Free,
    Import,
    ProtocolError,
    Rows,
    StepPlan,
    Truncate,
)
from lamina.protocol.tables import PlanError
from lamina.protocol.tiers import Transferred

from .atoms import Located, PoolAtoms
from .meter import Meter
from .store import Store

log = logging.getLogger(__name__)
LAST_S = 3.0  # for what is still to be saved, once the driver ends


@dataclass
class _Task:
    op: Export | Import
    at: list[Located | None]  # by page
    written: bool  # whether the pool has all tokens that are to be saved


class _Ended(NamedTuple):
    op: Export | Import
    pages: int  # that were transferred, from the first one on


class Transfers:
    """Of one view. ``add``, ``check`` and ``settle`` are for the thread that serves rounds."""

    def __init__(
        self,
        medium: Medium,
        store: Store,
        report: Callable[[Transferred], None],
        meter: Meter,
        view: int = 0,
        rank: int = 0,
    ) -> None:
        """``report`` is called from threads of its own, and may raise what says that nobody listens any more."""
        self._medium, self._store, self._report, self._meter, self._view = medium, store, report, meter, view
        self._atoms = PoolAtoms(store, rank)
        self._last = -1  # the number of the last transfer that was added
        self._open: dict[type, Counter[int]] = {Import: Counter(), Export: Counter()}  # by sequence, not settled
        self._ended: deque[_Ended] = deque()  # not settled
        self._queues: dict[type, SimpleQueue[_Task | None]] = {Import: SimpleQueue(), Export: SimpleQueue()}
        self._cancelled = False
        self._threads = [
            Thread(target=self._run, args=each, name=f"lamina-{each[1]}", daemon=True)
            for each in ((Import, "load"), (Export, "save"))
        ]
        for thread in self._threads:
            thread.start()

    def pages(self, most: int) -> list[bytes]:
        """Keys of the whole pages of which the medium has all that this worker can need, ``most`` at most: those that
        were used last. Raises MediumError.
        """
        share = self._atoms.share
        there = (x.page.key for x in self._medium.pages() if x.page.tokens == PAGE and share <= x.atoms)
        return list(there)[-most:]

    def check(self, plan: StepPlan) -> None:
        """Raises PlanError where the plan touches a sequence with a transfer under way, ProtocolError for one that
        cannot be.
        """
        transfers = [op for op in plan.ops if isinstance(op, Export | Import)]
        if transfers and all(op.id <= self._last for op in transfers):
            return  # it has come again
        loading, saving = self._open[Import], self._open[Export]
        coming = {op.sequence for op in transfers} | loading.keys() | saving.keys()
        for op in plan.ops:
            if isinstance(op, Export | Import):
                _check(op)
            elif isinstance(op, Free | Truncate) and (op.sequence in loading or op.sequence in saving):
                raise PlanError(f"sequence {op.sequence} is freed or truncated while it is loaded or saved")
            elif isinstance(op, Fork) and op.source in loading:
                raise PlanError(f"sequence {op.source} is forked while it is loaded")
        for row in plan.rows:
            if row.sequence in coming:
                raise PlanError(f"sequence {row.sequence} has rows in step {plan.step} while it is loaded or saved")

    def add(self, plan: StepPlan) -> None:
        """Begin what a plan asks for that the store has begun. A plan may come twice."""
        for op in plan.ops:
            if not isinstance(op, Export | Import) or op.id <= self._last:
                continue
            self._last = op.id
            store = self._store
            place = op.place if isinstance(op, Import) else store.tables.place(op.sequence)
            at = [self._atoms.locate(op.sequence, first, place) for first in range(op.first, op.first + op.count, PAGE)]
            written = store.written.report().get(op.sequence, 0) >= op.first + op.count
            self._open[type(op)][op.sequence] += 1
            self._queues[type(op)].put(_Task(op, at, written))

    def settle(self) -> None:
        """Take in what has ended: rows may see what was loaded."""
        while self._ended:
            op, pages = self._ended.popleft()
            if isinstance(op, Import) and pages:
                self._store.written.done([Rows(op.sequence, op.first, pages * PAGE)])
            mine = self._open[type(op)]
            mine[op.sequence] -= 1
            mine += Counter()  # without those that have none left

    def end(self, *, finish: bool = False) -> None:
        """Take back what has not begun, and wait for the rest. ``finish``: save first what is to be saved, for LAST_S
        at most.
        """
        for queue in self._queues.values():
            queue.put(None)
        if finish:
            self._threads[1].join(LAST_S)
        self._cancelled = True
        for thread in self._threads:
            thread.join()
        self.settle()

    def _run(self, kind: type, name: str) -> None:
        if kind is Export:
            with suppress(OSError):
                os.nice(NICENESS)  # of this thread alone: nobody waits for it
        while (task := self._queues[kind].get()) is not None and not self._cancelled:
            start = time.perf_counter()
            try:
                done, gone, error = self._load(task) if kind is Import else self._save(task)
            except Exception as e:  # whatever it is, nobody must wait for ever
                log.exception("a transfer has failed")
                done, gone, error = 0, [], f"{type(e).__name__}: {e}"
            self._finish(task, name, done, gone, error, time.perf_counter() - start)

    def _finish(self, task: _Task, name: str, done: int, gone: list[bytes], error: str, seconds: float) -> None:
        if self._cancelled:
            return
        self._meter.add(f"{name}_s", seconds)
        self._ended.append(_Ended(task.op, done))
        with suppress(LinkClosedError):
            self._report(Transferred(view=self._view, id=task.op.id, pages=done, gone=gone, error=error))

    def _load(self, task: _Task) -> tuple[int, list[bytes], str]:
        """Pages from the first one on that are in the pool now, and why not all. The deepest is read first: so it is
        the first that gives way.
        """
        done, gone, error = len(task.at), list[bytes](), ""
        for number, at in reversed(list(enumerate(task.at))):
            if self._cancelled:
                break
            try:
                if at is None:
                    raise MediumError("the plan holds no blocks for it")
                room = self._atoms.room(at)
                if room:
                    self._medium.read(task.op.keys[number], room)
                    self._atoms.put(at, room)
                    self._meter.add("kv_loaded_bytes", sum(x.nbytes for x in room.values()))
            except (MediumError, ValueError) as e:
                done, error = number, f"page {task.op.first // PAGE + number} was not loaded: {e}"
                if isinstance(e, AtomLostError):  # whoever asks again is not to fail, too
                    gone.append(task.op.keys[number])
        with suppress(MediumError):
            self._medium.drop(gone)
        return done, gone, error

    def _save(self, task: _Task) -> tuple[int, list[bytes], str]:
        """As ``_load``, and who has given way for them."""
        op, gone = task.op, list[bytes]()
        assert isinstance(op, Export)
        if not task.written:
            return 0, gone, f"{op.count} tokens of sequence {op.sequence} are to be saved, and were not written"
        done, error = len(task.at), ""
        for number, at in reversed(list(enumerate(task.at))):
            if self._cancelled:
                break
            first = op.first + number * PAGE
            recipe = Recipe("prompt" if first + PAGE <= op.prompt else "decode")
            try:
                if at is None:
                    raise MediumError("the pool has it not any more")
                if atoms := self._atoms.take(at):
                    nbytes = sum(x.nbytes for x in atoms.values())
                    gone += self._medium.reserve(nbytes)
                    self._medium.write(Page(op.keys[number], first // PAGE, PAGE, op.tenant, recipe), atoms)
                    self._meter.add("kv_saved_bytes", nbytes)
            except (MediumError, ValueError) as e:
                done, error = number, f"page {first // PAGE} was not saved: {e}"
        return done, gone, error


def _check(op: Export | Import) -> None:
    if not 1 <= len(op.keys) <= MOST_PAGES or op.count != len(op.keys) * PAGE or op.first < 0 or op.first % PAGE:
        raise ProtocolError(f"transfer {op.id}: {len(op.keys)} pages of {op.count} tokens from position {op.first} on")
    if any(len(key) != KEY_BYTES for key in op.keys) or (isinstance(op, Export) and len(op.tenant) != TENANT_BYTES):
        raise ProtocolError(f"transfer {op.id}: a key has {KEY_BYTES} bytes, the tag of a tenant {TENANT_BYTES}")
