"""The start of a prefill worker: load and cut the model; then, under each view, join the memory workers."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any

import torch
from msgspec import structs

from lamina import attention
from lamina.attention import name_of
from lamina.compute.capacity import kv_geometries, prompt_bytes, store_bytes
from lamina.compute.links import MemoryLink
from lamina.compute.memory_pool import MemoryPool
from lamina.compute.model_server import CutModel, ModelServer, serve
from lamina.compute.parity import parity_layers
from lamina.compute.worker import ComputeWorker
from lamina.kv.stored import stored_dtype
from lamina.memory.store import Store, available_bytes
from lamina.netstack import Terms
from lamina.protocol.beginnings import MeetPrefill
from lamina.protocol.control import ComputeReady, Connect, Loaded
from lamina.protocol.options.declare import size_flag
from lamina.protocol.partition import by_head
from lamina.protocol.plan import Bind, Bound, Join
from lamina.protocol.stages import stage_layers
from lamina.workers.devices import CPU
from lamina.workers.view import ViewDoor, ViewFabric

from . import OwnAttention, PrefillWorker
from .beginnings import Beginnings, prompts_reception
from .stages import StageProgram, StageRing, line_up, program_of, stage_reception, without_model


def serve_prefill(sock: socket.socket, module: Any = None) -> None:
    """Serve one driver until its link ends. ``module``: the model itself, where the driver is this process."""
    serve(PrefillServer, sock, module)


class PrefillServer(ModelServer):
    role = "prefill worker"
    prefills = True
    _program: Any = None
    _serving: PrefillWorker | None = None
    _store: Store  # once it serves
    _attention: OwnAttention  # the same
    _own: range  # the layers that it has
    _door: ViewDoor | None = None  # where the others of this stage come; None: there are none
    _stage_door: ViewDoor | None = None  # where the stage before comes; None: there is one stage

    def load(self) -> Loaded:
        start, topology = self.start, self.start.topology
        if topology.prefill_groups > 1:
            reception = prompts_reception(start.name, topology.prefill_groups)
            self._door = ViewDoor(self.fabric.listen(start.address, reception))
        if topology.prefill_pipeline > 1:
            self._stage_door = ViewDoor(self.fabric.listen(start.address, stage_reception(start.name)))
        self._cut = self.cut()
        self._own = self._own_layers(len(self._cut.layers))
        program = self.runnable(self._cut)
        if topology.prefill_pipeline > 1:
            program, self._cut = StageProgram(program, self._own, len(self._cut.layers)), without_model(self._cut)
        self._program = program
        return Loaded(prompts_url=_url(self._door), ring_url=_url(self._stage_door))

    def own_part(self, program: Any, num_layers: int) -> Any:
        one = self.start.topology.prefill_pipeline == 1
        return program if one else program_of(program, self._own_layers(num_layers), num_layers)

    def _own_layers(self, num_layers: int) -> range:
        stages = self.start.topology.prefill_pipeline
        return stage_layers(num_layers, stages, self.start.number % stages)

    def connect(self, meeting: Connect, fabric: ViewFabric) -> tuple[PrefillWorker, ComputeReady]:
        start, cut = self.start, self._cut
        links, bounds = self._join(meeting, fabric)
        workers, merging = cut.partition.num_workers, attention.get("reference", CPU, cut.dtype)
        parity = links[-1] if start.topology.kv_parity else None
        pool = MemoryPool(links[:workers], cut.partition, cut.layers, merging, self.staging, parity)
        if self._serving is not None:
            self._serving.connect(links, pool, meeting.view, meeting.keep)
            return self._serving, self._ready(bounds, meeting.view)
        self._store = self._open_store(cut, bounds[0].backend)
        own = self._attention = OwnAttention(self._store, pool, self.trace, self._own.start)
        self.clock.lap("bind_s")
        worker = ComputeWorker(
            self._program,
            own,
            dtype=cut.dtype,
            deterministic=start.model.deterministic,
            staging=self.staging,
            trace=self.trace,
            view=meeting.view,
        )
        self._serving = PrefillWorker(
            worker, own, links, start.deadlines.step_timeout_s, self.around.clock, self.trace, meeting.view
        )
        return self._serving, self._ready(bounds, meeting.view)

    def meet(self, order: MeetPrefill, fabric: ViewFabric) -> None:
        deadlines, cut = self.start.deadlines, self._cut
        if self._stage_door is not None and self._serving is not None:
            max_rows, name = self.start.batching.max_rows, self.start.name
            move = line_up(cut, order, fabric, self._stage_door, name, deadlines, max_rows)
            ring = StageRing(self._own, self._attention, move, self.staging, cut.dtype, fabric.view)
            self._serving.line_up(ring, ring.comes, self.start.number % self.start.topology.prefill_pipeline)
        if order.peers and self._door is not None:
            timeout_s, start = deadlines.step_timeout_s, self.around.start
            beginnings = Beginnings(self._store, self.staging, timeout_s, start, self.trace)
            beginnings.meet(order, fabric, self._door, deadlines.start_timeout_s)
            self._attention.meet(beginnings)

    def _ready(self, bounds: list[Bound], view: int) -> ComputeReady:
        return structs.replace(self.ready(self._cut, bounds, view), stores=[self._store.bound])

    def _join(self, meeting: Connect, fabric: ViewFabric) -> tuple[list[MemoryLink], list[Bound]]:
        start, cut, links, bounds = self.start, self._cut, list[MemoryLink](), list[Bound]()
        outbound, inbound = kv_geometries(
            cut.layers,
            cut.partition,
            cut.dtype.itemsize,
            max_rows=start.batching.max_rows,
            stages=start.topology.prefill_pipeline,
        )
        terms = Terms(outbound=outbound, inbound=inbound, name=start.name)
        join = Join(view=meeting.view, number=self.replicas + start.number, layers=cut.layers)
        workers = cut.partition.num_workers
        for number, there in enumerate(meeting.memory):
            limit_s = start.deadlines.start_timeout_s
            channel = fabric.connect(there.url, replace(terms, peer=there.name, key=there.key), timeout_s=limit_s)
            if number == workers:  # the worker with the others' parity
                join = structs.replace(join, layers=parity_layers(cut.layers, workers))
            links.append(
                MemoryLink(channel, number % workers, start.deadlines.step_timeout_s, self.trace, number=number)
            )
            bounds.append(links[-1].join(join))
        return links, bounds[:workers]

    def _open_store(self, cut: CutModel, backend: str) -> Store:
        """A store for all heads of prompts, one at least. Raises ValueError where there is no room for it."""
        start, device, layers = self.start, self.staging.device, cut.layers[self._own.start : self._own.stop]
        free, asked = available_bytes(device), start.devices.prefill_kv_bytes()
        needed = store_bytes(layers, stored_dtype(start.kv.kv_cache_dtype, cut.dtype), cut.max_len, start.kv.block_size)
        if asked and not needed <= asked <= free:
            raise ValueError(
                f"--prefill-kv-memory {start.devices.prefill_kv_memory}: a prompt of up to {cut.max_len} tokens takes "
                f"{size_flag(needed, least=True)}, and {size_flag(free)} are free: choose between, or lower "
                f"--max-model-len"
            )
        if needed > free:
            raise ValueError(
                f"a prefill worker takes {size_flag(needed, least=True)} for K and V of a prompt of up to "
                f"{cut.max_len} tokens, {size_flag(free)} are free: lower --max-model-len or --prefill-workers"
            )
        own = self._backend(backend, device, cut)
        bind = Bind(
            worker=0,
            partition=by_head([s.kv_heads for s in layers], [1.0], 0),
            layers=layers,
            dtype=str(cut.dtype).removeprefix("torch."),
            kv=structs.replace(start.kv, attention=own),
            kv_bytes=asked or prompt_bytes(needed, free, start.topology.prefill_workers),
            max_rows=start.batching.max_rows,
            max_model_len=cut.max_len,
        )
        return Store(bind, device)

    def _backend(self, name: str, device: torch.device, cut: CutModel) -> str:
        """The memory workers' backend where it is for such a device, else the best of the device. Raises ValueError."""
        try:
            return name_of(attention.get_alike(name, device, cut.dtype, "auto"))
        except ValueError as e:
            raise ValueError(f"{self.role}: {e}") from e


def _url(door: ViewDoor | None) -> str:
    return door.url if door else ""
