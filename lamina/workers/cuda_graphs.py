"""Slices as graphs: the kernels of a slice are recorded once for each number of rows, and then launched together.

A slice sends Q, K and V while it runs, and meets other ranks. Calls of a host cannot be recorded, so a graph ends at
each one and the next graph begins after it. Messages and collectives by kernels (``recordable``) are part of the graph;
such ranks record their graphs at the same time and with the same rows.

Rows are padded (``padded_rows``), and results of padding are not used. A graph uses the same memory at every replay, so
its messages and carried tensors are copies: the next replay would overwrite them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lamina.ops import collective
from lamina.ops.collective import Collective, RankCollectives

log = logging.getLogger(__name__)
MAX_GRAPH_ROWS = 256  # with more rows, launches cost little of a slice


def padded_rows(rows: int) -> int:
    """Return the rows of the graph that runs ``rows`` rows. This is a power of two up to 8, as few rows mostly read
    weights. Above, it is a multiple of 8, which tensor cores process at a time, or of an eighth of the next power of
    two if that is more.
    """
    below = 1 << max(0, rows - 1).bit_length()
    if below <= 8:
        return below
    step = max(8, below // 8)
    return -(-rows // step) * step


class Graph(Protocol):
    """A recorded piece of the device's work."""

    def replay(self) -> None:
        """Repeat the recorded work, on the same memory."""
        ...


class GraphCapture(Protocol):
    """Records the work that this thread gives to its device; the device need not do it meanwhile."""

    def begin(self) -> None:
        """Start recording."""
        ...

    def end(self) -> Graph:
        """End recording and return the graph of all work since ``begin``."""
        ...


class CudaCapture:
    """A recorder of CUDA graphs, which share one pool of memory. HARDWARE-UNVERIFIED: run with a stand-in on a CPU."""

    def __init__(self, device: torch.device) -> None:
        """Must be used on a stream other than the default one, as ``staging.CudaStaging`` ensures."""
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._graph: Any = None

    def begin(self) -> None:
        """Record the work given to this thread's stream from now on."""
        torch.cuda.current_stream(self._device).synchronize()
        self._graph = torch.cuda.CUDAGraph()
        # Other workers may be threads of this process, and continue.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> Graph:
        """Return the graph of the work recorded since ``begin``."""
        graph: Graph = self._graph
        self._graph.capture_end()
        return graph


class GraphableCollective:
    """A collective for slices whose graphs cannot hold it: while a slice is tried or recorded, no rank is called."""

    def __init__(self, group: Collective) -> None:
        self.group = group
        self._met: RankCollectives = group

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' ``x``; a stand-in while a slice is tried or recorded."""
        return self._met.all_reduce(x)

    def all_gather(self, x: Tensor, size: int) -> Tensor:
        """Return all ranks' ``x`` concatenated; a stand-in of that shape while a slice is tried or recorded."""
        return self._met.all_gather(x, size)

    @contextmanager
    def replaced_by(self, other: RankCollectives) -> Iterator[None]:
        """Use ``other`` in place of the ranks while the block runs."""
        self._met = other
        try:
            yield
        finally:
            self._met = self.group


