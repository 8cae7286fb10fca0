"""Slices as graphs: rows padded, messages in the midst, memory that every replay writes again."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stand_in_device import RecordingCapture
from torch import Tensor

from lamina.workers.cuda_graphs import (
    MAX_GRAPH_ROWS,
    GraphableCollective,
    GraphedProgram,
    GraphedSlice,
    padded_rows,
)


class Kept:
    """Holds on to what is sent, as it comes."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, int, Tensor]] = []

    def q(self, call: int, q: Tensor) -> None:
        self.sent.append(("q", call, q))

    def kv(self, call: int, k: Tensor, v: Tensor) -> None:
        self.sent += [("k", call, k), ("v", call, v)]


WEIGHT = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))


def slice_of_a_model(ids: Tensor, x: Tensor, send: Any) -> tuple[Tensor, ...]:
    """With a message in the midst, an epoch, an operator in place, and an input that is a result."""
    h = x @ WEIGHT
    q = torch.relu(h)
    send.q(4, q.view(-1, 2, 1, 4))
    h = h.clone()
    h.add_(ids)
    send.kv(4, h[:, None], h * 2)
    return ids, h.sin() + q


def last_slice(x: Tensor, o: Tensor) -> tuple[Tensor, ...]:
    return (x @ WEIGHT + o,)


def inputs(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, 9, (rows, 1), generator=g), torch.randn(rows, 8, generator=g)


def test_results_and_messages_are_those_of_the_slice_and_stay() -> None:
    """All of them are compared at the end, when later replays have written their memory again and again."""
    capture = RecordingCapture()
    graphed, kept, held = GraphedSlice(slice_of_a_model, capture), Kept(), list[tuple[Tensor, ...]]()
    wanted, plain = list[tuple[Tensor, ...]](), Kept()
    order = [1, 3, 4, 2, 3, 8, 5, 1, 7]
    for seed, rows in enumerate(order):
        held.append(graphed(*inputs(rows, seed), kept))
        wanted.append(slice_of_a_model(*inputs(rows, seed), plain))
    for a, b in zip(held, wanted, strict=True):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)
    assert [(s[0], s[1], s[2].shape) for s in kept.sent] == [(s[0], s[1], s[2].shape) for s in plain.sent]
    for a, b in zip(kept.sent, plain.sent, strict=True):
        torch.testing.assert_close(a[2], b[2], atol=1e-5, rtol=1e-5)
    assert capture.graphs == 3 * len({1, 2, 4, 8}), "three pieces for each number of rows, recorded once"


class Doubling:
    """A group of two ranks with the same data. Remembers what it was given."""

    rank, size, wait_s = 0, 2, 0.0

    def __init__(self) -> None:
        self.rows: list[int] = []

    def all_reduce(self, x: Tensor) -> Tensor:
        self.rows.append(x.shape[0])
        return x * 2

    def all_gather(self, x: Tensor, size: int) -> Tensor:
        self.rows.append(x.shape[0])
        return torch.cat([x] * size, -1)

    def broadcast(self, x: Tensor) -> Tensor:
        return x


def test_ranks_meet_between_graphs_and_for_rows_that_are_there() -> None:
    group, capture = Doubling(), RecordingCapture()
    meetings = GraphableCollective(group)

    def meets(met: Any) -> Any:
        def run(x: Tensor, send: Any) -> tuple[Tensor, ...]:
            h = met.all_reduce((x @ WEIGHT).relu())
            send.q(1, h + x)
            return met.all_gather(h.sin(), 2), h

        return run

    graphed, kept, plain = GraphedSlice(meets(meetings), capture, meetings), Kept(), Kept()
    held, wanted = list[tuple[Tensor, ...]](), list[tuple[Tensor, ...]]()
    for seed, rows in enumerate([3, 4, 1, 3]):
        _, x = inputs(rows, seed)
        held.append(graphed(x, kept))
        wanted.append(meets(Doubling())(x, plain))
    torch.testing.assert_close(held, wanted, atol=1e-5, rtol=1e-5)
    sent = [[x for _, _, x in to.sent] for to in (kept, plain)]
    torch.testing.assert_close(sent[0], sent[1], atol=1e-5, rtol=1e-5)
    assert group.rows == [3, 3, 4, 4, 1, 1, 3, 3], "neither padding nor recording is anything to others"
    assert capture.graphs == 4 * len({1, 4})


def test_the_last_slice_sends_nothing() -> None:
    capture = RecordingCapture()
    graphed = GraphedSlice(last_slice, capture)
    for seed, rows in enumerate((4, 3, 4)):
        _, x = inputs(rows, seed)
        torch.testing.assert_close(graphed(x, x * 3)[0], last_slice(x, x * 3)[0])
    assert capture.graphs == 1


def test_padding_is_a_quarter_at_most_and_graphs_are_few() -> None:
    sizes = [padded_rows(rows) for rows in range(1, MAX_GRAPH_ROWS + 1)]
    assert sizes == sorted(sizes)
    for rows, size in enumerate(sizes, 1):
        assert rows <= size == padded_rows(size)
        assert size <= (2 * rows if rows < 8 else max(1.25 * rows, rows + 7))
    assert sizes[-1] == MAX_GRAPH_ROWS
    assert len({*sizes}) == 19
    average = sum(sizes) / sum(range(1, MAX_GRAPH_ROWS + 1))
    assert average < 1.1, "powers of two, as they were: 1.33"


