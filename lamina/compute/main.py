"""The start of a compute worker: load and cut the model; then, under each view, connect and bind."""

from __future__ import annotations

import socket
from dataclasses import replace
from functools import partial
from typing import Any

from msgspec import structs

from lamina import attention, collective, netstack
from lamina.attention import AttentionBackend
from lamina.collective import RankPlace
from lamina.collective.choose import choose_and_open
from lamina.collective.mesh import listen_and_connect, reception
from lamina.kv.stored import stored_dtype
from lamina.memory.store import available_bytes
from lamina.protocol.control import ComputeReady, Connect, Loaded
from lamina.protocol.options.resolve import LayerPath, layer_path
from lamina.protocol.plan import Bind, Bound, Join, ProtocolError
from lamina.workers.devices import CPU
from lamina.workers.graphs import Graphs
from lamina.workers.view import ViewDoor, ViewFabric
from lamina.workers.wire import can_be_direct

from .capacity import check_longest, choose_kv_bytes, geometries
from .direct import DirectAttention, open_wires
from .emulated import EmulatedProgram
from .identity import identity_of
from .links import MemoryLink, RefusedError
from .memory_pool import MemoryPool
from .model_server import CutModel, ModelServer, serve
from .native_pool import open_pool
from .parity import parity_bind, parity_layers
from .ranks import Together
from .ring import RING, RingEnds
from .staged import stage_collective, stage_ring
from .view_group import ViewGroup
from .worker import Attention, ComputeWorker

NO_LIMIT = 1 << 62  # bytes


def _connect(
    fabric: ViewFabric, url: str, terms: netstack.Terms, timeout_s: float, *, kernels: bool
) -> netstack.Channel:
    """``kernels``: whether they are to send its messages, where the transport can choose."""
    return fabric.connect(url, replace(terms, kernels=kernels), timeout_s=timeout_s)


def ring_name(worker: str) -> str:
    """The name of the place where the replica before ``worker`` connects; "" where there is no worker."""
    return f"{worker}/ring" if worker else ""


def rank_name(worker: str) -> str:
    """The name of the place where the other ranks of ``worker`` connect; "" where there is no worker."""
    return f"{worker}/ranks" if worker else ""


def serve_compute(sock: socket.socket, module: Any = None) -> None:
    """Serve one driver until its link ends. ``module``: the model itself, where the driver is this process."""
    serve(ComputeServer, sock, module)


