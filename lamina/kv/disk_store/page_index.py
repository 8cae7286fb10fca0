"""The index of a store: SQLite with a write-ahead log, which any number of workers use at once.

Each change is one transaction, so it is complete or not begun if a worker is killed. After a loss of power the index
may lack the last changes, or have records whose bytes never reached the disk, which their tags reveal.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from lamina.kv.eviction_policy import EvictionRank, PageUsage
from lamina.kv.pages import Page, PageFragment

from .index_schema import (
    PAGE,
    PROLONGED,
    RECORD,
    SCHEMA,
    USED_AT,
    VERSION,
    PageEntry,
    Record,
    RecordExtent,
    pack_fragment_set,
    pack_fragments,
    page_from_row,
    record_from_row,
    unpack_fragment_set,
)
from .store_directory import INDEX, StoreDirectory

_BUSY_S = 30.0
_MOST_TOUCHED = 256


class PageIndex:
    """One worker's connection to the index. Any thread may use it. Raises sqlite3.Error; ``check`` finds the damage."""

    def __init__(self, folder: StoreDirectory, clock: Callable[[], float] = time.time) -> None:
        """Open the index, which is created if missing. Raises ValueError if it cannot be read. ``clock``: seconds since
        a fixed time, the same for all that open it.
        """
        self._clock = clock
        opened = folder.write_at_start(partial(folder.open, INDEX, os.O_RDWR | os.O_CREAT))
        os.close(opened)  # its log gets the same mode
        self._name = folder.name
        self._lock = threading.Lock()
        self._touched: dict[tuple[bytes, bytes], tuple[int, float]] = {}  # page -> uses, and the time of the last one
        try:
            self._db = sqlite3.connect(
                folder.path / INDEX, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
            )
            for setting in ("journal_mode = WAL", "synchronous = NORMAL", "foreign_keys = ON", "secure_delete = ON"):
                self._db.execute(f"PRAGMA {setting}")
            self._prepare()
        except sqlite3.DatabaseError as e:
            if folder.is_full:
                raise folder.full_error from e
            raise ValueError(f"{folder.name}: the index cannot be read ({e}): lamina-launch kv purge empties it") from e

    def _prepare(self) -> None:
        with self._change():
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if version == 0:
                for statement in SCHEMA.split(";"):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {VERSION}")
            elif version != VERSION:
                raise ValueError(
                    f"{self._name}: the index has version {version}, not {VERSION}: lamina-launch kv purge empties it"
                )
            self._db.execute(PROLONGED)
            if all(name != "used_at" for _, name, *_ in self._db.execute("PRAGMA table_info(pages)")):
                self._db.execute(USED_AT)
            self._db.execute(
                "UPDATE pages SET used_at = ? WHERE used_at IS NULL", (self._clock(),)
            )  # of older versions
            self._db.execute("DROP TABLE IF EXISTS ages")

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Run the block as a transaction; nothing of it is done if the block raises."""
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                self._flush_uses()
                yield
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")
            self._touched.clear()

    def _rows(self, query: str, *values: object) -> list[tuple[object, ...]]:
        with self._lock:
            return self._db.execute(query, values).fetchall()

    def lookup(self, identity: bytes, key: bytes) -> PageEntry | None:
        """Return a page; None if it is missing."""
        with self._lock:
            row = self._db.execute(f"SELECT id, {PAGE} FROM pages WHERE identity = ? AND key = ?", (identity, key))
            entry = row.fetchone()
            if entry is None:
                return None
            query = f"SELECT {RECORD} FROM records WHERE page = ? ORDER BY id"
            return PageEntry(page_from_row(entry[1:]), [record_from_row(r) for r in self._db.execute(query, entry[:1])])

    def note_use(self, identity: bytes, key: bytes) -> None:
        """Note that a page was used; this is written with the next change."""
        with self._lock:
            uses, _ = self._touched.pop((identity, key), (0, 0.0))
            self._touched[identity, key] = uses + 1, self._clock()
            many = len(self._touched) >= _MOST_TOUCHED
        if many:
            with self._change():
                pass

    def add(self, identity: bytes, page: Page, record: Record) -> None:
        """Add a record that is on the disk, and remove records whose fragments it replaces all. Raises ValueError if
        the stored page is another one.
        """
        with self._change():
            now = self._next_use()
            where = (identity, page.key)
            query = f"SELECT id, {PAGE} FROM pages WHERE identity = ? AND key = ?"
            known = self._db.execute(query, where).fetchone()
            if known is None:
                values = (
                    identity,
                    *page[:4],
                    *page.provenance,
                    now,
                    now,
                    1,
                    self._set(record.fragments),
                    self._clock(),
                )
                marks = ", ".join("?" * len(values))
                columns = f"identity, {PAGE}, came, used, uses, held, used_at"
                number = self._db.execute(f"INSERT INTO pages ({columns}) VALUES ({marks})", values).lastrowid
            else:
                number, old, held = known[0], page_from_row(known[1:]), set(record.fragments)
                if not page.is_same_page(old):
                    raise ValueError("another page has this key")
                for row in self._db.execute(f"SELECT {RECORD} FROM records WHERE page = ?", (number,)).fetchall():
                    fragments = record_from_row(row).fragments.keys()
                    if old != page or fragments <= record.fragments.keys():
                        self._db.execute("DELETE FROM records WHERE id = ?", row[:1])
                    else:
                        held |= fragments
                columns = "used = ?, used_at = ?, source = ?, chunk = ?, build = ?, ranks = ?, held = ?"
                new = (now, self._clock(), *page.provenance, self._set(held), number)
                self._db.execute(f"UPDATE pages SET {columns} WHERE id = ?", new)
            self._db.execute(
                "INSERT INTO records (page, segment, at, size, encrypted, salt, atoms) VALUES (?, ?, ?, ?, ?, ?, ?)",
                (number, *record.extent, record.encrypted, record.salt, pack_fragments(record.fragments)),
            )

    def _set(self, fragments: Iterable[PageFragment]) -> int:
        """Return the number of a set of fragments, which is added if missing."""
        name = (pack_fragment_set(fragments),)
        known = self._db.execute("SELECT id FROM sets WHERE atoms = ?", name).fetchone()
        if known is None:
            known = self._db.execute("INSERT INTO sets (atoms) VALUES (?) RETURNING id", name).fetchone()
        return int(known[0])

    def drop(self, identity: bytes, keys: Iterable[bytes]) -> None:
        """Remove pages, all of them or none."""
        with self._change():
            self._db.executemany("DELETE FROM pages WHERE identity = ? AND key = ?", [(identity, key) for key in keys])

    def set_last_use(self, identity: bytes, keys: Iterable[bytes], seconds_ago: float) -> None:
        """Note that these pages were last used so many seconds ago, also if that is before they came."""
        with self._change():
            at, query = self._clock() - seconds_ago, "UPDATE pages SET used_at = ? WHERE identity = ? AND key = ?"
            self._db.executemany(query, [(at, identity, key) for key in keys])

    def set_retention(self, identity: bytes, keys: Iterable[bytes], until_s: int) -> None:
        """Retain those of these pages that are stored until then."""
        with self._change():
            self._db.execute("DELETE FROM prolonged_pages WHERE until <= ?", (self._clock(),))
            self._db.executemany(
                "INSERT INTO prolonged_pages SELECT id, ? FROM pages WHERE identity = ? AND key = ?"
                " ON CONFLICT DO UPDATE SET until = max(until, excluded.until)",
                [(until_s, identity, key) for key in keys],
            )

    def retained_keys(self) -> set[bytes]:
        """Return the keys of pages with retention, of any identity, which are evicted after all others."""
        query = "SELECT key FROM pages JOIN prolonged_pages ON page = id WHERE until > ?"
        return {key for (key,) in self._rows(query, self._clock())}  # type: ignore[misc]

    def expire(self, ttl_s: float) -> list[bytes]:
        """Remove pages of all identities, except those with retention, that were not used for ``ttl_s`` seconds.
        Returns their keys.
        """
        with self._change():
            now, prolonged = self._clock(), "SELECT page FROM prolonged_pages WHERE until > ?"
            query = f"DELETE FROM pages WHERE used_at <= ? AND id NOT IN ({prolonged}) RETURNING key"
            return [row[0] for row in self._db.execute(query, (now - ttl_s, now)).fetchall()]

    def drop_tenant(self, tenant: bytes) -> int:
        """Remove a tenant's pages of all identities, and return their number."""
        with self._change():
            return self._db.execute("DELETE FROM pages WHERE tenant = ?", (tenant,)).rowcount

    def evict(
        self, segments: Iterable[int], enough: Callable[[RecordExtent], bool], rank: Callable[[PageUsage], EvictionRank]
    ) -> list[bytes]:
        """Evict pages that have a record in ``segments``, of any identity, the lowest rank first, and return their
        keys. Calls ``enough`` for every extent that is freed there, until it returns True.
        """
        given: list[tuple[bytes, int]] = []
        with self._change():
            for page, use, extents in self._victims(list(segments), rank):
                given.append((use.key, page))
                if [enough(extent) for extent in extents][-1]:
                    break
            self._db.executemany("DELETE FROM pages WHERE id = ?", [(page,) for _, page in given])
        return [key for key, _ in given]

    def _victims(
        self, segments: list[int], rank: Callable[[PageUsage], EvictionRank]
    ) -> Iterator[tuple[int, PageUsage, list[RecordExtent]]]:
        marks = ", ".join("?" * len(segments))
        pages: dict[int, tuple[PageUsage, list[RecordExtent]]] = {}
        query = (
            "SELECT p.id, p.key, p.number, p.came, p.used, p.uses, r.segment, r.at, r.size FROM records r"
            f" JOIN pages p ON p.id = r.page WHERE r.segment IN ({marks})"
        )
        for page, key, number, came, used, uses, *extent in self._db.execute(query, segments):
            use = PageUsage(key, number, 0, came, used, uses)
            pages.setdefault(page, (use, []))[1].append(RecordExtent(*extent))
        for page in sorted(pages, key=lambda page: rank(pages[page][0])):
            yield page, *pages[page]

    def entries(self, identity: bytes | None = None, tenant: bytes | None = None) -> list[PageEntry]:
        """Return all pages, or those of one identity or tenant; the most recently used last."""
        with self._change():  # writes this worker's uses first
            records: dict[int, list[Record]] = {}
            for page, *row in self._db.execute(f"SELECT page, {RECORD} FROM records ORDER BY id"):
                records.setdefault(page, []).append(record_from_row(row))
            query = f"SELECT id, {PAGE} FROM pages WHERE coalesce(identity = ?, 1) AND coalesce(tenant = ?, 1)"
            rows = self._db.execute(f"{query} ORDER BY used", (identity, tenant))
            return [PageEntry(page_from_row(row[1:]), records[row[0]]) for row in rows if row[0] in records]

    def keys(self, identity: bytes, fragments: frozenset[PageFragment], most: int) -> list[bytes]:
        """Return keys of the ``most`` last used pages that have all of ``fragments``, in the order of their use."""
        if self._touched:
            with self._change():  # writes this worker's uses first
                pass
        sets = [
            number
            for number, held in self._rows("SELECT id, atoms FROM sets")
            if fragments <= unpack_fragment_set(held)  # type: ignore[arg-type]
        ]
        marks = ", ".join("?" * len(sets))
        query = f"SELECT key FROM pages WHERE identity = ? AND held IN ({marks}) ORDER BY used DESC LIMIT ?"
        return [key for (key,) in reversed(self._rows(query, identity, *sets, most))]  # type: ignore[misc]

    def counts(self) -> list[tuple[bytes, bytes, int, int]]:
        """Return rows of identity, tenant, pages and bytes on disk."""
        query = (
            "SELECT p.identity, p.tenant, count(DISTINCT p.id), sum(r.size)"
            " FROM pages p JOIN records r ON r.page = p.id GROUP BY p.identity, p.tenant ORDER BY p.identity, p.tenant"
        )
        return self._rows(query)  # type: ignore[return-value]

    def segments(self) -> dict[int, int]:
        """Return the sizes of segments by number."""
        return {int(number): int(size) for number, size in self._rows("SELECT id, size FROM segments")}  # type: ignore[call-overload]

    def extents(self, segment: int) -> list[RecordExtent]:
        """Return the extents of ``segment`` that hold records, in order."""
        rows = self._rows("SELECT segment, at, size FROM records WHERE segment = ? ORDER BY at", segment)
        return [RecordExtent(*row) for row in rows]  # type: ignore[arg-type]

    def add_segment(self, least: int, most: int, limit: int) -> tuple[int, int] | None:
        """Add a segment of ``least`` to ``most`` bytes, and return its number and size. All segments together have at
        most ``limit`` bytes; None if too few of them are left.
        """
        with self._change():
            (taken,) = self._db.execute("SELECT coalesce(sum(size), 0) FROM segments").fetchone()
            size = min(most, limit - taken)
            if size < least:
                return None
            number = self._db.execute("INSERT INTO segments (size) VALUES (?)", (size,)).lastrowid
            return (int(number), size) if number is not None else None

    def drop_segments(self, numbers: Iterable[int]) -> list[bytes]:
        """Remove segments and all pages that have a record there; returns the keys of these pages."""
        given: list[bytes] = []
        with self._change():
            for number in numbers:
                query = "id IN (SELECT page FROM records WHERE segment = ?)"
                given += [row[0] for row in self._db.execute(f"SELECT key FROM pages WHERE {query}", (number,))]
                self._db.execute(f"DELETE FROM pages WHERE {query}", (number,))
                self._db.execute("DELETE FROM segments WHERE id = ?", (number,))
        return given

    def segments_by_use(self) -> list[int]:
        """Return the numbers of segments, the one with the least recently used pages first."""
        query = (
            "SELECT s.id FROM segments s LEFT JOIN records r ON r.segment = s.id LEFT JOIN pages p ON p.id = r.page"
            " GROUP BY s.id ORDER BY max(p.used)"
        )
        return [int(row[0]) for row in self._rows(query)]  # type: ignore[call-overload]

    def check(self) -> str:
        """Return the damage that SQLite finds in its file; "" for none."""
        problems = [str(row[0]) for row in self._rows("PRAGMA integrity_check(3)")]
        return "" if problems == ["ok"] else "; ".join(problems)

    def close(self) -> None:
        """Write noted uses and close the index. Idempotent."""
        try:
            if self._touched:
                with self._change():
                    pass
        except sqlite3.Error:  # it is closed already, or the uses are lost
            pass
        with self._lock:
            self._db.close()

    def _next_use(self) -> int:
        self._db.execute("UPDATE clock SET now = now + 1")
        (now,) = self._db.execute("SELECT now FROM clock").fetchone()
        return int(now)

    def _flush_uses(self) -> None:
        for where, (times, at) in self._touched.items():
            query = "UPDATE pages SET used = ?, used_at = ?, uses = uses + ? WHERE identity = ? AND key = ?"
            self._db.execute(query, (self._next_use(), at, times, *where))
