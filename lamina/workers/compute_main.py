"""Start of a compute worker: load, cut, connect, bind; then serve steps."""

from __future__ import annotations

import socket
import time
from typing import Any

import torch

from lamina import attention, gemm, netstack
from lamina.attention.merge import CHUNK_TOKENS
from lamina.kv.partition import PARTITIONS, Partition, stripe_of
from lamina.netstack import ChannelError
from lamina.observe.trace import Event, recorder

from .capacity import choose_kv_bytes, geometries, together
from .compute import ComputeWorker
from .compute_emulated import emulated
from .control import (
    AskClock,
    AskStats,
    AskTrace,
    ComputeReady,
    ControlLink,
    LinkClosedError,
    Progress,
    RingPeer,
    RingUrl,
    RunRound,
    StartCompute,
    Stop,
)
from .links import MemoryLink, RefusedError
from .memory_pool import MemoryPool
from .memory_store import available_bytes
from .ring import RingEnds
from .service import Service
from .stepplan import Bind, Bound, Join, LayerShape, ProtocolError


def serve_compute(sock: socket.socket, module: Any = None) -> None:
    """Serve one driver until its link ends. ``module``: the model itself, where the driver is this process."""
    link = ControlLink(sock, StartCompute | RunRound | RingPeer | AskStats | AskClock | AskTrace | Stop)
    try:
        start = link.recv()
    except LinkClosedError:
        return
    if isinstance(start, StartCompute):
        _Server(link, start, module).run()


