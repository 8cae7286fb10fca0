"""A device of its own memory, for tests: what is brought down is there when the host has waited, and not before."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lamina.workers import staging
from lamina.workers.staging import DeviceStaging

CPU = torch.device("cpu")


class StandIn(DeviceStaging):
    """Computes on the CPU, at once. Copies down are late; memory on the way up must stay as it was until a wait."""

    def __init__(self, device: torch.device = CPU, graphs: bool = False) -> None:
        super().__init__(device)
        self.places = 0
        self.graphs = graphs
        self._pinned: list[weakref.ref[Tensor]] = []
        self._down: list[tuple[Tensor, Tensor]] = []
        self._up: list[tuple[Tensor, Tensor]] = []

    def empty_host(self, *shape: int, dtype: torch.dtype) -> Tensor:
        made = super().empty_host(*shape, dtype=dtype)
        made.view(-1).view(torch.uint8).fill_(0xFF)  # NaN, or no token
        self._pinned = [p for p in self._pinned if p() is not None]
        self._pinned.append(weakref.ref(made))
        return made

    def is_pinned(self, x: Tensor) -> bool:
        return x.numel() > 0 and any((p := ref()) is not None and p.data_ptr() == x.data_ptr() for ref in self._pinned)

    def copy(self, to: Tensor, x: Tensor) -> None:
        if self.is_pinned(to):
            self._down.append((to, x.clone()))
        else:
            self._up.append((x, x.clone()))
            to.copy_(x)

    def record_event(self) -> Callable[[], None]:
        down, up, self._down, self._up = self._down, self._up, [], []

        def wait() -> None:
            for to, x in down:
                to.copy_(x)
            for x, before in up:
                assert torch.equal(_bytes(x), _bytes(before)), "changed on its way up"

        return wait

    def wait(self) -> None:
        self.record_event()()

    @property
    def is_done(self) -> bool:
        """Returns whether all that it was given was waited for."""
        return not self._down and not self._up

    def graph_capture(self) -> RecordingCapture | None:
        return RecordingCapture() if self.graphs else None

    def move_program(self, program: Any) -> Any:
        self.places += 1
        return super().move_program(program)


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


@contextmanager
def stand_in_for_cpu(
    monkeypatch: pytest.MonkeyPatch, *, graphs: bool = False, kind: type[StandIn] = StandIn
) -> Iterator[list[StandIn]]:
    """Has all work of the CPU done on a stand-in, which has ``graphs`` or not. Those that were made."""
    made = list[StandIn]()

    def make(device: torch.device) -> StandIn:
        made.append(kind(device, graphs))
        return made[-1]

    with monkeypatch.context() as patch:
        patch.setitem(staging.KINDS, "cpu", make)
        yield made


class Recorded:
    """Operators with the very tensors that they read and wrote."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def replay(self) -> None:
        for operator, args, kwargs, before in self.calls:
            found = operator(*args, **kwargs)
            for old, new in zip(tree_leaves(before), tree_leaves(found), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():  # else a view, or written in place
                    old.copy_(new)


class RecordingCapture(TorchDispatchMode):
    """Graphs of a CPU: replayed, they write the same memory again, as those of a GPU do."""

    def __init__(self) -> None:
        super().__init__()
        self.graphs = 0
        self._graph: Recorded | None = None

    @property
    def recording(self) -> bool:
        return self._graph is not None

    def begin(self) -> None:
        assert self._graph is None
        self._graph = Recorded()
        self.__enter__()

    def add(self, call: Any) -> None:
        """Adds a part of the graph that is no operator of torch."""
        assert self._graph is not None
        self._graph.calls.append((call, (), {}, None))

    def end(self) -> Recorded:
        assert self._graph is not None
        self.__exit__(None, None, None)
        graph, self._graph = self._graph, None
        self.graphs += 1
        return graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if self._graph is not None:
            self._graph.calls.append((func, args, kwargs or {}, found))
        return found
