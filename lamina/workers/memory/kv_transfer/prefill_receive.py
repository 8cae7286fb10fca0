"""K and V from prefill workers, which a memory worker stores while decoding leaves it idle.

A plan's grant says what will arrive: K and V of some tokens of a sequence, one message for each layer. They come from a
prefill worker, or from each stage of a group. Until the memory worker stores them, messages lie in the slots of the
prefill worker's channel, which stops when these are full. So prompts never delay decoding. They are never stopped by it
either: before a layer, one message is stored if none was for MAX_WAIT_S.

The paper calls this the pull in the idle periods between messages of decoding (arXiv 2405.01814 section 5).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from lamina.netstack import Channel, ChannelTimeout
from lamina.observe.trace import NULL_RECORDER, Event, Recorder
from lamina.protocol.blocks.block_tables import PlanError
from lamina.protocol.prefill_stages import max_grants_in_flight, stage_layers
from lamina.protocol.step_plan import (
    ContextShift,
    FetchPrefix,
    Fork,
    Free,
    MessageKey,
    MessageKind,
    PrefillGrant,
    ProtocolError,
    StepPlan,
    Truncate,
)
from lamina.workers.memory.attention_step import KvWrites, row_layouts
from lamina.workers.memory.kv_store import KvStore
from lamina.workers.memory.worker_counters import Counters

MAX_WAIT_S = 0.005  # seconds between checks of the prefill workers while decoding leaves no gap
DECODE_GAP_S = 0.0005  # seconds that an idle worker waits for decoding before it checks the prefill workers again
IDLE_S = 1.0  # seconds, if nothing is granted: only decoding can continue then


class PrefillReceiver:
    """The K and V that prefill workers may still send, and their channels. One thread uses it."""

    def __init__(
        self,
        store: KvStore,
        meter: Counters,
        trace: Recorder = NULL_RECORDER,
        clock: Callable[[], float] = time.monotonic,
        epoch: int = 0,
    ) -> None:
        """``store``: its Bind says how many prefill workers there are."""
        self._store, self._meter, self._trace, self._clock, self._view = store, meter, trace, clock, epoch
        self._senders: list[_Sender] = []  # by prefill worker; those of a group are consecutive
        self._stages = store.bind_request.prefill_pipeline  # of a group
        self._ahead = max_grants_in_flight(self._stages, store.tables.windows)  # grants of a group at a time
        # The last granted step, by group.
        self._last_steps = [-1] * (store.bind_request.prefill_workers // self._stages)
        self._looked = 0.0
        self._found_last = False  # if the last check found a message
        self._next = 0  # the prefill worker to check first

    def add_sender(self, channel: Channel) -> None:
        """Add the channel of the next prefill worker."""
        self._senders.append(_Sender(channel, len(self._senders) % self._stages))

    @property
    def is_open(self) -> bool:
        """True if messages are still to arrive."""
        return any(x.deliveries for x in self._senders)

    def _group(self, worker: int) -> list[_Sender]:
        return self._senders[worker * self._stages : (worker + 1) * self._stages]

    @property
    def poll_timeout_s(self) -> float:
        """The seconds to wait for decoding before the next ``receive_one``."""
        if not self.is_open:
            return IDLE_S
        return 0.0 if self._found_last else DECODE_GAP_S

    @property
    def overdue_s(self) -> float:
        """The seconds until the prefill workers have waited too long for a check."""
        return max(0.0, MAX_WAIT_S - (self._clock() - self._looked))

    def check_plan(self, plan: StepPlan) -> None:
        """Raise PlanError if the plan touches a sequence whose K and V are still to arrive. Raises ProtocolError for an
        invalid grant.
        """
        waiting = [d.sequence for d in {d for x in self._senders for d in x.deliveries}]
        for op in plan.ops:
            if isinstance(op, PrefillGrant):
                if not 0 <= op.worker < (groups := len(self._last_steps)):
                    raise ProtocolError(f"step {plan.step} grants to prefill worker {op.worker} of {groups}")
                waiting.append(op.sequence)
                if waiting.count(op.sequence) > self._ahead and self._is_new(op):
                    raise PlanError(
                        f"sequence {op.sequence}: more than {self._ahead} grants whose K and V are still to come"
                    )
            elif isinstance(op, FetchPrefix):
                raise ProtocolError(f"step {plan.step}: only prefill workers fetch what others have computed")
            elif isinstance(op, Free | Truncate | ContextShift) and op.sequence in waiting:
                raise PlanError(
                    f"sequence {op.sequence} is freed, truncated or shifted while its K and V are still to come"
                )
            elif isinstance(op, Fork) and op.source in waiting:
                raise PlanError(f"sequence {op.source} is forked while its K and V are still to come")
        for row in plan.rows:
            if row.sequence in waiting:
                raise PlanError(
                    f"sequence {row.sequence} has rows in step {plan.step}, but its K and V are still to come"
                )

    def expect(self, plan: StepPlan) -> None:
        """Expect the K and V that a plan grants, after the store has applied it."""
        for op in plan.ops:
            if isinstance(op, PrefillGrant) and self._is_new(op):
                delivery = _ExpectedKv(self._store, op, self._stages)
                self._last_steps[op.worker] = op.step
                for inlet in self._group(op.worker):
                    inlet.deliveries.append(delivery)
                for inlet in self._group(op.worker):
                    self._close_done(inlet)

    def _is_new(self, grant: PrefillGrant) -> bool:
        """Return whether a grant is new: a plan that is sent again has old ones."""
        return grant.step > self._last_steps[grant.worker]

    def receive_overdue(self) -> None:
        """Call ``receive_one`` if that was not done for MAX_WAIT_S seconds."""
        if self.is_open and not self.overdue_s:
            self.receive_one()

    def receive_one(self) -> None:
        """Store one message if one has arrived, from each prefill worker in rotation."""
        self._looked, self._found_last = self._clock(), False
        count = len(self._senders)
        for number in range(self._next, self._next + count):
            if self._take_from(number % count):
                self._found_last, self._next = True, (number + 1) % count
                return

    def _take_from(self, worker: int) -> bool:
        inlet = self._senders[worker]
        if not inlet.deliveries:
            return False
        try:
            arrival = inlet.channel.wait_signal(timeout_s=0.0)
        except ChannelTimeout:
            return False
        delivery, start = inlet.deliveries[0], self._trace.now()
        layer = delivery.layers[inlet.stage][0]
        key, got = (
            MessageKey(MessageKind.KV, delivery.step, epoch=self._view, layer=layer),
            MessageKey.unpack(arrival.tag),
        )
        due = delivery.num_bytes(layer)
        if got._replace(batch=0) != key or arrival.data.nbytes != due:
            raise ProtocolError(
                f"prefill worker {worker}: {got} of {arrival.data.nbytes} bytes in place of {key} of {due}"
            )
        with self._meter.time("grant_s"):
            delivery.write(layer, arrival.data)
        self._meter.add("bytes_received", due)
        inlet.channel.release(arrival)
        self._trace.add(Event.GRANT, start, got, layer, worker, due)
        delivery.layers[inlet.stage].popleft()
        self._close_done(inlet)
        return True

    def _close_done(self, inlet: _Sender) -> None:
        """Report complete grants, which all stages have sent, to the last prefill worker of the group. This includes
        grants of which this worker keeps nothing.
        """
        while inlet.deliveries and not inlet.deliveries[0].layers[inlet.stage]:
            done = inlet.deliveries.popleft()
            done.senders -= 1
            if done.senders:
                continue
            done.finish()
            teller = self._group(done.worker)[-1].channel
            slot = teller.reserve(0, timeout_s=0.0)  # one is free: few grants are open at a time
            teller.put_signal(slot, MessageKey(MessageKind.STORED, done.step, epoch=self._view).pack())


class _Sender:
    """The channel of one prefill worker. ``stage``: its number in the group."""

    def __init__(self, channel: Channel, stage: int) -> None:
        self.channel, self.stage = channel, stage
        self.deliveries: deque[_ExpectedKv] = deque()


class _ExpectedKv:
    """The messages that one grant still brings, by stage. ``senders``: the number of stages that are not done."""

    def __init__(self, store: KvStore, grant: PrefillGrant, stages: int) -> None:
        self.sequence, self.step, self.worker, self.senders = grant.sequence, grant.step, grant.worker, stages
        self._store, self._rows = store, grant.rows
        self._writes = KvWrites(store, row_layouts(store, [grant.rows]))
        each = (stage_layers(len(store.layers), stages, stage) for stage in range(stages))
        self.layers = [deque(x for x in own if self.num_bytes(x)) for own in each]

    def num_bytes(self, layer: int) -> int:
        return self._writes.messages(layer).kv_bytes

    def finish(self) -> None:
        """Commit the rows: all layers are stored."""
        self._store.committed.commit([self._rows])

    def write(self, layer: int, data: memoryview) -> None:
        self._writes.write(layer, self._writes.rows(layer, self._store.message_tensor(data)))