class _Server:
    def __init__(self, link: ControlLink, start: StartCompute, module: Any) -> None:
        self._start = start
        self._module = module
        self._fabric = netstack.open(start.scheme, key=start.key)
        self._worker: ComputeWorker | None = None
        self._trace = recorder(start.trace)
        self._service = Service(link, self._stats, lambda reason: self._fabric.close(), self._trace)

    def run(self) -> None:
        try:
            if self._start_up() and self._worker:
                self._loop(self._worker)
        except LinkClosedError:
            pass  # the driver is gone: so are we
        except (ChannelError, ProtocolError, RefusedError) as e:
            if not self._service.stopped.is_set():
                self._service.fail(f"compute worker: {e}")
        except Exception as e:
            self._service.fail(f"compute worker: {type(e).__name__}: {e}")
            raise
        finally:
            self._fabric.close()
            self._service.link.close()

    def _start_up(self) -> bool:
        """Whether there is a model to serve; what a user can put right has been told."""
        try:
            self._worker, ready = self._prepare()
        except (RefusedError, ValueError) as e:
            self._service.fail(str(e), user_error=True)
            return False
        self._service.link.send(ready)
        return True

    def _loop(self, worker: ComputeWorker) -> None:
        while True:
            self._take_steps(worker)
            if self._service.stopped.is_set():
                return
            done = worker.turn()
            if done is not None:
                self._service.link.send(done)

    def _take_steps(self, worker: ComputeWorker) -> None:
        """The rounds that have come; the next one where the worker has nothing to do."""
        idle, start = not worker.has_work, self._trace.now()
        while (new := self._service.next(block=not worker.has_work)) is not None:
            if idle:
                self._trace.add(Event.WAIT_STEP, start, new.steps[0].plan)
                idle = False
            worker.submit(new)

    def _stats(self) -> dict[str, float]:
        return self._worker.stats() if self._worker else {}

    def _progress(self, stage: str, done: int, total: int) -> None:
        self._service.link.send(Progress(stage=stage, done=done, total=total))

    def _prepare(self) -> tuple[ComputeWorker, ComputeReady]:
        from lamina.models.convert import convert_model, layer_shapes
        from lamina.models.load import load

        start, clock = self._start, _Clock()
        if start.threads and start.threads != torch.get_num_threads():
            torch.set_num_threads(start.threads)
        source = self._module if self._module is not None else start.model
        listener = self._listen() if start.replicas > 1 else None
        loaded = load(source, dtype=start.dtype, trust_remote_code=start.trust_remote_code, progress=self._progress)
        max_len = _sequence_limit(start.max_model_len, loaded.max_model_len)
        clock.lap("load_s")
        self._progress("cutting the model", 0, 1)
        program = convert_model(loaded.model, max_model_len=max_len, deterministic=start.deterministic)
        self._progress("cutting the model", 1, 1)
        clock.lap("convert_s")
        linear = gemm.get(start.gemm, torch.get_num_threads())
        program = gemm.bind(program, linear)
        shapes = layer_shapes(program)
        dtype = program.calls[0].q.dtype
        ring = self._close_ring(listener, program) if listener else None
        pool, bounds = self._connect(shapes, dtype, max_len, ring)
        clock.lap("bind_s")
        worker = ComputeWorker(
            emulated(program),
            pool,
            dtype=dtype,
            deterministic=start.deterministic,
            replica=start.replica,
            ring=ring.ring if ring else None,
            trace=self._trace,
        )
        ready = ComputeReady(
            vocab_size=loaded.config.get_text_config().vocab_size,
            num_layers=len(shapes),
            max_model_len=max_len,
            dtype=str(dtype).removeprefix("torch."),
            eos_token_ids=list(loaded.eos_token_ids),
            **together(bounds)._asdict(),
            block_size=start.block_size,
            summary={
                **_summary(program, shapes, dtype),
                "attention": bounds[0].backend,
                "gemm": type(linear).__name__.lower(),
                **clock.laps,
            },
        )
        return worker, ready

    def _listen(self) -> netstack.Listener:
        """Where the replica before this one comes. Raises ModelError where there is no room for all of them."""
        from lamina.models.checkpoint import check_room, find_checkpoint

        start, listener = self._start, self._fabric.listen()
        self._service.link.send(RingUrl(url=listener.url))
        if not start.replica and self._module is None:
            directory = find_checkpoint(start.model, trust_remote_code=start.trust_remote_code)
            check_room(directory, start.replicas, available_bytes())
        return listener

    def _close_ring(self, listener: netstack.Listener, program: Any) -> RingEnds:
        peer, start = self._service.next(block=True), self._start
        if not isinstance(peer, RingPeer):
            raise LinkClosedError("the driver ended before the ring was closed")
        return RingEnds(
            self._fabric,
            listener,
            peer.url,
            [cut.tensors for cut in program.cuts],
            first=start.replica == 0,
            max_rows=start.max_rows,
            num_batches=start.num_batches,
            start_timeout_s=start.start_timeout_s,
            step_timeout_s=start.step_timeout_s,
        )

    def _connect(
        self, shapes: list[LayerShape], dtype: torch.dtype, max_len: int, ring: RingEnds | None
    ) -> tuple[MemoryPool, list[Bound]]:
        """Bind the memory workers, or join them once the replica before has."""
        start = self._start
        if ring and start.replica:
            ring.await_turn()
        stripe = stripe_of(-(-max_len // CHUNK_TOKENS), len(start.memory_urls))
        partition = PARTITIONS[start.partition]([s.kv_heads for s in shapes], start.memory_weights, stripe)
        rows = {"max_rows": start.max_rows, "max_len": max_len, "num_batches": start.num_batches}
        outbound, inbound = geometries(shapes, partition, dtype.itemsize, **rows)
        links, bounds = list[MemoryLink](), list[Bound]()
        for worker, url in enumerate(start.memory_urls):
            channel = self._fabric.connect(url, outbound=outbound, inbound=inbound)
            links.append(MemoryLink(channel, worker, start.step_timeout_s, self._trace))
            if start.replica:
                bounds.append(links[-1].join(Join(replica=start.replica, layers=shapes)))
            else:
                bounds.append(links[-1].bind(self._bind(worker, partition, shapes, dtype, max_len)))
        if ring and start.replica + 1 < start.replicas:
            ring.pass_turn()
        merging = attention.get(bounds[0].backend if partition.stripe else "reference", torch.device("cpu"), dtype)
        return MemoryPool(links, partition, shapes, merging), bounds

    def _bind(
        self, worker: int, partition: Partition, shapes: list[LayerShape], dtype: torch.dtype, max_len: int
    ) -> Bind:
        start = self._start
        chosen = choose_kv_bytes(
            shapes,
            partition,
            worker,
            dtype.itemsize,
            max_len=max_len,
            max_num_seqs=start.max_num_seqs,
            block_size=start.block_size,
            free=available_bytes(),
        )
        return Bind(
            worker=worker,
            partition=partition,
            layers=shapes,
            dtype=str(dtype).removeprefix("torch."),
            block_size=start.block_size,
            kv_bytes=start.kv_bytes or chosen,
            max_rows=start.max_rows,
            max_model_len=max_len,
            replicas=start.replicas,
            overlap=start.overlap,
            backend=start.backend,
        )


def _sequence_limit(asked: int, own: int) -> int:
    if asked > own:
        raise ValueError(f"--max-model-len {asked} exceeds the model's own limit of {own} tokens")
    return asked or own


def _summary(program: Any, layers: list[LayerShape], dtype: torch.dtype) -> dict[str, Any]:
    return {
        "num_slices": len(program.slices),
        "cut_bytes_per_token": [c.bytes_per_token for c in program.cuts],
        "q_bytes": [s.q_heads * s.qk_dim * dtype.itemsize for s in layers],
        "kv_bytes": [s.kv_heads * (s.qk_dim + s.v_dim) * dtype.itemsize for s in layers],
        "o_bytes": [s.q_heads * s.v_dim * dtype.itemsize for s in layers],
    }


class _Clock:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now
