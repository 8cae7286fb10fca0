"""Slices as graphs: the kernels of a slice are recorded once for each number of rows, and then launched as a whole.

A slice sends Q, K and V while it runs, and meets other ranks. Calls of a host cannot be recorded: a graph ends at each,
and the next one begins behind it. Messages and meetings by kernels (``recordable``) are part of the graph; all ranks
that meet so record their graphs at the same time and with the same rows. Rows are padded (``padded_rows``), and results
of the extra ones are not used. A graph reads and writes the same memory at every replay, so what leaves it is a copy: a
message, or a carried tensor that waits for other batches, would be overwritten by the next replay.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lamina.ops import collective
from lamina.ops.collective import Collective, RankCollectives

log = logging.getLogger(__name__)
MAX_GRAPH_ROWS = 256  # of a graph; with more, launches cost little of a slice


def padded_rows(rows: int) -> int:
    """The rows of the graph that ``rows`` run in: a power of two up to 8, as weights are what few rows read; then steps
    of 8, which tensor cores take at a time, or of a quarter of the power of two below.
    """
    below = 1 << max(0, rows - 1).bit_length()
    if below <= 8:
        return below
    step = max(8, below // 8)
    return -(-rows // step) * step


class Graph(Protocol):
    """A recorded piece of work of the device."""

    def replay(self) -> None:
        """Do the recorded work again, on the same memory."""
        ...


class GraphCapture(Protocol):
    """Records what this thread has its device do. Nothing need be done while it is recorded."""

    def begin(self) -> None:
        """Record from here on."""
        ...

    def end(self) -> Graph:
        """End the recording: the graph of all work since ``begin``."""
        ...


class CudaCapture:
    """CUDA graphs, which share one pool of memory. HARDWARE-UNVERIFIED: run with a stand-in that records on a CPU."""

    def __init__(self, device: torch.device) -> None:
        """To be used on a stream other than the default one, as ``staging.CudaStaging`` sees to."""
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._graph: Any = None

    def begin(self) -> None:
        """Record what this thread's stream is given from here on."""
        torch.cuda.current_stream(self._device).synchronize()
        self._graph = torch.cuda.CUDAGraph()
        # Other workers may be threads of this process, and go on.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> Graph:
        """The graph of what was recorded since ``begin``."""
        graph: Graph = self._graph
        self._graph.capture_end()
        return graph


class GraphableCollective:
    """Where the slices of a rank meet the others. While a slice is tried out or recorded, nobody is met."""

    def __init__(self, group: Collective) -> None:
        self.group = group
        self._met: RankCollectives = group

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' ``x``; of this rank's alone while a slice is tried out or recorded."""
        return self._met.all_reduce(x)

    def all_gather(self, x: Tensor, size: int) -> Tensor:
        """All ranks' ``x`` side by side; a stand-in of that shape while a slice is tried out or recorded."""
        return self._met.all_gather(x, size)

    @contextmanager
    def replaced_by(self, other: RankCollectives) -> Iterator[None]:
        """``other`` is met while the block goes on."""
        self._met = other
        try:
            yield
        finally:
            self._met = self.group


class GraphedProgram:
    """A program whose slices run as graphs. To be called by one thread, one slice at a time."""

    def __init__(self, program: Any, capture: GraphCapture, group: Collective | None = None) -> None:
        """``group``: whom the slices meet. The program given is used up."""
        meetings = GraphableCollective(group) if group and not group.recordable else None
        bound = collective.bind(program, meetings or group) if group else program
        joined = group if group and group.recordable else None
        self.slices = [GraphedSlice(inner, capture, meetings, joined) for inner in bound.slices]

    def clear_graphs(self) -> None:
        """Record anew: what was recorded may be sent over channels, or meet ranks, that are gone."""
        for each in self.slices:
            each.clear_graphs()


class GraphedSlice:
    """Called as the slice that it stands for, with any number of rows."""

    def __init__(
        self,
        inner: Any,
        capture: GraphCapture,
        meetings: GraphableCollective | None = None,
        joined: Collective | None = None,
    ) -> None:
        """``meetings``: what ``inner`` calls where ranks meet; ``joined``: the ranks whose meetings are recorded."""
        self._inner, self._capture, self._meetings, self._captures_messages = inner, capture, meetings, joined
        self._known: dict[tuple[int, Any], _PaddedSlice] = {}  # by rows and by what is part of the graph
        self._refused = False

    def __call__(self, *args: Any) -> tuple[Tensor, ...]:
        rows = args[0].shape[0]
        bucket = padded_rows(rows)
        if bucket > MAX_GRAPH_ROWS or self._refused:
            return self._plain(args)
        inputs, send = (args, None) if isinstance(args[-1], Tensor) else (args[:-1], args[-1])
        kind = bucket, send if getattr(send, "recordable", False) else None
        if kind not in self._known:
            try:
                tape = _SegmentRecorder(self._capture) if kind[1] is None else _MessageRecorder(self._capture, send)
                self._known[kind] = _PaddedSlice(
                    self._inner, inputs, bucket, send is not None, tape, self._meetings, self._captures_messages
                )
            except RuntimeError as error:
                log.warning("a slice cannot be a graph and runs without: %s", str(error).partition("\n")[0])
                self._refused = True
                return self._plain(args)
        return self._known[kind](inputs, rows, send)

    def clear_graphs(self) -> None:
        """Forget the recorded graphs; the next call records anew."""
        self._known.clear()

    def _plain(self, args: Sequence[Any]) -> tuple[Tensor, ...]:
        out: tuple[Tensor, ...] = self._inner(*args)
        return out