def test_many_rows_run_without_graphs() -> None:
    capture = RecordingCapture()
    graphed = GraphedSlice(last_slice, capture)
    _, x = inputs(MAX_GRAPH_ROWS + 1, 0)
    assert torch.equal(graphed(x, x)[0], last_slice(x, x)[0])
    assert not capture.graphs


def test_what_cannot_be_recorded_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    def looks(x: Tensor, send: Any) -> tuple[Tensor, ...]:
        send.q(0, x)
        if capture.recording:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        return (x + 1,)

    capture = RecordingCapture()
    graphed, kept = GraphedSlice(looks, capture), Kept()
    x = torch.ones(2, 8)
    for _ in range(3):
        assert torch.equal(graphed(x, kept)[0], x + 1)
    assert len(kept.sent) == 3, "no message of a recording has left"
    assert len(caplog.records) == 1
    assert not capture.recording


def first_slice(ids: Tensor, positions: Tensor, send: Any) -> tuple[Tensor, ...]:
    x = (ids + positions) * WEIGHT[:1]
    send.q(0, x.view(-1, 2, 1, 4))
    send.kv(0, x[:, None], x[:, None] * 2)
    return ids, x


def middle_slice(ids: Tensor, x: Tensor, o: Tensor, send: Any) -> tuple[Tensor, ...]:
    h = x @ WEIGHT + o.view(-1, 8)
    send.q(1, h.view(-1, 2, 1, 4))
    send.kv(1, h[:, None], h[:, None] * 2)
    return ids, h.sin()


def slice_of_the_end(ids: Tensor, x: Tensor, o: Tensor) -> tuple[Tensor, ...]:
    return (x.cos() + o.view(-1, 8) + ids,)


SLICES = [first_slice, middle_slice, slice_of_the_end]


def steps(slices: Any, rows: int, send: Any) -> Tensor:
    """A step of all slices, whose attention returns what depends on the layer alone."""
    ids, positions = torch.arange(rows)[:, None], torch.full((rows, 1), 3)
    carry = slices[0](ids, positions, send)
    carry = slices[1](*carry, torch.full((rows, 1, 2, 4), 0.5), send)
    return slices[2](*carry, torch.full((rows, 1, 2, 4), 0.25))[0]


def test_what_is_recorded_at_the_start_serves_every_step() -> None:
    """19 numbers of rows: with nothing at the start, each of them was recorded while sequences decoded. All graphs have
    the inputs and results of one; with memory of their own they had 1,543 rows of each slice.
    """
    capture, kept = RecordingCapture(), Kept()
    program, one = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1, 2, 4)
    graphed = GraphedProgram(SimpleNamespace(slices=SLICES), capture)
    graphed.record(range(1, MAX_GRAPH_ROWS + 9), [program, program], [[one], [one]], kept)
    assert kept.sent == [], "nothing is launched"
    sizes = {padded_rows(rows) for rows in range(1, MAX_GRAPH_ROWS + 1)}
    recorded = capture.graphs
    assert graphed.num_recorded == len(SLICES) * len(sizes)
    assert sum(sizes) == 1543
    floats, numbers = 4 * 8 * 4, 5 * 8  # x, o and two places of results; ids of each slice, positions, a result
    assert graphed.buffers.nbytes == MAX_GRAPH_ROWS * (floats + numbers)
    for rows in (1, 3, 8, 33, 200, MAX_GRAPH_ROWS, 5):
        torch.testing.assert_close(steps(graphed.slices, rows, kept), steps(SLICES, rows, Kept()), atol=1e-5, rtol=1e-5)
    assert capture.graphs == recorded, "nothing is recorded while sequences decode"


class Recordable(Kept):
    """Its messages are parts of graphs."""

    recordable = True

    def launching(self) -> Any:
        return nullcontext(True)


class Joined(Doubling):
    """Its collectives are parts of graphs."""

    recordable = True

    def on_graph_launched(self) -> None: ...


@pytest.mark.parametrize(
    ("client", "group", "stay", "anew"),
    [(Kept, None, 6, 0), (Kept, Doubling, 6, 0), (Recordable, None, 2, 2), (Kept, Joined, 0, 7)],
    ids=["messages of hosts", "collectives of hosts", "messages in graphs", "collectives in graphs"],
)
def test_an_epoch_keeps_the_graphs_that_hold_no_channel(client: Any, group: Any, stay: int, anew: int) -> None:
    """The pause of a recovery recorded all of them again: 19 numbers of rows for each slice. The last one sends
    nothing.
    """
    capture, kept = RecordingCapture(), client()
    program, one = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1, 2, 4)
    graphed = GraphedProgram(SimpleNamespace(slices=SLICES), capture)
    if group is not None:
        graphed.slices = [
            GraphedSlice(inner, capture, *((None, group()) if group is Joined else (GraphableCollective(group()),)))
            for inner in SLICES
        ]
    graphed.record([3, 200], [program, program], [[one], [one]], kept)
    recorded = capture.graphs
    graphed.begin_epoch()
    assert graphed.num_recorded == stay
    steps(graphed.slices, 3, kept)
    assert capture.graphs - recorded == anew
