"""The journal: accepted requests and their tokens, written to disk before a client gets them.

**Order.** A request is on the disk itself (fdatasync) before it is begun. Requests that arrive together share one wait.
The tokens of a step are written, without a wait, before readers get them. They survive the process. A host that loses
power loses the last ones, which are computed again.

**A disk that fails.** After a failed wait the bytes on the disk are unknown. The next request first begins another
segment, with all known records.

**Lifetime.** Records go to the newest segment. At half of ``journal_size`` another one begins with the running
requests. All older segments but one are removed, so a reply stays until one or two segments are full. Only a thread of
the journal waits for the disk.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Iterable, Sequence
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
    RestartsRecord,
)
from .next_segment import DiskFailedError, NextSegment, begin_segment, is_whole
from .segment import Segment, SegmentContents, frame_record

RETRY_S = 10.0  # until another segment is tried again

log = logging.getLogger(__name__)


class Journal:
    """The journal of requests. All methods belong to one thread, the event loop's."""

    def __init__(self, path: str, model: str, size: int) -> None:
        """Open the journal at ``path``, or begin one. ``size``: the approximate bytes that it may take. Raises
        ValueError if it belongs to another model, user or server, or is damaged; nothing is changed then. Raises
        OSError.
        """
        self._entries: dict[str, JournalEntry] = {}
        self._by_key: dict[int, JournalEntry] = {}
        self._next_key = 0
        self._torn = max(1, size // 2)
        self._header = HeaderRecord(format=FORMAT, model=model, digest=model_digest(model))
        self._folder = JournalDirectory(path)
        self._path, self._written, self._synced = path, 0, 0
        self._next_try = 0.0  # when another segment may be tried
        self._following: NextSegment | None = None
        self._behind_at = 0  # value of ``_written`` when the following segment was begun
        self._left = set[str]()  # ids of entries that the following segment leaves to earlier ones
        self._syncing: asyncio.Future[None] | None = None
        self._full = False  # whether the last write failed
        self._unsynced = False  # whether the last wait for the disk failed
        self._begun_with = 0  # bytes of the segment's opening
        try:
            self._number, self._segment = self._open()
        except BaseException:
            self._folder.close()
            raise

    def _open(self) -> tuple[int, Segment]:
        segments, size = self._folder.segments(), 0
        for place, (number, path) in enumerate(segments):
            contents = SegmentContents(path)
            if place and place == len(segments) - 1 and not is_whole(contents.records):
                log.warning("--journal: %s was not begun whole: left out, as the one before has all of it", path)
                size = 0
                break
            for at, record in enumerate(contents.records):
                self._replay(record, first=at == 0, number=number)
            if contents.num_torn_bytes:
                log.warning(
                    "--journal: the last %d bytes of %s were not written whole: left out", contents.num_torn_bytes, path
                )
            size = contents.end
        number = segments[-1][0] if segments else 0
        segment = Segment(self._folder.path_of(number), size)
        if not size:
            begin_segment(segment, self._opening(self.unfinished()), self._folder).note_synced(segment.size)
        return number, segment

    def _replay(self, record: Any, *, first: bool, number: int) -> None:
        if first or isinstance(record, HeaderRecord):
            self._check(record)
        elif isinstance(record, AcceptedRecord):
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

    def _check(self, heading: Any) -> None:
        if not isinstance(heading, HeaderRecord) or heading.format != FORMAT:
            text = "was written by another version of Lamina: finish it there, or name another directory"
            raise ValueError(f"--journal {self._path} {text}")
        if heading.digest != self._header.digest:
            text = f"is of another model ({heading.model}): serve that one, or name another directory"
            raise ValueError(f"--journal {self._path} {text}")

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
        while self._unsynced:
            await self._sync_all()
        self._append(record)
        self._note(record)
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
        gaps = [d for d in own if self._by_key[d.key].gap_segment == self._number]
        if own and not self._try(DeltasRecord([d for d in own if d not in gaps] if gaps else own), DeltasRecord(own)):
            gaps = own
        self._grow(own, self._number)
        for delta in gaps:
            if entry := self._by_key.get(delta.key):
                entry.gap_segment = self._number
        self._next_segment()

    def drop(self, answer_id: str) -> None:
        """Drop a reply that has no reader. A finished one stays; an unknown id is ignored."""
        entry = self._entries.get(answer_id)
        if entry is not None and not entry.ended:
            self._try(DroppedRecord(answer_id))
            self._forget(answer_id)

    def restart(self, entry: JournalEntry) -> None:
        """Note that this server restarts a request of an earlier one."""
        entry.num_restarts += 1
        self._try(RestartsRecord({entry.accepted.id: entry.num_restarts}))

    def defer(self, entry: JournalEntry) -> None:
        """Undo ``restart``: this server stops in order and leaves the request to the next one."""
        entry.num_restarts -= 1
        self._try(RestartsRecord({entry.accepted.id: entry.num_restarts}))

    def refuse(self, record: FailedRecord) -> None:
        """Write that a request cannot be finished."""
        self._try(record)
        self._entries[record.id].refuse(record, self._number)

    def close(self) -> None:
        """Close the journal, so that another server may open it. Idempotent."""
        following, self._following = self._following, None
        if following is not None:
            following.discard()
        self._segment.close()
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

    def _append(self, record: Any) -> None:
        data = frame_record(record)
        self._segment.append(data)
        self._written += len(data)

    def _note(self, record: Any) -> None:
        """Add a record to the next segment, if one is begun."""
        if self._following is not None:
            self._following.add(frame_record(record))

    def _try(self, record: Any, whole: Any = None) -> bool:
        """Append a record if possible. Returns False if it cannot be written; running requests continue without it.
        ``whole``: the record for a segment that has no gaps.
        """
        self._note(record if whole is None else whole)
        try:
            self._append(record)
        except OSError as e:
            if not self._full:
                text = "running requests continue, and would restart from what is written there"
                log.error("--journal %s cannot be written (%s): %s", self._path, e.strerror, text)
            self._full = True
            return False
        self._full = False
        return True

    async def _sync(self) -> None:
        """Wait until all written bytes are on disk. One wait at a time serves all callers that came before it."""
        wanted = self._written
        while self._synced < wanted:
            if self._syncing is None:
                self._syncing = asyncio.ensure_future(self._sync_once(self._written))
            await asyncio.shield(self._syncing)

    async def _sync_once(self, written: int) -> None:
        size = self._segment.size
        try:
            await asyncio.to_thread(self._segment.sync)
            self._synced = max(self._synced, written)
        except OSError:
            self._unsynced = True
            raise
        finally:
            self._syncing = None
        self._segment.note_synced(size)
        self._next_segment()  # while requests keep coming, a wait is nearly always pending

    def _opening(self, entries: Iterable[JournalEntry]) -> bytes:
        """Return the first records of a segment: all that is needed without the earlier segments."""
        parts = [frame_record(self._header)]
        for entry in entries:
            parts.append(frame_record(entry.accepted))
            if deltas := entry.deltas:
                parts.append(frame_record(DeltasRecord(deltas)))
            if entry.refusal is not None:
                parts.append(frame_record(entry.refusal))
            if entry.num_restarts:
                parts.append(frame_record(RestartsRecord({entry.accepted.id: entry.num_restarts})))
        return b"".join(parts)

    async def _sync_all(self) -> None:
        """Write all known records to another segment. Raises OSError if none can be begun now."""
        self._follow()
        if self._following is None:
            raise OSError(errno.EIO, "its disk has failed")
        with suppress(OSError):
            await asyncio.shield(asyncio.wrap_future(self._following.work))
        self._next_segment()

    def _next_segment(self) -> None:
        """Begin another segment if this one is full, and switch to it once neither has a pending wait."""
        if self._syncing is not None:
            return
        if self._following is not None:
            if self._following.work.done():
                self._go_over()
        elif self._segment.size >= max(self._torn, 2 * self._begun_with) and not self._unsynced:
            self._follow()

    def _follow(self) -> None:
        """Begin another segment with the running requests, or with all requests if the state of this segment is
        unknown.
        """
        if self._following is not None or time.monotonic() < self._next_try:
            return
        self._next_try = time.monotonic() + RETRY_S  # after a failure, such as a full disk
        carried = list(self._entries.values()) if self._unsynced else self.unfinished()
        self._left, self._behind_at = self._entries.keys() - {e.accepted.id for e in carried}, self._written
        before = None if self._unsynced else self._segment
        try:
            self._following = NextSegment(self._number + 1, self._folder, self._opening(carried), before)
        except RuntimeError as e:  # no thread could be started
            log.error("--journal %s: no other segment can be begun (%s)", self._path, e)

    def _go_over(self) -> None:
        """Switch to the following segment, if there is one; waits for it."""
        following, self._following = self._following, None
        if following is None:
            return
        try:
            new = following.take(self._segment)
        except DiskFailedError as e:
            log.error("--journal %s: its disk has failed (%s): another file gets all of it", self._path, e.strerror)
            self._unsynced, self._next_try = True, 0.0
            self._follow()
            return
        except OSError as e:
            log.error("--journal %s: no other segment can be begun (%s)", self._path, e.strerror)
            return
        self._segment.close()
        before, self._number, self._segment, self._next_try = self._number, following.number, new, 0.0
        self._begun_with, self._synced = new.size, max(self._synced, self._behind_at)
        for answer_id, entry in list(self._entries.items()):
            if answer_id not in self._left and entry.ended:
                entry.ended_in = self._number
            elif entry.ended and entry.ended_in < before:
                self._forget(answer_id)
        self._remove(self._number if following.is_complete else before)
        self._unsynced = False

    def _remove(self, before: int) -> None:
        """Remove the segments with numbers below ``before``."""
        try:
            for old, path in self._folder.segments():
                if old < before:
                    path.unlink(missing_ok=True)
        except (OSError, ValueError) as e:
            log.error("--journal %s: old segments stay (%s)", self._path, e)
