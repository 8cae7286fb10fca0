"""Helpers of the memory worker's tests: the compute worker's side of a channel, pools of workers, random tokens."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from lamina import netstack
from lamina.config.engine_config import KVOptions
from lamina.config.option import options_of
from lamina.config.partition import PARTITIONS, Partition
from lamina.netstack import Channel, ChannelError, Geometry, Terms
from lamina.ops.attention import get
from lamina.ops.attention.spec import AttentionSpec
from lamina.protocol.control import Connect, TransferPeer
from lamina.protocol.kv_placement import KvLocation
from lamina.protocol.step_plan import (
    BindReply,
    BindRequest,
    Fork,
    JoinRequest,
    LayerShape,
    MessageKey,
    MessageKind,
    PrefillGrant,
    ProtocolError,
    RowRange,
    SequenceOp,
    StepPlan,
    decode_bind_reply,
    encode,
)
from lamina.workers.compute.attention_client import MemoryWorkerClient
from lamina.workers.compute.native_attention_client import open_attention_client
from lamina.workers.epoch_channels import EpochListener
from lamina.workers.memory.memory_worker import MemoryWorker
from lamina.workers.staging import HostStaging

WAIT_S = 90.0
GEOMETRY = Geometry(slots=4, slot_bytes=1 << 20)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class RefusedError(Exception):
    pass


def shape(q_heads: int = 8, kv_heads: int = 4, dim: int = 16, v_dim: int = 16, **spec: float) -> LayerShape:
    sinks, slopes = bool(spec.pop("sinks", 0)), bool(spec.pop("alibi", 0))
    text = AttentionSpec(**{"scale": dim**-0.5, **spec}, sinks=sinks, alibi=slopes).encode()  # type: ignore[arg-type]
    operand = torch.linspace(0.1, 1.0, q_heads).numpy().tobytes()
    return LayerShape(q_heads, kv_heads, dim, v_dim, text, operand if sinks else b"", operand if slopes else b"")


def bind(
    layers: list[LayerShape],
    weights: Sequence[float] = (1.0,),
    worker: int = 0,
    partition: str = "head",
    **fields: object,
) -> BindRequest:
    stored = {name: fields.pop(name) for name in options_of(KVOptions) if name in fields}
    values: dict[str, object] = {
        "worker": worker,
        "partition": PARTITIONS[partition]([x.kv_heads for x in layers], weights),
        "layers": layers,
        "dtype": "float32",
        "kv": KVOptions(**{"block_size": 16, "attention": "native", **stored}),  # type: ignore[arg-type]
        "kv_bytes": 4 << 20,
        "max_rows": 64,
        "max_model_len": 512,
    }
    return BindRequest(**{**values, **fields})  # type: ignore[arg-type]


class Peer:
    """The compute worker's side of one channel."""

    def __init__(self, channel: Channel, bind: BindRequest, join: JoinRequest | None = None) -> None:
        self.channel = channel
        self.bind = bind
        self.send(MessageKey(MessageKind.JOIN if join else MessageKind.BIND), encode(join or bind))
        self.bound: BindReply = decode_bind_reply(self.receive(MessageKey(MessageKind.BOUND)))

    def send(self, key: MessageKey, data: bytes) -> None:
        slot = self.channel.reserve(len(data), timeout_s=WAIT_S)
        slot.data[:] = data
        self.channel.put_signal(slot, key.pack())

    def send_tensors(self, key: MessageKey, *parts: Tensor) -> None:
        self.send(key, b"".join(bytes(p.contiguous().view(torch.uint8).numpy().tobytes()) for p in parts))

    def receive(self, key: MessageKey) -> bytes:
        arrival = self.channel.wait_signal(timeout_s=WAIT_S)
        got, data = MessageKey.unpack(arrival.tag), bytes(arrival.data)
        self.channel.release(arrival)
        if got.kind == MessageKind.REFUSED:
            assert got == key._replace(kind=MessageKind.REFUSED, layer=-1)
            raise RefusedError(data.decode())
        assert got == key
        return data

    def plan(self, plan: StepPlan) -> None:
        self.send(MessageKey(MessageKind.PLAN, plan.step, plan.batch, plan.epoch), encode(plan))


