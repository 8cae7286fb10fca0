"""The journal: accepted requests and their tokens, written to disk before a client gets them.

**Order.** A request is on the disk itself (fdatasync) before it is begun. Requests that arrive together share one wait.
The tokens of a step are written, without a wait, before readers get them. They survive the process. A host that loses
power loses the last ones, which are computed again.

**A disk that is full.** New requests are refused and running ones continue. What was not written of a request is
written as a whole once there is room.

**A disk that fails.** After a failed wait the bytes on the disk are unknown: another segment begins with all known
records.

**Lifetime.** Records go to the newest segment. At half of ``journal_size`` another one begins with the running
requests. Once it is on disk all older segments but one are removed, so a reply stays until one or two segments are
full. Only a thread of the journal waits for the disk.

**Why no database.** SQLite's log ends, without a word, where it is damaged. Its one writer holds the lock while it
waits for the disk, so tokens would wait for the requests that arrive.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from lamina.server.engine_client.messages import Delta

from .journal_directory import JournalDirectory, model_digest
from .journal_entry import JournalEntry
from .journal_records import (
    FORMAT,
    AcceptedRecord,
    DeltasRecord,
    DroppedRecord,
    FailedRecord,
    HeaderRecord,
    OpenedRecord,
    RestartsRecord,
)
from .segment import Segment, frame_record

RETRY_S = 10.0  # until a disk that was full or has failed is tried again

log = logging.getLogger(__name__)


class Journal:
    """The journal of requests. All methods belong to one thread, the event loop's. ``error``: why it cannot be written
    now; None if it can.
    """

    def __init__(self, path: str, model: str, size: int, retry_s: float = RETRY_S) -> None:
        """Open the journal at ``path``, or begin one. ``size``: the approximate bytes that it may take. Raises
        ValueError if it belongs to another model, user or server, or is damaged; nothing is changed then. Raises
        OSError.
        """
        self.error: str | None = None
        self._entries: dict[str, JournalEntry] = {}
        self._by_key: dict[int, JournalEntry] = {}
        self._next_key = 0
        self._full_at, self._retry_s = max(1, size // 2), retry_s
        self._header = HeaderRecord(format=FORMAT, model=model, digest=model_digest(model))
        self._path, self._written, self._synced = path, 0, 0
        self._unwritten = set[str]()  # ids of replies whose last records are not in the segment
        self._next_rewrite = self._next_try = 0.0  # when these, and when another segment, may be tried
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lamina-journal")
        self._wait: Future[None] | None = None
        self._wait_written = 0  # ``_written`` when the wait began
        self._is_unknown = False  # whether the last wait for the disk failed
        self._before: Segment | None = None  # the full segment, until it is on disk, too
        self._is_fresh = False  # whether this segment has not been on disk yet
        self._folder = JournalDirectory(path)
        try:
            self._open()
        except BaseException as e:
            self._folder.close()
            if isinstance(e, OSError):
                raise OSError(f"--journal {path} cannot be opened: {e.strerror}") from e
            raise

    def _open(self) -> None:
        self._number, size, size_before = 0, 0, 0
        for number, contents in self._folder.read(self._check):
            for record in contents.records:
                self._replay(record, number)
            if torn := contents.size - contents.end:
                log.warning("--journal: the last %d bytes of %s were not written whole: left out", torn, contents.path)
            self._number, size, size_before = number, contents.end, size
        if size:
            self._segment = Segment(self._folder.path_of(self._number), size)
            # An earlier server may have ended while it waited for the disk.
            self._is_fresh = self._number > self._folder.newest_on_disk
            if self._is_fresh and size_before:
                self._before = Segment(self._folder.path_of(self._number - 1), size_before)
        else:
            self._segment = self._folder.begin(0, self._opening((), 0))
            self._folder.sync()
            self._folder.note_synced(0, self._segment.size)
        self._keep_from, self._begun_with = self._number - 1, 0
        self._has_room()

    def _replay(self, record: Any, number: int) -> None:
        if isinstance(record, AcceptedRecord):
            self._enter(JournalEntry(record))
        elif isinstance(record, DeltasRecord):
            self._grow(record.deltas, number)
        elif isinstance(record, DroppedRecord):
            self._forget(record.id)
        elif isinstance(record, FailedRecord) and (entry := self._entries.get(record.id)):
            entry.refuse(record, number)
        elif isinstance(record, RestartsRecord):
            for answer_id, count in record.counts.items():
                if entry := self._entries.get(answer_id):
                    entry.num_restarts = count

    def _check(self, heading: HeaderRecord) -> None:
        if heading.format != FORMAT:
            text = "was written by another version of Lamina: finish it there, or name another directory"
            raise ValueError(f"--journal {self._path} {text}")
        if heading.digest != self._header.digest:
            text = f"is of another model ({heading.model}): serve that one, or name another directory"
            raise ValueError(f"--journal {self._path} {text}")

    @property
    def entries(self) -> list[JournalEntry]:
        """All known requests, the oldest first."""
        return list(self._entries.values())

    def unfinished(self) -> list[JournalEntry]:
        """Return requests that an earlier server left unfinished, the oldest first."""
        return [entry for entry in self._entries.values() if not entry.ended]

    def find(self, answer_id: str) -> JournalEntry | None:
        """Return the request whose reply has that id, or None."""
        return self._entries.get(answer_id)

    def new_keys(self, count: int) -> list[int]:
        """Return keys for ``count`` prompts. No server of this journal has used them with an engine."""
        first, self._next_key = self._next_key, self._next_key + count
        return list(range(first, self._next_key))

    async def accept(self, record: AcceptedRecord) -> JournalEntry:
        """Write a request that is about to begin. It is on disk when this returns. Raises OSError; then it is not in
        the journal.
        """
        self._maintain()
        self._append(frame_record(record))
        entry = JournalEntry(record)
        self._enter(entry)
        try:
            await self._sync()
        except OSError:
            self.drop(record.id)
            raise
        return entry

    def add_deltas(self, deltas: Sequence[Delta]) -> None:
        """Write the tokens of one step. Deltas of requests that are not in the journal are ignored."""
        own = [d for d in deltas if d.key in self._by_key]
        if own:
            self._grow(own, self._number)
            ids = (self._by_key[d.key].accepted.id for d in own)
            if self._unwritten:
                own = [d for d in own if self._by_key[d.key].accepted.id not in self._unwritten]
            self._try(DeltasRecord(own), ids)
        self._maintain()

    def drop(self, answer_id: str) -> None:
        """Drop a reply that has no reader. A finished one stays; an unknown id is ignored."""
        entry = self._entries.get(answer_id)
        if entry is not None and not entry.ended:
            self._forget(answer_id)
            self._try(DroppedRecord(answer_id), [answer_id])

    def restart(self, entry: JournalEntry) -> None:
        """Note that this server restarts a request of an earlier one."""
        self._count_restart(entry, 1)

    def defer(self, entry: JournalEntry) -> None:
        """Undo ``restart``: this server stops in order and leaves the request to the next one."""
        self._count_restart(entry, -1)

    def _count_restart(self, entry: JournalEntry, more: int) -> None:
        entry.num_restarts += more
        self._try(RestartsRecord({entry.accepted.id: entry.num_restarts}), [entry.accepted.id])

    def refuse(self, record: FailedRecord) -> None:
        """Write that a request cannot be finished."""
        self._entries[record.id].refuse(record, self._number)
        self._try(record, [record.id])

    def retry(self) -> None:
        """After an error, see whether there is room now, and write what did not fit."""
        self._maintain()
        if self.error is not None and self._has_room():
            with suppress(OSError):
                self._rewrite()
                if not (self._is_unknown or self._is_full):
                    log.warning("--journal %s can be written again", self._path)
                    self.error = None

    async def retry_forever(self) -> None:
        """Try a full disk again, from time to time."""
        while True:
            await asyncio.sleep(self._retry_s)
            self.retry()

    def close(self) -> None:
        """Close the journal, so that another server may open it. Idempotent."""
        self._thread.shutdown()
        with suppress(OSError):
            self._rewrite()
        self._segment.close()
        self._close_before()
        self._folder.close()

    def _enter(self, entry: JournalEntry) -> None:
        self._entries[entry.accepted.id] = entry
        for prompt in entry.accepted.prompts:
            self._by_key[prompt.key] = entry
            self._next_key = max(self._next_key, prompt.key + 1)

    def _grow(self, deltas: Iterable[Delta], number: int) -> None:
        for delta in deltas:
            if entry := self._by_key.get(delta.key):
                entry.add_delta(delta, number)

    def _forget(self, answer_id: str) -> None:
        if entry := self._entries.pop(answer_id, None):
            for prompt in entry.accepted.prompts:
                self._by_key.pop(prompt.key, None)

    def _append(self, data: bytes) -> None:
        try:
            self._segment.append(data)
        except OSError as e:
            self._note_error(e)
            raise
        self._written += len(data)

    def _has_room(self) -> bool:
        try:
            self._segment.check_room()
        except OSError as e:
            self._note_error(e)
            return False
        return True

    def _note_error(self, e: OSError) -> None:
        if self.error is None:
            text = "new requests are refused, and running ones continue"
            log.error("--journal %s cannot be written (%s): %s", self._path, e.strerror, text)
        self.error = e.strerror or str(e)

    def _try(self, record: Any, ids: Iterable[str]) -> None:
        """Append a record of requests, whose change is known already, if possible."""
        try:
            self._append(frame_record(record))
        except OSError:
            self._unwritten.update(ids)
            return
        if self._unwritten and time.monotonic() >= self._next_rewrite:
            with suppress(OSError):
                self._rewrite()

    def _rewrite(self) -> None:
        """Write all of the requests of which records are missing. Raises OSError."""
        self._next_rewrite = time.monotonic() + self._retry_s
        self._append(b"".join(map(self._all_of, self._unwritten)))
        self._note_written(self._unwritten, self._number)

    def _note_written(self, ids: Iterable[str], number: int) -> None:
        """Note that a segment has all of these requests."""
        for answer_id in ids:
            if entry := self._entries.get(answer_id):
                entry.ended_in = number
        self._unwritten.clear()
        self._next_rewrite = 0.0

    def _all_of(self, answer_id: str) -> bytes:
        """Return the records of a request, which replace those before them."""
        entry = self._entries.get(answer_id)
        if entry is None:
            return frame_record(DroppedRecord(answer_id))
        records: list[Any] = [entry.accepted]
        if deltas := entry.deltas:
            records.append(DeltasRecord(deltas))
        if entry.refusal is not None:
            records.append(entry.refusal)
        if entry.num_restarts:
            records.append(RestartsRecord({answer_id: entry.num_restarts}))
        return b"".join(map(frame_record, records))

    def _opening(self, ids: Iterable[str], before: int) -> bytes:
        """Return the first records of a segment: all that is needed without the earlier segments."""
        return b"".join([frame_record(self._header), *map(self._all_of, ids), frame_record(OpenedRecord(before))])

    async def _sync(self) -> None:
        """Wait until all written bytes are on disk. One wait at a time serves all callers that came before it. Raises
        OSError.
        """
        wanted = self._written
        while self._synced < wanted:
            wait = self._begin_wait()
            try:
                await asyncio.shield(asyncio.wrap_future(wait))
            finally:
                self._maintain()

    def _begin_wait(self) -> Future[None]:
        """Have the thread wait for the disk. Raises OSError, also if an earlier wait failed: Linux says it once."""
        if self._is_unknown:
            raise OSError(errno.EIO, "its disk has failed")
        if self._wait is None:
            folder, number, segment, before = self._folder, self._number, self._segment, self._before
            size, is_fresh, keep_from = segment.size, self._is_fresh, self._keep_from

            def wait() -> None:
                if before is not None:
                    before.sync()
                segment.sync()
                if is_fresh:
                    folder.sync()
                folder.note_synced(number, size)
                if is_fresh:
                    folder.remove(keep_from)

            try:
                self._wait = self._thread.submit(wait)
            except RuntimeError as e:
                raise OSError(errno.EAGAIN, f"no thread can be started ({e})") from e
            self._wait_written = self._written
        return self._wait

    def _maintain(self) -> None:
        """Note the end of a wait, and begin another segment where this one is full or unknown."""
        if self._wait is not None and self._wait.done():
            self._end_wait(self._wait.exception())
        if self._wait is not None:
            return
        with suppress(OSError):
            if self._is_fresh and not self._is_unknown:  # the one before has to be on disk first
                self._begin_wait()
            elif (self._is_full or self._is_unknown) and time.monotonic() >= self._next_try:
                self._turn_over()

    @property
    def _is_full(self) -> bool:
        return self._segment.size >= max(self._full_at, 2 * self._begun_with)

    def _end_wait(self, failed: BaseException | None) -> None:
        self._wait = None
        if isinstance(failed, OSError):
            self._is_unknown = True
            self._note_error(failed)
        elif failed is not None:
            raise failed
        else:
            self._synced = self._wait_written
            if self._is_fresh:
                self._is_fresh, self._next_try = False, 0.0
                self._close_before()

    def _turn_over(self) -> None:
        """Go on in another segment. It begins with the running requests, or with all if this one is unknown. Raises
        OSError.
        """
        self._next_try = time.monotonic() + self._retry_s
        before, keeps_all = self._segment, self._is_unknown
        ids = [*(self._unwritten - self._entries.keys())]  # those that were dropped
        ids += [i for i, e in self._entries.items() if keeps_all or not e.ended or i in self._unwritten]
        try:
            self._segment = self._folder.begin(self._number + 1, self._opening(ids, 0 if keeps_all else before.size))
        except OSError as e:
            self._note_error(e)
            raise
        self._close_before()
        self._before, self._keep_from = before, self._number
        if keeps_all:
            self._close_before()
            self._keep_from += 1
        self._note_written(ids, self._number + 1)
        for entry in self.entries:
            if entry.ended and entry.ended_in < self._number:
                self._forget(entry.accepted.id)
        self._number, self._begun_with = self._number + 1, self._segment.size
        self._is_fresh, self._is_unknown = True, False
        self._begin_wait()

    def _close_before(self) -> None:
        before, self._before = self._before, None
        if before is not None:
            before.close()
