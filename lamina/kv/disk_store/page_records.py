"""Records: some fragments of one page in a segment, one after another, encrypted or authenticated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from secrets import token_bytes
from typing import NamedTuple

from lamina.kv.pages import Page, PageFragment

from .encryption import SALT_BYTES, TAG_BYTES, DataKeys, FragmentCipher, IntegrityError
from .index_schema import EncryptedFragment, Record, RecordExtent
from .segments import BLOCK, Buffers, Segments, padded

_GAP = 64 << 10  # the most bytes between two wanted fragments that one read brings together


class _PlacedFragment(NamedTuple):
    """A fragment at byte ``at`` of its record."""

    at: int
    fragment: PageFragment
    sealed: EncryptedFragment

    @property
    def stop(self) -> int:
        return self.at + self.sealed.nbytes


class Records:
    """Writes records into extents, and reads fragments of them. Any thread may call."""

    def __init__(self, segments: Segments, keys: DataKeys) -> None:
        self._segments = segments
        self._keys = keys
        self._buffers = Buffers()

    def put(
        self, page: Page, extent: RecordExtent, fragments: Mapping[PageFragment, memoryview], *, encrypt: bool
    ) -> Record:
        """Write fragments into an extent, which is long enough, and return the record. Raises OSError."""
        salt, at, sealed = token_bytes(SALT_BYTES), 0, {}
        seal = FragmentCipher(self._keys.make(page.tenant), salt, page, encrypt=encrypt)
        with self._buffers.borrow(extent.size + TAG_BYTES) as memory:
            # By head, so that the heads that a worker reads are adjacent.
            for fragment in sorted(fragments, key=lambda fragment: (fragment.head, fragment.layer)):
                data = fragments[fragment]
                tag = seal.encrypt(fragment, data, memory[at : at + data.nbytes + TAG_BYTES])
                sealed[fragment] = EncryptedFragment(data.nbytes, tag)
                at += data.nbytes
            memory[at : extent.size] = bytes(extent.size - at)
            self._segments.write(extent, memory)
        return Record(extent, encrypt, salt, sealed)

    def get(self, page: Page, record: Record, into: Mapping[PageFragment, memoryview]) -> None:
        """Fill buffers, each as long as its fragment of ``record``. Raises IntegrityError, OSError."""
        key = self._keys.get(page.tenant)
        if key is None:
            raise IntegrityError("the tenant's data key is gone")
        seal = FragmentCipher(key, record.salt, page, encrypt=record.encrypted)
        for run in _runs(record, into):
            start = run[0].at // BLOCK * BLOCK
            part = RecordExtent(record.extent.segment, record.extent.at + start, padded(run[-1].stop - start))
            with self._buffers.borrow(part.size + TAG_BYTES) as memory:
                if not self._segments.read(part, memory):
                    raise IntegrityError(f"segment {part.segment} ends too early")
                for at, fragment, sealed in run:
                    stop = at - start + sealed.nbytes + TAG_BYTES
                    seal.decrypt(fragment, memory[at - start : stop], sealed.tag, into[fragment])

    def wipe(self, record: Record) -> None:
        """Overwrite a record with zeros. Raises OSError."""
        with self._buffers.borrow(record.extent.size) as memory:
            memory[: record.extent.size] = bytes(record.extent.size)
            self._segments.write(record.extent, memory)


def _runs(record: Record, fragments: Mapping[PageFragment, memoryview]) -> Iterator[list[_PlacedFragment]]:
    """Yield the wanted fragments in order, in groups that one read brings together."""
    run: list[_PlacedFragment] = []
    at = 0
    for fragment, sealed in record.fragments.items():
        if fragment in fragments:
            if run and at - run[-1].stop > _GAP:
                yield run
                run = []
            run.append(_PlacedFragment(at, fragment, sealed))
        at += sealed.nbytes
    if run:
        yield run
