"""A memory worker's rounds as graphs, with the kernels of the CUDA backend run on a CPU: the bits of launches.

Covers: lamina/workers/memory/layer_loop/device_loop.py.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import test_device_transport
import torch
from cuda_emulation import EmulatedKernels, needs_gxx
from memory_peer import LAYERS, Model, Pool, memory_pool, model
from stand_in_device import Recorded, RecordingCapture
from stand_in_gpu import StandInGpu, stand_in_gpus
from test_device_transport import direct_model, workers
from torch import Tensor

from lamina.ops.attention import cuda, native
from lamina.ops.attention.cuda import CudaAttention
from lamina.ops.attention.cuda_geometry import Variant
from lamina.ops.attention.cuda_kernels import Argument
from lamina.protocol.step_plan import Free, New, RowRange, SequenceOp, StepPlan
from lamina.workers.compute.device_attention_client import open_transports
from lamina.workers.memory.layer_loop import cuda_graph_loop

pytestmark = needs_gxx
Steps = list[tuple[list[SequenceOp], list[RowRange]]]
ONE_AT_A_TIME = threading.Lock()  # the emulated GPU is one
layers = [LAYERS[0], LAYERS[3]]  # all tokens; a window, sinks


@dataclass
class GraphedKernels(EmulatedKernels):
    """Launches become parts of what this thread records, and then do not run, as on a GPU."""

    of_host: int = 0
    captures: dict[int, RecordingCapture] = field(default_factory=dict)  # by thread
    graphs: weakref.WeakSet[Recorded] = field(default_factory=weakref.WeakSet)  # that are still referenced

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
    """Returns the kernels of all memory workers, whose only backend is the CUDA one."""
    made, capture, end = GraphedKernels(), StandInGpu.graph_capture, RecordingCapture.end

    def ended(capture: RecordingCapture) -> Recorded:
        graph = end(capture)
        made.graphs.add(graph)
        return graph

    def seen(gpu: StandInGpu) -> Any:
        recorder = capture(gpu)
        if recorder is not None:
            made.captures[threading.get_ident()] = recorder
        return recorder

    def opened(device: torch.device, dtype: torch.dtype, store_dtype: torch.dtype) -> CudaAttention:
        return CudaAttention(made, device, dtype, store_dtype)

    monkeypatch.setattr(RecordingCapture, "end", ended)
    monkeypatch.setattr(StandInGpu, "graph_capture", seen)
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
        steps.append(([], [RowRange(i, n, 1) for i, n in lengths.items()]))
        lengths.update({i: n + 1 for i, n in lengths.items()})
    return steps


def compare(steps: Steps, wanted: Model, found: Model, first: int = 0) -> None:
    for number, (ops, rows) in enumerate(steps, first):
        a, b = wanted.step(number, ops, rows), found.step(number, ops, rows)
        found.pool.check_errors()  # type: ignore[attr-defined]
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True)), number


def run_round(there: Model, number: int, batches: Sequence[tuple[list[SequenceOp], list[RowRange]]]) -> list[Tensor]:
    """O of every layer and batch: steps of one round, whose messages take turns in each layer."""
    last = len(batches) - 1
    plans = [
        StepPlan(step=number, batch=batch, ops=ops, rows=rows, has_more=batch < last)
        for batch, (ops, rows) in enumerate(batches)
    ]
    for plan in plans:
        there.pool.send_plan(plan)
    out = list[Tensor]()
    for layer in range(len(there.layers)):
        for plan in (x for x in plans if x.rows):
            q, k, v = (x.unsqueeze(2) for x in there.rows(plan.rows, layer))
            there.pool.begin_step(plan)
            there.pool.q(layer, q)
            there.pool.kv(layer, k, v)
            out.append(there.pool.o(layer, len(q), there.dtype)[:, 0].clone())
    return out


def graph_turns(pool: Pool) -> int:
    """Once the pool is closed and its threads are gone."""
    return int(pool.workers[-1].stats()["graph_turns"])


@pytest.mark.no_retry
@pytest.mark.long
def test_rounds_of_decoding_are_launched_as_graphs_and_have_the_same_bits(
    kernels: GraphedKernels, gpu: Callable[[], StandInGpu]
) -> None:
    """Over a block's end, a window that slides, a sequence that leaves and another that takes its blocks."""
    lengths = {1: 38, 2: 5}
    steps: Steps = [([New(1), New(2)], [RowRange(1, 0, 38), RowRange(2, 0, 5)]), *decoding(12, lengths)]
    steps.append(([Free(1), New(3)], [RowRange(3, 0, 33), RowRange(2, lengths[2], 1)]))
    steps += decoding(6, {3: 33, 2: lengths[2] + 1})
    with memory_pool() as hosts, workers("cuda") as pool:
        wanted, found = model(hosts, layers=layers), direct_model(pool, gpu(), layers=layers)
        compare(steps, wanted, found)
    assert graph_turns(pool) == (11 + 6) * len(layers), "all but the first round of two lone rows"
    (capture,) = kernels.captures.values()
    assert capture.graphs == 1


