"""Layer messages from device to device: the bits and the bytes of those that hosts send, and what ends them.

Covers: lamina/workers/compute/device_attention_client.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import memory_peer
import pytest
import torch
from cuda_emulation import EmulatedKernels, emulated, needs_gxx
from memory_peer import GEOMETRY, LAYERS, WAIT_S, Model, Pool, bind, memory_pool, model, shape
from running import eventually
from stand_in_device import CPU, Recorded, StandIn
from stand_in_gpu import StandInGpu, stand_in_gpus
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lamina import netstack
from lamina.config.partition import PARTITIONS, Partition, by_head
from lamina.config.resolve import LayerPath, layer_path
from lamina.netstack import Channel, ChannelAborted, ChannelTimeout, PeerFault, Terms
from lamina.ops.attention import get
from lamina.protocol.step_plan import (
    Free,
    LayerShape,
    MessageKey,
    MessageKind,
    New,
    ProtocolError,
    RowRange,
    SequenceOp,
    StepPlan,
)
from lamina.workers import staging
from lamina.workers.compute import device_attention_client
from lamina.workers.compute.attention_client import AttentionClient, MemoryWorkerClient, RefusedError
from lamina.workers.compute.device_attention_client import DeviceAttentionClient, open_transports
from lamina.workers.cuda_graphs import GraphedSlice
from lamina.workers.device_transport import (
    DESCRIPTOR_WORDS,
    DeviceTransport,
    FusedMessages,
    can_use_device_path,
    message_descriptors,
)
from lamina.workers.memory import kv_store
from lamina.workers.memory.layer_loop.cuda_graph_loop import RoundGraphs
from lamina.workers.staging import HostStaging, Queue

STEPS: list[tuple[list[SequenceOp], list[RowRange]]] = [
    ([New(1), New(2)], [RowRange(1, 0, 40), RowRange(2, 0, 5)]),
    ([], [RowRange(1, 40, 1), RowRange(2, 5, 20)]),
    ([New(3)], [RowRange(2, 25, 1), RowRange(1, 41, 1), RowRange(3, 0, 33)]),
]
DECODING: list[tuple[list[SequenceOp], list[RowRange]]] = [
    ([], [RowRange(1, 3 + n, 1), RowRange(2, 5 + n, 1)]) for n in range(2)
]
Make = Callable[[], StandInGpu]


@pytest.fixture
def gpu() -> Iterator[Make]:
    with stand_in_gpus() as make:
        yield make


@pytest.fixture(params=["cuda", "loopback"])
def scheme(request: pytest.FixtureRequest) -> str:
    """Between processes, and within one."""
    return str(request.param)


@contextmanager
def workers(scheme: str) -> Iterator[Pool]:
    with memory_pool() as pool:
        pool.fabric.close()
        pool.fabric = netstack.open(scheme, key=b"k" * 32, gpu=0)
        yield pool


def connect_to(pool: Pool, url: str, *, kernels: bool) -> Channel:
    return pool.fabric.connect(url, Terms(outbound=GEOMETRY, inbound=GEOMETRY, kernels=kernels))


def direct_model(
    pool: Pool,
    gpu: StandInGpu,
    weights: Sequence[float] = (1.0,),
    layers: list[LayerShape] = LAYERS,
    wait_s: float = WAIT_S,
) -> Model:
    """Its attention is a DeviceAttentionClient."""
    bound = model(pool, weights, layers, device_path=True)
    peers, partition, dtype = bound.peers, bound.peers[0].bind.partition, bound.peers[0].bind.dtype
    connects = [partial(connect_to, pool, x.url) for x in pool.doors[-len(weights) :]]
    links = [MemoryWorkerClient(p.channel, n, wait_s) for n, p in enumerate(peers)]
    wires = open_transports(links, connects, [p.bound for p in peers], gpu, wait_s, LayerPath.DEVICE, graphs=True)
    for peer, link in zip(peers, links, strict=True):
        peer.channel = link.channel  # for plans
    there = Model(peers, partition, layers, dtype)
    itemsize = there.dtype.itemsize
    there.pool = DeviceAttentionClient(there.pool, wires, partition, there.layers, itemsize, gpu)  # type: ignore[assignment]
    return there


@pytest.mark.no_retry
@pytest.mark.parametrize(("weights", "layers"), [([1.0], LAYERS), ([1.0, 1.0], LAYERS), ([3.0, 1.0], LAYERS[:4])])
def test_the_bits_are_those_of_messages_of_hosts(
    weights: list[float], layers: list[LayerShape], gpu: Make, scheme: str
) -> None:
    with memory_pool() as hosts, workers(scheme) as pool:
        wanted, mine = model(hosts, weights, layers), gpu()
        there = direct_model(pool, mine, weights, layers)
        for number, (ops, rows) in enumerate(STEPS):
            a, b = wanted.step(number, ops, rows), there.step(number, ops, rows)
            before = mine.num_waits
            there.pool.check_errors()
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True)), number
            assert mine.num_waits == before + len(weights)
        assert mine.num_waits == len(STEPS) * len(weights), (
            "a wait in each step for each memory worker, none in a layer"
        )


class Copies(TorchDispatchMode):
    """Counts the copies of this thread, each of which a GPU launches."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten.clone, torch.ops.aten.copy_)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("scheme", "launches"), [("cuda", 3), ("loopback", 14)])
