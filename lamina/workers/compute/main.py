"""The start of a compute worker: load and cut the model once, then connect and bind in each epoch."""

from __future__ import annotations

import socket
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from msgspec import structs

from lamina import netstack
from lamina.config.resolve import LayerPath, layer_path
from lamina.kv.stored_format import stored_dtype
from lamina.ops import attention, collective
from lamina.ops.attention import AttentionBackend
from lamina.ops.collective import RankLocation
from lamina.ops.collective.collective_choice import choose_and_open
from lamina.ops.collective.mesh import connect_mesh, listener_terms
from lamina.protocol.control import ComputeReady, Connect, Loaded
from lamina.protocol.mixers import num_state_slots, versions_of_sequence
from lamina.protocol.step_plan import BindReply, BindRequest, JoinRequest, ProtocolError
from lamina.workers.cuda_graphs import MAX_GRAPH_ROWS, GraphedProgram
from lamina.workers.device_selection import CPU
from lamina.workers.device_transport import can_use_device_path
from lamina.workers.epoch_channels import EpochFabric, EpochListener
from lamina.workers.memory.kv_store import available_bytes
from lamina.workers.mixer_messages import largest_messages, mixer_pieces, state_bytes

from .attention_client import AttentionClient, MemoryWorkerClient, RefusedError
from .compute_worker import FIXED_ROWS, Attention, BufferedSends, ComputeWorker
from .device_attention_client import DeviceAttentionClient, open_transports
from .emulated_slices import EmulatedProgram
from .epoch_group import EpochGroup
from .kv_capacity import STATES_SHARE, check_longest_sequence, choose_kv_bytes, inbox_geometries
from .kv_identity import kv_identity
from .kv_parity import parity_bind, parity_layers
from .mixer_client import HybridClient, send_operands
from .model_server import CutModel, ModelServer, serve
from .native_attention_client import open_attention_client
from .pipeline_comm import PIPELINE_LISTENER_TERMS, PipelineChannels
from .staged_comm import collective_with_staging, with_staging
from .tensor_parallel import TensorParallelRanks

NO_LIMIT = 1 << 62  # bytes


def _connect(
    fabric: EpochFabric, url: str, terms: netstack.Terms, timeout_s: float, *, kernels: bool
) -> netstack.Channel:
    """Connect to ``url``. ``kernels``: if kernels are to send the messages, where the transport offers both."""
    return fabric.connect(url, replace(terms, kernels=kernels), timeout_s=timeout_s)


def pipeline_name(worker: str) -> str:
    """Return the name of the listener for the replica before ``worker``; "" if there is no worker."""
    return f"{worker}/ring" if worker else ""


def rank_name(worker: str) -> str:
    """Return the name of the listener for the other ranks of ``worker``; "" if there is no worker."""
    return f"{worker}/ranks" if worker else ""


def serve_compute(sock: socket.socket, module: Any = None) -> None:
    """Serve one driver until its link ends. ``module``: the model itself, if the worker runs in the driver's
    process.
    """
    serve(ComputeServer, sock, module)


