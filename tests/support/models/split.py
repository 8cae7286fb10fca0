"""Runs slices here and attention in real memory worker processes, which are started once and serve model after
model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from lamina import netstack
from lamina.config.engine_config import KVOptions
from lamina.config.partition import by_head
from lamina.converter import SlicedProgram
from lamina.executor.launchers.local import ProcessWorker
from lamina.models.convert import layer_shapes
from lamina.ops import attention
from lamina.protocol.control import (
    Connect,
    ControlLink,
    Failed,
    MemoryReady,
    StartMemory,
    Stats,
    StatsRequest,
    Stop,
)
from lamina.protocol.kv_placement import KvLocation
from lamina.protocol.step_plan import BindRequest, New, RowRange, StepPlan
from lamina.workers.compute.attention_client import AttentionClient, MemoryWorkerClient
from lamina.workers.compute.kv_capacity import inbox_geometries

TIMEOUT_S = 60.0
MAX_ROWS = 64
MAX_LEN = 256
MAX_SEQUENCES = 1000


class Row(Protocol):
    """One token of one sequence."""

    @property
    def sequence(self) -> int: ...
    @property
    def position(self) -> int: ...
    @property
    def token(self) -> int: ...


class MemoryWorkers:
    """Memory worker processes of one transport; ``connect`` binds them to a model."""

    def __init__(self, scheme: str, roles: Sequence[str]) -> None:
        self.key = os.urandom(32)
        self.fabric = netstack.open(scheme, key=self.key)
        self._workers = [ProcessWorker(role, i) for i, role in enumerate(roles)]
        self._controls = [ControlLink(w.sock, MemoryReady | Stats | Failed) for w in self._workers]
        for control in self._controls:
            control.send(StartMemory(scheme=scheme, address="", key=self.key, threads=1))
        self.urls = [c.recv(TIMEOUT_S).url for c in self._controls]
        self._view = 0

    @property
    def pids(self) -> list[int]:
        return [w.pid for w in self._workers]

    def stats(self) -> list[dict[str, float]]:
        for control in self._controls:
            control.send(StatsRequest())
        return [c.recv(TIMEOUT_S).values for c in self._controls]

    def close(self) -> None:
        self.fabric.close()
        for control, worker in zip(self._controls, self._workers, strict=True):
            control.send(Stop())
            control.close()
            worker.join(10.0)

    @contextmanager
    def connect(
        self, program: SlicedProgram, *, num_workers: int, backend: str = "native", **options: Any
    ) -> Iterator[AttentionClient]:
        """The first ``num_workers`` of them, bound to ``program``, with attention by ``backend``; ``options`` replace
        fields of the Bind.
        """
        layers = layer_shapes(program)
        partition = by_head([s.kv_heads for s in layers], [1.0] * num_workers)
        dtype = program.calls[0].q.dtype
        outbound, inbound = inbox_geometries(layers, partition, dtype.itemsize, max_rows=MAX_ROWS, max_len=MAX_LEN)
        links, self._view = [], self._view + 1
        try:
            for worker, (url, control) in enumerate(zip(self.urls[:num_workers], self._controls, strict=False)):
                control.send(Connect(epoch=self._view))
                channel = self.fabric.connect(
                    url, netstack.Terms(outbound=outbound, inbound=inbound, epoch=self._view), timeout_s=TIMEOUT_S
                )
                links.append(MemoryWorkerClient(channel, worker, TIMEOUT_S))
                fields = {
                    "epoch": self._view, "worker": worker, "partition": partition, "layers": layers,
                    "dtype": str(dtype)[6:], "kv": KVOptions(block_size=16, attention=backend),
                    "kv_bytes": 16 << 20, "max_rows": MAX_ROWS, "max_model_len": MAX_LEN, **options,
                }  # fmt: skip
                links[-1].bind(BindRequest(**fields))
            yield AttentionClient(links, partition, layers, attention.get(backend, torch.device("cpu"), dtype))
        finally:
            for link in links:
                link.channel.close()


class SplitRunner:
    """Slices in this process, with attention in ``pool``."""

    def __init__(self, program: SlicedProgram, pool: AttentionClient) -> None:
        self._program, self._pool = program, pool
        self._view = pool.clients[0].channel.epoch
        self._known: set[int] = set()
        self._step = 0

    def step(self, rows: Sequence[Row]) -> Tensor:
        """Store the K, V of the rows and return their logits [rows, vocabulary]."""
        parts: dict[int, list[int]] = {}
        for row in rows:
            # A model of the same shape may have been here: its sequences are still there.
            parts.setdefault(self._view * MAX_SEQUENCES + row.sequence, []).append(row.position)
        ops = [New(s) for s in parts if s not in self._known]
        self._known |= set(parts)
        lanes = self._pool.placement.num_kv_shards  # in turn, so that all workers have something
        listed = [RowRange(s, p[0], len(p), KvLocation(s % lanes)) for s, p in parts.items()]
        plan = StepPlan(epoch=self._view, step=self._step, ops=list(ops), rows=listed)
        self._step += 1
        self._pool.send_plan(plan)
        self._pool.begin_step(plan)
        first, *others = self._program.slices
        carry = first(torch.tensor([[r.token] for r in rows]), torch.tensor([[r.position] for r in rows]), self._pool)
        for layer, slice_ in enumerate(others):
            send = () if slice_ is others[-1] else (self._pool,)
            o = self._pool.o(layer, len(rows), self._program.calls[layer].out.dtype)
            carry = slice_(*carry, o, *send)
        return carry[0][:, -1]
