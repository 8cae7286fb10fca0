"""Start of a prefill worker: load, cut, join the memory workers; then serve chunks of prompts."""

from __future__ import annotations

import socket
from typing import Any

import torch
from msgspec import structs

from lamina import attention
from lamina.attention import name_of
from lamina.kv.stored import stored_dtype
from lamina.memory.store import Store, available_bytes
from lamina.protocol.control import ComputeReady, Connect, LinkClosedError
from lamina.protocol.partition import by_head
from lamina.protocol.plan import Bind, Bound, Join
from lamina.workers.devices import CPU

from .capacity import kv_geometries, store_bytes
from .emulated import emulated
from .links import MemoryLink
from .memory_pool import MemoryPool
from .model_server import Cut, ModelServer, serve
from .prefill import OwnAttention, PrefillWorker
from .staged import stage_attention
from .worker import ComputeWorker


def serve_prefill(sock: socket.socket, module: Any = None) -> None:
    """Serve one driver until its link ends. ``module``: the model itself, where the driver is this process."""
    serve(_Server, sock, module)


class _Server(ModelServer):
    role = "prefill worker"

    def prepare(self) -> tuple[PrefillWorker, ComputeReady]:
        start, cut = self.start, self.cut()
        if not isinstance(self.service.next(block=True), Connect):
            raise LinkClosedError("the driver ended before the memory workers were bound")
        links, bounds = self._join(cut)
        store = self._store(cut, bounds[0].backend)
        pool = MemoryPool(links, cut.partition, cut.layers, attention.get("reference", CPU, cut.dtype))
        self.clock.lap("bind_s")
        own = OwnAttention(store, stage_attention(pool, self.staging), self.trace)
        worker = ComputeWorker(
            emulated(self.runnable(cut), prefill=True),
            own,
            dtype=cut.dtype,
            deterministic=start.model.deterministic,
            staging=self.staging,
            trace=self.trace,
        )
        return PrefillWorker(worker, own, links, start.deadlines.step_timeout_s, trace=self.trace), self.ready(
            cut, bounds
        )

    def _join(self, cut: Cut) -> tuple[list[MemoryLink], list[Bound]]:
        start, links, bounds = self.start, list[MemoryLink](), list[Bound]()
        outbound, inbound = kv_geometries(
            cut.layers, cut.partition, cut.dtype.itemsize, max_rows=start.batching.max_rows
        )
        for worker, (url, name) in enumerate(zip(start.memory_urls, start.memory_names, strict=True)):
            channel = self.fabric.connect(url, outbound=outbound, inbound=inbound, name=start.name, peer=name)
            links.append(MemoryLink(channel, worker, start.deadlines.step_timeout_s, self.trace))
            bounds.append(links[-1].join(Join(number=start.topology.replicas + start.number, layers=cut.layers)))
        return links, bounds

    def _store(self, cut: Cut, backend: str) -> Store:
        """Of all heads of one sequence. Raises ValueError where there is no room for that."""
        start, device = self.start, self.staging.device
        free = available_bytes(device)
        needed = store_bytes(
            cut.layers, stored_dtype(start.kv.kv_cache_dtype, cut.dtype), cut.max_len, start.kv.block_size
        )
        if needed > free:
            raise ValueError(
                f"a prefill worker takes {needed} bytes for K and V of a prompt of up to {cut.max_len} tokens, {free} "
                f"are free: lower --max-model-len or --prefill-workers"
            )
        own = self._backend(backend, device, cut)
        bind = Bind(
            worker=0,
            partition=by_head([s.kv_heads for s in cut.layers], [1.0], 0),
            layers=cut.layers,
            dtype=str(cut.dtype).removeprefix("torch."),
            kv=structs.replace(start.kv, attention=own),
            kv_bytes=needed,
            max_rows=start.batching.max_rows,
            max_model_len=cut.max_len,
        )
        return Store(bind, device)

    def _backend(self, name: str, device: torch.device, cut: Cut) -> str:
        """That of the memory workers, where it is for such a device."""
        try:
            return name_of(attention.get_alike(name, device, cut.dtype, "auto"))
        except ValueError as e:
            raise ValueError(f"{self.role}: {e}") from e
