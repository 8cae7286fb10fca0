"""Slices as graphs: what a slice launches is recorded once for each number of rows and then launched as a whole.

A slice sends Q, K and V while it runs, and a send cannot be recorded: a graph ends where a message leaves, and the next
one begins behind it. Rows are padded to a power of two, whose extra results nobody takes. A graph reads and writes the
same memory at every replay, so what leaves it is a copy: a message, or a carried tensor that waits for other batches,
would be overwritten by the next replay.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

log = logging.getLogger(__name__)
MOST_ROWS = 256  # of a graph; with more, launches cost little of a slice


class Graph(Protocol):
    """What was recorded."""

    def replay(self) -> None:
        """Do it again, on the same memory."""
        ...


class Capture(Protocol):
    """Records what this thread has its device do. Nothing need be done while it is recorded."""

    def begin(self) -> None:
        """Record from here on."""
        ...

    def end(self) -> Graph:
        """What has come since ``begin``."""
        ...


class CudaCapture:
    """CUDA graphs, which share one pool of memory. HARDWARE-UNVERIFIED: run with a stand-in that records on a CPU."""

    def __init__(self, device: torch.device) -> None:
        """To be used on a stream other than the default one, as ``staging.Cuda`` sees to."""
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._graph: Any = None

    def begin(self) -> None:
        """See Capture."""
        torch.cuda.current_stream(self._device).synchronize()
        self._graph = torch.cuda.CUDAGraph()
        # Other workers may be threads of this process, and go on.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> Graph:
        """See Capture."""
        graph: Graph = self._graph
        self._graph.capture_end()
        return graph


class Graphs:
    """A program whose slices run as graphs. To be called by one thread, one slice at a time."""

    def __init__(self, program: Any, capture: Capture) -> None:
        self.slices: Sequence[Any] = [GraphedSlice(inner, capture) for inner in program.slices]


class GraphedSlice:
    """Called as the slice that it stands for, with any number of rows."""

    def __init__(self, inner: Any, capture: Capture) -> None:
        self._inner, self._capture = inner, capture
        self._known: dict[int, _Padded] = {}
        self._refused = False

    def __call__(self, *args: Any) -> tuple[Tensor, ...]:
        rows = args[0].shape[0]
        bucket = 1 << max(0, rows - 1).bit_length()
        if bucket > MOST_ROWS or self._refused:
            return self._plain(args)
        inputs, send = (args, None) if isinstance(args[-1], Tensor) else (args[:-1], args[-1])
        if bucket not in self._known:
            try:
                self._known[bucket] = _Padded(self._inner, inputs, bucket, send is not None, self._capture)
            except RuntimeError as error:
                log.warning("a slice cannot be a graph and runs without: %s", str(error).splitlines()[0])
                self._refused = True
                return self._plain(args)
        return self._known[bucket](inputs, rows, send)

    def _plain(self, args: Sequence[Any]) -> tuple[Tensor, ...]:
        out: tuple[Tensor, ...] = self._inner(*args)
        return out


class _Message(NamedTuple):
    """What a graph ends with: the arguments of ``send.q`` or ``send.kv``."""

    kind: str
    call: int
    tensors: tuple[Tensor, ...]


class _Padded:
    """A slice with ``bucket`` rows: its graphs, and the memory that they read and write."""

    def __init__(self, inner: Any, inputs: Sequence[Tensor], bucket: int, sends: bool, capture: Capture) -> None:
        """Raises RuntimeError where it does what cannot be recorded."""
        self._inputs = [x.new_zeros(bucket, *x.shape[1:]) for x in inputs]  # rows of no token are rows of token 0
        inner(*self._inputs, *([_Nobody()] if sends else []))  # libraries prepare themselves in their first call
        tape = _Tape(capture)
        capture.begin()
        try:
            self._results: tuple[Tensor, ...] = inner(*self._inputs, *([tape] if sends else []))
        except BaseException:
            with suppress(RuntimeError):
                capture.end()
            raise
        self._parts = [*tape.parts, (capture.end(), None)]

    def __call__(self, inputs: Sequence[Tensor], rows: int, send: Any) -> tuple[Tensor, ...]:
        for mine, x in zip(self._inputs, inputs, strict=True):
            mine[:rows].copy_(x)
        for graph, message in self._parts:
            graph.replay()
            if message is not None:
                getattr(send, message.kind)(message.call, *(x[:rows].clone() for x in message.tensors))
        return tuple(x[:rows].clone() for x in self._results)


class _Tape:
    """In place of the receiver of messages: each ends a graph and begins the next one."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self.parts: list[tuple[Graph, _Message | None]] = []

    def q(self, call: int, q: Tensor) -> None:
        self._cut(_Message("q", call, (q,)))

    def kv(self, call: int, k: Tensor, v: Tensor) -> None:
        self._cut(_Message("kv", call, (k, v)))

    def _cut(self, message: _Message) -> None:
        self.parts.append((self._capture.end(), message))
        self._capture.begin()


class _Nobody:
    """Takes messages that mean nothing."""

    def q(self, call: int, q: Tensor) -> None: ...

    def kv(self, call: int, k: Tensor, v: Tensor) -> None: ...