@pytest.mark.long
def test_a_graphed_round_launches_nothing_else(kernels: GraphedKernels, gpu: Callable[[], StandInGpu]) -> None:
    launched = list[int]()
    for rounds in (0, 1, 2, 7):
        kernels.of_host = 0
        with workers("cuda") as pool:
            found = direct_model(pool, gpu(), layers=layers)
            for number, (ops, rows) in enumerate([([New(1)], [RowRange(1, 0, 3)]), *decoding(rounds, {1: 3})]):
                found.step(number, ops, rows)
                found.pool.check_errors()  # type: ignore[attr-defined]
        launched.append(kernels.of_host)
    assert launched[0] < launched[1], "the first of its kind goes piece by piece"
    assert launched[1] == launched[2] == launched[3], launched


@pytest.mark.long
def test_a_longer_table_is_recorded_anew(kernels: GraphedKernels, gpu: Callable[[], StandInGpu]) -> None:
    """A sequence that grows past a power of two of chunks."""
    steps: Steps = [([New(1)], [RowRange(1, 0, 60)]), ([], [RowRange(1, 60, 60)]), *decoding(16, {1: 120})]
    with memory_pool() as hosts, workers("cuda") as pool:
        compare(steps, model(hosts, layers=layers), direct_model(pool, gpu(), layers=layers))
    (capture,) = kernels.captures.values()
    assert capture.graphs == 2
    assert graph_turns(pool) == (16 - 2) * len(layers), "all but the first of each length"


