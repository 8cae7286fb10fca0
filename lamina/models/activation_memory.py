"""The memory of slices while they run, found by running them without data."""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from lamina.converter import SlicedProgram


def peak_activation_bytes(program: SlicedProgram, *, rows: int, sampled: int) -> int:
    """Return the most bytes of tensors that exist at once, besides weights, in a step of ``rows`` rows. ``sampled`` of
    these rows run the last slice. Counted are the arguments of a slice, and results that it still needs. ``program`` is
    on the meta device.
    """
    most, known = 0, set[str]()
    for piece in program.slices:
        if piece.signature in known:
            continue
        known.add(piece.signature)
        given = _inputs(program, piece.index, rows)
        if piece.index == len(program.cuts):
            live = _run(piece.module, [x[:sampled].clone() for x in given], [])
            live += sum(_storages(given).values())
        else:
            live = _run(piece.module, given, [_NoReceiver()])
        most = max(most, live)
    return most


def graph_buffer_bytes(program: SlicedProgram, *, rows: int) -> int:
    """Return the bytes that CUDA graphs of up to ``rows`` rows keep. These are inputs and results, which all graphs
    share, and the memory in which the largest one computes. ``program`` is on the meta device.
    """
    kept = dict[tuple[Any, ...], int]()
    for index in range(len(program.cuts) + 1):
        for i, x in enumerate(_inputs(program, index, 1)):
            number = -1 if x.is_floating_point() else index  # see GraphedSlice
            kept["input", i, tuple(x.shape[1:]), x.dtype, number] = x.nbytes
        for i, result in enumerate(program.cuts[index].tensors if index < len(program.cuts) else ()):
            kept["result", i, tuple(result.shape), result.dtype] = math.prod(result.shape) * result.dtype.itemsize
    return rows * sum(kept.values()) + peak_activation_bytes(program, rows=rows, sampled=rows)


def _inputs(program: SlicedProgram, index: int, rows: int) -> list[Tensor]:
    if index == 0:
        return [torch.empty(rows, 1, dtype=torch.int64, device="meta") for _ in range(2)]
    tensors = [*program.cuts[index - 1].tensors, program.calls[index - 1].out]
    return [torch.empty(rows, *t.shape, dtype=t.dtype, device="meta") for t in tensors]


def _run(module: fx.GraphModule, given: list[Tensor], send: list[Any]) -> int:
    live = _LiveValues(module, given)
    with torch.no_grad():
        live.run(*given, *send)
    return live.most


class _LiveValues(fx.Interpreter):
    """Runs a slice operator by operator, and drops values after their last use, like its Python code."""

    def __init__(self, module: fx.GraphModule, given: list[Tensor]) -> None:
        super().__init__(module)
        self._weights = _storages([*chain(module.parameters(), module.buffers())]).keys()
        self._given = given  # the caller holds them
        self.most = 0

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        live = _storages([self._given, list(self.env.values()), result])
        self.most = max(self.most, sum(nbytes for at, nbytes in live.items() if at not in self._weights))
        return result


def _storages(values: Any) -> dict[int, int]:
    """Return, for each storage under the tensors in ``values``, its address and bytes."""
    storages = [x.untyped_storage() for x in tree_leaves(values) if isinstance(x, Tensor)]
    return {storage._cdata: storage.nbytes() for storage in storages}


class _NoReceiver:
    """Discards all that a slice sends."""

    def q(self, call: int, q: Tensor) -> None:
        """Discard q [R, Hq, 1, D]."""

    def kv(self, call: int, k: Tensor, v: Tensor) -> None:
        """Discard k [R, Hkv, 1, D] and v [R, Hkv, 1, Dv]."""