def test_a_layer_is_three_launches_however_many_memory_workers(scheme: str, launches: int, gpu: Make) -> None:
    """Q, K and V, and O: each is one launch for both memory workers, straight from and to all heads. With a launch for
    each message, as between threads, and copies of each worker's heads, they are 14.
    """
    with workers(scheme) as pool:
        mine, layers = gpu(), [shape(), shape()]
        there = direct_model(pool, mine, [1.0, 1.0], layers)
        counts = list[int]()
        for number, (ops, rows) in enumerate(STEPS):
            plan = StepPlan(step=number, batch=0, ops=ops, rows=rows)
            there.pool.send_plan(plan)
            there.pool.begin_step(plan)
            for layer in range(len(layers)):
                q, k, v = (x.unsqueeze(2) for x in there.rows(rows, layer))
                before = mine.launches
                with Copies() as copies:
                    there.pool.q(layer, q)
                    there.pool.kv(layer, k, v)
                    there.pool.o(layer, len(q), there.dtype)
                counts.append(mine.launches - before + copies.count)
            there.pool.check_errors()
        assert counts == [launches] * len(counts)


@needs_gxx
@pytest.mark.long
def test_a_layer_is_six_launches_of_a_memory_worker(gpu: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three messages, attention over what is stored and what is new, and the write of K and V; a plan in a step, too.
    The kernels are the product's, emulated.
    """
    made, backend, layers = list[StandInGpu](), emulated(torch.float32), [shape(4, 2, 64, 64), shape(4, 2, 64, 64)]
    kernels = backend.kernels
    assert isinstance(kernels, EmulatedKernels)
    for module in (kv_store, memory_peer):
        monkeypatch.setattr(module, "get", lambda *asked: backend)
    with workers("cuda") as pool:
        mine = gpu()
        monkeypatch.setitem(staging.KINDS, "cpu", lambda device: (made.append(gpu()), made[-1])[1])
        there = direct_model(pool, mine, [1.0], layers)
        prompts: list[RowRange] = [RowRange(1, 0, 3), RowRange(2, 0, 5)]
        for number, (ops, rows) in enumerate([([New(1), New(2)], prompts), *DECODING]):
            messages, computed = sum(x.launches for x in made), kernels.launched.copy()
            found = there.step(number, ops, rows)
            there.pool.check_errors()
            for layer, o in enumerate(found):
                torch.testing.assert_close(o, there.oracle(rows, layer).float(), atol=1e-4, rtol=1e-4)
            written = (number + 1) * len(layers)  # K and V of the last layer are written after its O has left
            assert eventually(lambda count=written: kernels.launched["lamina_append"] == count, 30.0)
        kernels.launched.subtract(computed)
        each = {"messages": sum(x.launches for x in made) - messages, **kernels.launched}
        assert each.pop("lamina_plan") <= 2 * len(layers)
        assert {name: count / len(layers) for name, count in each.items() if name != "tensor"} == {
            "messages": 3, "lamina_attend": 2, "lamina_append": 1,
        }  # fmt: skip


def test_a_launch_never_has_two_messages_of_a_channel(gpu: Make) -> None:
    """They would have no order, and the lock of a channel is entered once in a launch."""
    with workers("cuda") as pool:
        mine = gpu()
        wire = direct_model(pool, mine, [1.0], [shape()]).pool.transports[0]  # type: ignore[attr-defined]
        line = torch.zeros(DESCRIPTOR_WORDS, dtype=torch.int64)
        shares = [(wire, line, [range(32)]), (wire, line, [range(32, 64)])]
        with pytest.raises(ValueError, match="one message for each channel"):
            FusedMessages(MessageKind.Q, shares, mine)


class Sent:
    """The memory workers' ends of channels, which take what comes by the host's calls."""

    def __init__(
        self, gpu: StandInGpu, layers: list[LayerShape], weights: Sequence[float], scheme: str = "cuda"
    ) -> None:
        self.fabric = netstack.open(scheme, key=b"k" * 32, gpu=0)
        partition = by_head([x.kv_heads for x in layers], weights)
        wires, links = list[DeviceTransport](), list[MemoryWorkerClient]()
        self.channels: list[tuple[Channel, Channel]] = []
        for worker in range(len(weights)):
            pairs = [self._connect() for _ in range(2)]
            wires.append(DeviceTransport(pairs[0][0], gpu, WAIT_S))
            links.append(MemoryWorkerClient(pairs[1][0], worker, WAIT_S))
            self.channels.append((pairs[0][1], pairs[1][1]))
        pool = AttentionClient(links, partition, layers, get("reference", CPU, torch.float32))
        self.by_host: AttentionClient = pool
        self.by_kernels = DeviceAttentionClient(pool, wires, partition, layers, 4, gpu)

    def _connect(self) -> tuple[Channel, Channel]:
        listener = self.fabric.listen()
        with ThreadPoolExecutor(1) as threads:
            accepted = threads.submit(listener.accept, timeout_s=WAIT_S)
            connected = self.fabric.connect(listener.url, Terms(outbound=GEOMETRY, inbound=GEOMETRY))
            return connected, accepted.result(WAIT_S)

    def check(self) -> None:
        """The next message of both ways is the same, at every memory worker."""
        for both in self.channels:
            a, b = (channel.wait_signal(timeout_s=WAIT_S) for channel in both)
            assert (a.tag, bytes(a.data)) == (b.tag, bytes(b.data)), MessageKey.unpack(a.tag)
            for channel, arrival in zip(both, (a, b), strict=True):
                channel.release(arrival)


WEIGHT = torch.randn(8 * 16, generator=torch.Generator().manual_seed(1))


def slice_of_a_model(ids: Tensor, x: Tensor, send: Any) -> tuple[Tensor, ...]:
    """Heads of q lie apart, as of a model whose rows have several tokens; v is not of the width of k."""
    h = x.repeat(1, 16) * WEIGHT
    q = torch.relu(h).view(-1, 16, 8).transpose(1, 2)
    send.q(1, q[:, :, None])
    k, v = h[:, :64].view(-1, 4, 1, 16), (h[:, :96] * 2).view(-1, 4, 1, 24)
    send.kv(1, k + ids[:, :, None, None], v)
    return ids, h.sin()


@pytest.mark.parametrize("weights", [[1.0], [1.0, 1.0], [3.0, 1.0]])
def test_a_graph_sends_the_bytes_that_hosts_send(weights: list[float]) -> None:
    """The graph has any number of rows, of two batches in turn: what differs is read from the device's memory."""
    layers = [shape(), shape(8, 4, 16, 24)]
    with stand_in_gpus(graphs=True) as make:
        gpu = make()
        sent, capture = Sent(gpu, layers, weights), gpu.graph_capture()
        assert capture is not None
        graphed = GraphedSlice(slice_of_a_model, capture)
        for step, rows in enumerate([1, 3, 4, 2, 3, 8, 5, 1, 7]):
            g = torch.Generator().manual_seed(step)
            inputs = torch.randint(0, 9, (rows, 1), generator=g), torch.randn(rows, 8, generator=g)
            plan = StepPlan(step=step, batch=step % 2, ops=[], rows=[RowRange(1, 0, rows)])
            for attention in (sent.by_kernels, sent.by_host):
                attention.begin_step(plan)
            launched = gpu.launches
            found = graphed(*inputs, sent.by_kernels)
            assert gpu.launches == launched, "all of the messages are parts of graphs"
            wanted = slice_of_a_model(*inputs, sent.by_host)
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
            for _ in ("q", "kv"):
                sent.check()
        assert capture.graphs == len({1, 2, 4, 8}), "no graph ends where a message leaves"
        sent.fabric.close()


def test_no_graph_is_launched_over_a_channel_that_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that it would use is given back. The slice's caller hears of it where it settles."""
    with stand_in_gpus(graphs=True) as make:
        gpu = make()
        sent, capture = Sent(gpu, [shape(), shape(8, 4, 16, 24)], [1.0, 1.0]), gpu.graph_capture()
        assert capture is not None
        graphed, replays = GraphedSlice(slice_of_a_model, capture), list[int]()
        plan, inputs = StepPlan(step=0, ops=[], rows=[RowRange(1, 0, 2)]), (torch.zeros(2, 1).long(), torch.zeros(2, 8))
        sent.by_kernels.begin_step(plan)
        graphed(*inputs, sent.by_kernels)
        replay = Recorded.replay
        monkeypatch.setattr(Recorded, "replay", lambda graph: (replays.append(1), replay(graph))[1])
        graphed(*inputs, sent.by_kernels)
        assert len(replays) == 1
        sent.by_kernels.transports[1].channel.close()
        graphed(*inputs, sent.by_kernels)
        assert len(replays) == 1
        with pytest.raises(ChannelAborted):
            sent.by_kernels.check_errors()
        sent.fabric.close()


def test_no_round_is_launched_over_a_channel_that_is_closed() -> None:
    steps, done, is_open = [SimpleNamespace(graph_key=(1, 1), copy_inputs_from=lambda other: None)], list[str](), [True]
    graph = SimpleNamespace(replay=lambda: done.append("replayed"))
    capture = SimpleNamespace(begin=lambda: None, end=lambda: graph)
    rounds: Any = RoundGraphs(capture, lambda *_: None, lambda: nullcontext(is_open[0]))
    assert rounds.run(steps, [torch.zeros(1)]) == steps, "piece by piece at first"
    for n in range(3):
        is_open[0] = n < 2
        assert rounds.run(steps, [torch.zeros(1)]) == []
    assert done == ["replayed"] * 2


@pytest.mark.parametrize(
    ("fields", "offered"),
    [({"device_path": True}, True), ({}, False), ({"device_path": True, "prefill_workers": 1}, False),
     ({"device_path": True, "replicas": 2}, False),
     ({"device_path": True, "weights": [1.0, 1.0], "partition": "token"}, False)],
)  # fmt: skip
def test_a_memory_worker_offers_what_it_can(fields: dict[str, Any], offered: bool, gpu: Make, scheme: str) -> None:
    with workers(scheme) as pool:
        assert pool.connect(bind(LAYERS, **fields)).bound.device_path is offered


def test_over_other_transports_and_on_other_devices_hosts_send(
    gpu: Make, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = gpu()
    monkeypatch.setattr(other, "current_queue", lambda: Queue(1, 0))
    with workers(scheme) as pool, memory_pool() as hosts:
        assert not hosts.connect(bind(LAYERS, device_path=True)).bound.device_path
        here = pool.open()
        assert can_use_device_path(here, gpu())
        assert not can_use_device_path(here, other), "a channel of another GPU"
        assert not can_use_device_path(here, StandIn())
        assert not can_use_device_path(here, HostStaging(CPU))
        here.close()


def test_plans_go_by_a_channel_for_hosts(gpu: Make, scheme: str) -> None:
    """Not by one that was made for kernels, as a transport that chooses may have a nearer way for hosts."""
    with workers(scheme) as pool:
        bound = model(pool, (1.0,), LAYERS, device_path=True)
        (peer,), asked = bound.peers, list[bool]()

        def connect(*, kernels: bool) -> Channel:
            asked.append(kernels)
            return connect_to(pool, pool.doors[0].url, kernels=kernels)

        link, path = MemoryWorkerClient(peer.channel, 0, WAIT_S), LayerPath.DEVICE
        (wire,) = open_transports([link], [connect], [peer.bound], gpu(), WAIT_S, path, graphs=True)
        assert asked == [False]
        assert wire.channel is peer.channel
        assert link.channel is not peer.channel


class Lanes:
    """Stands in for a DeviceSide whose calls are recorded by the lane's name, with the bytes that they may have at
    most.
    """

    recordable = True

    def __init__(self, calls: list[tuple[str, str, int]], name: str = "first") -> None:
        self._calls, self._name = calls, name

    @property
    def bulk(self) -> Lanes:
        return Lanes(self._calls, "bulk")

    def __getattr__(self, call: str) -> Any:
        return lambda *arguments: self._calls.append((self._name, call, arguments[-1]))


def test_k_and_v_go_by_the_lane_of_bulk_and_nothing_else(gpu: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """On both sides, in one order: what comes on either is counted there."""
    calls = list[tuple[str, str, int]]()
    with two_wires(gpu, "cuda") as (wire, _, here):
        monkeypatch.setattr(wire, "device_side", Lanes(calls))
        line, tensor = here.to_device(message_descriptors(here, [(MessageKey(MessageKind.Q), 4, 0)]))[0], torch.zeros(4)
        for kind in (MessageKind.Q, MessageKind.KV, MessageKind.O):
            wire.send(kind, line, tensor)
            wire.receive(kind, line, tensor)
        wire.send(MessageKind.KV, line, tensor, tensor)
        monkeypatch.undo()
    lanes = ["first"] * 2 + ["bulk"] * 2 + ["first"] * 2
    assert calls == [*zip(lanes, ["send", "receive_due"] * 3, [16] * 6, strict=True), ("bulk", "send_two", 32)]


def test_where_one_memory_worker_cannot_hosts_send_to_all(
    gpu: Make, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with memory_pool() as hosts, workers(scheme) as pool:
        binds = [bind(LAYERS, [1.0, 1.0], w, device_path=True) for w in range(2)]
        peers = [pool.connect(binds[0])]
        monkeypatch.setitem(staging.KINDS, "cpu", StandIn)
        peers.append(pool.connect(binds[1]))
        bounds, asked = [p.bound for p in peers], list[bool]()
        assert [b.device_path for b in bounds] == [True, False]

        def connect(url: str, *, kernels: bool) -> Channel:
            asked.append(kernels)
            return connect_to(pool, url, kernels=kernels)

        links = [MemoryWorkerClient(p.channel, n, WAIT_S) for n, p in enumerate(peers)]
        connects = [partial(connect, x.url) for x in pool.doors]
        assert open_transports(links, connects, bounds, gpu(), WAIT_S, LayerPath.HOST, graphs=True) == []
        assert asked == [False], "one for hosts, in place of one that may have been for kernels"
        with pytest.raises(ChannelAborted):
            peers[0].channel.reserve(8, timeout_s=0)
        assert links[1].channel is peers[1].channel
        for peer, link in zip(peers, links, strict=True):
            peer.channel = link.channel
        there, wanted = Model(peers, binds[0].partition, LAYERS, "float32"), model(hosts, [1.0, 1.0])
        for number, (ops, rows) in enumerate(STEPS):
            a, b = wanted.step(number, ops, rows), there.step(number, ops, rows)
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def path(partition: Partition, replicas: int = 1, prefill_workers: int = 0, *, kernels: bool = True) -> str:
    return layer_path(partition, replicas, prefill_workers, kernels=kernels).name


@pytest.mark.parametrize("name", ["token", "request"])
def test_messages_of_some_rows_are_for_hosts(name: str) -> None:
    assert path(PARTITIONS[name]([4], [1.0, 1.0], 1)) == "HOST"
    assert path(PARTITIONS[name]([4], [1.0], 1)) == "DEVICE"
    assert path(by_head([3], [1.0, 1.0], 1)) == "HOST"


def test_messages_of_several_senders_are_for_hosts() -> None:
    heads = by_head([4], [1.0, 1.0], 1)
    assert path(heads) == "DEVICE"
    assert path(heads, replicas=2) == "HOST"
    assert path(heads, prefill_workers=1) == "HOST"


def test_where_kernels_cannot_use_the_channels_hosts_send() -> None:
    assert path(by_head([4], [1.0, 1.0], 1), kernels=False) == "HOST"


def test_a_refused_step_ends_what_kernels_wait_for_and_says_why(gpu: Make, scheme: str) -> None:
    with workers(scheme) as pool:
        there = direct_model(pool, gpu())
        there.step(0, *STEPS[0])
        there.pool.check_errors()
        there.step(1, [Free(99)], [RowRange(1, 40, 1)])
        with pytest.raises(RefusedError, match="99"):
            there.pool.check_errors()


def test_a_memory_worker_that_dies_in_a_layer_is_named(gpu: Make, scheme: str) -> None:
    with workers(scheme) as pool:
        there, plan = direct_model(pool, gpu()), StepPlan(step=0, ops=[New(1)], rows=[RowRange(1, 0, 3)])
        there.pool.send_plan(plan)
        there.pool.begin_step(plan)
        q, *_ = there.rows(plan.rows, 0)
        there.pool.q(0, q.unsqueeze(2))
        pool.workers[0].abort("out of heads")
        there.pool.o(0, 3, torch.float32)  # at once, with nothing in it
        with pytest.raises(PeerFault, match=f"{pool.doors[0].url}.*out of heads"):
            there.pool.check_errors()


def test_a_compute_worker_that_dies_frees_its_memory_worker(gpu: Make, scheme: str) -> None:
    with workers(scheme) as pool:
        there, plan = direct_model(pool, gpu()), StepPlan(step=0, ops=[New(1)], rows=[RowRange(1, 0, 3)])
        there.pool.send_plan(plan)
        pool.fabric.close()
        pool.threads[0].join(WAIT_S)
        assert [type(e) for e in pool.ends] in ([PeerFault], [ChannelAborted])


@pytest.mark.parametrize("wrong", ["kind", "step", "layer", "length"])
def test_a_message_that_is_not_the_next_one_ends_the_memory_worker(
    wrong: str, gpu: Make, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no O that was computed from it leaves."""

    def spoilt(staging: Any, messages: Sequence[tuple[MessageKey, int, int]]) -> Tensor:
        found = list(messages)
        key, first, second = found[3]
        other = {"kind": {"kind": MessageKind.KV}, "step": {"step": 7}, "layer": {"layer": 0}}.get(wrong, {})
        found[3] = key._replace(**other), first - 4 * (wrong == "length"), second
        return message_descriptors(staging, found)

    with workers(scheme) as pool:
        there = direct_model(pool, gpu())
        monkeypatch.setattr(device_attention_client, "message_descriptors", spoilt)
        there.step(0, *STEPS[0])
        pool.threads[0].join(WAIT_S)
        (end,) = pool.ends
        assert isinstance(end, ProtocolError)
        assert "in place of MessageKey(kind=4, step=0, batch=0, epoch=0, layer=1)" in str(end)
        with pytest.raises(PeerFault, match="in place of"):
            there.pool.check_errors()


@contextmanager
def two_wires(
    gpu: Make, scheme: str, wait_s: float = WAIT_S
) -> Iterator[tuple[DeviceTransport, DeviceTransport, StandInGpu]]:
    """The two ends of one channel: they send and receive."""
    here = gpu()
    sent = Sent(here, [shape()], [1.0], scheme)
    (ours, theirs) = sent.by_kernels.transports[0], sent.channels[0][0]
    yield ours, DeviceTransport(theirs, here, wait_s), here
    sent.fabric.close()


def test_another_message_than_the_one_that_is_due_goes_nowhere(gpu: Make, scheme: str) -> None:
    with two_wires(gpu, scheme) as (a, b, here):
        keys, target = [MessageKey(MessageKind.O, step=n) for n in range(3)], torch.zeros(4)
        going = here.to_device(message_descriptors(here, [(key, 16, 0) for key in keys]))
        for n in range(3):
            a.send(MessageKind.O, going[n], torch.full((4,), n + 1.0))
        b.receive(MessageKind.O, going[0], target)
        b.check_errors()
        b.receive(MessageKind.O, going[2], target)
        b.receive(MessageKind.O, going[1], target)  # too late
        assert (target == 1).all()
        with pytest.raises(ProtocolError, match=r"step=1.* of 16 bytes in place of .*step=2.* of 16 bytes"):
            b.check_errors()


def test_a_kernel_waits_no_longer_than_it_may(gpu: Make, scheme: str) -> None:
    with two_wires(gpu, scheme, wait_s=0.05) as (_, b, _here):
        b.receive(MessageKind.Q, torch.zeros(6, dtype=torch.int64), torch.zeros(4))
        with pytest.raises(ChannelTimeout, match="within its time"):
            b.check_errors()
