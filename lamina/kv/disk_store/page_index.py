"""The index of a store: SQLite with a write-ahead log, which any number of workers use at once.

Each change is one transaction, so it is complete or not begun if a worker is killed. After a loss of power the index
may lack the last changes, or have records whose bytes never reached the disk, which their tags reveal.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from lamina.kv.eviction_policy import EvictionRank, PageUsage
from lamina.kv.pages import Page, PageFragment

from .index_schema import (
    AGES,
    PAGE,
    PROLONGED,
    RECORD,
    SCHEMA,
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

    def __init__(self, folder: StoreDirectory) -> None:
        """Open the index, which is created if missing. Raises ValueError if it cannot be read."""
        os.close(folder.open(INDEX, os.O_RDWR | os.O_CREAT))  # its log gets the same mode
        self._name = folder.name
        self._lock = threading.Lock()
        self._touched: dict[tuple[bytes, bytes], int] = {}
        try:
            self._db = sqlite3.connect(
                folder.path / INDEX, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
            )
            for setting in ("journal_mode = WAL", "synchronous = NORMAL", "foreign_keys = ON", "secure_delete = ON"):
                self._db.execute(f"PRAGMA {setting}")
            self._prepare()
        except sqlite3.DatabaseError as e:
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
            self._db.execute(AGES)
            self._db.execute(PROLONGED)

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
            self._touched[identity, key] = self._touched.pop((identity, key), 0) + 1
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
                values = (identity, *page[:4], *page.provenance, now, now, 1, self._set(record.fragments))
                marks = ", ".join("?" * len(values))
                columns = f"identity, {PAGE}, came, used, uses, held"
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
                self._db.execute(
                    "UPDATE pages SET used = ?, source = ?, chunk = ?, build = ?, ranks = ?, held = ? WHERE id = ?",
                    (now, *page.provenance, self._set(held), number),
                )
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

    def set_retention(self, identity: bytes, keys: Iterable[bytes], now_s: int, until_s: int) -> None:
        """Retain those of these pages that are stored until then. ``now_s``: as in ``expire``."""
        with self._change():
            self._db.execute("DELETE FROM prolonged_pages WHERE until <= ?", (now_s,))
            self._db.executemany(
                "INSERT INTO prolonged_pages SELECT id, ? FROM pages WHERE identity = ? AND key = ?"
                " ON CONFLICT DO UPDATE SET until = max(until, excluded.until)",
                [(until_s, identity, key) for key in keys],
            )

    def retained_keys(self, now_s: int) -> set[bytes]:
        """Return the keys of pages with retention, of any identity, which are evicted after all others."""
        query = "SELECT key FROM pages JOIN prolonged_pages ON page = id WHERE until > ?"
        return {key for (key,) in self._rows(query, now_s)}  # type: ignore[misc]

    def expire(self, now_s: int, ttl_s: float) -> list[bytes]:
        """Remove pages of all identities, except those with retention, that were not used for ``ttl_s`` seconds. The
        last use is known as exactly as the times of earlier calls. Returns their keys. ``now_s``: seconds since any
        fixed time, the same for all calls.
        """
        with self._change():
            self._db.execute("INSERT OR REPLACE INTO ages SELECT ?, now FROM clock", (now_s,))
            (last,) = self._db.execute("SELECT max(tick) FROM ages WHERE at <= ?", (now_s - ttl_s,)).fetchone()
            if last is None:
                return []
            self._db.execute("DELETE FROM ages WHERE tick < ?", (last,))
            prolonged = "SELECT page FROM prolonged_pages WHERE until > ?"
            query = f"DELETE FROM pages WHERE used <= ? AND id NOT IN ({prolonged}) RETURNING key"
            gone = self._db.execute(query, (last, now_s)).fetchall()
            return [row[0] for row in gone]

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
        for where, times in self._touched.items():
            values = (self._next_use(), times, *where)
            self._db.execute("UPDATE pages SET used = ?, uses = uses + ? WHERE identity = ? AND key = ?", values)
