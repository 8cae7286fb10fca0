"""Linear layers of the compute workers. Each entry of the table is a module of this package with ``open_backend``."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from torch import Tensor

    from lamina.converter import SlicedProgram

    from .packed_memory import PackedMemory
    from .quantized import PackedWeight, QuantizedWeight

# name -> module of this package with a function open_backend(threads); imported when first used
BACKENDS: dict[str, str] = {"native": "native", "torch": "torch"}


class LinearBackend(Protocol):
    """Replaces ``torch.nn.functional.linear`` in slices.

    Contract, the same for every entry (tests/contract/test_gemm.py): sums in fp32 (torch: as torch does) and one
    rounding to the dtype of x. Any number of rows and any strides are allowed; operands without code of an entry go to
    torch. Nothing of x, w, b is kept. Numbers below 2^-126 in magnitude keep their value. But if the CPU multiplies
    bf16 itself (AVX512-BF16, AMX), those of bf16 all count as zero, in x, w and results. torch does one or the other.
    """

    @property
    def has_own_threads(self) -> bool:
        """True if a few rows are computed without torch's threads."""
        ...

    @property
    def engine(self) -> object | None:
        """The object by which other native modules use its linear layers and threads; None if there is none."""
        ...

    def packed_bytes(self, dtype: torch.dtype, cols: int, k_size: int) -> int:
        """Return the bytes of w [cols, k_size] in the faster order; 0 if there is none."""
        ...

    def pack(self, w: Tensor, memory: PackedMemory) -> Tensor:
        """Return a copy of w [N, K], whose rows have no gaps, in the faster order: bytes of ``memory`` that ``engine``
        takes in place of w. Results have the same bits, but a NaN may be another NaN. Raises ValueError if there is no
        such order.
        """
        ...

    def linear(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        """Return x [..., K] times w [N, K] plus b [N], [..., N], all of one dtype."""
        ...

    def pack_quantized(self, w: QuantizedWeight) -> PackedWeight:
        """Return a copy of w in this entry's order, which ``linear_quantized`` of the same entry takes. On the meta
        device it has no contents.
        """
        ...

    def linear_quantized(self, x: Tensor, data: Tensor, b: Tensor | None, form: str) -> Tensor:
        """Return x [..., K] times the packed weight (data, form) [N, K] plus b [N], [..., N], of x's dtype, which is
        also b's. ``native`` multiplies by q, and scales sums of groups in fp32: csrc/gemm/quantized.h has the
        definition. Its numbers have the same bits for all rows and CPUs, but for those below 2^-126; a NaN may be
        another NaN. Raises ValueError for operands that do not fit.
        """
        ...

    def quantized_products(self) -> tuple[int, int]:
        """Return the number of products by packed quantized weights so far, and of those by rows of int8. Safe from any
        thread.
        """
        ...

    def pack_quantized_experts(self, weights: Iterable[QuantizedWeight], count: int) -> PackedWeight:
        """Return copies of ``count`` weights of one form, as of ``pack_quantized``: data [count, bytes]. Raises
        ValueError for weights of several forms.
        """
        ...

    def linear_quantized_experts(self, x: Tensor, data: Tensor, ids: Tensor, b: Tensor | None, form: str) -> Tensor:
        """Return each row of x [rows, K] times the packed weight number ids[row] plus b[ids[row]]: [rows, N]. A row has
        the bits that ``linear_quantized`` gives it. Raises ValueError for operands that do not fit.
        """
        ...

    def quantized_rows(self, ids: Tensor, data: Tensor, form: str) -> Tensor:
        """Return rows ``ids`` [...], int64, of the packed weight (data, form) [N, K]: [..., K], in fp32. Of a number,
        the product by its scale is rounded, and the sum with its offset. Raises IndexError for a row that there is not.
        """
        ...


def get(name: str, threads: int) -> LinearBackend:
    """Open the backend ``name``; "auto" is the first entry of the table that this machine can run. Raises ValueError
    for an unknown name or a CPU that lacks what it needs, ImportError if it was not built.
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
    """Return the program with its linear layers on ``backend`` and everything else on torch. ``program`` must not be
    used again: if it was called before, it holds on to what it called.
    """
    import torch

    from lamina.converter import redirect

    from .quantized_op import QUANTIZED_EXPERTS_OP, QUANTIZED_LINEAR_OP, QUANTIZED_ROWS_OP

    methods = {
        torch.ops.aten.linear.default: "linear",
        QUANTIZED_LINEAR_OP: "linear_quantized",
        QUANTIZED_EXPERTS_OP: "linear_quantized_experts",
        QUANTIZED_ROWS_OP: "quantized_rows",
    }
    return redirect(program, "gemm", backend, methods)
