"""Maintenance of a store from outside a server: show, verify or purge it."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import closing
from typing import NamedTuple

from lamina.kv.page_keys import tenant_tag
from lamina.kv.pages import Page, PageFragment

from .encryption import DataKeys, IntegrityError, destroy_data_key
from .index_schema import PageEntry
from .page_index import PageIndex
from .page_records import Records
from .segments import Segments
from .store_directory import DRAFT, ERA, INDEX, KEY, SECRET, SEGMENT, StoreDirectory


class TenantPart(NamedTuple):
    """The part of a store that belongs to one tenant and one identity of a model."""

    identity: bytes
    tenant: bytes
    pages: int
    nbytes: int  # on disk


class StoreSummary(NamedTuple):
    """A summary of a store. ``nbytes``: of all segments, free space included."""

    parts: list[TenantPart]
    segments: int
    nbytes: int


class DamagedPage(NamedTuple):
    """The fragments of a page that cannot be read, and the reason."""

    page: Page
    fragments: list[PageFragment]
    reason: str


def store_summary(folder: StoreDirectory) -> StoreSummary:
    """Return a summary of a store, even if a server has it open. Raises ValueError if there is none."""
    with closing(_index(folder)) as index:
        sizes = index.segments()
        return StoreSummary([TenantPart(*row) for row in index.counts()], len(sizes), sum(sizes.values()))


def verify(folder: StoreDirectory, secret: bytes) -> Iterator[DamagedPage | Page]:
    """Read every fragment; yields each page, or its damage. Pages that are removed meanwhile are left out. Raises
    ValueError if there is no store, or if its index is damaged; OSError.
    """
    with closing(_index(folder)) as index:
        if wrong := index.check():
            raise ValueError(f"{folder.name}: the index is damaged ({wrong}): lamina-launch kv purge empties it")
        with closing(Segments(folder, index, 0, 1)) as segments:
            records = Records(segments, DataKeys(folder, secret))
            for entry in index.entries():
                damage = _damage(records, entry)
                if damage is None:
                    yield entry.page
                elif entry in index.entries(tenant=entry.page.tenant):
                    yield damage


def _damage(records: Records, entry: PageEntry) -> DamagedPage | None:
    lost, why = [], ""
    for record in entry.records:
        for fragment, sealed in record.fragments.items():
            try:
                records.get(entry.page, record, {fragment: memoryview(bytearray(sealed.nbytes))})
            except IntegrityError as e:
                lost.append(fragment)
                why = why or str(e)
    return DamagedPage(entry.page, lost, why) if lost else None


def purge(folder: StoreDirectory) -> None:
    """Destroy all keys and remove all other files. Raises ValueError if a server has the store open or there is none;
    OSError.
    """
    _check_store(folder)
    folder.lock(_own_name())
    for name in folder.list_names():
        if name.startswith(KEY):
            destroy_data_key(folder, bytes.fromhex(name.removeprefix(KEY)))
    for name in folder.list_names():
        if name in (SECRET, ERA) or name.startswith((INDEX, SEGMENT, DRAFT)):
            folder.remove(name)
    folder.sync()


def purge_tenant(folder: StoreDirectory, secret: bytes, tenant: bytes) -> int:
    """Destroy the data key of ``tenant``, as tenant_of returns it, and remove the tenant's pages; returns their number.
    Data that is not encrypted is overwritten. Raises ValueError if a server has the store open or there is no such
    tenant; OSError.
    """
    _check_store(folder)
    folder.lock(_own_name())
    tag = tenant_tag(secret, tenant)
    with closing(_index(folder)) as index:
        if not destroy_data_key(folder, tag):
            raise ValueError(
                f"{folder.name}: it has nothing of this tenant under this secret: stat lists what there is"
            )
        with closing(Segments(folder, index, 0, 1)) as segments:
            records = Records(segments, DataKeys(folder, secret))
            for entry in index.entries(tenant=tag):
                for record in entry.records:
                    if not record.encrypted:
                        records.wipe(record)
        return index.drop_tenant(tag)


def _check_store(folder: StoreDirectory) -> None:
    if INDEX not in folder.list_names():
        raise ValueError(f"{folder.name}: no KV store is there: name the directory of --kv-offload dir=")


def _index(folder: StoreDirectory) -> PageIndex:
    _check_store(folder)
    return PageIndex(folder)


def _own_name() -> str:
    return f"purge {secrets.token_hex(8)}"
