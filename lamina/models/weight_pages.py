"""Pages of weights that are mapped from files, read before the first step needs them."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

WILL_NEED = 3  # madvise(2)
DONT_NEED = 4
POPULATE_READ = 22  # since Linux 5.14
PIECE_BYTES = 64 << 20
READERS = 4  # a disk is fastest with several requests at once
_MB = 1_000_000


def prefault_weights(tensors: Iterable[Tensor], report: Callable[[int, int], None]) -> None:
    """Map all pages of ``tensors`` on the CPU; those of files come from the page cache, or by several reads at once.
    ``report``: (done, total) in MB. Raises OSError if a file cannot be read, which would end the process later. If the
    kernel does not support this, pages are read when they are needed.
    """
    pieces = list(_pieces(tensors))
    total, done = sum(length for _, length in pieces), 0
    report(0, total // _MB)
    with ThreadPoolExecutor(READERS) as readers:
        for length in readers.map(_read, pieces):
            done += length
            report(done // _MB, total // _MB)


def _pieces(tensors: Iterable[Tensor]) -> Iterator[tuple[int, int]]:
    """Yield address and length of runs of whole pages, each tensor's once."""
    page = mmap.PAGESIZE
    extents = {(x.data_ptr(), x.nbytes) for x in tensors if x.nbytes and x.device.type == "cpu"}
    for start, nbytes in sorted(extents):
        low, high = start // page * page, -(-(start + nbytes) // page) * page
        for at in range(low, high, PIECE_BYTES):
            yield at, min(PIECE_BYTES, high - at)


def _read(piece: tuple[int, int]) -> int:
    _advise(*piece, WILL_NEED)
    error = _advise(*piece, POPULATE_READ)
    if error not in (0, errno.EINVAL):
        raise OSError(error, f"its pages cannot be read: {os.strerror(error)}")
    return piece[1]


def unmap_pages(x: Tensor) -> None:
    """Unmap the whole pages between the first and the last element of ``x``, which lies in a mapped file that was not
    written to. They are read again if they are needed.
    """
    page, start = mmap.PAGESIZE, x.data_ptr()
    reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1
    low, high = -(-start // page) * page, (start + reach * x.element_size()) // page * page
    if x.numel() and low < high:
        _advise(low, high - low, DONT_NEED)


def _advise(address: int, length: int, advice: int) -> int:
    """Call madvise(2) and return the error, 0 for none."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return ctypes.get_errno() if madvise(address, length, advice) else 0
