"""Memory of this host for KV blocks, in huge pages, which one store may pass on to the next.

The kernel zeroes each page that a process writes first; of all that opening a store takes, this takes longest. So
memory is allocated ahead of its use, and the layers of one store take over that of another. It then contains old
numbers of the same dtype, like a block that another sequence has freed.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
MADV_POPULATE_WRITE = 23  # <linux/mman.h>, since 5.14
MAX_POPULATE_BYTES = 64 << 20  # bytes, after which prefault checks if the memory is still wanted
_libc = ctypes.CDLL(None)  # its calls release Python's lock
Shape = tuple[tuple[int, ...], torch.dtype]


class HugePageArena:
    """The memory of the pool that no layer uses now. Safe from any thread."""

    def __init__(self) -> None:
        self.free: list[Tensor] = []  # with the shapes that they had last
        self._most = 0  # the most tensors that are kept
        self._lock = threading.Lock()

    def prepare(self, shapes: Iterable[Shape], slack: int = 0) -> None:
        """Allocate and touch memory for tensors of these shapes. ``slack``: bytes more for each tensor, whose pages are
        mapped when first written. Raises as ``huge_page_zeros``.
        """
        for shape, dtype in shapes:
            slab = huge_page_zeros(shape, dtype, slack)
            prefault([slab])
            with self._lock:
                self.free.append(slab)
                self._most += 1

    def can_allocate(self, shapes: Iterable[Shape]) -> bool:
        """Return whether all of these tensors, allocated one after another, would fit in the free memory."""
        with self._lock:
            free = list(self.free)
        for shape, dtype in shapes:
            slab = _best_fit(free, prod(shape) * dtype.itemsize, dtype)
            free = [x for x in free if x is not slab]
            if slab is None:
                return False
        return True

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor with any contents in the smallest free memory that fits. If none fits, returns new zeros,
        whose pages are mapped when first written. Raises as ``huge_page_zeros``.
        """
        nbytes = prod(shape) * dtype.itemsize
        with self._lock:
            slab = _best_fit(self.free, nbytes, dtype)
            self.free = [x for x in self.free if x is not slab]
        if slab is None:
            return huge_page_zeros(shape, dtype)
        whole = torch.empty(0, dtype=torch.uint8).set_(slab.untyped_storage())
        _let_go(whole, nbytes, slab.nbytes)
        taken: Tensor = whole[:nbytes].view(dtype).view(*shape)
        return taken

    def release(self, tensors: Sequence[Tensor]) -> None:
        """Keep the memory of tensors, which must not be used any more, for later ones. Keeps as many tensors as were
        prepared, or as are given if these are more; the smallest ones go back to the host.
        """
        with self._lock:
            free = sorted([*self.free, *tensors], key=_capacity, reverse=True)
            self.free = free[: max(self._most, len(tensors))]

    def clear(self) -> None:
        """Return all free memory to the host."""
        with self._lock:
            self.free, self._most = [], 0

    @property
    def nbytes(self) -> int:
        """The bytes that are free here."""
        with self._lock:
            return sum(x.nbytes for x in self.free)


def huge_page_zeros(shape: Sequence[int], dtype: torch.dtype, slack: int = 0) -> Tensor:
    """Return zeros in huge pages if the kernel has them: with small pages a core reads half as fast (madvise(2)).
    ``slack``: bytes of storage after the tensor. Raises OSError, OverflowError, RuntimeError if the host lacks memory.
    """
    nbytes = prod(shape) * dtype.itemsize
    size = -(-(nbytes + slack) // HUGE_PAGE) * HUGE_PAGE
    memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % HUGE_PAGE
    with suppress(OSError, ValueError, AttributeError):  # a kernel without huge pages uses small ones
        # The rest after the last whole huge page stays out: the kernel would take a huge page for it, too.
        memory.madvise(mmap.MADV_HUGEPAGE, start, nbytes // HUGE_PAGE * HUGE_PAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start)
    return whole[:nbytes].view(dtype).view(*shape)


def prefault(tensors: Iterable[Tensor], wanted: Callable[[], bool] = lambda: True) -> None:
    """Map the memory of tensors of ``huge_page_zeros`` as long as ``wanted`` returns True. So a lack of memory shows
    now, not when a token is first written. Before Linux 5.14 nothing happens.
    """
    for each in tensors:
        start, stop = each.data_ptr(), each.data_ptr() + -(-each.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        for low in range(start, stop, MAX_POPULATE_BYTES):
            if not wanted():
                return
            _madvise(low, min(MAX_POPULATE_BYTES, stop - low), MADV_POPULATE_WRITE)


def _best_fit(free: Sequence[Tensor], nbytes: int, dtype: torch.dtype) -> Tensor | None:
    fitting = [x for x in free if x.dtype == dtype and _capacity(x) >= nbytes]
    return min(fitting, key=_capacity, default=None)


def _capacity(slab: Tensor) -> int:
    return slab.untyped_storage().nbytes()


def _let_go(whole: Tensor, low: int, high: int) -> None:
    """Return the whole huge pages from ``low`` to ``high``, the end of the tensor's used part, to the host."""
    low, high = (-(-n // HUGE_PAGE) * HUGE_PAGE for n in (low, high))
    if low < high:
        _madvise(whole.data_ptr() + low, high - low, mmap.MADV_DONTNEED)


def _madvise(start: int, nbytes: int, advice: int) -> None:
    _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), advice)
