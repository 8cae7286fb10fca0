"""The start of a prefill worker: load and cut the model once, then join the memory workers in each epoch."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any

import torch
from msgspec import structs

from lamina.config.option import size_flag
from lamina.config.partition import Partition, across_ranks, by_head
from lamina.config.sparsity import SparsityOptions
from lamina.kv.stored_format import stored_dtype
from lamina.netstack import Terms
from lamina.ops import attention
from lamina.ops.attention import name_of
from lamina.protocol.capacity import layers_of_rank, partition_of
from lamina.protocol.control import ComputeReady, Connect, Loaded
from lamina.protocol.mixers import MixerShape
from lamina.protocol.prefill_stages import stage_layers
from lamina.protocol.prefix_fetch import ConnectPrefillPeers, stored_prefix_reader
from lamina.protocol.step_plan import BindReply, BindRequest, JoinRequest, LayerShape
from lamina.workers.compute.attention_client import AttentionClient
from lamina.workers.compute.compute_worker import ComputeWorker
from lamina.workers.compute.kv_capacity import prefill_inbox_geometries, prompt_cache_bytes, store_bytes
from lamina.workers.compute.kv_parity import parity_layers
from lamina.workers.compute.model_server import CutModel, ModelServer, serve
from lamina.workers.device_selection import CPU
from lamina.workers.epoch_channels import EpochFabric, EpochListener
from lamina.workers.memory.kv_store import KvStore, available_bytes
from lamina.workers.mixer_messages import mixer_pieces, state_bytes
from lamina.workers.mixer_shares import with_shares

from .kv_sender import KvSender
from .local_mixers import LocalMixers
from .prefill_worker import LocalAttention, PrefillWorker
from .prefix_fetch import PrefixFetch, PrefixSource, cached_prefixes, prefix_listener_terms
from .stage_worker import StagePipeline, StageProgram, connect_stages, drop_model, stage_listener_terms, stage_program
from .stored_prefixes import stored_prefixes

STATE_VERSIONS = 3  # of recurrent states here: before a chunk and after it, and one more while prompts change


def serve_prefill(sock: socket.socket, module: Any = None) -> None:
    """Serve one driver until its link ends. ``module``: the model itself, if the worker runs in the driver's
    process.
    """
    serve(PrefillServer, sock, module)


class PrefillServer(ModelServer):
    role = "prefill worker"
    is_prefill = True
    _program: Any = None
    _worker_in_epoch: PrefillWorker | None = None
    _store: KvStore  # set by the first ``connect``
    _attention: LocalAttention  # set by the first ``connect``
    _own_slices: range  # the layers of this stage
    # The other workers of this stage connect here; None if there are none.
    _prefix_listener: EpochListener | None = None
    _stage_listener: EpochListener | None = None  # the stage before connects here; None if there is one stage

    def load(self) -> Loaded:
        start, topology = self.start, self.start.topology
        if topology.prefill_groups > 1:
            reception = prefix_listener_terms(start.name, topology.prefill_groups)
            self._prefix_listener = EpochListener(self.fabric.listen(start.address, reception))
        if topology.prefill_pipeline > 1:
            self._stage_listener = EpochListener(self.fabric.listen(start.address, stage_listener_terms(start.name)))
        self._cut = self.load_and_cut()
        self._own_slices = self._own_layers(len(self._cut.layers))
        program = self.compile(self._cut)
        if topology.prefill_pipeline > 1:
            program, self._cut = StageProgram(program, self._own_slices, len(self._cut.layers)), drop_model(self._cut)
        self._program = program
        return Loaded(prefix_url=_url(self._prefix_listener), pipeline_url=_url(self._stage_listener))

    def own_slices(self, program: Any, num_layers: int) -> Any:
        one = self.start.topology.prefill_pipeline == 1
        return program if one else stage_program(program, self._own_layers(num_layers), num_layers)

    def _partition(self, layers: list[LayerShape], max_len: int) -> Partition:
        ranks, topology = self.start.memory_ranks, self.start.topology
        if ranks == 1:
            return super()._partition(layers, max_len)
        own, weights = layers_of_rank(layers, 0, ranks), topology.normalized_weights[::ranks]
        return across_ranks(partition_of(topology.partition, own, weights, max_len), ranks)

    def _own_layers(self, num_layers: int) -> range:
        stages = self.start.topology.prefill_pipeline
        return stage_layers(num_layers, stages, self.start.replica % stages)

    def connect(self, meeting: Connect, fabric: EpochFabric) -> tuple[PrefillWorker, ComputeReady]:
        start, cut = self.start, self._cut
        links, bounds = self._join(meeting, fabric)
        workers, merging = cut.partition.num_workers, attention.get("reference", CPU, cut.dtype)
        pool = AttentionClient(
            links[:workers], cut.partition, cut.layers, merging, self.staging, parity=links[workers:]
        )
        if self._worker_in_epoch is not None:
            self._worker_in_epoch.connect(links, pool, meeting.epoch, meeting.surviving)
            self._connect_mixers(self._attention, links)
            return self._worker_in_epoch, self._ready(bounds, meeting.epoch)
        self._store = self._open_store(cut, bounds[0].backend)
        own = self._attention = self._open_attention(pool, links)
        self.clock.lap("bind_s")
        worker = ComputeWorker(
            self._program,
            own,
            dtype=cut.dtype,
            deterministic=start.model.deterministic,
            staging=self.staging,
            trace=self.trace,
            epoch=meeting.epoch,
        )
        self._worker_in_epoch = PrefillWorker(
            worker, own, links, start.deadlines.step_timeout_s, self.runtime.clock, self.trace, meeting.epoch
        )
        return self._worker_in_epoch, self._ready(bounds, meeting.epoch)

    def _open_attention(self, pool: AttentionClient, links: list[KvSender]) -> LocalAttention:
        cut = self._cut
        if not cut.recurrent.shapes:
            return LocalAttention(self._store, pool, self.trace, self._own_slices.start)
        attention = LocalMixers(self._store, pool, self.trace, cut.recurrent)
        self._connect_mixers(attention, links)
        return attention

    def _connect_mixers(self, attention: LocalAttention, links: list[KvSender]) -> None:
        if isinstance(attention, LocalMixers):
            attention.set_links(links, self.mixers_of(self._cut))

    def connect_prefill_peers(self, order: ConnectPrefillPeers, fabric: EpochFabric) -> None:
        deadlines, cut = self.start.deadlines, self._cut
        if self._stage_listener is not None and self._worker_in_epoch is not None:
            max_rows, name = self.start.batching.max_rows, self.start.name
            move = connect_stages(cut, order, fabric, self._stage_listener, name, deadlines, max_rows)
            ring = StagePipeline(self._own_slices, self._attention, move, self.staging, cut.dtype, fabric.epoch)
            self._worker_in_epoch.connect_stages(
                ring, ring.can_receive, self.start.replica % self.start.topology.prefill_pipeline
            )
        if order.memory:
            reader = stored_prefix_reader(self.start.name)
            stored = stored_prefixes(self._store, order, cut.partition, self._own_slices.start, reader)
            self._add_prefix_fetch(stored, fabric).connect()
        if order.peers and self._prefix_listener is not None:
            cached = cached_prefixes(self._store, order, self.trace)
            self._add_prefix_fetch(cached, fabric).connect(self._prefix_listener)

    def _add_prefix_fetch(self, source: PrefixSource, fabric: EpochFabric) -> PrefixFetch:
        """Return a fetch that is still to connect. It is stopped even if it cannot."""
        fetch = PrefixFetch(self._store, source, fabric, self.start.deadlines, self.runtime, self.trace)
        self._attention.add_prefix_fetch(fetch)
        return fetch

    def _ready(self, bounds: list[BindReply], epoch: int) -> ComputeReady:
        return structs.replace(self.ready_message(self._cut, bounds, epoch), prefill_stores=[self._store.bind_reply])

    def _join(self, meeting: Connect, fabric: EpochFabric) -> tuple[list[KvSender], list[BindReply]]:
        start, cut, links, bounds = self.start, self._cut, list[KvSender](), list[BindReply]()
        states = [piece.spec.state_bytes for piece in mixer_pieces(_whole_mixers(cut), 0) if piece is not None]
        outbound, inbound = prefill_inbox_geometries(
            cut.layers,
            cut.partition,
            cut.dtype.itemsize,
            max_rows=start.batching.max_rows,
            stages=start.topology.prefill_pipeline,
            state_bytes=max(states, default=0),
        )
        terms = Terms(outbound=outbound, inbound=inbound, name=start.name)
        ranks, workers = start.memory_ranks, cut.partition.num_workers
        layers = [layers_of_rank(cut.layers, rank, ranks) if ranks > 1 else cut.layers for rank in range(ranks)]
        join = JoinRequest(epoch=meeting.epoch, peer_number=self.replicas + start.replica, layers=cut.layers)
        for number, there in enumerate(meeting.memory_addresses):
            limit_s = start.deadlines.start_timeout_s
            channel = fabric.connect(there.url, replace(terms, peer=there.name, key=there.key), timeout_s=limit_s)
            join = structs.replace(join, layers=layers[number % ranks])
            if number >= workers:  # a rank's parity worker
                join = structs.replace(join, layers=parity_layers(join.layers, workers // ranks))
            limit_s = start.deadlines.step_timeout_s
            links.append(KvSender(channel, number % workers, limit_s, self.trace, number, self.runtime))
            bounds.append(links[-1].join(join))
        return links, bounds[:workers]

    def _open_store(self, cut: CutModel, backend: str) -> KvStore:
        """Open a store for all heads of one prompt or more. Raises ValueError if the memory does not suffice, or a GPU
        would have to compute recurrent layers.
        """
        start, device, layers = (
            self.start,
            self.staging.device,
            cut.layers[self._own_slices.start : self._own_slices.stop],
        )
        free, asked = available_bytes(device), start.devices.prefill_kv_bytes()
        if cut.recurrent.shapes and device.type != "cpu":
            raise ValueError(
                f"prefill workers compute recurrent layers on CPUs, not on {device}: leave out --prefill-workers"
            )
        mixers, partition = _whole_mixers(cut), by_head([s.kv_heads for s in layers], [1.0], 0)
        needed = STATE_VERSIONS * state_bytes(mixer_pieces(mixers, 0)) + store_bytes(
            layers, stored_dtype(start.kv.kv_cache_dtype, cut.dtype), cut.max_len, start.kv.block_size
        )
        if asked and not needed <= asked <= free:
            raise ValueError(
                f"--prefill-kv-memory {start.devices.prefill_kv_memory}: a prompt of up to {cut.max_len} tokens takes "
                f"{size_flag(needed, least=True)}, and {size_flag(free)} are free: choose between, or lower "
                f"--max-model-len"
            )
        if needed > free:
            raise ValueError(
                f"a prefill worker takes {size_flag(needed, least=True)} for a prompt of up to "
                f"{cut.max_len} tokens, {size_flag(free)} are free: lower --max-model-len or --prefill-workers"
            )
        own, dense = self._backend(backend, device, cut), structs.asdict(SparsityOptions())
        bind = BindRequest(
            worker=0,
            partition=partition,
            layers=layers,
            dtype=str(cut.dtype).removeprefix("torch."),
            kv=structs.replace(start.kv, attention=own, **dense),  # memory workers alone drop blocks
            kv_bytes=asked or (needed if mixers else prompt_cache_bytes(needed, free, start.topology.prefill_workers)),
            max_rows=start.batching.max_rows,
            max_model_len=cut.max_len,
            mixers=mixers,
            exchanges=[*cut.recurrent.exchanges],
            state_slots=STATE_VERSIONS if mixers else 0,
            state_versions=STATE_VERSIONS,
            num_sequences=1,
        )
        return KvStore(bind, device)

    def _backend(self, name: str, device: torch.device, cut: CutModel) -> str:
        """Return the memory workers' backend if this device can run it, else the device's best one. Raises
        ValueError.
        """
        try:
            return name_of(attention.get_equivalent(name, device, cut.dtype, "auto"))
        except ValueError as e:
            raise ValueError(f"{self.role}: {e}") from e


def _whole_mixers(cut: CutModel) -> list[MixerShape]:
    """Return the recurrent layers of a cut model, as one worker with all heads has them."""
    return [with_shares(mixer, "head", cut.partition, [1.0]) for mixer in cut.recurrent.shapes]


def _url(listener: EpochListener | None) -> str:
    return listener.url if listener else ""