class ComputeServer(ModelServer):
    """The process of a compute worker: loads and cuts the model once, and serves each epoch by its ComputeWorker."""

    role = "compute worker"
    _pipeline_listener: EpochListener | None = None
    _rank_listener: EpochListener | None = None
    _program: Any = None
    _ranks: EpochGroup | None = None
    _worker_in_epoch: ComputeWorker | None = None

    def load(self) -> Loaded:
        start, size = self.start, self.start.topology.tensor_parallel_size
        if size > 1 and (lacks := collective.why_unavailable(start.topology.collective, self.staging.device)):
            raise ValueError(lacks)
        if start.topology.replicas > 1:
            self._pipeline_listener = self._open_door(replace(PIPELINE_LISTENER_TERMS, name=pipeline_name(start.name)))
        if size > 1:
            self._rank_listener = self._open_door(listener_terms(rank_name(start.name), size))
        if self.module is None:
            self._check_room(start.weight_copies)
        self._cut = self.load_and_cut()
        if size == 1:  # a rank's slices call collectives, so they are compiled after it connects
            self._program = self.compile(self._cut)
        if start.rotates_keys:
            self._cut = self._with_rotary(self._cut)
        identity = (
            kv_identity(start, self._cut.loaded_model, self._cut.layers, self._cut.dtype)
            if start.needs_identity
            else b""
        )
        return Loaded(pipeline_url=_url(self._pipeline_listener), rank_url=_url(self._rank_listener), identity=identity)

    def connect(self, meeting: Connect, fabric: EpochFabric) -> tuple[ComputeWorker, ComputeReady]:
        start, cut = self.start, self._cut
        group = self._connect_ranks(meeting, fabric, self._rank_listener) if self._rank_listener else None
        ring = (
            self._connect_pipeline(meeting, fabric, self._pipeline_listener)
            if self._pipeline_listener and self.replicas > 1
            else None
        )
        attention, bounds = self._connect_memory(meeting, fabric, ring)
        self.clock.lap("bind_s")
        own_ring = with_staging(ring.pipeline, self.staging) if ring else None
        ranks = TensorParallelRanks(group, start.topology.max_batches) if group else None
        if self._worker_in_epoch is not None:
            self._worker_in_epoch.connect(attention, meeting.epoch, own_ring, ranks, start.replica)
        else:
            self._worker_in_epoch = ComputeWorker(
                self._program,
                attention,
                dtype=cut.dtype,
                deterministic=start.model.deterministic,
                replica=start.replica,
                ring=own_ring,
                ranks=ranks,
                staging=self.staging,
                trace=self.trace,
                epoch=meeting.epoch,
            )
        if not meeting.kv_bytes:  # else sequences wait: what was not kept is recorded when it first runs
            self._record_graphs(attention)
        bind = self._bind(meeting, 0) if not start.replica else None
        return self._worker_in_epoch, structs.replace(self.ready_message(cut, bounds, meeting.epoch), bind=bind)

    def _record_graphs(self, attention: Attention) -> None:
        """Record the graphs of all numbers of rows that a step may have, so that none is recorded while sequences
        decode. Slices of hybrid models, and of several replicas, are recorded when they first run.
        """
        start, cut = self.start, self._cut
        if not isinstance(self._program, GraphedProgram) or self.mixers_of(cut) or self.replicas > 1:
            return
        token = torch.zeros(1, 1, dtype=torch.int64, device=self.staging.device)
        outputs = [
            [torch.zeros(1, 1, x.q_heads, x.v_dim, dtype=cut.dtype, device=self.staging.device)] for x in cut.layers
        ]
        fixed = start.model.deterministic
        sizes = [FIXED_ROWS] if fixed else range(1, min(MAX_GRAPH_ROWS, start.batching.max_rows) + 1)
        self._program.record(sizes, [token, token], outputs, BufferedSends() if fixed else attention)
        self.clock.lap("record_s")

    def _with_rotary(self, cut: CutModel) -> CutModel:
        """Return the cut with layers that describe how keys rotate with their position, after that was verified. Raises
        UnsupportedModelError.
        """
        from lamina.models.key_rotation import find_rotary

        # A rank's slices have no collectives yet, and compute as if all ranks had its data. So all rows stay alike. It
        # has embeddings of its own tokens alone.
        program = cut.program if self._program is None else self._program
        rank, size = self.start.rank, self.start.topology.tensor_parallel_size
        own = (2 * rank + 1) * cut.loaded_model.config.get_text_config().vocab_size // (2 * size)
        model, tokens = cut.loaded_model.model, (own, own + 1)
        layers = find_rotary(program, model, cut.layers, cut.dtype, cut.max_len, self.staging.device, tokens)
        self.clock.lap("rotary_s")
        return cut._replace(layers=layers)

    def _open_door(self, reception: netstack.ListenTerms) -> EpochListener:
        """Listen for the replica before this one, or for the other ranks."""
        return EpochListener(self.fabric.listen(self.start.address, reception))

    def _connect_ranks(self, meeting: Connect, fabric: EpochFabric, listener: EpochListener) -> EpochGroup:
        """Connect to the other ranks and wait until all have connected. Raises ValueError, ChannelError."""
        start, urls = self.start, [rank.url for rank in meeting.rank_addresses]
        names = [rank_name(rank.name) for rank in meeting.rank_addresses]
        start_s, step_s = start.deadlines.start_timeout_s, start.deadlines.step_timeout_s
        mesh = connect_mesh(
            fabric,
            fabric.listener_for(listener),
            urls,
            names,
            start.rank,
            start_timeout_s=start_s,
            step_timeout_s=step_s,
        )
        at = RankLocation(self.staging.device, start_s, step_s)
        self.group, choice = choose_and_open(start.topology.collective, mesh, at)
        self.decisions["collective"] = f"{choice.name}: {choice.why}"
        self.clock.lap("meet_s")
        staged = collective_with_staging(self.group, self.staging)
        if self._ranks is None:
            self._ranks = EpochGroup(staged)
            self._program = self.compile(self._cut, self._ranks)
        else:
            self._ranks.begin_epoch(staged)
        return self._ranks

    def _check_room(self, copies: int) -> None:
        """Raise ModelError if the host has no space for ``copies`` copies of the weights."""
        from lamina.models.checkpoint import check_room, find_checkpoint

        if copies > 1 and not self.staging.is_separate:
            directory = find_checkpoint(self.start.path, trust_remote_code=self.start.model.trust_remote_code)
            check_room(directory, copies, available_bytes())

    def _connect_pipeline(self, meeting: Connect, fabric: EpochFabric, listener: EpochListener) -> PipelineChannels:
        start, following = self.start, meeting.next_replica
        if following is None:
            raise ProtocolError("a Connect that names no next replica")
        return PipelineChannels(
            fabric,
            fabric.listener_for(listener),
            following.url,
            [pipeline_name(name) for name in (meeting.previous_replica, start.name, following.name)],
            [cut.tensors for cut in self._cut.program.cuts],
            first=start.replica == 0,
            max_rows=start.batching.max_rows,
            num_batches=start.topology.max_batches,
            start_timeout_s=start.deadlines.start_timeout_s,
            step_timeout_s=start.deadlines.step_timeout_s,
        )

    def _connect_memory(
        self, meeting: Connect, fabric: EpochFabric, ring: PipelineChannels | None
    ) -> tuple[Attention, list[BindReply]]:
        """Bind the memory workers as replica 0, or join them after the replica before this one has."""
        start, cut, partition = self.start, self._cut, self._cut.partition
        if isinstance(self._program, GraphedProgram | EmulatedProgram):
            self._program.begin_epoch()
        if ring and start.replica:
            ring.wait_for_previous()
        rows = {"max_rows": start.batching.max_rows, "max_len": cut.max_len, "num_batches": start.topology.max_batches}
        mixers = self.mixers_of(cut)
        most = largest_messages(mixers, partition.num_workers, start.batching.max_rows)
        outbound, inbound = inbox_geometries(cut.layers, partition, cut.dtype.itemsize, **rows, mixed=most)
        kernels = self._layer_path(kernels=True) is LayerPath.DEVICE
        terms = netstack.Terms(outbound=outbound, inbound=inbound, name=start.name)
        links, bounds = list[MemoryWorkerClient](), list[BindReply]()
        connects = [
            partial(_connect, fabric, at.url, replace(terms, peer=at.name, key=at.key), start.deadlines.start_timeout_s)
            for at in meeting.memory_addresses
        ]
        last = connects.pop() if start.topology.kv_parity else None
        for worker, connect in enumerate(connects):
            channel = connect(kernels=kernels)
            number = worker * start.topology.tensor_parallel_size + start.rank
            links.append(MemoryWorkerClient(channel, worker, start.deadlines.step_timeout_s, self.trace, number))
            if start.replica:
                bounds.append(
                    links[-1].join(JoinRequest(epoch=meeting.epoch, peer_number=start.replica, layers=cut.layers))
                )
            else:
                direct = self._layer_path(kernels=can_use_device_path(channel, self.staging)) is LayerPath.DEVICE
                bounds.append(self._bind_next(links[-1], self._bind(meeting, worker, direct=direct), bounds))
                send_operands(links[-1], mixers, cut.recurrent.operands)
        parity = [self._join_parity(last(kernels=False), meeting, bounds[0])] if last else []
        own, more = sum(b.kv_bytes for b in bounds), start.topology.extra_kv_bytes(start.devices.kv_bytes())
        check_longest_sequence(bounds, cut.max_len, start.kv.block_size, own, more)
        path = self._layer_path(kernels=all(bound.device_path for bound in bounds))
        wait_s, graphs = start.deadlines.step_timeout_s, start.model.cuda_graphs
        wires = open_transports(links, connects, bounds, self.staging, wait_s, path, graphs=graphs)
        if ring and start.replica + 1 < self.replicas:
            ring.let_next_go()
        merging = self._merging(cut, bounds[0].backend)
        if mixers:
            pool = AttentionClient(links, partition, cut.layers, merging, self.staging)
            return HybridClient(pool, cut.recurrent.exchanges, mixers, self.staging), bounds
        if path is LayerPath.HOST:
            return open_attention_client(links, partition, cut.layers, merging, cut.dtype, self.staging, parity), bounds
        pool = AttentionClient(links, partition, cut.layers, merging, self.staging)
        return DeviceAttentionClient(pool, wires, partition, cut.layers, cut.dtype.itemsize, self.staging), bounds

    def _join_parity(self, channel: netstack.Channel, meeting: Connect, bound: BindReply) -> MemoryWorkerClient:
        """Connect to the parity worker of this rank. ``bound``: the first memory worker's reply to its Bind."""
        start, number = self.start, self.start.topology.memory_workers + self.start.rank
        link = MemoryWorkerClient(channel, 0, start.deadlines.step_timeout_s, self.trace, number)
        if start.replica:
            layers = parity_layers(self._cut.layers, self._cut.partition.num_workers)
            link.join(JoinRequest(epoch=meeting.epoch, peer_number=start.replica, layers=layers))
        else:
            link.bind(parity_bind(self._bind(meeting, 0), bound.backend, bound.kv_bytes))
        return link

    def _layer_path(self, *, kernels: bool) -> LayerPath:
        topology = self.start.topology
        kernels = kernels and not topology.kv_parity and not self._cut.recurrent.shapes
        return layer_path(self._cut.partition, self.replicas, topology.prefill_workers, kernels=kernels)

    def _bind_next(self, link: MemoryWorkerClient, bind: BindRequest, bounds: list[BindReply]) -> BindReply:
        """Bind one memory worker, with the backend that the first one chose. Raises RefusedError, naming a worker
        without it.
        """
        backend = bounds[0].backend if bounds else bind.kv.attention
        try:
            return link.bind(structs.replace(bind, kv=structs.replace(bind.kv, attention=backend)))
        except RefusedError as e:
            if backend == bind.kv.attention or repr(backend) not in str(e):
                raise
            others = "earlier memory workers chose that one: name one that all have by --attention-backend"
            raise RefusedError(f"memory worker {link.number}: {e}; {others}") from e

    def _merging(self, cut: CutModel, backend: str) -> AttentionBackend:
        """Return the backend that merges partial results: the memory workers' own one, if CPUs have it."""
        if not cut.partition.stripe_chunks:
            return attention.get("reference", CPU, cut.dtype)
        try:
            return attention.get_equivalent(backend, CPU, cut.dtype, "reference")
        except ValueError as e:
            raise ValueError(f"{self.role}: {e}, or --partition other than {self.start.topology.partition}") from e

    def _bind(self, meeting: Connect, worker: int, *, direct: bool = False) -> BindRequest:
        start, cut = self.start, self._cut
        pool = start.topology.pool_bytes(start.devices.kv_bytes())
        asked = meeting.kv_bytes[worker] if meeting.kv_bytes else pool
        prefill_workers, mixers = start.topology.prefill_workers, self.mixers_of(cut)
        batches = start.topology.max_batches
        cached = start.batching.enable_prefix_caching is not False
        slots = num_state_slots(start.batching.max_num_seqs, batches, caches_prefixes=cached)
        each, versions = state_bytes(mixer_pieces(mixers, worker)), versions_of_sequence(batches)
        free = available_bytes() // start.topology.tensor_parallel_size
        states = each * max(versions, min(slots, int(free * STATES_SHARE) // max(each, 1)))
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
        return BindRequest(
            epoch=meeting.epoch,
            worker=worker,
            partition=cut.partition,
            layers=cut.layers,
            dtype=str(cut.dtype).removeprefix("torch."),
            kv=start.kv,
            kv_bytes=asked or states + wanted(free=free),
            max_kv_bytes=0 if asked else wanted(free=NO_LIMIT),
            max_rows=start.batching.max_rows,
            max_model_len=cut.max_len,
            replicas=self.replicas,
            prefill_workers=prefill_workers,
            prefill_pipeline=start.topology.prefill_pipeline,
            device_path=direct,
            mixers=mixers,
            exchanges=[*cut.recurrent.exchanges],
            state_slots=slots if mixers else 0,
            state_versions=versions,
            num_sequences=start.batching.max_num_seqs if mixers else 0,
        )


def _url(listener: EpochListener | None) -> str:
    return listener.url if listener else ""
