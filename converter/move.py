"""Moves a sliced program to another device: its weights, and the constants that its operators make there."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from .slices import SlicedProgram

Copy = Callable[[Tensor], Tensor]


def move(program: SlicedProgram, device: torch.device, copy: Copy | None = None) -> SlicedProgram:
    """Return the program with its weights on ``device``. The given program is used up; the model that it was cut from
    stays unchanged.

    Weights that share memory share it on the device too. Each byte is copied once, from its place (such as a mapped
    file), without another copy on the host. ``copy``: copies flat bytes to the device.
    """
    moved = _MovedTensors((t for s in program.slices for t in s.weights.values()), copy or (lambda x: _copy(x, device)))
    for part in program.slices:
        for module in part.module.modules():
            _move_module(module, moved)
            if isinstance(module, fx.GraphModule):
                _move_constants(module, device)
    parts = (replace(s, weights={name: moved(t) for name, t in s.weights.items()}) for s in program.slices)
    return replace(program, slices=tuple(parts))


def _copy(x: Tensor, device: torch.device) -> Tensor:
    return x.to(device, copy=True)


def _move_module(module: nn.Module, moved: _MovedTensors) -> None:
    for name, weight in module._parameters.items():
        if weight is not None:
            module._parameters[name] = nn.Parameter(moved(weight), requires_grad=False)
    for name, tensor in module._buffers.items():
        if tensor is not None:
            module._buffers[name] = moved(tensor)


def _move_constants(module: fx.GraphModule, device: torch.device) -> None:
    def instead(value: Any) -> Any:
        return device if isinstance(value, torch.device) else value

    for node in module.graph.nodes:
        node.args, node.kwargs = (fx.node.map_aggregate(x, instead) for x in (node.args, node.kwargs))
    module.recompile()


class _MovedTensors:
    """Gives each tensor its copy on the new device. Copies of tensors whose bytes overlap are views of one tensor."""

    def __init__(self, tensors: Iterable[Tensor], copy: Copy) -> None:
        self._copy = copy
        by_storage: dict[int, tuple[torch.UntypedStorage, list[tuple[int, int]]]] = {}
        for t in tensors:
            if t.numel():
                storage = t.untyped_storage()
                by_storage.setdefault(storage._cdata, (storage, []))[1].append(_extent(t))
        self._spans = {key: _Spans(storage, extents, copy) for key, (storage, extents) in by_storage.items()}

    def __call__(self, t: Tensor) -> Tensor:
        spans = self._spans.get(t.untyped_storage()._cdata) if t.numel() else None
        return spans.view(t) if spans else self._copy(t.detach())


class _Spans:
    """The needed byte ranges of one storage, each copied once."""

    def __init__(self, storage: torch.UntypedStorage, extents: list[tuple[int, int]], copy: Copy) -> None:
        merged = list[tuple[int, int]]()
        for low, high in sorted(extents):
            if merged and low < merged[-1][1]:
                low, high = merged[-1][0], max(high, merged.pop()[1])
            merged.append((low, high))
        self._starts = [low for low, _ in merged]
        self._bytes = [copy(_bytes(storage, low, high)) for low, high in merged]

    def view(self, t: Tensor) -> Tensor:
        """Return the view of the copy that corresponds to ``t``."""
        low, high = _extent(t)
        at = bisect_right(self._starts, low) - 1
        start = self._starts[at]
        flat = self._bytes[at].narrow(0, low - start, high - low).view(t.dtype)
        return flat.as_strided(t.size(), t.stride())


def _extent(t: Tensor) -> tuple[int, int]:
    """Return the byte range of a tensor in its storage: its first byte, and the end (exclusive)."""
    low = int(t.storage_offset()) * t.element_size()
    last = sum((n - 1) * int(s) for n, s in zip(t.shape, t.stride(), strict=True))
    return low, low + (last + 1) * t.element_size()


def _bytes(storage: torch.UntypedStorage, low: int, high: int) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, low, (high - low,), (1,))
