"""Threads of torch while slices run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lamina.compute.few_rows import FEW_ROWS, FewRows


@pytest.fixture(autouse=True)
def three_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("rows", "threads"), [(1, 1), (FEW_ROWS, 1), (FEW_ROWS + 1, 3)])
def test_few_rows_have_one_thread_and_what_follows_has_all(rows: int, threads: int) -> None:
    seen: list[int] = []

    def inner(x: Tensor, send: str) -> tuple[Tensor, ...]:
        seen.append(torch.get_num_threads())
        return (x + 1,)

    (slice_,) = FewRows(SimpleNamespace(slices=[inner])).slices
    (found,) = slice_(torch.zeros(rows, 1), "send")
    assert torch.equal(found, torch.ones(rows, 1))
    assert seen == [threads]
    assert torch.get_num_threads() == 3


def test_all_threads_are_back_behind_an_error() -> None:
    def inner(x: Tensor) -> tuple[Tensor, ...]:
        raise RuntimeError("no")

    (slice_,) = FewRows(SimpleNamespace(slices=[inner])).slices
    with pytest.raises(RuntimeError):
        slice_(torch.zeros(1, 1))
    assert torch.get_num_threads() == 3
