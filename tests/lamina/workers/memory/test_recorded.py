"""A memory worker's rounds as graphs, with the kernels of the CUDA backend run on a CPU: the bits of launches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import test_direct
import torch
from cuda_emulation import EmulatedKernels, needs_gxx
from memory_peer import LAYERS, Model, Pool, memory_pool, model
from stand_in_device import RecordingCapture
from stand_in_gpu import StandInGpu, stand_in_gpus
from test_direct import direct_model, workers

from lamina.attention import cuda, native
from lamina.attention.cuda import Cuda
from lamina.attention.cuda_geometry import Variant
from lamina.attention.cuda_kernels import Argument
from lamina.compute.direct import open_wires
from lamina.protocol.plan import Free, New, Rows, SequenceOp

pytestmark = needs_gxx
Steps = list[tuple[list[SequenceOp], list[Rows]]]
ONE_AT_A_TIME = threading.Lock()  # the emulated GPU is one
layers = [LAYERS[0], LAYERS[3]]  # all tokens; a window, sinks


@dataclass
class GraphedKernels(EmulatedKernels):
    """Launches become parts of what this thread records, and then do not run, as on a GPU."""

    of_host: int = 0
    captures: dict[int, RecordingCapture] = field(default_factory=dict)  # by thread

    def launch(self, variant: Variant, name: str, blocks: int, arguments: tuple[Argument, ...]) -> None:
        def run() -> None:
            with ONE_AT_A_TIME:
                EmulatedKernels.launch(self, variant, name, blocks, arguments)

        capture = self.captures.get(threading.get_ident())
        if capture is not None and capture.recording:
            capture.add(run)
        else:
            self.of_host += 1
            run()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> GraphedKernels:
    """Of all memory workers, whose only backend is the CUDA one."""
    made, capture = GraphedKernels(), StandInGpu.capture

    def seen(gpu: StandInGpu) -> Any:
        recorder = capture(gpu)
        if recorder is not None:
            made.captures[threading.get_ident()] = recorder
        return recorder

    def opened(device: torch.device, dtype: torch.dtype, store_dtype: torch.dtype) -> Cuda:
        return Cuda(made, device, dtype, store_dtype)

    monkeypatch.setattr(StandInGpu, "capture", seen)
    for backend in (native, cuda):
        monkeypatch.setattr(backend, "open_backend", opened)
    return made


@pytest.fixture
def gpu() -> Iterator[Callable[[], StandInGpu]]:
    with stand_in_gpus(graphs=True) as make:
        yield make


def decoding(count: int, lengths: dict[int, int]) -> Steps:
    """``count`` steps of a row for each sequence of ``lengths``, which grow."""
    steps: Steps = []
    for _ in range(count):
        steps.append(([], [Rows(i, n, 1) for i, n in lengths.items()]))
        lengths.update({i: n + 1 for i, n in lengths.items()})
    return steps


def compare(steps: Steps, wanted: Model, found: Model) -> None:
    for number, (ops, rows) in enumerate(steps):
        a, b = wanted.step(number, ops, rows), found.step(number, ops, rows)
        found.pool.settle()  # type: ignore[attr-defined]
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True)), number


def graph_turns(pool: Pool) -> int:
    """Once the pool is closed and its threads are gone."""
    return int(pool.workers[-1].stats()["graph_turns"])


def test_rounds_of_decoding_are_launched_as_graphs_and_have_the_same_bits(
    kernels: GraphedKernels, gpu: Callable[[], StandInGpu]
) -> None:
    """Over a block's end, a window that slides, a sequence that leaves and another that takes its blocks."""
    lengths = {1: 38, 2: 5}
    steps: Steps = [([New(1), New(2)], [Rows(1, 0, 38), Rows(2, 0, 5)]), *decoding(12, lengths)]
    steps.append(([Free(1), New(3)], [Rows(3, 0, 33), Rows(2, lengths[2], 1)]))
    steps += decoding(6, {3: 33, 2: lengths[2] + 1})
    with memory_pool() as hosts, workers("cuda") as pool:
        wanted, found = model(hosts, layers=layers), direct_model(pool, gpu(), layers=layers)
        compare(steps, wanted, found)
    assert graph_turns(pool) == (11 + 6) * len(layers), "all but the first round of two lone rows"
    (capture,) = kernels.captures.values()
    assert capture.graphs == 1


