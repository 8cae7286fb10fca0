"""Slices of few rows on one of torch's threads, where linear layers have threads of their own.

What is left to torch is then so little that waking its other threads takes longer than the work; awake, they hold cores
that the threads of the linear layers need.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

FEW_ROWS = 32  # prompts have more, and elements enough for several threads


class FewRows:
    """A program whose slices do so. To be called by one thread: torch counts its threads for each."""

    def __init__(self, program: Any) -> None:
        self.slices: Sequence[Any] = [_FewRowsSlice(inner) for inner in program.slices]


class _FewRowsSlice:
    """Called as the slice that it stands for, with any number of rows."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __call__(self, *args: Any) -> tuple[Tensor, ...]:
        threads = torch.get_num_threads()
        if threads == 1 or args[0].shape[0] > FEW_ROWS:
            return self._inner(*args)  # type: ignore[no-any-return]
        torch.set_num_threads(1)
        try:
            return self._inner(*args)  # type: ignore[no-any-return]
        finally:
            torch.set_num_threads(threads)