@dataclass
class Pool:
    """Memory workers on threads, and what became of them."""

    fabric: netstack.Fabric = field(default_factory=lambda: netstack.open("loopback", key=b"k" * 32))
    workers: list[MemoryWorker] = field(default_factory=list)
    ends: list[Exception] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)
    doors: list[EpochListener] = field(default_factory=list)
    said: list[object] = field(default_factory=list)  # what workers have reported to their driver

    def join(
        self, first: Peer, replica: int, layers: list[LayerShape] | None = None, name: str = "", **fields: int
    ) -> Peer:
        """One more replica of what ``first`` bound on the newest worker; ``fields`` replace those of its Join."""
        channel = self.knock(-1, first.bind.epoch, name)
        join = JoinRequest(epoch=first.bind.epoch, peer_number=replica, layers=layers or first.bind.layers)
        return Peer(channel, first.bind, replace(join, **fields))

    def connect(self, bind: BindRequest, name: str = "", names: Sequence[str] = ()) -> Peer:
        """A new worker, bound."""
        return Peer(self.open(name, bind.epoch, names), bind)

    def open(
        self,
        name: str = "",
        view: int = 0,
        names: Sequence[str] = (),
        inbound: Geometry = GEOMETRY,
        movers: Sequence[TransferPeer] = (),
    ) -> Channel:
        """The channel to a new worker, which serves ``view`` and lets ``names`` in."""
        self.workers.append(MemoryWorker(report=self.said.append))
        self.doors.append(EpochListener(self.fabric.listen()))
        self.serve(-1, view, names, movers)
        return self.knock(-1, view, name, inbound)

    def serve(self, worker: int, view: int, names: Sequence[str] = (), movers: Sequence[TransferPeer] = ()) -> None:
        """Have a worker serve an epoch, on a thread of its own."""

        def serve() -> None:
            try:
                server.serve(door, Connect(epoch=view, joining_names=list(names), peers=list(movers)))
            except (ChannelError, ProtocolError) as e:
                self.ends.append(e)

        server, door = self.workers[worker], self.doors[worker]
        self.threads.append(threading.Thread(target=serve, daemon=True))
        self.threads[-1].start()

    def knock(self, worker: int, view: int, name: str = "", inbound: Geometry = GEOMETRY) -> Channel:
        """A channel to a worker, of the epoch ``epoch``."""
        url = self.doors[worker].url
        return self.fabric.connect(url, Terms(outbound=GEOMETRY, inbound=inbound, epoch=view, name=name))


SCHEMES = "loopback", "shm"  # whose channels are Python's and native: then so are the layers' loops


@contextmanager
def memory_pool(scheme: str = "loopback") -> Iterator[Pool]:
    """Closed again, with all threads gone, at the end."""
    pool = Pool(netstack.open(scheme, key=b"k" * 32))
    try:
        yield pool
    finally:
        pool.fabric.close()
        for worker in pool.workers:
            worker.abort("the test is over")
        for thread in pool.threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()


def pools(*schemes: str) -> Any:
    """A fixture: a pool over each of these in turn."""

    @pytest.fixture(params=schemes)
    def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
        with memory_pool(request.param) as pool:
            yield pool

    return pool


SPREAD = [  # a partition, and the weights of its memory workers
    ("head", [1.0]),
    ("head", [0.7, 0.3]),
    ("request", [2.0, 1.0]),
    ("token", [1.0, 1.0]),
    ("token", [2.0, 1.0, 1.0]),
]
Placed = TypeVar("Placed", RowRange, PrefillGrant)


def placed(rows: Placed, partition: Partition) -> Placed:
    """In these tests sequences lie in KV shards by their ids."""
    return replace(rows, location=KvLocation(rows.sequence % partition.num_kv_shards))


RUN = 128  # tokens that are drawn at once