def test_a_graphed_round_launches_nothing_else(kernels: GraphedKernels, gpu: Callable[[], StandInGpu]) -> None:
    launched = list[int]()
    for rounds in (0, 1, 2, 7):
        kernels.of_host = 0
        with workers("cuda") as pool:
            found = direct_model(pool, gpu(), layers=layers)
            for number, (ops, rows) in enumerate([([New(1)], [Rows(1, 0, 3)]), *decoding(rounds, {1: 3})]):
                found.step(number, ops, rows)
                found.pool.settle()  # type: ignore[attr-defined]
        launched.append(kernels.of_host)
    assert launched[0] < launched[1], "the first of its kind goes piece by piece"
    assert launched[1] == launched[2] == launched[3], launched


def test_a_longer_table_is_recorded_anew(kernels: GraphedKernels, gpu: Callable[[], StandInGpu]) -> None:
    """A sequence that grows past a power of two of chunks."""
    steps: Steps = [([New(1)], [Rows(1, 0, 60)]), ([], [Rows(1, 60, 60)]), *decoding(16, {1: 120})]
    with memory_pool() as hosts, workers("cuda") as pool:
        compare(steps, model(hosts, layers=layers), direct_model(pool, gpu(), layers=layers))
    (capture,) = kernels.captures.values()
    assert capture.graphs == 2
    assert graph_turns(pool) == (16 - 2) * len(layers), "all but the first of each length"


def test_graphs_can_be_switched_off(
    kernels: GraphedKernels, gpu: Callable[[], StandInGpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_direct, "open_wires", lambda *args, graphs: open_wires(*args, graphs=False))
    steps: Steps = [([New(1)], [Rows(1, 0, 3)]), *decoding(4, {1: 3})]
    with memory_pool() as hosts, workers("cuda") as pool:
        compare(steps, model(hosts, layers=layers), direct_model(pool, gpu(), layers=layers))
    assert graph_turns(pool) == 0


def test_where_a_round_cannot_be_recorded_it_is_launched_and_no_other_is_tried(
    kernels: GraphedKernels, gpu: Callable[[], StandInGpu], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """As without room for a graph, in the midst of it: what was recorded by then is not taken for done."""
    launch, capture = GraphedKernels.launch, RecordingCapture.end

    def full(self: GraphedKernels, variant: Variant, name: str, *rest: Any) -> None:
        launch(self, variant, name, *rest)
        recording = self.captures.get(threading.get_ident())
        if name == "lamina_append" and recording is not None and recording.recording:
            raise torch.OutOfMemoryError("no room\nfor a graph")

    def left_out(self: RecordingCapture) -> Any:
        graph = capture(self)
        for _, _, _, made in graph.calls:
            if isinstance(made, torch.Tensor) and made.dtype == torch.int32:
                made.fill_(-(1 << 30))  # memory of a graph that is not there
        return graph

    monkeypatch.setattr(GraphedKernels, "launch", full)
    monkeypatch.setattr(RecordingCapture, "end", left_out)
    steps: Steps = [([New(1)], [Rows(1, 0, 60)]), *decoding(5, {1: 60})]
    with memory_pool() as hosts, workers("cuda") as pool:
        compare(steps, model(hosts, layers=layers), direct_model(pool, gpu(), layers=layers))
    assert graph_turns(pool) == 0
    assert [m for m in caplog.messages if "graph" in m] == ["a round cannot be a graph, and runs without: no room"]