class ComputeServer(ModelServer):
    """The process of a compute worker: it loads and cuts the model once, and serves each view by its ComputeWorker."""

    role = "compute worker"
    _ring_door: ViewDoor | None = None
    _rank_door: ViewDoor | None = None
    _program: Any = None
    _ranks: ViewGroup | None = None
    _serving: ComputeWorker | None = None

    def load(self) -> Loaded:
        start, size = self.start, self.start.topology.tensor_parallel_size
        if size > 1 and (lacks := collective.lacks(start.topology.collective, self.staging.device)):
            raise ValueError(lacks)
        if start.topology.replicas > 1:
            self._ring_door = self._open_door(replace(RING, name=ring_name(start.name)))
        if size > 1:
            self._rank_door = self._open_door(reception(rank_name(start.name), size))
        if self.module is None:
            self._check_room(start.copies)
        self._cut = self.cut()
        if size == 1:  # a rank's slices meet the others
            self._program = self.runnable(self._cut)
        if start.turns_keys:
            self._cut = self._with_rotary(self._cut)
        identity = identity_of(start, self._cut.loaded, self._cut.layers, self._cut.dtype) if start.identify else b""
        return Loaded(ring_url=_url(self._ring_door), rank_url=_url(self._rank_door), identity=identity)

    def connect(self, meeting: Connect, fabric: ViewFabric) -> tuple[ComputeWorker, ComputeReady]:
        start, cut = self.start, self._cut
        group = self._meet(meeting, fabric, self._rank_door) if self._rank_door else None
        ring = self._close_ring(meeting, fabric, self._ring_door) if self._ring_door and self.replicas > 1 else None
        attention, bounds = self._connect_memory(meeting, fabric, ring)
        self.clock.lap("bind_s")
        own_ring = stage_ring(ring.ring, self.staging) if ring else None
        ranks = Together(group, start.topology.most_batches) if group else None
        if self._serving is not None:
            self._serving.connect(attention, meeting.view, own_ring, ranks, start.number)
        else:
            self._serving = ComputeWorker(
                self._program,
                attention,
                dtype=cut.dtype,
                deterministic=start.model.deterministic,
                replica=start.number,
                ring=own_ring,
                ranks=ranks,
                staging=self.staging,
                trace=self.trace,
                view=meeting.view,
            )
        bind = self._bind(meeting, 0) if not start.number else None
        return self._serving, structs.replace(self.ready(cut, bounds, meeting.view), bind=bind)

    def _with_rotary(self, cut: CutModel) -> CutModel:
        """The same cut; its layers now say how keys turn with their position, which was proved. Raises
        UnsupportedModelError.
        """
        from lamina.models.shifts import with_rotary

        layers = with_rotary(self._program, cut.loaded.model, cut.layers, cut.dtype, cut.max_len, self.staging.device)
        self.clock.lap("rotary_s")
        return cut._replace(layers=layers)

    def _open_door(self, reception: netstack.Reception) -> ViewDoor:
        """Open the place where the replica before this one connects, or where the other ranks do."""
        return ViewDoor(self.fabric.listen(self.start.address, reception))

    def _meet(self, meeting: Connect, fabric: ViewFabric, door: ViewDoor) -> ViewGroup:
        """The other ranks, once all are there. Raises ValueError, ChannelError."""
        start, urls = self.start, [rank.url for rank in meeting.ranks]
        names = [rank_name(rank.name) for rank in meeting.ranks]
        start_s, step_s = start.deadlines.start_timeout_s, start.deadlines.step_timeout_s
        mesh = listen_and_connect(
            fabric, fabric.at(door), urls, names, start.rank, start_timeout_s=start_s, step_timeout_s=step_s
        )
        at = RankPlace(self.staging.device, start_s, step_s)
        self.group, choice = choose_and_open(start.topology.collective, mesh, at)
        self.choices["collective"] = f"{choice.name}: {choice.why}"
        self.clock.lap("meet_s")
        staged = stage_collective(self.group, self.staging)
        if self._ranks is None:
            self._ranks = ViewGroup(staged)
            self._program = self.runnable(self._cut, self._ranks)
        else:
            self._ranks.renew(staged)
        return self._ranks

    def _check_room(self, copies: int) -> None:
        """Raises ModelError where the host has no room for so many copies of the weights."""
        from lamina.models.checkpoint import check_room, find_checkpoint

        if copies > 1 and not self.staging.apart:
            directory = find_checkpoint(self.start.path, trust_remote_code=self.start.model.trust_remote_code)
            check_room(directory, copies, available_bytes())

    def _close_ring(self, meeting: Connect, fabric: ViewFabric, door: ViewDoor) -> RingEnds:
        start, behind = self.start, meeting.behind
        if behind is None:
            raise ProtocolError("a Connect that names no next replica")
        return RingEnds(
            fabric,
            fabric.at(door),
            behind.url,
            [ring_name(name) for name in (meeting.before, start.name, behind.name)],
            [cut.tensors for cut in self._cut.program.cuts],
            first=start.number == 0,
            max_rows=start.batching.max_rows,
            num_batches=start.topology.most_batches,
            start_timeout_s=start.deadlines.start_timeout_s,
            step_timeout_s=start.deadlines.step_timeout_s,
        )

    def _connect_memory(
        self, meeting: Connect, fabric: ViewFabric, ring: RingEnds | None
    ) -> tuple[Attention, list[Bound]]:
        """Bind the memory workers, or join them once the replica before has."""
        start, cut, partition = self.start, self._cut, self._cut.partition
        if isinstance(self._program, Graphs | EmulatedProgram):
            self._program.forget()
        if ring and start.number:
            ring.await_turn()
        rows = {"max_rows": start.batching.max_rows, "max_len": cut.max_len, "num_batches": start.topology.most_batches}
        outbound, inbound = geometries(cut.layers, partition, cut.dtype.itemsize, **rows)
        kernels = self._layer_path(kernels=True) is LayerPath.DEVICE
        terms = netstack.Terms(outbound=outbound, inbound=inbound, name=start.name)
        links, bounds = list[MemoryLink](), list[Bound]()
        connects = [
            partial(_connect, fabric, at.url, replace(terms, peer=at.name, key=at.key), start.deadlines.start_timeout_s)
            for at in meeting.memory
        ]
        last = connects.pop() if start.topology.kv_parity else None
        for worker, connect in enumerate(connects):
            channel = connect(kernels=kernels)
            number = worker * start.topology.tensor_parallel_size + start.rank
            links.append(MemoryLink(channel, worker, start.deadlines.step_timeout_s, self.trace, number))
            if start.number:
                bounds.append(links[-1].join(Join(view=meeting.view, number=start.number, layers=cut.layers)))
            else:
                direct = self._layer_path(kernels=can_be_direct(channel, self.staging)) is LayerPath.DEVICE
                bounds.append(self._bind_next(links[-1], self._bind(meeting, worker, direct=direct), bounds))
        parity = self._join_parity(last(kernels=False), meeting, bounds[0]) if last else None
        own, more = sum(b.kv_bytes for b in bounds), start.topology.more_bytes(start.devices.kv_bytes())
        check_longest(bounds, cut.max_len, start.kv.block_size, own, more)
        path = self._layer_path(kernels=all(bound.direct for bound in bounds))
        wait_s, graphs = start.deadlines.step_timeout_s, start.model.cuda_graphs
        wires = open_wires(links, connects, bounds, self.staging, wait_s, path, graphs=graphs)
        if ring and start.number + 1 < self.replicas:
            ring.pass_turn()
        merging = self._merging(cut, bounds[0].backend)
        if path is LayerPath.HOST:
            return open_pool(links, partition, cut.layers, merging, cut.dtype, self.staging, parity), bounds
        pool = MemoryPool(links, partition, cut.layers, merging, self.staging)
        return DirectAttention(pool, wires, partition, cut.layers, cut.dtype.itemsize, self.staging), bounds

    def _join_parity(self, channel: netstack.Channel, meeting: Connect, bound: Bound) -> MemoryLink:
        """The link to who keeps the parity of the others, of which the first one has answered ``bound``."""
        start, workers = self.start, self.start.topology.memory_workers
        link = MemoryLink(channel, 0, start.deadlines.step_timeout_s, self.trace, workers)
        if start.number:
            layers = parity_layers(self._cut.layers, workers)
            link.join(Join(view=meeting.view, number=start.number, layers=layers))
        else:
            link.bind(parity_bind(self._bind(meeting, 0), bound.backend, bound.kv_bytes))
        return link

    def _layer_path(self, *, kernels: bool) -> LayerPath:
        topology = self.start.topology
        kernels = kernels and not topology.kv_parity
        return layer_path(self._cut.partition, self.replicas, topology.prefill_workers, kernels=kernels)

    def _bind_next(self, link: MemoryLink, bind: Bind, bounds: list[Bound]) -> Bound:
        """All take the backend that the first one has taken. Raises RefusedError, naming one that cannot."""
        backend = bounds[0].backend if bounds else bind.kv.attention
        try:
            return link.bind(structs.replace(bind, kv=structs.replace(bind.kv, attention=backend)))
        except RefusedError as e:
            if backend == bind.kv.attention or repr(backend) not in str(e):
                raise
            others = "memory workers before it took that one: name one that all have by --attention"
            raise RefusedError(f"memory worker {link.number}: {e}; {others}") from e

    def _merging(self, cut: CutModel, backend: str) -> AttentionBackend:
        """Merges what memory workers return in parts: with their own backend, where CPUs have it."""
        if not cut.partition.stripe:
            return attention.get("reference", CPU, cut.dtype)
        try:
            return attention.get_alike(backend, CPU, cut.dtype, "reference")
        except ValueError as e:
            raise ValueError(f"{self.role}: {e}, or --partition other than {self.start.topology.partition}") from e

    def _bind(self, meeting: Connect, worker: int, *, direct: bool = False) -> Bind:
        start, cut = self.start, self._cut
        pool = start.topology.pool_bytes(start.devices.kv_bytes())
        asked = meeting.kv_bytes[worker] if meeting.kv_bytes else pool
        prefill_workers = start.topology.prefill_workers
        wanted = partial(
            choose_kv_bytes,
            cut.layers,
            cut.partition,
            worker,
            stored_dtype(start.kv.kv_cache_dtype, cut.dtype),
            max_len=cut.max_len,
            max_num_seqs=start.batching.max_num_seqs,
            block_size=start.kv.block_size,
        )
        return Bind(
            view=meeting.view,
            worker=worker,
            partition=cut.partition,
            layers=cut.layers,
            dtype=str(cut.dtype).removeprefix("torch."),
            kv=start.kv,
            kv_bytes=asked or wanted(free=available_bytes() // start.topology.tensor_parallel_size),
            kv_most=0 if asked else wanted(free=NO_LIMIT),
            max_rows=start.batching.max_rows,
            max_model_len=cut.max_len,
            replicas=self.replicas,
            prefill_workers=prefill_workers,
            prefill_pipeline=start.topology.prefill_pipeline,
            direct=direct,
        )


def _url(door: ViewDoor | None) -> str:
    return door.url if door else ""