def test_graphs_can_be_switched_off(
    kernels: GraphedKernels, gpu: Callable[[], StandInGpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        test_device_transport, "open_transports", lambda *args, graphs: open_transports(*args, graphs=False)
    )
    steps: Steps = [([New(1)], [RowRange(1, 0, 3)]), *decoding(4, {1: 3})]
    with memory_pool() as hosts, workers("cuda") as pool:
        compare(steps, model(hosts, layers=layers), direct_model(pool, gpu(), layers=layers))
    assert graph_turns(pool) == 0


def test_where_a_round_cannot_be_recorded_it_is_launched_and_no_other_is_tried(
    kernels: GraphedKernels, gpu: Callable[[], StandInGpu], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """A graph may find no room in the midst of a recording: what was recorded by then is not taken for done."""
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
    steps: Steps = [([New(1)], [RowRange(1, 0, 60)]), *decoding(5, {1: 60})]
    with memory_pool() as hosts, workers("cuda") as pool:
        compare(steps, model(hosts, layers=layers), direct_model(pool, gpu(), layers=layers))
    assert graph_turns(pool) == 0
    assert [m for m in caplog.messages if "graph" in m] == ["a round cannot be a graph, and runs without: no room"]


def alternating(kinds: str) -> Steps:
    """Prompts of three sequences, then steps: of ``a`` two lone rows, of ``b`` one, of ``c`` three."""
    lengths = {1: 38, 2: 5, 3: 20}
    steps: Steps = [([New(i) for i in lengths], [RowRange(i, 0, n) for i, n in lengths.items()])]
    for kind in kinds:
        steps += decoding(1, lengths_of := {i: lengths[i] for i in {"a": (1, 2), "b": (3,), "c": (1, 2, 3)}[kind]})
        lengths |= lengths_of
    return steps


@pytest.mark.long
@pytest.mark.parametrize(
    ("most", "kinds", "graphs", "turns"),
    [
        (1, "aaabbbaaabb", 4, 2 + 2 + 2 + 1),  # each kind that comes makes the other one forgotten
        (2, "aaabbbaaabb", 2, 2 + 2 + 3 + 2),
        (2, "aabbacca", 3, 1 + 1 + 1 + 1 + 1),  # the one that is forgotten is the one not seen for the longest
        (2, "aabbaccb", 3, 1 + 1 + 1 + 1),
    ],
)
def test_what_was_not_seen_for_the_longest_is_forgotten_and_recorded_anew(
    kernels: GraphedKernels,
    gpu: Callable[[], StandInGpu],
    monkeypatch: pytest.MonkeyPatch,
    most: int,
    kinds: str,
    graphs: int,
    turns: int,
) -> None:
    monkeypatch.setattr(cuda_graph_loop, "MAX_GRAPHS", most)
    held = list[int]()
    with memory_pool() as hosts, workers("cuda") as pool:
        wanted, there = model(hosts, layers=layers), direct_model(pool, gpu(), layers=layers)
        for number, step in enumerate(alternating(kinds)):
            compare([step], wanted, there, number)
            held.append(len(kernels.graphs))
    (capture,) = kernels.captures.values()
    assert capture.graphs == graphs
    assert graph_turns(pool) == turns * len(layers)
    assert max(held) == most, "none is kept that is forgotten"


@pytest.mark.long
@pytest.mark.parametrize("mixed", [False, True], ids=["as before", "batches change places"])
def test_rounds_of_two_batches_are_one_graph_each(
    kernels: GraphedKernels, gpu: Callable[[], StandInGpu], mixed: bool
) -> None:
    """The batches have other numbers of rows, and one may have none, or a prompt."""
    one, two = {1: 38, 2: 5}, {3: 33}
    rounds = [[([New(1), New(2)], [RowRange(1, 0, 38), RowRange(2, 0, 5)]), ([New(3)], [RowRange(3, 0, 33)])]]

    def add(count: int, *batches: dict[int, int]) -> None:
        rounds.extend([list(x) for x in zip(*(decoding(count, each) for each in batches), strict=True)])

    add(4, one, two)
    add(2, two, one) if mixed else add(2, one, two)
    rounds.append([([], []), ([], [RowRange(3, two[3], 1)])])  # a round of one batch
    two[3] += 1
    rounds.append([([New(4)], [RowRange(4, 0, 7)]), ([], [RowRange(3, two[3], 1)])])
    two[3] += 1
    add(3, one, two)
    with memory_pool() as hosts, workers("cuda") as pool:
        wanted, there = model(hosts, layers=layers), direct_model(pool, gpu(), layers=layers)
        for number, batches in enumerate(rounds):
            a, b = (run_round(each, number, batches) for each in (wanted, there))
            there.pool.check_errors()  # type: ignore[attr-defined]
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True)), number
    (capture,) = kernels.captures.values()
    assert capture.graphs == 1 + mixed
    assert graph_turns(pool) == 2 * len(layers) * (3 + (1 if mixed else 2) + 3)


def test_where_there_is_no_room_for_another_graph_those_before_give_theirs_back(
    kernels: GraphedKernels, gpu: Callable[[], StandInGpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, held = GraphedKernels.launch, list[int]()

    def full(self: GraphedKernels, *args: Any) -> None:
        launch(self, *args)
        recording = self.captures.get(threading.get_ident())
        if len(self.graphs) == 1 and recording is not None and recording.recording:
            raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(GraphedKernels, "launch", full)
    with memory_pool() as hosts, workers("cuda") as pool:
        wanted, there = model(hosts, layers=layers), direct_model(pool, gpu(), layers=layers)
        for number, step in enumerate(alternating("aaabbba")):
            compare([step], wanted, there, number)
            held.append(len(kernels.graphs))
        assert held == [0, 0, 1, 1, 1, 0, 0, 0]
    assert graph_turns(pool) == 2 * len(layers)