class GraphBuffers:
    """The inputs and results of all graphs of a program, which run one after another and are copied out at once. So a
    slice and a number of rows have none of their own, but the first rows of one buffer.
    """

    def __init__(self, max_rows: int = MAX_GRAPH_ROWS) -> None:
        self._max_rows = max_rows
        self._buffers: dict[tuple[Any, ...], Tensor] = {}

    @property
    def nbytes(self) -> int:
        """The bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def rows_like(self, place: tuple[Any, ...], x: Tensor, rows: int) -> Tensor:
        """Return ``rows`` rows like those of ``x``: the same memory for an equal ``place``. They have what was last
        written, at first zeros.
        """
        key = (*place, x.shape[1:], x.dtype)
        if key not in self._buffers:
            self._buffers[key] = x.new_zeros(self._max_rows, *x.shape[1:])
        return self._buffers[key][:rows]


class GraphedProgram:
    """A program whose slices run as graphs. One thread calls it, one slice at a time."""

    def __init__(self, program: Any, capture: GraphCapture, group: Collective | None = None) -> None:
        """``group``: connects the ranks, if there are several. ``program`` must not be used again."""
        meetings = GraphableCollective(group) if group and not group.recordable else None
        bound = collective.bind(program, meetings or group) if group else program
        joined = group if group and group.recordable else None
        self.buffers = GraphBuffers()
        self.slices = [
            GraphedSlice(inner, capture, meetings, joined, self.buffers, number)
            for number, inner in enumerate(bound.slices)
        ]

    @property
    def num_recorded(self) -> int:
        """The number of slices and numbers of rows that have graphs."""
        return sum(each.num_recorded for each in self.slices)

    def record(
        self, sizes: Iterable[int], first: Sequence[Tensor], outputs: Sequence[Sequence[Tensor]], send: Any
    ) -> None:
        """Record the graphs of all slices for the numbers of rows ``sizes``, the most first, whose memory the others
        share. Nothing is launched, and no message is sent. ``first``: the inputs of the first slice, for one row.
        ``outputs``: by slice, further inputs of the next one after the results of this one. ``send``: the client whose
        messages are recorded, if they can be.
        """
        for rows in sorted({padded_rows(size) for size in sizes if size <= MAX_GRAPH_ROWS}, reverse=True):
            inputs = _repeated(first, rows)
            for each, more in zip_longest(self.slices, outputs):
                results = each.record((*inputs, *([] if more is None else [send])))
                inputs = (*results, *_repeated(more or (), rows))

    def begin_epoch(self) -> None:
        """Discard the graphs that hold messages or collectives: their channels are gone. Keep all others."""
        for each in self.slices:
            each.begin_epoch()


class GraphedSlice:
    """A slice with the arguments and results of ``inner``, for any number of rows."""

    def __init__(
        self,
        inner: Any,
        capture: GraphCapture,
        meetings: GraphableCollective | None = None,
        joined: Collective | None = None,
        buffers: GraphBuffers | None = None,
        number: int = 0,
    ) -> None:
        """``meetings``: what ``inner`` calls for collectives of the host. ``joined``: the ranks, if collectives are
        recorded. ``buffers``: those of the program, in which it is slice ``number``.
        """
        self._buffers, self._number = buffers or GraphBuffers(), number
        self._inner, self._capture, self._meetings, self._joined = inner, capture, meetings, joined
        self._known: dict[tuple[int, Any], _PaddedSlice] = {}  # by rows, and by the client whose messages are recorded
        self._refused = False

    def __call__(self, *args: Any) -> tuple[Tensor, ...]:
        rows, (inputs, send) = args[0].shape[0], _parted(args)
        graphed = self._graphed(inputs, send)
        return self._plain(args) if graphed is None else graphed(inputs, rows, send)

    @property
    def num_recorded(self) -> int:
        """The number of numbers of rows that have graphs."""
        return len(self._known)

    def record(self, args: Sequence[Any]) -> tuple[Tensor, ...]:
        """Record the graph for these arguments without launching it. Returns tensors like its results; without data."""
        inputs, send = _parted(args)
        graphed = self._graphed(inputs, send)
        if graphed is not None:
            return graphed.results
        return self._plain([*inputs, *([] if send is None else [_NullReceiver()])])

    def _graphed(self, inputs: Sequence[Tensor], send: Any) -> _PaddedSlice | None:
        """Return the graphs for so many rows, recorded now or before; None if there are none."""
        bucket = padded_rows(inputs[0].shape[0])
        if bucket > MAX_GRAPH_ROWS or self._refused:
            return None
        kind = bucket, send if getattr(send, "recordable", False) else None
        if kind not in self._known:
            try:
                tape = _SegmentRecorder(self._capture) if kind[1] is None else _MessageRecorder(self._capture, send)
                own = [self._input(i, x, bucket) for i, x in enumerate(inputs)]
                self._known[kind] = _PaddedSlice(
                    self._inner, own, send is not None, tape, self._meetings, self._joined, self._buffers
                )
            except RuntimeError as error:
                log.warning("a slice cannot be a graph, and runs without: %s", str(error).partition("\n")[0])
                self._refused = True
                return None
        return self._known[kind]

    def begin_epoch(self) -> None:
        """Discard the graphs that hold messages or collectives; the next call records new ones."""
        kept = {} if self._joined else {kind: known for kind, known in self._known.items() if kind[1] is None}
        self._known = kept

    def _input(self, index: int, x: Tensor, bucket: int) -> Tensor:
        """Return the memory of an input. What padding has is of no use, but integers, which may be token ids, must be
        those of an earlier call of this slice.
        """
        place = ("input", index) if x.is_floating_point() else ("input", index, self._number)
        return self._buffers.rows_like(place, x, bucket)

    def _plain(self, args: Sequence[Any]) -> tuple[Tensor, ...]:
        out: tuple[Tensor, ...] = self._inner(*args)
        return out


def _parted(args: Sequence[Any]) -> tuple[Sequence[Tensor], Any]:
    """Return the tensors among a slice's arguments, and where its messages go; None for the last slice."""
    return (args, None) if isinstance(args[-1], Tensor) else (args[:-1], args[-1])


