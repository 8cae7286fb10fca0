"""K, V and recurrent states from prefill workers, which a memory worker stores while decoding leaves it idle.

A plan's grant says what will arrive: K and V of some tokens of a sequence, a transfer with one part for each layer. If
later rows or prompts continue after these tokens, their states come too. The transfer comes from a prefill worker, or
one from each stage of a group. Until the memory worker stores them, messages lie in the
slots of the prefill worker's channel, which stops when these are full. So prompts never delay decoding. They are never
stopped by it either: before a layer, one message is stored if none was for MAX_WAIT_S. A grant may let this worker send
stored tokens first (prefix_send.py).

The paper calls this the pull in the idle periods between messages of decoding (arXiv 2405.01814 section 5).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from lamina.netstack import Channel
from lamina.observe.trace import NULL_RECORDER, Event, Recorder
from lamina.protocol.blocks.block_tables import PlanError
from lamina.protocol.mixers import Exchange
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
from lamina.workers.device_selection import CPU
from lamina.workers.memory.attention_step import KvWrites, row_layouts
from lamina.workers.memory.kv_store import KvStore
from lamina.workers.memory.offload.kv_load import KvLoader
from lamina.workers.memory.state_store import StateStore
from lamina.workers.memory.worker_counters import Counters
from lamina.workers.staging import HostStaging, Staging

from .prefix_send import PrefixSender
from .transfer import Transfer, TransferPart
from .transfer_link import NOTHING, TransferLink

MAX_WAIT_S = 0.005  # seconds between checks of the prefill workers while decoding leaves no gap
DECODE_GAP_S = 0.0005  # seconds that an idle worker waits for decoding before it checks the prefill workers again
IDLE_S = 1.0  # seconds, if nothing is granted: only decoding can continue then
SILENCE_S = 0.0  # decoding waits neither for an unexpected message nor for a slot: few grants are open at a time


class PrefillReceiver:
    """The K and V that prefill workers may still send, and their channels. One thread uses it."""

    def __init__(
        self,
        store: KvStore,
        meter: Counters,
        trace: Recorder = NULL_RECORDER,
        clock: Callable[[], float] = time.monotonic,
        epoch: int = 0,
        loads: KvLoader | None = None,
        prefixes: PrefixSender | None = None,
    ) -> None:
        """``store``: its Bind says how many prefill workers there are. ``loads``: if pages are loaded. ``prefixes``: if
        stored tokens are sent.
        """
        self._store, self._meter, self._trace, self._clock, self._view = store, meter, trace, clock, epoch
        self._loads, self._prefixes = loads, prefixes
        self._links: list[TransferLink] = []  # by prefill worker; those of a group are consecutive
        self._stages = store.bind_request.prefill_pipeline  # of a group
        self._ahead = max_grants_in_flight(self._stages, store.tables.windows)  # grants of a group at a time
        num_groups = store.bind_request.prefill_workers // self._stages
        self._open = [deque[_OpenGrant]() for _ in range(num_groups)]  # by group, in order
        self._last_steps = [-1] * num_groups  # the last granted step, by group
        self._staging = HostStaging(CPU)  # parts are copied by the store's own staging
        self._looked = 0.0
        self._found_last = False  # if the last check found a message
        self._next = 0  # the prefill worker to check first

    def add_sender(self, channel: Channel) -> None:
        """Add the channel of the next prefill worker."""
        self._links.append(TransferLink(f"prefill worker {len(self._links)}", SILENCE_S))
        self._links[-1].attach(channel)

    @property
    def is_open(self) -> bool:
        """True if messages are still to arrive."""
        return any(self._open)

    def _group(self, number: int) -> range:
        """Return the prefill workers of a group."""
        return range(number * self._stages, (number + 1) * self._stages)

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
        waiting = [grant.op.sequence for group in self._open for grant in group]
        for op in plan.ops:
            if isinstance(op, PrefillGrant):
                if not 0 <= op.worker < (groups := len(self._open)):
                    raise ProtocolError(f"step {plan.step} grants to prefill worker {op.worker} of {groups}")
                if op.has_states and self._store.states is None:
                    raise ProtocolError(f"step {plan.step} grants states of a model without recurrent layers")
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
                self._last_steps[op.worker] = op.step
                writes, group = KvWrites(self._store, row_layouts(self._store, [op.rows])), self._group(op.worker)
                each = [Transfer(op.step, self._parts(op, writes, worker), on_end=_check_end) for worker in group]
                self._open[op.worker].append(_OpenGrant(op, each))
                for worker, transfer in zip(group, each, strict=True):
                    if op.num_fetched and self._prefixes is not None:
                        self._prefixes.send(op, worker, self._layers_of(worker))
                    self._links[worker].expect(transfer)
                self._confirm_stored(op.worker)

    def _parts(self, grant: PrefillGrant, writes: KvWrites, worker: int) -> Iterator[TransferPart]:
        """Yield the parts of a grant that ``worker`` sends: a layer each, if this memory worker keeps some of it."""
        states = self._store.states if grant.has_states else None
        exchanges = self._store.bind_request.exchanges or [Exchange(layer) for layer in self._layers_of(worker)]
        for layer, mixer in ((each.layer, each.mixer) for each in exchanges):
            if layer >= 0 and (nbytes := writes.messages(layer).kv_bytes):
                yield TransferPart(nbytes, partial(self._write, grant, writes, worker, layer), layer)
            if states and mixer >= 0 and (nbytes := states.bytes_of_state(mixer, grant.rows)):
                yield TransferPart(nbytes, partial(self._write_state, grant, states, worker, mixer), mixer)

    def _layers_of(self, worker: int) -> range:
        return stage_layers(len(self._store.layers), self._stages, worker % self._stages)

    def _write(
        self, grant: PrefillGrant, writes: KvWrites, worker: int, layer: int, data: memoryview, staging: Staging
    ) -> None:
        start = self._trace.now()
        with self._meter.time("grant_s"):
            writes.write(layer, writes.rows(layer, self._store.message_tensor(data)))
        self._meter.add("bytes_received", data.nbytes)
        key = MessageKey(MessageKind.KV, grant.step, epoch=self._view, layer=layer)
        self._trace.add(Event.GRANT, start, key, layer, worker, data.nbytes)

    def _write_state(
        self, grant: PrefillGrant, states: StateStore, worker: int, mixer: int, data: memoryview, staging: Staging
    ) -> None:
        start = self._trace.now()
        with self._meter.time("grant_s"):
            states.put_state(mixer, grant.rows, data)
        self._meter.add("bytes_received", data.nbytes)
        key = MessageKey(MessageKind.MIXED, grant.step, epoch=self._view, layer=mixer)
        self._trace.add(Event.GRANT, start, key, mixer, worker, data.nbytes)

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
        count = len(self._links)
        for number in range(self._next, self._next + count):
            worker, link = number % count, self._links[number % count]
            if link.is_receiving and link.receive_one(self._staging):
                self._confirm_stored(worker // self._stages)
                self._found_last, self._next = True, (worker + 1) % count
                return

    def _confirm_stored(self, group: int) -> None:
        """Confirm grants of which everything is stored, in order, to the last prefill worker of the group. This
        includes grants of which this worker keeps nothing.
        """
        grants, last = self._open[group], self._links[self._group(group)[-1]]
        while grants and all(transfer.next_part is None for transfer in grants[0].transfers):
            op = grants.popleft().op
            if self._loads is not None:
                self._loads.settle(op.sequence)  # tokens before these, which the prefill worker has fetched
            self._store.committed.commit([op.rows])
            if op.has_states and self._store.states:
                self._store.states.versions.commit([op.rows])
            last.send_part(op.step, 0, NOTHING, self._staging)


def _check_end(transfer: Transfer) -> None:
    """Raise ProtocolError for a grant that its prefill worker refuses: no one else computes its K and V."""
    if transfer.error is not None:
        raise ProtocolError(f"what was granted is refused: {transfer.error}")


class _OpenGrant(NamedTuple):
    """A grant whose K and V are still to arrive. ``transfers``: by stage."""

    op: PrefillGrant
    transfers: Sequence[Transfer]
