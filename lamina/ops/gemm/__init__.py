"""Linear layers of the compute workers. Each entry of the table is a module of this package with ``open_backend``; see
``get``."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from lamina.converter import SlicedProgram

    from .packed_memory import PackedMemory

# name -> module of this package with a function open_backend(threads); imported when first used
BACKENDS: dict[str, str] = {"native": "native", "torch": "torch"}


class LinearBackend(Protocol):
    """What slices call in place of ``torch.nn.functional.linear``.

    Contract, the same for every entry (tests/contract/test_gemm.py): sums in fp32 (torch: as torch does), one rounding
    to the dtype of x; any number of rows; any strides; operands that an entry has no code for go to torch. Nothing of
    x, w, b is kept. Numbers below 2^-126 in magnitude count for their value; but those of bf16 all count for zero, in
    x, w and results alike, where the CPU multiplies bf16 itself (AVX512-BF16, AMX). torch does either.
    """

    @property
    def has_own_threads(self) -> bool:
        """Whether a few rows are computed without torch's threads."""
        ...

    packs_weights: bool  # whether weights for ``engine`` are copied into an order by which it is faster; False at first
    packed_memory: PackedMemory  # where to

    @property
    def engine(self) -> object | None:
        """For other native modules, which use its linear layers and its threads; None where there is none."""
        ...

    def max_engine_rows(self, dtype: torch.dtype) -> int:
        """The most rows that ``engine`` is to be given at once; with more, torch is faster."""
        ...

    def packed_bytes(self, dtype: torch.dtype, cols: int, k_size: int) -> int:
        """Of w [cols, k_size] in that order; 0 where there is none."""
        ...

    def pack(self, w: Tensor) -> Tensor:
        """Such a copy of w [N, K], whose rows have no gaps inside: bytes, which ``engine`` takes in place of w. Results
        have the same bits. Raises ValueError where there is no such order.
        """
        ...

    def linear(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        """x [..., K], w [N, K], b [N] -> [..., N], all of one dtype."""
        ...


def get(name: str, threads: int) -> LinearBackend:
    """Open the backend ``name``; "auto" is the first entry of the table that this machine can run.

    Raises ValueError for an unknown name or a CPU that lacks what it needs, ImportError where it was not built.
    """
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"--gemm {name}: unknown; choose one of auto, {', '.join(BACKENDS)}")
    if name != "auto":
        return _open(name, threads)
    for candidate in BACKENDS:
        try:
            return _open(candidate, threads)
        except (ImportError, ValueError):
            continue
    raise ImportError("no backend for linear layers can be used here")


def _open(name: str, threads: int) -> LinearBackend:
    try:
        module = import_module(f"{__name__}.{BACKENDS[name]}")
    except ImportError as e:
        raise ImportError(f"--gemm {name} cannot be used here: {e}") from e
    backend: LinearBackend = module.open_backend(threads)
    return backend


def bind(program: SlicedProgram, backend: LinearBackend) -> SlicedProgram:
    """The program with its linear layers on ``backend`` and everything else with torch. The one given is used up: it
    may have been called before, and holds on to what it called.
    """
    import torch

    from lamina.converter import redirect

    return redirect(program, "gemm", backend, {torch.ops.aten.linear.default: "linear"})
