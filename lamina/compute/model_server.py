"""The life of a worker that has the model: load and cut it once; then connect and serve rounds, view after view, until
the driver goes.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from msgspec import structs

from lamina import gemm, netstack
from lamina.collective import Collective
from lamina.env import cluster_key
from lamina.gemm import LinearBackend, packing
from lamina.memory.store import available_bytes
from lamina.netstack import ChannelError
from lamina.observe.trace import Event
from lamina.observe.tripwire import recorder
from lamina.protocol.beginnings import MeetPrefill
from lamina.protocol.control import (
    AskClock,
    AskStats,
    AskTrace,
    Broken,
    ComputeReady,
    Connect,
    ControlLink,
    Failed,
    Halt,
    Halted,
    LinkClosedError,
    Loaded,
    Progress,
    RunRound,
    StartCompute,
    StepDone,
    Stop,
)
from lamina.protocol.groups import partition_of, together
from lamina.protocol.options.resolve import sequence_limit
from lamina.protocol.partition import Partition
from lamina.protocol.plan import Bound, LayerShape, ProtocolError
from lamina.protocol.step_parts import parted
from lamina.workers.devices import CPU, gpu_of, linear, pick
from lamina.workers.process import write_error
from lamina.workers.service import WorkerService
from lamina.workers.stage_times import StageTimes
from lamina.workers.staging import Staging, open_staging
from lamina.workers.surroundings import HERE, Surroundings
from lamina.workers.view import ViewFabric

from .links import LacksError, RefusedError
from .passes import passes

MESSAGES = StartCompute | RunRound | Connect | MeetPrefill | Halt | AskStats | AskClock | AskTrace | Stop


class Worker(Protocol):
    """The part of a worker that serves the rounds: ComputeWorker, PrefillWorker."""

    @property
    def has_work(self) -> bool:
        """Whether ``turn`` has something to do."""
        ...

    def submit(self, new: RunRound) -> None:
        """Queue a round."""
        ...

    def turn(self) -> StepDone | None:
        """Do a part of the work; returns a step that is done."""
        ...

    def stats(self) -> dict[str, float]:
        """Counters by name. Safe from any thread."""
        ...


class CutModel(NamedTuple):
    """A loaded model, in slices. ``layers``: its attention operators; ``backend``: for its linear layers, which the
    program has not yet.
    """

    program: Any
    loaded: Any
    layers: list[LayerShape]
    dtype: torch.dtype
    max_len: int
    partition: Partition
    backend: LinearBackend


class ModelServer:
    """The process of a worker that has a model. Subclasses load it in ``load``, and build the Worker of a view in
    ``connect``.
    """

    role: str  # for messages to people
    prefills = False  # whether it computes prompts alone
    _cut: CutModel  # once it is loaded
    replicas = 1  # that there are in the view

    def __init__(self, link: ControlLink, start: StartCompute, module: Any, around: Surroundings = HERE) -> None:
        """``module``: the model itself, where the driver is this process."""
        self.start = start
        self.module = module
        self.around = around
        gpu, device = gpu_of(start.devices.compute_device, start.device_number), start.devices.rdma_device
        self.fabric = around.open_fabric(start.scheme, key=start.key or cluster_key(), gpu=gpu, device=device)
        self.trace = recorder(start.trace)
        self.clock = StageTimes()
        self.staging: Staging = open_staging(CPU)  # until the device is picked
        self.group: Collective | None = None
        self.choices: dict[str, str] = {}  # use -> what was chosen for it here, and why
        self.counts = {"loads": 0.0, "connects": 0.0}
        self._worker: Worker | None = None
        self._in_view: ViewFabric | None = None
        self._called = -1  # the newest view that the driver has named
        self._broken = False  # a channel of the view has ended
        self.service = WorkerService(
            link, self._stats, lambda reason: self.fabric.close(), self.trace, heed=self._heed, around=around
        )

    def load(self) -> Loaded:
        """Raises ValueError for what a user can put right."""
        raise NotImplementedError

    def connect(self, meeting: Connect, fabric: ViewFabric) -> tuple[Worker, ComputeReady]:
        """All channels are opened by ``fabric``. Raises RefusedError, ValueError for what a user can put right."""
        raise NotImplementedError

    def meet(self, order: MeetPrefill, fabric: ViewFabric) -> None:
        """Open channels to the other prefill workers. Raises ChannelError."""
        raise ProtocolError(f"a {self.role} is to meet prefill workers")

    def own_part(self, program: Any, num_layers: int) -> Any:
        """Of the cut program, what this worker runs. Raises ValueError."""
        return program

    def run(self) -> None:
        """Serve until the driver's end of the link closes or says Stop."""
        try:
            if self._told(self._load):
                self._loop()
        except LinkClosedError:
            pass  # the driver is gone: so are we
        except (ChannelError, ProtocolError, RefusedError) as e:
            if not self.service.stopped.is_set():
                self.service.fail(f"{self.role}: {e}", by_peer=isinstance(e, ChannelError))
        except Exception as e:
            write_error()
            self.service.fail(f"{self.role}: {type(e).__name__}: {e}")
            raise
        finally:
            self.let_go()
            self.fabric.close()
            self.service.link.close()

    def cut(self) -> CutModel:
        """Load the model and cut it at its attention operators. Raises ModelError, ValueError."""
        from lamina.models.captures import may_be_kept
        from lamina.models.convert import convert_model, layer_shapes
        from lamina.models.load import load

        start = self.start
        if start.threads and start.threads != torch.get_num_threads():
            torch.set_num_threads(start.threads)
        loaded = load(
            self.module if self.module is not None else start.path,
            dtype=start.model.dtype,
            trust_remote_code=start.model.trust_remote_code,
            progress=self._progress,
            rank=start.rank,
            size=start.topology.tensor_parallel_size,
        )
        max_len = sequence_limit(start.model.max_model_len, loaded.max_model_len)
        self.clock.lap("load_s")
        self._progress("cutting the model", 0, 1)
        here = netstack.in_process(start.scheme)
        program = convert_model(
            loaded.model,
            max_model_len=max_len,
            deterministic=start.model.deterministic,
            part=loaded.part,
            stamps=loaded.stamps,
            keep=loaded.path is not None and not start.model.trust_remote_code and may_be_kept(in_process=here),
        )
        self._progress("cutting the model", 1, 1)
        self.clock.lap("convert_s")
        backend = gemm.get(linear(start.model.gemm, self.staging.device), torch.get_num_threads())
        if self.module is None and not here:
            patience_s = start.deadlines.start_timeout_s / 2
            packing.decide(program, backend, available_bytes, start.topology, start.devices, patience_s)
        layers, dtype = layer_shapes(program), program.calls[0].q.dtype
        program = self.staging.place(self.own_part(program, len(layers)))
        partition = self._partition(layers, max_len)
        return CutModel(program, loaded, layers, dtype, max_len, partition, backend)

    def _partition(self, layers: list[LayerShape], max_len: int) -> Partition:
        topology = self.start.topology
        weights = topology.of_rank(topology.weights, self.start.rank)
        return partition_of(topology.partition, layers, weights, max_len)

    def runnable(self, cut: CutModel, group: Collective | None = None) -> Any:
        """The program behind all passes. ``group``: the other ranks."""
        model, program = self.start.model, cut.program
        todo = passes(
            cut.backend,
            group=group,
            capture=self.staging.capture() if model.cuda_graphs else None,
            prefill=self.prefills,
        )
        for each in todo:
            program = each.run(program)
        cut.backend.pages.done()
        return program

    def ready(self, cut: CutModel, bounds: Sequence[Bound], view: int) -> ComputeReady:
        """The facts that the driver must know; ``bounds``: the memory workers' answers, in their order."""
        start = self.start
        return ComputeReady(
            view=view,
            vocab_size=cut.loaded.config.get_text_config().vocab_size,
            num_layers=len(cut.layers),
            max_model_len=cut.max_len,
            dtype=str(cut.dtype).removeprefix("torch."),
            eos_token_ids=list(cut.loaded.eos_token_ids),
            **together(bounds, lambda worker: worker * start.topology.tensor_parallel_size + start.rank)._asdict(),
            block_size=self.start.kv.block_size,
            kv_bytes=[b.kv_bytes for b in bounds],
            summary={
                **_summary(cut),
                "attention": bounds[0].backend,
                "gemm": type(cut.backend).__name__.lower(),
                "device": str(self.staging.device),
                **self.choices,
                **self.clock.laps,
            },
        )

    def _pick(self) -> torch.device:
        start = self.start
        return pick(
            "--compute-device", start.devices.compute_device, start.device_number, start.topology.tensor_parallel_size
        )

    def _told(self, work: Callable[[], None]) -> bool:
        """Do ``work``; whether it was done. If not, the driver was told of an error that a user can put right."""
        try:
            work()
        except (RefusedError, ValueError) as e:
            if self._called_away and not isinstance(e, ValueError):
                return True
            self.service.fail(str(e), user_error=True)
            return False
        return True

    def _load(self) -> None:
        self.staging = open_staging(self._pick())
        loaded = self.load()
        self.counts["loads"] += 1
        self.service.link.send(loaded)

    def _connect(self, meeting: Connect) -> None:
        self.let_go()
        self.clock.skip()
        self._in_view = fabric = ViewFabric(meeting.view, self.fabric, self.around.clock)
        self._broken = False
        if self._called_away:
            return
        if meeting.number is not None:  # a spare learns its place as it takes it, all where replicas come and go
            self.start = structs.replace(self.start, number=meeting.number)
        self.replicas = meeting.replicas or self.start.topology.replicas
        if meeting.topology is not None and meeting.topology != self.start.topology:
            self.start = structs.replace(self.start, topology=meeting.topology)
            self._cut = self._cut._replace(partition=self._partition(self._cut.layers, self._cut.max_len))
        self._worker, ready = self.connect(meeting, fabric)
        self.counts["connects"] += 1
        self.service.link.send(ready)

    def let_go(self) -> None:
        """Of all channels of the view."""
        if self.group:
            self.group.close()
            self.group = None
        if self._in_view:
            self._in_view.close()

    def _heed(self, message: object) -> None:
        """Look at a message as it comes: a Connect or a Halt ends the older view at once, as work in it may wait for
        peers that have gone on.
        """
        if isinstance(message, Connect | Halt):
            self._called = message.view
            if self._in_view and self._called_away:
                self._in_view.leave(f"view {self._in_view.view} is over: view {message.view} begins")

    @property
    def _called_away(self) -> bool:
        """Whether the Connect of a newer view has come."""
        return self._in_view is not None and self._called > self._in_view.view

    def _loop(self) -> None:
        while not self.service.stopped.is_set():
            try:
                if not self._take_messages():
                    return
                done = self._worker.turn() if self._worker and not self._resting else None
            except (ChannelError, ProtocolError, RefusedError) as error:
                if not self._called_away:
                    self._break(error)
                continue
            if done is not None:
                for part in parted(done):
                    self.service.link.send(part)

    def _break(self, error: Exception) -> None:
        """A channel has ended: its other end knows why. Whatever else it is, this worker has failed."""
        if not isinstance(error, ChannelError) or self._in_view is None or self.service.stopped.is_set():
            raise error
        self._broken = True
        (view := self._in_view).leave(f"{self.role}: {error}")
        self.service.link.send(Broken(view.view, str(error), isinstance(error, LacksError), view.peer_of(error)))

    def _take_messages(self) -> bool:
        """Handle the messages that have come; waits for one where there is nothing else to do. Whether to go on."""
        idle, start = not self._has_work, self.trace.now()
        while (new := self.service.next(block=not self._has_work)) is not None:
            if isinstance(new, Connect):
                if not self._told(partial(self._connect, new)):
                    return False
            elif isinstance(new, Halt):
                self.let_go()
                self.service.link.send(Halted(view=new.view))
            elif self._worker is None or self._in_view is None or self._resting:
                continue
            elif isinstance(new, MeetPrefill):
                self.meet(new, self._in_view)
            else:
                if idle:
                    self.trace.add(Event.WAIT_STEP, start, new.steps[0].plan)
                    idle = False
                self._worker.submit(new)
        return not self.service.stopped.is_set()

    @property
    def _has_work(self) -> bool:
        return self._worker is not None and self._worker.has_work and not self._resting

    @property
    def _resting(self) -> bool:
        return self._broken or self._called_away

    def _stats(self) -> dict[str, float]:
        return {**(self._worker.stats() if self._worker else {}), **self.counts}

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