@lru_cache(1 << 10)
def drawn(seed: int, sizes: tuple[tuple[int, int], ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q, k, v of RUN tokens in a row, which models that are compared draw in turn. No test writes to them."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(RUN, *size, generator=generator).to(dtype) for size in sizes)


class Model:
    """Sequences of random q, k, v in every layer, by token; runs steps on peers that share the heads."""

    def __init__(self, peers: list[Peer], partition: Partition, layers: list[LayerShape], dtype: str) -> None:
        self.peers, self.layers, self.dtype = peers, layers, DTYPES[dtype]
        self.forks: dict[int, Fork] = {}  # by the sequence that they start
        links = [MemoryWorkerClient(p.channel, p.bind.worker, WAIT_S) for p in peers]
        merging = get(peers[0].bound.backend, torch.device("cpu"), self.dtype)
        self.pool = open_attention_client(
            links, partition, layers, merging, self.dtype, HostStaging(torch.device("cpu"))
        )

    def span(self, sequence: int, first: int, stop: int, layer: int) -> Iterator[tuple[Tensor, ...]]:
        """q, k, v of tokens ``first`` to ``stop``, in parts."""
        fork = self.forks.get(sequence)
        if fork is not None and first < fork.length:
            yield from self.span(fork.source, first, min(stop, fork.length), layer)
            first = fork.length
        x = self.layers[layer]
        sizes = (x.q_heads, x.qk_dim), (x.kv_heads, x.qk_dim), (x.kv_heads, x.v_dim)
        for run in range(first // RUN, -(-stop // RUN)):
            low, high = max(0, first - run * RUN), max(0, stop - run * RUN)
            yield tuple(x[low:high] for x in drawn(hash((sequence, run, layer)) % 2**31, sizes, self.dtype))

    def rows(self, rows: list[RowRange], layer: int) -> tuple[Tensor, Tensor, Tensor]:
        spans = [part for r in rows for part in self.span(r.sequence, r.first, r.first + r.count, layer)]
        q, k, v = (torch.cat(x) for x in zip(*spans, strict=True))
        return q, k, v

    def step(self, step: int, ops: list[SequenceOp], rows: list[RowRange], *, epoch: int = 0) -> list[Tensor]:
        """O of every layer, all heads."""
        partition = self.peers[0].bind.partition
        rows = [placed(r, partition) for r in rows]
        ops = [placed(op, partition) if isinstance(op, PrefillGrant) else op for op in ops]
        self.forks |= {op.sequence: op for op in ops if isinstance(op, Fork)}
        plan, out = StepPlan(step=step, ops=ops, rows=rows, epoch=epoch), []
        self.pool.send_plan(plan)
        self.pool.begin_step(plan)
        for layer in range(len(self.layers) if rows else 0):
            q, k, v = (x.unsqueeze(2) for x in self.rows(rows, layer))
            self.pool.q(layer, q)
            self.pool.kv(layer, k, v)
            out.append(self.pool.o(layer, len(q), self.dtype)[:, 0])
        return out

    def oracle(self, rows: list[RowRange], layer: int) -> Tensor:
        """Dense attention in fp64."""
        shape, out = self.layers[layer], []
        spec, group = AttentionSpec.decode(shape.spec), shape.q_heads // shape.kv_heads
        for row in rows:
            tokens = self.span(row.sequence, 0, row.first + row.count, layer)
            q, k, v = (torch.cat(x).double() for x in zip(*tokens, strict=True))
            score = torch.einsum("thd,shd->hts", q[row.first :], k.repeat_interleave(group, 1)) * spec.scale
            if spec.softcap:
                score = spec.softcap * torch.tanh(score / spec.softcap)
            t, s = torch.arange(row.first, row.first + row.count)[:, None], torch.arange(row.first + row.count)[None]
            if spec.alibi:
                score += torch.frombuffer(bytearray(shape.slopes), dtype=torch.float32).double()[:, None, None] * (
                    s - t
                )
            seen = (s <= t) & (s > t - (spec.window or 1 << 40))
            score = score.masked_fill(~seen, float("-inf"))
            if spec.sinks:
                sinks = torch.frombuffer(bytearray(shape.sinks), dtype=torch.float32).double()
                score = torch.cat([score, sinks[:, None, None].expand(-1, row.count, 1)], -1)
            weight = score.softmax(-1)[..., : row.first + row.count]
            out.append(torch.einsum("hts,shd->thd", weight, v.repeat_interleave(group, 1)))
        return torch.cat(out)


LAYERS = [shape(), shape(window=40), shape(8, 4, 16, 24, softcap=3.0), shape(window=40, sinks=1), shape(8, 2, alibi=1)]


def model(
    pool: Pool,
    weights: Sequence[float] = (1.0,),
    layers: list[LayerShape] = LAYERS,
    partition: str = "head",
    **fields: object,
) -> Model:
    binds = [bind(layers, weights, w, partition, **fields) for w in range(len(weights))]
    return Model([pool.connect(b) for b in binds], binds[0].partition, layers, binds[0].dtype)


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm(dim=-1).max() / want.norm(dim=-1).max())
