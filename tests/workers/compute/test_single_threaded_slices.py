"""Threads of torch while slices run."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lamina.workers.compute.single_threaded_slices import MAX_SINGLE_THREAD_ROWS, SingleThreadedProgram


@pytest.fixture(autouse=True)
def three_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("rows", "threads"), [(1, 1), (MAX_SINGLE_THREAD_ROWS, 1), (MAX_SINGLE_THREAD_ROWS + 1, 3)])
def test_few_rows_have_one_thread_and_what_follows_has_all(rows: int, threads: int) -> None:
    seen: list[int] = []

    def inner(x: Tensor, send: str) -> tuple[Tensor, ...]:
        seen.append(torch.get_num_threads())
        return (x + 1,)

    (slice_,) = SingleThreadedProgram(SimpleNamespace(slices=[inner])).slices
    (found,) = slice_(torch.zeros(rows, 1), "send")
    assert torch.equal(found, torch.ones(rows, 1))
    assert seen == [threads]
    assert torch.get_num_threads() == 3


def counts() -> tuple[int, ...]:
    """Threads of the calling one: by torch, and by MKL where torch computes with that."""
    mkl = getattr(ctypes.PyDLL(torch._C.__file__), "mkl_get_max_threads", torch.get_num_threads)
    return torch.get_num_threads(), mkl()


def test_a_thread_that_begins_meanwhile_has_all_threads() -> None:
    """A thread of a user who runs a model in this process has all threads, for as long as it lives."""
    if "ATen parallel backend: OpenMP" not in torch.__config__.parallel_info():
        pytest.skip("threads of a torch without OpenMP are counted for all threads at once")
    seen = dict[str, tuple[int, ...]]()

    def inner(x: Tensor) -> tuple[Tensor, ...]:
        seen["inside"] = counts()
        with ThreadPoolExecutor(1) as threads:
            seen["beside"] = threads.submit(counts).result(60.0)
        return (x,)

    (slice_,) = SingleThreadedProgram(SimpleNamespace(slices=[inner])).slices
    before = counts()
    slice_(torch.zeros(1, 1))
    assert seen == {"inside": (1, 1), "beside": before}
    assert counts() == before == (3, before[1])


def test_where_torch_computes_with_neither_library_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamina.workers.compute.single_threaded_slices.ctypes.PyDLL", lambda path: object())
    test_few_rows_have_one_thread_and_what_follows_has_all(1, 1)


def test_all_threads_are_back_behind_an_error() -> None:
    def inner(x: Tensor) -> tuple[Tensor, ...]:
        raise RuntimeError("no")

    (slice_,) = SingleThreadedProgram(SimpleNamespace(slices=[inner])).slices
    with pytest.raises(RuntimeError):
        slice_(torch.zeros(1, 1))
    assert torch.get_num_threads() == 3