class _GraphSend(NamedTuple):
    """What a graph ends with: the arguments of ``send.q`` or ``send.kv``."""

    kind: str
    call: int
    tensors: tuple[Tensor, ...]


class _GraphCollectiveCall(NamedTuple):
    """What a graph ends with: a call of ``Collective``, and where the next graph finds its result."""

    kind: str
    x: Tensor
    more: tuple[int, ...]
    result: Tensor

    def meet(self, group: Collective, bucket: int, rows: int) -> None:
        """Meet over the first ``rows`` of a graph's ``bucket`` rows, the ones that mean something: ranks without graphs
        have no others.
        """
        rows = rows if self.x.shape[0] == bucket else self.x.shape[0]
        self.result[:rows].copy_(getattr(group, self.kind)(self.x[:rows], *self.more))


class _PaddedSlice:
    """A slice with ``bucket`` rows: its graphs, and the memory that they read and write."""

    def __init__(
        self,
        inner: Any,
        inputs: Sequence[Tensor],
        bucket: int,
        sends: bool,
        tape: _SegmentRecorder,
        meetings: GraphableCollective | None,
        joined: Collective | None,
    ) -> None:
        """Raises RuntimeError where it does what cannot be recorded."""
        self._bucket, self._meetings, self._joined, self._launching = bucket, meetings, joined, tape.launching
        self._inputs = [x.new_zeros(bucket, *x.shape[1:]) for x in inputs]  # rows of no token are rows of token 0
        self._run(inner, _NullReceiver(), sends)  # libraries prepare themselves in their first call
        tape.capture.begin()
        try:
            self._results = self._run(inner, tape, sends)
        except BaseException:
            with suppress(RuntimeError):
                tape.capture.end()
            raise
        self._parts = [*tape.parts, (tape.capture.end(), None)]

    def __call__(self, inputs: Sequence[Tensor], rows: int, send: Any) -> tuple[Tensor, ...]:
        for own, x in zip(self._inputs, inputs, strict=True):
            own[:rows].copy_(x)
        for graph, end in self._parts:
            with self._launching() as may_be:
                if may_be:
                    graph.replay()
            if self._joined is not None:
                self._joined.on_graph_launched()
            if isinstance(end, _GraphSend):
                getattr(send, end.kind)(end.call, *(x[:rows].clone() for x in end.tensors))
            elif end is not None and self._meetings is not None:
                end.meet(self._meetings.group, self._bucket, rows)
        return tuple(x[:rows].clone() for x in self._results)

    def _run(self, inner: Any, other: _NullReceiver, sends: bool) -> tuple[Tensor, ...]:
        """The slice, with ``other`` in the place of all that it talks to."""
        with self._meetings.replaced_by(other) if self._meetings else nullcontext():
            out: tuple[Tensor, ...] = inner(*self._inputs, *([other] if sends else []))
        return out


class _NullReceiver:
    """Takes messages that mean nothing, and is met in place of ranks."""

    def q(self, call: int, q: Tensor) -> None: ...

    def kv(self, call: int, k: Tensor, v: Tensor) -> None: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)

    def all_gather(self, x: Tensor, size: int) -> Tensor:
        return x.new_zeros(*x.shape[:-1], size * x.shape[-1])


class _SegmentRecorder(_NullReceiver):
    """Each message and each meeting ends a graph and begins the next one."""

    def __init__(self, capture: GraphCapture) -> None:
        self.capture = capture
        self.parts: list[tuple[Graph, _GraphSend | _GraphCollectiveCall | None]] = []

    def launching(self) -> AbstractContextManager[bool]:
        """Around each launch of a part; False: it must not be launched."""
        return nullcontext(True)

    def q(self, call: int, q: Tensor) -> None:
        self._cut(_GraphSend("q", call, (q,)))

    def kv(self, call: int, k: Tensor, v: Tensor) -> None:
        self._cut(_GraphSend("kv", call, (k, v)))

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._meet("all_reduce", x, (), super().all_reduce(x))

    def all_gather(self, x: Tensor, size: int) -> Tensor:
        return self._meet("all_gather", x, (size,), super().all_gather(x, size))

    def _meet(self, kind: str, x: Tensor, more: tuple[int, ...], result: Tensor) -> Tensor:
        self._cut(_GraphCollectiveCall(kind, x, more, result))
        return result

    def _cut(self, end: _GraphSend | _GraphCollectiveCall) -> None:
        self.parts.append((self.capture.end(), end))
        self.capture.begin()


class _MessageRecorder(_SegmentRecorder):
    """Messages become part of the graph."""

    def __init__(self, capture: GraphCapture, send: Any) -> None:
        super().__init__(capture)
        self._send = send

    def launching(self) -> AbstractContextManager[bool]:
        held: AbstractContextManager[bool] = self._send.launching()
        return held

    def q(self, call: int, q: Tensor) -> None:
        self._send.q(call, q)

    def kv(self, call: int, k: Tensor, v: Tensor) -> None:
        self._send.kv(call, k, v)
