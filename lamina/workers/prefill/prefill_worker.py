"""The prefill worker: a compute worker for prompts that computes attention itself and sends K and V to memory workers.

It computes a prompt in chunks, with all K and V of the prompt in its own store, and draws the first token. It sends K
and V of each layer as soon as they exist. Memory workers store them when decoding leaves them idle
(workers.memory.kv_transfer.prefill_receive), so a prompt hardly delays decoding. It may get K and V of a prompt's
beginning from another prefill worker or from memory workers (prefill.prefix_fetch).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
from msgspec import structs
from torch import Tensor

from lamina.netstack import ChannelTimeout
from lamina.observe.trace import NULL_RECORDER, Event, Recorder
from lamina.protocol.control import RunRound, StepDone
from lamina.protocol.step_plan import FetchPrefix, ProtocolError, StepPlan, SurvivingKv
from lamina.utils.tensor_buffers import part_of
from lamina.workers.compute.compute_worker import Attention, ComputeWorker, PipelineComm
from lamina.workers.memory.attention_step import AttentionStep, StoredAttention, StoredKvRows
from lamina.workers.memory.kv_store import KvStore
from lamina.workers.staging import EMPTY_BYTES

from .kv_sender import KvSender
from .prefix_fetch import PrefixFetch

STAGE_WAIT_S = 0.02  # seconds of a wait for the stage before, before the driver's messages are checked again
POLL_S = 0.002  # seconds of a wait for memory workers, before the driver's messages are checked again


class LocalAttention:
    """Has the methods of AttentionClient for slices, but computes attention here. It also sends K and V by ``pool``."""

    def __init__(self, store: KvStore, pool: Attention, trace: Recorder = NULL_RECORDER, first: int = 0) -> None:
        """``store``: of all heads, for one prompt after another, of the layers from ``first`` on. Tensors are on its
        device. ``pool``: sends K and V of all layers, and accepts tensors of that device.
        """
        self._store, self._first = store, first
        self._before = EMPTY_BYTES  # O of the layer before the first one here, from the stage before
        self._client = pool
        # Exchange KV with other prefill workers, and get KV of memory workers; none until they are connected.
        self._prefix_fetches: list[PrefixFetch] = []
        self._trace = trace
        self._step: AttentionStep | None = None
        self._q = EMPTY_BYTES
        self._writes: list[StoredKvRows] = []
        self._stored: list[StoredAttention] = []
        self.attend_s = 0.0
        self.wait_s = 0.0  # always 0: it waits for no memory worker
        self.fetch_s = 0.0  # waits for beginnings of prompts from other workers, after their steps began
        self.fetched_bytes = 0
        self._in_slices_s = 0.0  # seconds of fetching and attending
        self._past_s = 0.0  # sending, in older epochs and by others than the client

    def connect(self, pool: Attention, keep: Sequence[SurvivingKv] | None = None) -> None:
        """Send K and V by ``pool`` from now on. ``keep``: the KV of the store to keep; None for all."""
        for fetch in self._prefix_fetches:
            fetch.stop()
        if keep is not None:
            self._store.reconcile(keep)
        self._past_s, self._client, self._step, self._prefix_fetches = self.sending_s, pool, None, []

    def add_prefix_fetch(self, beginnings: PrefixFetch) -> None:
        """Use the connections to other workers of this epoch, which have beginnings of prompts."""
        self._prefix_fetches.append(beginnings)

    @property
    def send_s(self) -> float:
        """Seconds that slices spent in here: sending, fetching, and attending."""
        return self.sending_s + self._in_slices_s

    @property
    def sending_s(self) -> float:
        """The seconds spent sending."""
        return self._past_s + self._client.send_s

    def send_plan(self, plan: StepPlan) -> None:
        """Announce a coming step, and request the KV that it fetches. Raises ChannelError, ProtocolError."""
        for op in plan.ops:
            if isinstance(op, FetchPrefix) and not any(each.fetches(op) for each in self._prefix_fetches):
                raise ProtocolError(f"step {plan.step} fetches from workers to which this one has no channel")
        for fetch in self._prefix_fetches:
            fetch.request(plan)

    def prepare(self, plan: StepPlan) -> None:
        """Do nothing: the store is as the last step left it."""

    def begin_step(self, plan: StepPlan) -> None:
        """Select the step that the next messages belong to. Raises PlanError, NoBlocksError."""
        if self._step is None or self._step.plan is not plan:
            self._store.apply_plan(plan)
            self._store.apply_block_copies()
            self._step = AttentionStep(self._store, plan)
            for fetch in self._prefix_fetches:
                fetch.begin_step(plan)
            self._client.begin_step(plan)

    def receive_output(self, o: Tensor) -> None:
        """Take ``o`` [R, 1, Hq, Dv] of the layer before the first one here, from the stage before."""
        self._before = o

    def q(self, layer: int, q: Tensor) -> None:
        """Attend the stored tokens with q [R, Hq, 1, D], after the layer's fetched KV has arrived."""
        begun, own = time.perf_counter(), layer - self._first
        if nbytes := sum(fetch.receive_layer(own) for fetch in self._prefix_fetches):
            self.fetched_bytes += nbytes
            self.fetch_s += time.perf_counter() - begun
        start, step, fetched = self._trace.now(), self._store_step, time.perf_counter()
        self._q = _flat(q)
        self._stored = step.attend_stored(own, self._q)
        done = time.perf_counter()
        self._in_slices_s += done - begun
        self.attend_s += done - fetched
        self._trace.add(Event.STORED, start, step.plan, layer)

    def kv(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Send k [R, Hkv, 1, D] and v [R, Hkv, 1, Dv], and store them here."""
        self._client.kv(layer, k, v)
        begun, own = time.perf_counter(), layer - self._first
        (both,), data = (
            self._store_step.messages(own).kv,
            torch.empty(k.numel() + v.numel(), dtype=k.dtype, device=k.device),
        )
        for x, part in zip((k, v), both[:2], strict=True):
            part_of(data, *part).copy_(x[:, :, 0])
        self._writes = self._store_step.rows(own, _flat(data))
        self._store_step.write(own, self._writes)
        self._in_slices_s += time.perf_counter() - begun

    def o(self, layer: int, num_rows: int, dtype: torch.dtype) -> Tensor:
        """Return O [R, 1, Hq, Dv] of the layer whose Q, K and V came last, or of the layer before all layers here."""
        own = layer - self._first
        if own < 0:
            return self._before
        start, step, begun = self._trace.now(), self._store_step, time.perf_counter()
        (piece,) = self._store.layers[own]
        shape = num_rows, 1, piece.operator.q_heads, piece.operator.v_dim
        out = torch.empty(shape, dtype=dtype, device=self._store.device)
        step.finish(own, self._stored, self._q, self._writes, EMPTY_BYTES, _flat(out))
        self.attend_s += time.perf_counter() - begun
        self._trace.add(Event.NEW, start, step.plan, layer)
        return out

    def outputs(self, exchange: int, num_rows: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Receive O, the only output of an exchange."""
        return (self.o(exchange, num_rows, dtype),)

    def check_errors(self) -> None:
        """Do nothing: there are no messages whose errors are still due."""

    @property
    def _store_step(self) -> AttentionStep:
        if self._step is None:
            raise ProtocolError("a layer without a step")
        return self._step


class PrefillWorker:
    """Serves one prompt after another. A step is done when every memory worker has stored its K and V. With several
    stages, the last one reports it for all.
    """

    def __init__(
        self,
        worker: ComputeWorker,
        attention: LocalAttention,
        links: list[KvSender],
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        trace: Recorder = NULL_RECORDER,
        epoch: int = 0,
    ) -> None:
        """``worker``: runs with ``attention``."""
        self._worker = worker
        self._attention = attention
        self._trace = trace
        self._links, self._view = links, epoch
        self._receives_q: Callable[[float], bool] = _is_here
        self._before = 0  # the number of earlier stages
        self._waiting_since: float | None = None  # for the stage before, since when
        self._timeout_s = timeout_s
        self._clock = clock
        self.computed: deque[StepDone] = deque()  # steps that are not stored everywhere yet
        self.stored_wait_s = 0.0
        self._fetch_s = 0.0  # its seconds at the end of the last computed step

    def connect(
        self, links: list[KvSender], pool: Attention, epoch: int, keep: Sequence[SurvivingKv] | None = None
    ) -> None:
        """Continue in ``epoch``, with ``pool`` over ``links``. Chunks of older epochs are dropped. ``keep``: the KV of
        the store to keep; see Connect.
        """
        self._attention.connect(pool, keep)
        self._worker.connect(self._attention, epoch)
        self._links, self._view, self._receives_q, self._waiting_since = links, epoch, _is_here, None
        self.computed.clear()
        self._fetch_s = self._attention.fetch_s

    def connect_stages(self, ring: PipelineComm, comes: Callable[[float], bool], before: int) -> None:
        """Use the connections to the stages before and after, in this epoch. ``comes``: waits for the input of the next
        slice, up to the seconds of its argument. ``before``: the number of earlier stages.
        """
        self._worker.connect(self._attention, self._view, ring)
        self._receives_q, self._before = comes, before

    @property
    def has_work(self) -> bool:
        """True if a slice task can be run, or memory workers have not stored everything."""
        return self._worker.has_work or bool(self.computed)

    def submit(self, new: RunRound) -> None:
        """Queue a round's chunk."""
        self._worker.submit(new)

    def run_next(self) -> StepDone | None:
        """Run a slice of the chunk. Returns the oldest step if that is now done. Raises ChannelError, ProtocolError."""
        busy = self._worker.has_work and self._can_run(0.0 if self.computed else STAGE_WAIT_S)
        done = self._worker.run_next() if busy else None
        if done is not None:
            before, self._fetch_s = self._fetch_s, self._attention.fetch_s
            self.computed.append(structs.replace(done, fetch_s=self._fetch_s - before))
        begun, start = self._clock(), self._trace.now()
        wait_s = 0.0 if busy else POLL_S
        stored = bool(self.computed) and all(x.wait_until_stored(self.computed[0].step, wait_s) for x in self._links)
        if not busy:
            self.stored_wait_s += self._clock() - begun
            if self.computed:
                self._trace.add(Event.WAIT_STORED, start, self.computed[0])
        return self.computed.popleft() if stored else None

    def stats(self) -> dict[str, float]:
        """Return a compute worker's counters as far as they apply, those of attention, and ``stored_wait_s``. The last
        one has the seconds in which the worker only waited for memory workers.
        """
        worker, attention = self._worker.stats(), self._attention
        names = ("slice_s", "sample_s", "steps", "rows", "carry_s")
        own = {"attend_s": attention.attend_s, "send_s": attention.sending_s, "stored_wait_s": self.stored_wait_s}
        fetched = {"fetch_s": attention.fetch_s, "fetched_bytes": float(attention.fetched_bytes)}
        return {**{name: worker[name] for name in names}, **own, **fetched}

    def _can_run(self, patience_s: float) -> bool:
        """Return whether the input of the next slice is there. Raises ChannelTimeout if earlier stages took too
        long.
        """
        if self._receives_q(patience_s):
            self._waiting_since = None
            return True
        now = self._clock()
        self._waiting_since = now if self._waiting_since is None else self._waiting_since
        if now - self._waiting_since > (limit_s := self._before * self._timeout_s):
            raise ChannelTimeout(f"the stage before sent nothing of a step in {limit_s:g} s")
        return False


def _flat(x: Tensor) -> Tensor:
    """Return the bytes of a tensor, shared if it is contiguous."""
    return x.contiguous().view(-1).view(torch.uint8)


def _is_here(timeout_s: float) -> bool:
    return True
