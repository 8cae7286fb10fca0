"""Messages of a device of its own memory: they are whole when they leave, and nothing overwrites them in flight.

Covers: lamina/workers/compute/staged_comm.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from memory_peer import Pool, error, model, pools
from stand_in_device import CPU, StandIn, stand_in_for_cpu
from torch import Tensor

from lamina.config.partition import by_head
from lamina.ops.attention import get
from lamina.ops.attention.spec import AttentionSpec
from lamina.protocol.codec import TensorSpan
from lamina.protocol.step_plan import LayerShape, MessageKey, New, RowRange, SequenceOp, StepPlan
from lamina.workers.compute.attention_client import AttentionClient
from lamina.workers.compute.staged_comm import StagedCollective, StagedPipeline
from lamina.workers.staging import DeviceStaging, HostStaging

STEPS: list[tuple[list[SequenceOp], list[RowRange]]] = [
    ([New(1), New(2)], [RowRange(1, 0, 40), RowRange(2, 0, 5)]),
    ([], [RowRange(1, 40, 1), RowRange(2, 5, 20)]),
    ([New(3)], [RowRange(2, 25, 1), RowRange(1, 41, 1), RowRange(3, 0, 33)]),
]
pool = pools("loopback")


def test_the_host_shares_and_a_device_copies() -> None:
    x, data = torch.arange(6.0), memoryview(bytearray(8))
    host, there = HostStaging(CPU), DeviceStaging(CPU)
    assert host.to_device(x) is x
    assert host.to_host(x)[0] is x
    host.device_buffer(data)[3] = 7
    assert data[3] == 7
    assert not host.is_separate
    assert there.to_device(x).data_ptr() != x.data_ptr()
    room = there.device_buffer(data)
    room.fill_(9)
    assert data[0] == 0
    there.copy_out(data, room)
    assert bytes(data) == b"\x09" * 8
    assert there.num_waits == 1


def test_what_comes_down_is_there_after_one_wait_for_all() -> None:
    device = StandIn()
    x, y = torch.randn(3, 4).t(), torch.arange(5)
    found = device.to_host(x, y)
    assert torch.equal(found[0], x)
    assert torch.equal(found[1], y)
    assert device.num_waits == 1
    assert device.to_device(torch.empty(0, 3)).shape == (0, 3)


def test_the_stand_in_finds_out_who_does_not_wait_and_who_overwrites() -> None:
    device = StandIn()
    late = device.empty_host(2, dtype=torch.float32)
    device.copy(late, torch.ones(2))
    assert late.isnan().all()
    sent = device.empty_host(2, dtype=torch.float32).fill_(1.0)
    device.to_device(sent)
    sent.fill_(2.0)
    with pytest.raises(AssertionError, match="on its way up"):
        device.wait()


def test_memory_that_is_not_pinned_may_be_overwritten_at_once() -> None:
    device, x = StandIn(), torch.ones(2)
    there = device.to_device(x)
    x.fill_(2.0)
    device.wait()
    assert (there == 1.0).all()


@pytest.mark.no_retry
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("partition", ["head", "token", "request"])
def test_a_memory_worker_on_a_device_gives_the_same_bits(
    pool: Pool, dtype: str, kv_cache_dtype: str, partition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"dtype": dtype, "kv_cache_dtype": kv_cache_dtype}
    host = model(pool, [1.0, 1.0], partition=partition, **options)
    with stand_in_for_cpu(monkeypatch) as made:
        there = model(pool, [1.0, 1.0], partition=partition, **options)
    assert len(made) == 2
    for number, (ops, rows) in enumerate(STEPS):
        outs = [m.step(number, ops, rows) for m in (host, there)]
        for layer, (a, b) in enumerate(zip(*outs, strict=True)):
            assert torch.equal(a, b), (number, layer)
            assert kv_cache_dtype != "auto" or error(b, there.oracle(rows, layer)) < 1e-2
    assert all(0 < device.num_waits <= 2 * len(STEPS) * len(host.layers) for device in made)


class Kept:
    """Takes what is sent, as it is when it comes."""

    send_s = wait_s = 1.5
    rank, size = 0, 2

    def __init__(self) -> None:
        self.sent: list[Tensor] = []

    def send_plan(self, plan: StepPlan) -> None: ...
    def prepare(self, plan: StepPlan) -> None: ...

    def begin_step(self, plan: StepPlan) -> None: ...

    def q(self, layer: int, q: Tensor) -> None:
        self.sent.append(q.clone())

    def kv(self, layer: int, k: Tensor, v: Tensor) -> None:
        self.sent += [k.clone(), v.clone()]

    def o(self, layer: int, num_rows: int, dtype: torch.dtype) -> Tensor:
        return torch.full((num_rows, 1), float(layer), dtype=dtype)

    def outputs(self, exchange: int, num_rows: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return (self.o(exchange, num_rows, dtype),)

    def check_errors(self) -> None:
        self.sent.clear()

    def send(self, plan: StepPlan, index: int, carry: tuple[Tensor, ...]) -> None:
        self.sent += [x.clone() for x in carry]

    def receive(self, plan: StepPlan, index: int) -> tuple[Tensor, ...]:
        return tuple(self.sent)

    def all_reduce(self, x: Tensor) -> Tensor:
        return x * 2

    def all_gather(self, x: Tensor, size: int) -> Tensor:
        return torch.cat([x] * size, -1)

    def broadcast(self, x: Tensor) -> Tensor:
        return x


PLAN = StepPlan(step=0, ops=[], rows=[])


class SentTensors:
    """A memory worker's link, which keeps what is sent as it is when it comes; its O is of sevens."""

    worker = 0

    def __init__(self) -> None:
        self.sent: list[Tensor] = []

    def send_tensors(self, key: MessageKey, nbytes: int, parts: Sequence[tuple[Tensor, TensorSpan]]) -> None:
        self.sent += [x.clone() for x, _ in parts]

    def receive(self, key: MessageKey, take: Callable[[memoryview], None], nbytes: int) -> None:
        take(memoryview(bytearray(torch.full((nbytes // 4,), 7.0).numpy().tobytes())))


def test_messages_are_whole_when_they_are_handed_on() -> None:
    """The messages of a layer come from a device: no replay of a graph may overwrite one in flight."""
    device, link, layer = StandIn(), SentTensors(), LayerShape(4, 2, 8, 8, AttentionSpec(scale=1.0).encode())
    backend = get("reference", CPU, torch.float32)
    pool = AttentionClient([link], by_head([2], [1.0]), [layer], backend, device)  # type: ignore[list-item]
    pool.begin_step(StepPlan(step=0, ops=[New(1)], rows=[RowRange(1, 0, 3)]))
    q, k, v = (torch.randn(3, heads, 1, 8) for heads in (4, 2, 2))
    first = [x.clone() for x in (q, k, v)]
    pool.q(0, q)
    q.fill_(0.0)
    pool.kv(0, k, v)
    for x in (k, v):
        x.fill_(0.0)
    assert all(torch.equal(a.flatten(), b.flatten()) for a, b in zip(link.sent, first, strict=True))
    assert device.num_waits == 2
    assert torch.equal(pool.o(0, 3, torch.float32), torch.full((3, 1, 4, 8), 7.0))
    assert device.num_waits == 2, "O needs none"


def test_the_ring_and_the_ranks_of_a_device() -> None:
    device, kept = StandIn(), Kept()
    ids, x = torch.arange(3)[:, None], torch.randn(3, 8)
    ring, group = StagedPipeline(kept, device), StagedCollective(kept, device)
    ring.send(PLAN, 0, (ids, x))
    got = ring.receive(PLAN, 0)
    assert torch.equal(got[0], ids)
    assert torch.equal(got[1], x)
    assert device.num_waits == 1
    assert torch.equal(group.all_reduce(x), x * 2)
    assert torch.equal(group.all_gather(x, 2), torch.cat([x, x], -1))
    assert group.broadcast(ids) is ids
    assert (group.rank, group.size, device.num_waits) == (0, 2, 3)
