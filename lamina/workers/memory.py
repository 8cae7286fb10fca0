"""The memory worker: keeps the KV cache and computes core attention. ``python -m lamina.workers.memory``.

It serves one channel at a time. When the compute worker behind it is lost, it waits for the next one, which binds
again; the sequences of the old one are dropped.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from lamina import netstack
from lamina.kv.blocks import NoBlocksError, PlanError
from lamina.netstack import Arrival, Channel, ChannelError, ChannelTimeout, Listener
from lamina.observe.trace import OFF, Event, Recorder, recorder

from .buffers import tensor_over
from .control import AskClock, AskStats, AskTrace, ControlLink, LinkClosedError, MemoryReady, StartMemory, Stop
from .memory_store import Step, Store
from .service import Service, run_process
from .stepplan import Key, Kind, ProtocolError, StepPlan, decode_bind, decode_plan, encode

POLL_S = 1.0  # of waits that only an event ends: a message, the peer's death, the driver's Stop
RESERVE_S = 60.0  # for a compute worker to take what it was sent before


class MemoryWorker:
    """Serves channels, one after the other. Holds state, decides nothing."""

    def __init__(self, device: torch.device | None = None, trace: Recorder = OFF) -> None:
        self._device = device or torch.device("cpu")
        self._meter = Meter()
        self._trace = trace
        self._channel: Channel | None = None
        self._aborted = ""

    def stats(self) -> dict[str, float]:
        """Since the start: attend_s, write_s, wait_s, plan_s; steps, rows, refused; payload bytes_received, bytes_sent.

        Safe from any thread.
        """
        return self._meter.read()

    def abort(self, reason: str) -> None:
        """End ``serve``, now and whenever it is called again. Safe from any thread."""
        self._aborted = reason
        channel = self._channel
        if channel is not None:
            channel.abort(reason)

    def serve(self, channel: Channel) -> None:
        """Bind, then serve steps until the channel ends; close it and drop the sequences.

        It ends by an exception only: ChannelError, or ProtocolError where the peer broke the contract.
        """
        self._channel = channel
        if self._aborted:
            channel.abort(self._aborted)
        try:
            with torch.inference_mode():
                _Session(channel, self._device, self._meter, self._trace).run()
        except ProtocolError as e:
            channel.abort(str(e))
            raise
        finally:
            self._channel = None
            channel.close()


class Meter:
    """Seconds, counts and bytes by name."""

    def __init__(self) -> None:
        names = "attend_s write_s wait_s plan_s steps rows refused bytes_received bytes_sent"
        self._values = dict.fromkeys(names.split(), 0.0)

    def read(self) -> dict[str, float]:
        return dict(self._values)

    def add(self, name: str, value: float) -> None:
        self._values[name] += value

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._values[name] += time.perf_counter() - start


class _Session:
    """One channel from its Bind to its end. The steps of a batch come one after the other; those of several batches
    alternate, layer by layer, in the order in which the compute worker sends.
    """

    def __init__(self, channel: Channel, device: torch.device, meter: Meter, trace: Recorder) -> None:
        self._channel = channel
        self._meter = meter
        self._trace = trace
        self._current: dict[int, tuple[Step, int]] = {}  # batch -> its step under way and the next layer of it
        self._refused: dict[int, Key] = {}  # batch -> its last plan, if refused: its layer messages are dropped
        self._store = self._bind(device)

    def run(self) -> None:
        while True:
            start = self._trace.now()
            arrival = self._receive()
            key = Key.unpack(arrival.tag)
            if key.kind == Kind.PLAN:
                if key.batch in self._current:
                    raise ProtocolError(f"{key} in place of a layer message: the step before is not done")
                start = self._trace.add(Event.WAIT_PLAN, start, key)
                self._begin(arrival, key)
                self._trace.add(Event.PLAN, start, key)
            elif key.batch in self._current:
                self._advance(arrival, key, start)
            elif (bad := self._refused.get(key.batch)) and key == bad._replace(kind=key.kind, layer=key.layer):
                self._channel.release(arrival)
            else:
                raise ProtocolError(f"{key} in place of a plan")

    def _advance(self, arrival: Arrival, key: Key, start: float) -> None:
        """The next layer of a batch: its Q has come."""
        step, layer = self._current[key.batch]
        self._trace.add(Event.WAIT_Q, start, step.plan, layer, 0, arrival.data.nbytes)
        self._layer(step, layer, arrival)
        if layer + 1 < len(self._store.layers):
            self._current[key.batch] = step, layer + 1
        else:
            del self._current[key.batch]

    def _bind(self, device: torch.device) -> Store:
        """Wait for a Bind that can be; the peer may try again after a refusal, or leave."""
        while True:
            arrival = self._receive()
            key = Key.unpack(arrival.tag)
            if key.kind != Kind.BIND:
                raise ProtocolError(f"{key} in place of a bind")
            try:
                store = Store(decode_bind(arrival.data), device)
            except (ValueError, ImportError, MemoryError, ProtocolError) as e:
                answer, text = Kind.REFUSED, str(e).encode()
            else:
                answer, text = Kind.BOUND, encode(store.bound)
            self._channel.release(arrival)
            self._send(Key(answer), text)
            if answer == Kind.BOUND:
                return store

    def _begin(self, arrival: Arrival, key: Key) -> None:
        """Apply a plan, or refuse it."""
        try:
            with self._meter.time("plan_s"):
                plan = decode_plan(arrival.data)
                if key != _key(Kind.PLAN, plan, -1):
                    raise ProtocolError(f"the plan of step {plan.step} came as {key}")
                step = self._store.begin(plan)
        except (ProtocolError, PlanError, NoBlocksError) as e:
            self._refused[key.batch] = key
            self._meter.add("refused", 1)
            self._send(key._replace(kind=Kind.REFUSED), str(e).encode())
            return
        finally:
            self._channel.release(arrival)
        self._refused.pop(key.batch, None)
        self._meter.add("steps", 1)
        self._meter.add("rows", step.num_rows)
        if step.num_rows:
            self._current[key.batch] = step, 0

    def _layer(self, step: Step, layer: int, q_arrival: Arrival) -> None:
        """Q in, attend the stored tokens; KV in, write, attend the new ones; O out.

        Q and KV are released before O is signalled: whoever sees O has their slots back.
        """
        store, meter, trace = self._store, self._meter, self._trace
        op, rows = store.operators[layer], step.num_rows
        (q,) = self._tensors(q_arrival, _key(Kind.Q, step.plan, layer), (rows, op.q_heads, op.qk_dim))
        start = trace.now()
        if store.bind.overlap:
            with meter.time("attend_s"):
                stored = step.attend_stored(layer, q)
            trace.add(Event.STORED, start, step.plan, layer)
        start = trace.now()
        kv_arrival = self._receive()
        start = trace.add(Event.WAIT_KV, start, step.plan, layer, 0, kv_arrival.data.nbytes)
        shapes = (rows, op.kv_heads, op.qk_dim), (rows, op.kv_heads, op.v_dim)
        k, v = self._tensors(kv_arrival, _key(Kind.KV, step.plan, layer), *shapes)
        if not store.bind.overlap:
            with meter.time("attend_s"):
                stored = step.attend_stored(layer, q)
            start = trace.add(Event.STORED, start, step.plan, layer)
        with meter.time("write_s"):
            step.write(layer, k, v)
        start = trace.add(Event.WRITE, start, step.plan, layer)
        slot = self._channel.reserve(rows * op.q_heads * op.v_dim * store.dtype.itemsize, timeout_s=RESERVE_S)
        start = trace.add(Event.RESERVE, start, step.plan, layer)
        with meter.time("attend_s"):
            out = tensor_over(slot.data, store.dtype).view(rows, op.q_heads, op.v_dim)
            step.finish(layer, stored, q, k, v, out)
        start = trace.add(Event.NEW, start, step.plan, layer)
        self._channel.release(q_arrival)
        self._channel.release(kv_arrival)
        self._channel.put_signal(slot, _key(Kind.O, step.plan, layer).pack())
        trace.add(Event.SEND_O, start, step.plan, layer, 0, out.numel() * out.element_size())
        meter.add("bytes_sent", out.numel() * out.element_size())

    def _tensors(self, arrival: Arrival, key: Key, *shapes: tuple[int, int, int]) -> list[Tensor]:
        """The layer message that must come next, as tensors over its bytes. Raises ProtocolError on any other."""
        got, dtype = Key.unpack(arrival.tag), self._store.dtype
        sizes = [a * b * c for a, b, c in shapes]
        nbytes = sum(sizes) * dtype.itemsize
        if got != key or arrival.data.nbytes != nbytes:
            raise ProtocolError(f"{got} of {arrival.data.nbytes} bytes in place of {key} of {nbytes} bytes")
        parts = torch.split(tensor_over(arrival.data, dtype), sizes)
        return [x.view(shape) for x, shape in zip(parts, shapes, strict=True)]

    def _receive(self) -> Arrival:
        """The next message. Waits as long as the peer and the driver live: an idle worker is no fault."""
        with self._meter.time("wait_s"):
            while True:
                try:
                    arrival = self._channel.wait_signal(timeout_s=POLL_S)
                    break
                except ChannelTimeout:
                    continue
        self._meter.add("bytes_received", arrival.data.nbytes)
        return arrival

    def _send(self, key: Key, data: bytes) -> None:
        slot = self._channel.reserve(len(data), timeout_s=RESERVE_S)
        slot.data[:] = data
        self._channel.put_signal(slot, key.pack())
        self._meter.add("bytes_sent", len(data))


def _key(kind: Kind, plan: StepPlan, layer: int) -> Key:
    return Key(kind, plan.step, plan.batch, plan.view, layer)


def serve_memory(sock: socket.socket) -> None:
    """Serve one driver, over its control socket, until the link ends or says Stop."""
    link = ControlLink(sock, StartMemory | AskStats | AskClock | AskTrace | Stop)
    try:
        start = link.recv()
    except LinkClosedError:
        return
    if isinstance(start, StartMemory):
        _Server(link, start).run()
    link.close()


class _Server:
    """The life of a memory worker's process, or thread."""

    def __init__(self, link: ControlLink, start: StartMemory) -> None:
        self._start = start
        trace = recorder(start.trace)
        self._worker = MemoryWorker(trace=trace)
        self._fabric: netstack.Fabric | None = None
        self._service = Service(link, self._worker.stats, self._abort, trace)

    def run(self) -> None:
        service, start = self._service, self._start
        try:
            if start.threads not in (0, torch.get_num_threads()):  # once called, it wakes threads for tiny tensors too
                torch.set_num_threads(start.threads)
            listener = self._listen()
            if listener is not None:
                service.link.send(MemoryReady(url=listener.url))
                while not service.stopped.is_set():
                    self._serve_next(listener)
        except LinkClosedError:
            pass  # the driver is gone: so are we
        except Exception as e:
            if not service.stopped.is_set():
                service.fail(f"memory worker: {type(e).__name__}: {e}")
                raise
        finally:
            if self._fabric is not None:
                self._fabric.close()

    def _listen(self) -> Listener | None:
        """None where that is impossible, and the driver knows why."""
        try:
            self._fabric = netstack.open(self._start.scheme, key=self._start.key)
            return self._fabric.listen(self._start.address)
        except (ValueError, ImportError, ChannelError) as e:
            self._service.fail(f"memory worker: {e}", user_error=True)
            return None

    def _serve_next(self, listener: Listener) -> None:
        try:
            channel = listener.accept(timeout_s=POLL_S)
        except ChannelTimeout:
            return  # nobody came yet
        with suppress(ChannelError, ProtocolError):
            self._worker.serve(channel)  # the driver hears from the other end why it ended, and may send another peer

    def _abort(self, reason: str) -> None:
        self._worker.abort(reason)
        if self._fabric is not None:
            self._fabric.close()


if __name__ == "__main__":
    run_process(serve_memory)
