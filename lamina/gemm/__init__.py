"""Linear layers of the compute workers. Each entry of the table is a module of this package with ``open_backend``; see
``get``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from lamina.converter import SlicedProgram

# name -> module of this package with a function open_backend(threads); imported when first used
BACKENDS: dict[str, str] = {"native": "native", "torch": "torch"}


class Inline(NamedTuple):
    """How code that is compiled beforehand calls a backend: by ``torch.ops.lamina.linear_on``, whose definition in C++
    is ``source``, with ``backend``, a tensor that names one of this process for as long as that lives.
    """

    source: str
    backend: Tensor


class Packing(Protocol):
    """A backend's own order of weights: a copy, with which it takes less time. Results have the bits that they have
    without.
    """

    @property
    def name(self) -> str:
        """Of the order."""
        ...

    def nbytes(self, w: Tensor) -> int:
        """Of the copy of ``w`` [N, K], which may be on the meta device; 0: it is best as it lies. A multiple of 64."""
        ...

    def write(self, w: Tensor, copy: Tensor) -> None:
        """Fill the copy: as many bytes, at a multiple of 64."""
        ...

    def use(self, w: Tensor, copy: Tensor) -> None:
        """Take the copy for ``w`` from now on. Neither may change; both are held on to."""
        ...


def copies_in(memory: Tensor, packing: Packing, weights: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Each of ``weights`` and the part of flat ``memory`` for its copy, one behind the other."""
    at = 0
    for w in weights:
        yield w, memory[at : (at := at + packing.nbytes(w))]


class LinearBackend(Protocol):
    """What slices call in place of ``torch.nn.functional.linear``.

    Contract, the same for every entry (tests/contract/test_gemm.py): sums in fp32 (torch: as torch does), one rounding
    to the dtype of x; any number of rows; any strides; operands that an entry has no code for go to torch. Nothing of
    x, w, b is kept, but by ``packing``. Numbers below 2^-126 in magnitude count for their value; but those of bf16 all
    count for zero, in x, w and results alike, where the CPU multiplies bf16 itself (AVX512-BF16, AMX). torch does
    either.
    """

    @property
    def own_threads(self) -> bool:
        """Whether a few rows are computed without torch's threads."""
        ...

    @property
    def inline(self) -> Inline | None:
        """For compiled code, which then calls nothing of Python; None: it is to call torch."""
        ...

    @property
    def packing(self) -> Packing | None:
        """None: weights are best as they lie, all of them."""
        ...

    def linear(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        """x [..., K], w [N, K], b [N] -> [..., N], all of one dtype."""
        ...

    def linears(self, x: Tensor, weights: Sequence[tuple[Tensor, Tensor | None]]) -> list[Tensor]:
        """What ``linear`` gives for x and each of ``weights``, w and b, bit for bit; at once where that is faster."""
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
    """The program with its linear layers on ``backend`` and everything else with torch; those of one x at once, such as
    K and V, but for what a message waits for: Q leaves first. The one given is used up: it may have been called before,
    and holds on to what it called.
    """
    import torch

    from lamina.converter import join, redirect

    layer = torch.ops.aten.linear.default
    return redirect(join(program, "gemm", backend, layer, "linears"), "gemm", backend, {layer: "linear"})
