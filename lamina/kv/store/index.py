"""The index of a store: SQLite with a write-ahead log, which any number of workers use at once.

A change is one transaction, so a worker that is killed leaves it done or not begun. After a loss of power the index may
lack the last changes, or know records whose bytes have not come to the disk: their tags tell.
"""

from __future__ import annotations

import os
import sqlite3
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from lamina.kv.pages import Atom, Page, Recipe
from lamina.kv.victims import PageUse, Rank

from .folder import INDEX, StoreFolder
from .seal import TAG_BYTES

VERSION = 1
_BUSY_S = 30.0
_MOST_TOUCHED = 256
_SCHEMA = """
CREATE TABLE segments (id INTEGER PRIMARY KEY AUTOINCREMENT, size INTEGER NOT NULL);
CREATE TABLE pages (
    id INTEGER PRIMARY KEY AUTOINCREMENT, identity BLOB NOT NULL, key BLOB NOT NULL, number INTEGER NOT NULL,
    tokens INTEGER NOT NULL, tenant BLOB NOT NULL, source TEXT NOT NULL, chunk INTEGER NOT NULL, build TEXT NOT NULL,
    ranks INTEGER NOT NULL, came INTEGER NOT NULL, used INTEGER NOT NULL, uses INTEGER NOT NULL, at_s REAL NOT NULL,
    UNIQUE (identity, key)
);
CREATE TABLE records (
    id INTEGER PRIMARY KEY AUTOINCREMENT, page INTEGER NOT NULL REFERENCES pages (id) ON DELETE CASCADE,
    segment INTEGER NOT NULL REFERENCES segments (id) ON DELETE CASCADE, at INTEGER NOT NULL, size INTEGER NOT NULL,
    encrypted INTEGER NOT NULL, salt BLOB NOT NULL, atoms BLOB NOT NULL
);
CREATE INDEX records_by_page ON records (page);
CREATE INDEX records_by_segment ON records (segment);
CREATE TABLE clock (now INTEGER NOT NULL);
INSERT INTO clock VALUES (0);
"""
_PAGE = "key, number, tokens, tenant, source, chunk, build, ranks"
_ATOM = struct.Struct(f"<III{TAG_BYTES}s")  # layer, head, bytes, tag
_RECORD = "id, segment, at, size, encrypted, salt, atoms"


class RecordExtent(NamedTuple):
    """Bytes ``at .. at + size`` of a segment."""

    segment: int
    at: int
    size: int


class Sealed(NamedTuple):
    """What is known of an atom that lies in a record."""

    nbytes: int
    tag: bytes


class Record(NamedTuple):
    """Some atoms of a page, one behind the other in the order of ``atoms``."""

    extent: RecordExtent
    encrypted: bool
    salt: bytes
    atoms: dict[Atom, Sealed]
    id: int = 0  # given by the index; of two records with one atom, that of the greater one counts


class PageEntry(NamedTuple):
    """A page of the index, its records in the order in which they came."""

    page: Page
    records: list[Record]


