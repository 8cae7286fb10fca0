"""The tables of a store's index, and the rows of pages and records.

A page's row names the set of fragments that its records have together (``held``). There are as few such sets as
partitions. So a query for certain fragments selects the pages of some sets, and reads no record.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

from lamina.kv.pages import Page, PageFragment, Provenance

from .encryption import TAG_BYTES

VERSION = 3
SCHEMA = """
CREATE TABLE segments (id INTEGER PRIMARY KEY AUTOINCREMENT, size INTEGER NOT NULL);
CREATE TABLE sets (id INTEGER PRIMARY KEY, atoms BLOB NOT NULL UNIQUE);
CREATE TABLE pages (
    id INTEGER PRIMARY KEY AUTOINCREMENT, identity BLOB NOT NULL, key BLOB NOT NULL, number INTEGER NOT NULL,
    tokens INTEGER NOT NULL, tenant BLOB NOT NULL, source TEXT NOT NULL, chunk INTEGER NOT NULL, build TEXT NOT NULL,
    ranks INTEGER NOT NULL, came INTEGER NOT NULL, used INTEGER NOT NULL, uses INTEGER NOT NULL,
    held INTEGER NOT NULL REFERENCES sets (id), UNIQUE (identity, key)
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
USED_AT = "ALTER TABLE pages ADD COLUMN used_at REAL"  # the time of the last use, in seconds
PROLONGED = (  # pages with retention
    "CREATE TABLE IF NOT EXISTS prolonged_pages (page INTEGER PRIMARY KEY REFERENCES pages (id) ON DELETE CASCADE,"
    " until INTEGER NOT NULL)"
)
PAGE = "key, number, tokens, tenant, source, chunk, build, ranks"
RECORD = "id, segment, at, size, encrypted, salt, atoms"
_ATOM = struct.Struct(f"<III{TAG_BYTES}s")  # layer, head, bytes, tag
_NAME = struct.Struct("<II")  # layer, head


class RecordExtent(NamedTuple):
    """The bytes ``at .. at + size`` of a segment."""

    segment: int
    at: int
    size: int


class EncryptedFragment(NamedTuple):
    """The size and the tag of a fragment in a record."""

    nbytes: int
    tag: bytes


class Record(NamedTuple):
    """Some fragments of a page, one after another in the order of ``fragments``."""

    extent: RecordExtent
    encrypted: bool
    salt: bytes
    fragments: dict[PageFragment, EncryptedFragment]
    id: int = 0  # given by the index; if two records have a fragment, the greater id counts


class PageEntry(NamedTuple):
    """A page of the index, with its records in the order of their arrival."""

    page: Page
    records: list[Record]


def page_from_row(row: tuple[object, ...]) -> Page:
    """Return the page of a row with columns PAGE."""
    key, number, tokens, tenant, *recipe = row
    return Page(key, number, tokens, tenant, Provenance(*recipe))  # type: ignore[arg-type]


def record_from_row(row: Iterable[object]) -> Record:
    """Return the record of a row with columns RECORD."""
    number, segment, at, size, encrypted, salt, fragments = row
    table = _ATOM.iter_unpack(fragments)  # type: ignore[arg-type]
    known = {PageFragment(layer, head): EncryptedFragment(nbytes, tag) for layer, head, nbytes, tag in table}
    return Record(RecordExtent(segment, at, size), bool(encrypted), salt, known, number)  # type: ignore[arg-type]


def pack_fragments(fragments: dict[PageFragment, EncryptedFragment]) -> bytes:
    """Return encrypted fragments as the bytes that ``record_from_row`` reads."""
    return b"".join(_ATOM.pack(*fragment, *sealed) for fragment, sealed in fragments.items())


def pack_fragment_set(fragments: Iterable[PageFragment]) -> bytes:
    """Return a set of fragments as bytes, equal for equal sets."""
    return b"".join(_NAME.pack(*fragment) for fragment in sorted(fragments))


def unpack_fragment_set(fragments: bytes) -> frozenset[PageFragment]:
    """Return the set of fragments that ``pack_fragment_set`` has packed."""
    return frozenset(map(PageFragment._make, _NAME.iter_unpack(fragments)))
