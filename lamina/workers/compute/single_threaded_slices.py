"""Slices with few rows on one of torch's threads, if linear layers have their own threads.

The operators that torch still runs are then so short that waking its other threads takes longer. Awake, these threads
also occupy cores that the threads of the linear layers need.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

MAX_SINGLE_THREAD_ROWS = 32  # prompts have more rows, enough elements for several threads
# Function -> the type of its result.
_COUNTS = {"omp_set_num_threads": None, "mkl_serv_set_num_threads_local": ctypes.c_int}


class SingleThreadedProgram:
    """A program whose slices run on one thread if they have few rows. One thread must make all calls: torch counts its
    threads separately for each calling thread.
    """

    def __init__(self, program: Any) -> None:
        counts = _counts()
        self.slices: Sequence[Any] = [_SingleThreadedSlice(inner, counts) for inner in program.slices]


class _SingleThreadedSlice:
    """A slice with the same arguments and results, for any number of rows."""

    def __init__(self, inner: Any, counts: Sequence[Callable[[int], int | None]]) -> None:
        self._inner, self._counts = inner, counts

    def __call__(self, *args: Any) -> tuple[Tensor, ...]:
        if args[0].shape[0] > MAX_SINGLE_THREAD_ROWS or torch.get_num_threads() == 1:
            return self._inner(*args)  # type: ignore[no-any-return]
        with _one_thread(self._counts):
            return self._inner(*args)  # type: ignore[no-any-return]


@contextmanager
def _one_thread(counts: Sequence[Callable[[int], int | None]]) -> Iterator[None]:
    threads = torch.get_num_threads()
    before = [count(1) for count in counts]
    try:
        yield
    finally:
        for count, had in zip(counts, before, strict=True):
            count(threads if had is None else had)


def _counts() -> list[Callable[[int], int | None]]:
    """Return functions that set the calling thread's number of threads in the libraries of torch. Each returns the
    number before, or None if the library does not report it. torch.set_num_threads would also set the number of every
    thread that starts meanwhile, as long as it lives: perhaps a thread of the program that uses Lamina.
    """
    torch_and_its_libraries, counts = ctypes.PyDLL(torch._C.__file__), list[Callable[[int], int | None]]()
    for name, result in _COUNTS.items():
        if (count := getattr(torch_and_its_libraries, name, None)) is not None:
            count.argtypes, count.restype = [ctypes.c_int], result
            counts.append(count)
    return counts or [torch.set_num_threads]