def _repeated(tensors: Sequence[Tensor], rows: int) -> tuple[Tensor, ...]:
    return tuple(x.new_zeros(rows, *x.shape[1:]) for x in tensors)


class _GraphSend(NamedTuple):
    """The end of a graph: the arguments of ``send.q`` or ``send.kv``."""

    kind: str
    call: int
    tensors: tuple[Tensor, ...]


class _GraphCollectiveCall(NamedTuple):
    """The end of a graph: a call of ``Collective``, and the tensor in which the next graph finds its result."""

    kind: str
    x: Tensor
    more: tuple[int, ...]
    result: Tensor

    def meet(self, group: Collective, bucket: int, rows: int) -> None:
        """Run the collective for the first ``rows`` of ``bucket`` rows: the rest is padding, which ranks without graphs
        lack.
        """
        rows = rows if self.x.shape[0] == bucket else self.x.shape[0]
        self.result[:rows].copy_(getattr(group, self.kind)(self.x[:rows], *self.more))


class _PaddedSlice:
    """A slice with some number of rows: its graphs."""

    def __init__(
        self,
        inner: Any,
        inputs: Sequence[Tensor],
        sends: bool,
        tape: _SegmentRecorder,
        meetings: GraphableCollective | None,
        joined: Collective | None,
        buffers: GraphBuffers,
    ) -> None:
        """Record the slice, which reads ``inputs``. Raises RuntimeError if it does something that cannot be
        recorded.
        """
        self._bucket = bucket = inputs[0].shape[0]
        self._meetings, self._joined, self._launching = meetings, joined, tape.launching
        self._inputs = inputs
        first = self._run(inner, _NullReceiver(), sends)  # libraries prepare themselves in their first call
        self.results = tuple(buffers.rows_like(("result", i), x, bucket) for i, x in enumerate(first))
        del first
        tape.capture.begin()
        try:
            for kept, x in zip(self.results, self._run(inner, tape, sends), strict=True):
                kept.copy_(x)
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
        return tuple(x[:rows].clone() for x in self.results)

    def _run(self, inner: Any, other: _NullReceiver, sends: bool) -> tuple[Tensor, ...]:
        """Run the slice with ``other`` in place of its receivers and ranks."""
        with self._meetings.replaced_by(other) if self._meetings else nullcontext():
            out: tuple[Tensor, ...] = inner(*self._inputs, *([other] if sends else []))
        return out


class _NullReceiver:
    """Accepts messages and collectives without sending them."""

    def q(self, call: int, q: Tensor) -> None: ...

    def kv(self, call: int, k: Tensor, v: Tensor) -> None: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)

    def all_gather(self, x: Tensor, size: int) -> Tensor:
        return x.new_zeros(*x.shape[:-1], size * x.shape[-1])


class _SegmentRecorder(_NullReceiver):
    """Records a slice so that each message and each collective ends a graph and begins the next one."""

    def __init__(self, capture: GraphCapture) -> None:
        self.capture = capture
        self.parts: list[tuple[Graph, _GraphSend | _GraphCollectiveCall | None]] = []

    def launching(self) -> AbstractContextManager[bool]:
        """Surround each launch of a graph. Yields False if it must not be launched."""
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
    """Records a slice whose messages are part of the graph."""

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
