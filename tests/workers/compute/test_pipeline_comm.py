"""Replicas in a ring: what a slice made reaches the one that runs the next slice, bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from lamina import netstack
from lamina.netstack import Geometry, PeerFault, Terms
from lamina.protocol.step_plan import New, ProtocolError, RowRange, StepPlan
from lamina.workers.compute.pipeline_comm import PIPELINE_LISTENER_TERMS, PipelineChannels, message_layout

WAIT_S = 60.0


class Row(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype


CUTS = [[Row((1, 24), torch.bfloat16), Row((1,), torch.int64)], [Row((1, 7), torch.float32)]]


@pytest.fixture
def ends() -> Iterator[list[PipelineChannels]]:
    fabric = netstack.open("loopback", key=b"k" * 32)
    names = [f"replica {i}" for i in range(3)]
    listeners = [fabric.listen(reception=replace(PIPELINE_LISTENER_TERMS, name=name)) for name in names]
    found: dict[int, PipelineChannels] = {}

    def close(i: int) -> None:
        found[i] = PipelineChannels(
            fabric, listeners[i], listeners[(i + 1) % 3].url, [names[j % 3] for j in (i - 1, i, i + 1)], CUTS,
            first=i == 0, max_rows=64, num_batches=2,
            start_timeout_s=WAIT_S, step_timeout_s=WAIT_S,
        )  # fmt: skip

    threads = [threading.Thread(target=close, args=(i,)) for i in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(WAIT_S)
    try:
        yield [found[i] for i in range(3)]
    finally:
        fabric.close()


def plan(rows: int, step: int = 0, batch: int = 0) -> StepPlan:
    return StepPlan(step=step, batch=batch, ops=[New(1)], rows=[RowRange(1, 0, rows)])


def carry(index: int, rows: int) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(rows)
    made = [torch.randn(rows, *x.shape, generator=g).mul(100).to(x.dtype) for x in CUTS[index]]
    return torch.arange(rows)[:, None], *made


@pytest.mark.parametrize("index", [0, 1])
def test_every_tensor_of_a_cut_arrives_as_it_was(ends: list[PipelineChannels], index: int) -> None:
    for rows in (1, 3, 64):
        for i in range(3):
            ends[i].pipeline.send(plan(rows), index, carry(index, rows))
            got = ends[(i + 1) % 3].pipeline.receive(plan(rows), index)
            assert all(torch.equal(a, b) for a, b in zip(got, carry(index, rows), strict=True))


def test_what_was_taken_stays_when_the_slot_is_used_again(ends: list[PipelineChannels]) -> None:
    kept = []
    for step in range(9):
        ends[0].pipeline.send(plan(3, step), 1, tuple(x + step for x in carry(1, 3)))
        kept.append(ends[1].pipeline.receive(plan(3, step), 1))
    assert [int(ids[0]) for ids, _ in kept] == list(range(9))


@pytest.mark.parametrize("other", [plan(3, step=1), plan(3, batch=1), plan(4)], ids=["step", "batch", "rows"])
def test_what_is_not_next_is_an_error(ends: list[PipelineChannels], other: StepPlan) -> None:
    ends[0].pipeline.send(plan(3), 0, carry(0, 3))
    with pytest.raises(ProtocolError, match="in place of"):
        ends[1].pipeline.receive(other, 0)


def test_replicas_take_turns_at_the_memory_workers(ends: list[PipelineChannels]) -> None:
    ends[0].let_next_go()
    ends[1].wait_for_previous()
    with pytest.raises(netstack.ChannelTimeout):
        ends[2].previous.wait_signal(timeout_s=0.0)
    ends[1].let_next_go()
    ends[2].wait_for_previous()


def test_tensors_of_a_message_do_not_overlap() -> None:
    places, total = message_layout(
        [Row((3,), torch.bfloat16), Row((1,), torch.int64), Row((5,), torch.float32)], rows=7
    )
    assert [stop - start for start, stop in places] == [42, 56, 140]
    assert all(a[1] <= b[0] and b[0] % 64 == 0 for a, b in pairwise(places))
    assert total == places[-1][1]


def test_another_than_the_replica_before_is_turned_away() -> None:
    """It holds the key; the driver has named another one."""
    fabric = netstack.open("loopback", key=b"k" * 32)
    listeners = [fabric.listen(reception=replace(PIPELINE_LISTENER_TERMS, name=f"replica {i}")) for i in range(2)]
    ended: list[Exception] = []

    def close() -> None:
        try:
            PipelineChannels(
                fabric, listeners[1], listeners[0].url, ["replica 0", "replica 1", "replica 0"], CUTS,
                first=False, max_rows=64, num_batches=2, start_timeout_s=WAIT_S, step_timeout_s=WAIT_S,
            )  # fmt: skip
        except PeerFault as error:
            ended.append(error)

    thread = threading.Thread(target=close)
    thread.start()
    inbox = Geometry(slots=3, slot_bytes=1 << 16)
    fabric.connect(
        listeners[1].url, Terms(outbound=inbox, inbound=inbox, name="third", peer="replica 1"), timeout_s=WAIT_S
    )
    thread.join(WAIT_S)
    assert "'third' in place of 'replica 0'" in str(ended[0])
    fabric.close()
