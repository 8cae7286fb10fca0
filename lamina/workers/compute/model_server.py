"""The life of a worker that has the model: load and cut it once, then serve the rounds of one epoch after another."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from msgspec import structs

from lamina import netstack
from lamina.config.conflicts import HYBRID_MODEL, conflicts_of
from lamina.config.engine_config import EngineConfig
from lamina.config.partition import Partition
from lamina.config.resolve import max_sequence_length
from lamina.env import cluster_key
from lamina.netstack import ChannelError
from lamina.observe.failpoints import recorder
from lamina.observe.trace import Event
from lamina.ops import gemm
from lamina.ops.collective import Collective
from lamina.ops.gemm import LinearBackend, packing
from lamina.ops.gemm.packed_memory import PackedMemory
from lamina.ops.recurrence.spec import RecurrenceSpec
from lamina.protocol.capacity import combined_capacity, partition_of
from lamina.protocol.control import (
    ChannelLost,
    ClockRequest,
    ComputeReady,
    Connect,
    ControlLink,
    Failed,
    LinkClosedError,
    Loaded,
    Progress,
    Quiesce,
    Quiesced,
    RunRound,
    StartCompute,
    StatsRequest,
    StepDone,
    Stop,
    TraceRequest,
    split_step_done,
)
from lamina.protocol.mixers import NO_RECURRENT_LAYERS, MixerShape, RecurrentLayers
from lamina.protocol.prefix_fetch import ConnectPrefillPeers
from lamina.protocol.step_plan import BindReply, LayerShape, ProtocolError
from lamina.utils.emulated_device import sends_early_q
from lamina.workers.control_loop import ControlLoop
from lamina.workers.device_selection import CPU, gpu_index, linear_backend, pick_device
from lamina.workers.epoch_channels import EpochFabric
from lamina.workers.memory.kv_store import available_bytes
from lamina.workers.mixer_shares import with_shares
from lamina.workers.runtime import RUNTIME, Runtime
from lamina.workers.staging import Staging, open_staging
from lamina.workers.startup_times import StartupTimes
from lamina.workers.worker_process import write_error

from .attention_client import MissingKvError, RefusedError
from .compile_passes import compile_passes
from .emulated_slices import emulation_of

log = logging.getLogger(__name__)

MESSAGES = (
    StartCompute
    | RunRound
    | Connect
    | ConnectPrefillPeers
    | Quiesce
    | StatsRequest
    | ClockRequest
    | TraceRequest
    | Stop
)


class Worker(Protocol):
    """The part of a worker that serves rounds: ComputeWorker, PrefillWorker."""

    @property
    def has_work(self) -> bool:
        """True if ``run_next`` has something to do."""
        ...

    def submit(self, new: RunRound) -> None:
        """Queue a round."""
        ...

    def run_next(self) -> StepDone | None:
        """Do a part of the work. Returns a step that is now done, or None."""
        ...

    def stats(self) -> dict[str, float]:
        """The counters by name. Safe from any thread."""
        ...


class CutModel(NamedTuple):
    """A loaded model, cut into slices. ``layers``: its attention operators. ``backend``: the linear layers' backend,
    which the program does not use yet. ``packed_memory``: for their packed weights; None: they stay as they are.
    """

    program: Any
    loaded_model: Any
    layers: list[LayerShape]
    dtype: torch.dtype
    max_len: int
    partition: Partition
    backend: LinearBackend
    recurrent: RecurrentLayers = NO_RECURRENT_LAYERS
    packed_memory: PackedMemory | None = None

    @property
    def num_exchanges(self) -> int:
        """The number of exchanges with memory workers in a step."""
        return len(self.recurrent.exchanges) or len(self.layers)


class ModelServer:
    """The process of a worker that has a model. Subclasses load it in ``load``, and build the Worker of an epoch in
    ``connect``.
    """

    role: str  # names the worker in error messages
    is_prefill = False  # True for a worker that only computes prompts
    _cut: CutModel  # set by ``load``
    replicas = 1  # the number of replicas in the epoch

    def __init__(self, link: ControlLink, start: StartCompute, module: Any, around: Runtime = RUNTIME) -> None:
        """``module``: the model itself, if the worker runs in the driver's process."""
        self.start = start
        self.module = module
        self.runtime = around
        gpu, device = gpu_index(start.devices.compute_device, start.device_number), start.devices.rdma_device
        self.fabric = around.open_fabric(start.scheme, key=start.key or cluster_key(), gpu=gpu, device=device)
        self.trace = recorder(start.trace)
        self.clock = StartupTimes()
        self.staging: Staging = open_staging(CPU)  # replaced when the device is chosen
        self.group: Collective | None = None
        self.decisions: dict[str, str] = {}  # use -> what was chosen for it here, and why
        self.counters = {"loads": 0.0, "connects": 0.0}
        self._linear_layers: LinearBackend | None = None
        self._worker: Worker | None = None
        self._epoch_fabric: EpochFabric | None = None
        self._next_epoch = -1  # the newest epoch that the driver has named
        self._failure = False  # a channel of the epoch has ended
        self.service = ControlLoop(
            link,
            self._stats,
            lambda reason: self.fabric.close(),
            self.trace,
            on_message=self._on_message,
            around=around,
        )

    def load(self) -> Loaded:
        """Load the model. Raises ValueError for an error that a user can correct."""
        raise NotImplementedError

    def connect(self, meeting: Connect, fabric: EpochFabric) -> tuple[Worker, ComputeReady]:
        """Connect to all peers by ``fabric`` and build the Worker of an epoch. Raises RefusedError, and ValueError for
        an error that a user can correct.
        """
        raise NotImplementedError

    def connect_prefill_peers(self, order: ConnectPrefillPeers, fabric: EpochFabric) -> None:
        """Open channels to the other prefill workers. Raises ChannelError."""
        raise ProtocolError(f"a {self.role} cannot connect to prefill workers")

    def own_slices(self, program: Any, num_layers: int) -> Any:
        """Return the part of the cut program that this worker runs. Raises ValueError."""
        return program

    def run(self) -> None:
        """Serve until the driver closes its link or sends Stop."""
        try:
            if self._work_or_failure(self._load):
                self._loop()
        except LinkClosedError:
            pass  # the driver has ended, so this worker ends
        except (ChannelError, ProtocolError, RefusedError) as e:
            if not self.service.is_stopped.is_set():
                self.service.report_failure(f"{self.role}: {e}", by_peer=isinstance(e, ChannelError))
        except Exception as e:
            write_error()
            self.service.report_failure(f"{self.role}: {type(e).__name__}: {e}")
            raise
        finally:
            self.close_channels()
            self.fabric.close()
            self.service.link.close()

    def load_and_cut(self) -> CutModel:
        """Load the model and cut it at its attention operators. Raises ModelError, ValueError."""
        from lamina.models.capture_cache import can_cache
        from lamina.models.checkpoint import is_quantized
        from lamina.models.convert import convert_model, layer_shapes, recurrent_layers
        from lamina.models.load import load

        start = self.start
        if start.threads and start.threads != torch.get_num_threads():
            torch.set_num_threads(start.threads)
        backend = gemm.get(linear_backend(start.model.gemm, self.staging.device), torch.get_num_threads())
        self._linear_layers = backend
        loaded = load(
            self.module if self.module is not None else start.path,
            dtype=start.model.dtype,
            trust_remote_code=start.model.trust_remote_code,
            allow_unused_weights=start.model.allow_unused_weights,
            hf_overrides=start.model.hf_overrides,
            quantization=start.model.quantization,
            quantization_compute=start.model.quantization_compute,
            progress=self._progress,
            rank=start.rank,
            size=start.topology.tensor_parallel_size,
            backend=backend if self.staging.device.type == "cpu" else None,
        )
        if self.staging.device.type != "cpu" and loaded.path is not None and is_quantized(loaded.path):
            log.warning("weights of few bits become numbers of %s on a GPU: only CPUs keep them packed", loaded.dtype)
        max_len = max_sequence_length(start.model.max_model_len, loaded.max_model_len, loaded.longest_model_len)
        self.clock.lap("load_s")
        self._progress("cutting the model", 0, 1)
        here = netstack.in_process(start.scheme)
        program = convert_model(
            loaded.model,
            max_model_len=max_len,
            deterministic=start.model.deterministic,
            part=loaded.part,
            stamps=loaded.stamps,
            early_q=sends_early_q(),
            keep=loaded.path is not None and not start.model.trust_remote_code and can_cache(in_process=here),
        )
        self._progress("cutting the model", 1, 1)
        self.clock.lap("convert_s")
        memory = None
        if self.module is None and not here:
            patience_s = start.deadlines.start_timeout_s / 2
            memory = packing.choose_packing(
                program, backend, available_bytes, start.topology, start.devices, patience_s
            )
        layers, dtype = layer_shapes(program), program.calls[0].q.dtype
        recurrent = recurrent_layers(program)
        if recurrent.shapes:
            self._check_hybrid()
        program = self.staging.move_program(self.own_slices(program, len(layers)))
        partition = self._partition(layers, max_len)
        return CutModel(program, loaded, layers, dtype, max_len, partition, backend, recurrent, memory)

    def _check_hybrid(self) -> None:
        """Raise ValueError for options that do not go with recurrent layers."""
        start = self.start
        config = EngineConfig(
            model=start.model, kv=start.kv, batching=start.batching, topology=start.topology, devices=start.devices
        )
        for line in conflicts_of(HYBRID_MODEL, config):
            raise ValueError(line)

    def _partition(self, layers: list[LayerShape], max_len: int) -> Partition:
        topology = self.start.topology
        weights = topology.of_rank(topology.normalized_weights, self.start.rank)
        return partition_of(topology.partition, layers, weights, max_len)

    def mixers_of(self, cut: CutModel) -> list[MixerShape]:
        """Return the recurrent layers of a cut model, with the shares of memory workers."""
        topology = self.start.topology
        weights = topology.of_rank(topology.normalized_weights, self.start.rank)
        return [with_shares(mixer, topology.partition, cut.partition, weights) for mixer in cut.recurrent.shapes]

    def compile(self, cut: CutModel, group: Collective | None = None) -> Any:
        """Return the program after all compile passes. ``group``: connects the ranks of a replica, if there are
        several.
        """
        self._progress("preparing the slices", 0, 1)
        model, program = self.start.model, cut.program
        todo = compile_passes(
            cut.backend,
            packed_memory=cut.packed_memory,
            group=group,
            capture=self.staging.graph_capture() if model.cuda_graphs else None,
            emulate=emulation_of(program, prefill=self.is_prefill),
        )
        for each in todo:
            program = each.run(program)
        if cut.packed_memory is not None:
            cut.packed_memory.seal()
        self._progress("preparing the slices", 1, 1)
        return program

    def ready_message(self, cut: CutModel, bounds: Sequence[BindReply], epoch: int) -> ComputeReady:
        """Build the report to the driver. ``bounds``: the memory workers' replies to the Bind, in their order."""
        start = self.start
        return ComputeReady(
            epoch=epoch,
            vocab_size=cut.loaded_model.config.get_text_config().vocab_size,
            num_layers=cut.num_exchanges,
            max_model_len=cut.max_len,
            dtype=str(cut.dtype).removeprefix("torch."),
            eos_token_ids=list(cut.loaded_model.eos_token_ids),
            **combined_capacity(
                bounds, lambda worker: worker * start.topology.tensor_parallel_size + start.rank
            )._asdict(),
            block_size=self.start.kv.block_size,
            kv_bytes=[b.kv_bytes for b in bounds],
            clamps_prompts=any(RecurrenceSpec.decode(x.spec).clamps_prompts for x in cut.recurrent.shapes),
            summary={
                **_summary(cut),
                "attention": bounds[0].backend,
                "gemm": type(cut.backend).__name__.lower(),
                "device": str(self.staging.device),
                **self.decisions,
                **self.clock.laps,
            },
        )

    def _pick(self) -> torch.device:
        start = self.start
        return pick_device(
            "--compute-device", start.devices.compute_device, start.device_number, start.topology.tensor_parallel_size
        )

    def _work_or_failure(self, work: Callable[[], None]) -> bool:
        """Do ``work``. Returns False if that failed by an error that a user can correct, which the driver then
        receives.
        """
        try:
            work()
        except (RefusedError, ValueError) as e:
            if self._is_epoch_over and not isinstance(e, ValueError):
                return True
            self.service.report_failure(str(e), user_error=True)
            return False
        return True

    def _load(self) -> None:
        self.staging = open_staging(self._pick())
        loaded = self.load()
        self.counters["loads"] += 1
        self.service.link.send(loaded)

    def _connect(self, meeting: Connect) -> None:
        self.close_channels()
        self.clock.restart()
        self._epoch_fabric = fabric = EpochFabric(meeting.epoch, self.fabric, self.runtime.clock)
        self._failure = False
        if self._is_epoch_over:
            return
        if meeting.replica is not None:  # spares get their number only now; it also changes as replicas come and go
            self.start = structs.replace(self.start, replica=meeting.replica)
        self.replicas = meeting.replicas or self.start.topology.replicas
        if meeting.topology is not None and meeting.topology != self.start.topology:
            self.start = structs.replace(self.start, topology=meeting.topology)
            self._cut = self._cut._replace(partition=self._partition(self._cut.layers, self._cut.max_len))
        self._worker, ready = self.connect(meeting, fabric)
        self.counters["connects"] += 1
        self.service.link.send(ready)

    def close_channels(self) -> None:
        """Close all channels of the epoch."""
        if self.group:
            self.group.close()
            self.group = None
        if self._epoch_fabric:
            self._epoch_fabric.close()

    def _on_message(self, message: object) -> None:
        """Inspect a message on arrival. A Connect or a Quiesce ends the older epoch at once: work in it may wait for
        peers that have left it.
        """
        if isinstance(message, Connect | Quiesce):
            self._next_epoch = message.epoch
            if self._epoch_fabric and self._is_epoch_over:
                self._epoch_fabric.end_epoch(f"epoch {self._epoch_fabric.epoch} is over: epoch {message.epoch} begins")

    @property
    def _is_epoch_over(self) -> bool:
        """True if the Connect of a newer epoch has arrived."""
        return self._epoch_fabric is not None and self._next_epoch > self._epoch_fabric.epoch

    def _loop(self) -> None:
        while not self.service.is_stopped.is_set():
            try:
                if not self._take_messages():
                    return
                done = self._worker.run_next() if self._worker and not self._is_idle else None
            except (ChannelError, ProtocolError, RefusedError) as error:
                if not self._is_epoch_over:
                    self._report_channel_lost(error)
                continue
            if done is not None:
                for part in split_step_done(done):
                    self.service.link.send(part)

    def _report_channel_lost(self, error: Exception) -> None:
        """Report the end of a channel, whose peer knows the reason. Any other error is this worker's own and is
        raised.
        """
        if not isinstance(error, ChannelError) or self._epoch_fabric is None or self.service.is_stopped.is_set():
            raise error
        self._failure = True
        (view := self._epoch_fabric).end_epoch(f"{self.role}: {error}")
        self.service.link.send(
            ChannelLost(view.epoch, str(error), isinstance(error, MissingKvError), view.peer_in_error(error))
        )

    def _take_messages(self) -> bool:
        """Handle the messages that have arrived; wait for one if there is no other work. Returns whether to
        continue.
        """
        idle, start = not self._has_work, self.trace.now()
        while (new := self.service.next_message(block=not self._has_work)) is not None:
            if isinstance(new, Connect):
                if not self._work_or_failure(partial(self._connect, new)):
                    return False
            elif isinstance(new, Quiesce):
                self.close_channels()
                self.service.link.send(Quiesced(epoch=new.epoch))
            elif self._worker is None or self._epoch_fabric is None or self._is_idle:
                continue
            elif isinstance(new, ConnectPrefillPeers):
                self.connect_prefill_peers(new, self._epoch_fabric)
            else:
                if idle:
                    self.trace.add(Event.WAIT_STEP, start, new.steps[0].plan)
                    idle = False
                self._worker.submit(new)
        return not self.service.is_stopped.is_set()

    @property
    def _has_work(self) -> bool:
        return self._worker is not None and self._worker.has_work and not self._is_idle

    @property
    def _is_idle(self) -> bool:
        return self._failure or self._is_epoch_over

    def _stats(self) -> dict[str, float]:
        packed, int8 = self._linear_layers.quantized_products() if self._linear_layers else (0, 0)
        own = {"packed_products": float(packed), "int8_products": float(int8)}  # by weights of few bits
        return {**(self._worker.stats() if self._worker else {}), **self.counters, **own}

    def _progress(self, stage: str, done: int, total: int) -> None:
        if self.start.progress:
            self.service.link.send(Progress(stage=stage, done=done, total=total))


def serve(server: type[ModelServer], sock: socket.socket, module: Any) -> None:
    """Serve one driver until its link ends."""
    link = ControlLink(sock, MESSAGES)
    try:
        start = link.recv()
    except LinkClosedError:
        return
    if not isinstance(start, StartCompute):
        return
    try:
        made = server(link, start, module)
    except (ValueError, ImportError, ChannelError) as e:  # this host lacks what the transport needs
        with suppress(LinkClosedError):
            link.send(Failed(text=f"{server.role}: {e}", user_error=True))
        return
    made.run()


def _summary(cut: CutModel) -> dict[str, Any]:
    layers, size = cut.layers, cut.dtype.itemsize
    return {
        "num_slices": len(cut.program.slices),
        "weight_bytes": cut.program.weight_bytes,
        "heads": [(s.q_heads, s.kv_heads) for s in layers],
        "cut_bytes_per_token": [c.bytes_per_token for c in cut.program.cuts],
        "q_bytes": [s.q_heads * s.qk_dim * size for s in layers],
        "kv_bytes": [s.kv_heads * (s.qk_dim + s.v_dim) * size for s in layers],
        "o_bytes": [s.q_heads * s.v_dim * size for s in layers],
    }