class PageIndex:
    """One worker's connection. Any thread may use it. Raises sqlite3.Error; ``check`` tells more."""

    def __init__(self, folder: StoreFolder) -> None:
        """Made where it is not there. Raises ValueError where it cannot be read."""
        os.close(folder.open(INDEX, os.O_RDWR | os.O_CREAT))  # it gives its log its own mode
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
                for statement in _SCHEMA.split(";"):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {VERSION}")
            elif version != VERSION:
                raise ValueError(
                    f"{self._name}: the index has version {version}, not {VERSION}: name another directory"
                )

    @contextmanager
    def _change(self) -> Iterator[None]:
        """A transaction; nothing of it is done where it raises."""
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                self._put_uses()
                yield
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")
            self._touched.clear()

    def _rows(self, query: str, *values: object) -> list[tuple[object, ...]]:
        with self._lock:
            return self._db.execute(query, values).fetchall()

    def look_up(self, identity: bytes, key: bytes) -> PageEntry | None:
        """A page; None where it is not there."""
        with self._lock:
            row = self._db.execute(f"SELECT id, {_PAGE} FROM pages WHERE identity = ? AND key = ?", (identity, key))
            found = row.fetchone()
            if found is None:
                return None
            query = f"SELECT {_RECORD} FROM records WHERE page = ? ORDER BY id"
            return PageEntry(_page(found[1:]), [_record(r) for r in self._db.execute(query, found[:1])])

    def touch(self, identity: bytes, key: bytes) -> None:
        """Say that a page was used: it is written with the next change."""
        with self._lock:
            self._touched[identity, key] = self._touched.pop((identity, key), 0) + 1
            many = len(self._touched) >= _MOST_TOUCHED
        if many:
            with self._change():
                pass

    def add(self, identity: bytes, page: Page, record: Record) -> None:
        """A record that is on the disk, whole or not at all; those that it replaces whole are gone. Raises ValueError
        where the page is there and is another one.
        """
        with self._change():
            now = self._tick()
            where = (identity, page.key)
            query = f"SELECT id, {_PAGE} FROM pages WHERE identity = ? AND key = ?"
            found = self._db.execute(query, where).fetchone()
            if found is None:
                values = (identity, *page[:4], *page.recipe, now, now, 1, time.time())
                marks = ", ".join("?" * len(values))
                columns = f"identity, {_PAGE}, came, used, uses, at_s"
                number = self._db.execute(f"INSERT INTO pages ({columns}) VALUES ({marks})", values).lastrowid
            else:
                number, old = found[0], _page(found[1:])
                self._renew(number, old, page, now)
                for row in self._db.execute(f"SELECT {_RECORD} FROM records WHERE page = ?", (number,)).fetchall():
                    if old != page or _record(row).atoms.keys() <= record.atoms.keys():
                        self._db.execute("DELETE FROM records WHERE id = ?", row[:1])
            self._db.execute(
                "INSERT INTO records (page, segment, at, size, encrypted, salt, atoms) VALUES (?, ?, ?, ?, ?, ?, ?)",
                (number, *record.extent, record.encrypted, record.salt, _packed(record.atoms)),
            )

    def _renew(self, number: int | None, old: Page, page: Page, now: int) -> None:
        """The entry of a page that more is written of."""
        if not page.is_same(old):
            raise ValueError("another page has this key")
        values = (now, time.time(), *page.recipe, number)
        self._db.execute(
            "UPDATE pages SET used = ?, at_s = ?, source = ?, chunk = ?, build = ?, ranks = ? WHERE id = ?", values
        )

    def drop(self, identity: bytes, keys: Iterable[bytes]) -> None:
        """Pages, all of them or none."""
        with self._change():
            self._db.executemany("DELETE FROM pages WHERE identity = ? AND key = ?", [(identity, key) for key in keys])

    def drop_old(self, ttl_s: float) -> list[bytes]:
        """Pages of any identity that were not used for ``ttl_s``; returns their keys."""
        before = time.time() - ttl_s
        if not self._rows("SELECT 1 FROM pages WHERE at_s < ? LIMIT 1", before):
            return []
        with self._change():
            keys = [row[0] for row in self._db.execute("SELECT key FROM pages WHERE at_s < ?", (before,))]
            self._db.execute("DELETE FROM pages WHERE at_s < ?", (before,))
        return keys

    def drop_tenant(self, tenant: bytes) -> int:
        """Its pages of all identities; returns how many."""
        with self._change():
            return self._db.execute("DELETE FROM pages WHERE tenant = ?", (tenant,)).rowcount

    def free(
        self, segments: Iterable[int], enough: Callable[[RecordExtent], bool], rank: Callable[[PageUse], Rank]
    ) -> list[bytes]:
        """Give up pages that have a record in ``segments``, of any identity, the lowest rank first, and tell ``enough``
        of every extent there that becomes free, until it says so. Returns their keys.
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
        self, segments: list[int], rank: Callable[[PageUse], Rank]
    ) -> Iterator[tuple[int, PageUse, list[RecordExtent]]]:
        marks = ", ".join("?" * len(segments))
        found: dict[int, tuple[PageUse, list[RecordExtent]]] = {}
        query = (
            "SELECT p.id, p.key, p.number, p.came, p.used, p.uses, r.segment, r.at, r.size FROM records r"
            f" JOIN pages p ON p.id = r.page WHERE r.segment IN ({marks})"
        )
        for page, key, number, came, used, uses, *extent in self._db.execute(query, segments):
            use = PageUse(key, number, 0, came, used, uses)
            found.setdefault(page, (use, []))[1].append(RecordExtent(*extent))
        for page in sorted(found, key=lambda page: rank(found[page][0])):
            yield page, *found[page]

    def entries(self, identity: bytes | None = None, tenant: bytes | None = None) -> list[PageEntry]:
        """Pages, all or those of one identity or tenant; the most recently used last."""
        with self._change():  # what this worker used counts
            records: dict[int, list[Record]] = {}
            for page, *row in self._db.execute(f"SELECT page, {_RECORD} FROM records ORDER BY id"):
                records.setdefault(page, []).append(_record(row))
            query = f"SELECT id, {_PAGE} FROM pages WHERE coalesce(identity = ?, 1) AND coalesce(tenant = ?, 1)"
            rows = self._db.execute(f"{query} ORDER BY used", (identity, tenant))
            return [PageEntry(_page(row[1:]), records[row[0]]) for row in rows if row[0] in records]

    def counts(self) -> list[tuple[bytes, bytes, int, int]]:
        """Identity, tenant, pages and bytes on disk."""
        query = (
            "SELECT p.identity, p.tenant, count(DISTINCT p.id), sum(r.size)"
            " FROM pages p JOIN records r ON r.page = p.id GROUP BY p.identity, p.tenant ORDER BY p.identity, p.tenant"
        )
        return self._rows(query)  # type: ignore[return-value]

    def segments(self) -> dict[int, int]:
        """Sizes by number."""
        return {int(number): int(size) for number, size in self._rows("SELECT id, size FROM segments")}  # type: ignore[call-overload]

    def extents(self, segment: int) -> list[RecordExtent]:
        """Those that hold records, by their places."""
        rows = self._rows("SELECT segment, at, size FROM records WHERE segment = ? ORDER BY at", segment)
        return [RecordExtent(*row) for row in rows]  # type: ignore[arg-type]

    def add_segment(self, least: int, most: int, limit: int) -> tuple[int, int] | None:
        """A number for a segment of ``least`` to ``most`` bytes, and its size; all of them have ``limit`` at most.

        None: there is too little left of it.
        """
        with self._change():
            (taken,) = self._db.execute("SELECT coalesce(sum(size), 0) FROM segments").fetchone()
            size = min(most, limit - taken)
            if size < least:
                return None
            number = self._db.execute("INSERT INTO segments (size) VALUES (?)", (size,)).lastrowid
            return (int(number), size) if number is not None else None

    def drop_segments(self, numbers: Iterable[int]) -> list[bytes]:
        """And all pages that have a record there; returns their keys."""
        given: list[bytes] = []
        with self._change():
            for number in numbers:
                query = "id IN (SELECT page FROM records WHERE segment = ?)"
                given += [row[0] for row in self._db.execute(f"SELECT key FROM pages WHERE {query}", (number,))]
                self._db.execute(f"DELETE FROM pages WHERE {query}", (number,))
                self._db.execute("DELETE FROM segments WHERE id = ?", (number,))
        return given

    def segments_by_use(self) -> list[int]:
        """That with the least recently used pages first."""
        query = (
            "SELECT s.id FROM segments s LEFT JOIN records r ON r.segment = s.id LEFT JOIN pages p ON p.id = r.page"
            " GROUP BY s.id ORDER BY max(p.used)"
        )
        return [int(row[0]) for row in self._rows(query)]  # type: ignore[call-overload]

    def check(self) -> str:
        """What SQLite finds wrong with its file; "" = nothing."""
        said = [str(row[0]) for row in self._rows("PRAGMA integrity_check(3)")]
        return "" if said == ["ok"] else "; ".join(said)

    def close(self) -> None:
        """Idempotent."""
        try:
            if self._touched:
                with self._change():
                    pass
        except sqlite3.Error:  # closed, or uses that are lost
            pass
        with self._lock:
            self._db.close()

    def _tick(self) -> int:
        self._db.execute("UPDATE clock SET now = now + 1")
        (now,) = self._db.execute("SELECT now FROM clock").fetchone()
        return int(now)

    def _put_uses(self) -> None:
        for where, times in self._touched.items():
            values = (self._tick(), times, time.time(), *where)
            self._db.execute(
                "UPDATE pages SET used = ?, uses = uses + ?, at_s = ? WHERE identity = ? AND key = ?", values
            )


def _page(row: tuple[object, ...]) -> Page:
    key, number, tokens, tenant, *recipe = row
    return Page(key, number, tokens, tenant, Recipe(*recipe))  # type: ignore[arg-type]


def _record(row: Iterable[object]) -> Record:
    number, segment, at, size, encrypted, salt, atoms = row
    table = _ATOM.iter_unpack(atoms)  # type: ignore[arg-type]
    known = {Atom(layer, head): Sealed(nbytes, tag) for layer, head, nbytes, tag in table}
    return Record(RecordExtent(segment, at, size), bool(encrypted), salt, known, number)  # type: ignore[arg-type]


def _packed(atoms: dict[Atom, Sealed]) -> bytes:
    return b"".join(_ATOM.pack(*atom, *sealed) for atom, sealed in atoms.items())
