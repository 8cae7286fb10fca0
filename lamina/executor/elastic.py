"""Changes of the set of memory workers while all other workers continue: one change of the epoch, in which KV moves.

First the new workers are started, import all modules and take their memory. No worker loads a model anew. Staying
workers take memory for one more layer, since KV passes to its new layout layer by layer. Then all workers quiesce, and
the engine lays its sequences out over the next members. These fetch their parts of the KV from the workers that have
it, and all reconnect. A leaving worker ends once its KV is confirmed elsewhere. If a worker dies meanwhile, its KV, and
perhaps that of other workers, is computed again: the change stands.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from msgspec import structs

from lamina.config.conflicts import SCALE, conflict_text
from lamina.config.engine_config import EngineConfig
from lamina.config.topology import TopologyOptions
from lamina.engine.evacuation import Evacuation
from lamina.facts.host_memory import free_bytes, not_enough_memory_message
from lamina.protocol.capacity import Capacity, capacity_of_all_ranks, combined_capacity
from lamina.protocol.control import Failed, LinkClosedError, MemoryReady, Stop
from lamina.protocol.executor import Clock
from lamina.protocol.reshard import PrepareStore, Reshard, ReshardDone, StorePrepared, TerminationNotice
from lamina.protocol.step_plan import BindRequest, SurvivingKv
from lamina.utils.state_machine import StateMachine

from .memory_worker_slots import (
    ResizeNeedsRestartError,
    binds_of,
    check_capacity,
    check_resizable,
    order_after_removal,
    reorder_workers,
    visible_addresses,
)
from .stall_detector import STOPPED_S, StallDetector
from .states import RESIZE_TRANSITIONS, ResizeState
from .worker_group import WorkerGroup
from .worker_registry import JOIN_S, RegisteredWorker, WorkerRegistry, WorkersLostError

log = logging.getLogger(__name__)
LISTEN_S = 0.05  # wait for workers that move KV, between looks at leaving workers


class ResizePlan(NamedTuple):
    """A planned change. ``binds``: rank -> the BindRequests of its memory workers."""

    topology: TopologyOptions
    binds: list[list[BindRequest]]
    capacity: Capacity


class ResizeResult(NamedTuple):
    """The result of a change. ``error``: why there was none; ``pause_s``: seconds in which no step was done."""

    error: str = ""
    pause_s: float = 0.0
    moved_bytes: int = 0
    reason: str = "scale"


class MemoryResizer:
    """Changes the set of memory workers, at most one change at a time. One thread uses it."""

    def __init__(
        self,
        config: EngineConfig,
        registry: WorkerRegistry,
        worker_group: WorkerGroup,
        clock: Clock = time.monotonic,
        free: Callable[[], int] = free_bytes,
    ) -> None:
        """``free``: returns the bytes that this host could give to processes."""
        self._config, self._registry, self._workers = config, registry, worker_group
        self._clock, self.free = clock, free
        self._extra_bytes = config.topology.extra_kv_bytes(config.devices.kv_bytes())
        self.moved_bytes = Counter[str]()  # bytes of KV, by the reason of changes
        self._reason = ""  # of the latest change
        self._state = StateMachine(ResizeState.IDLE, RESIZE_TRANSITIONS)
        self.change: ResizePlan | None = None  # requested, and not yet committed
        self._number = 0  # of the latest change
        self._leaving_members: list[int] = []  # numbers of memory workers, of that change
        self._exits: Evacuation | None = None  # of that change
        self.new_shards: dict[int, int] = {}  # KV shard before -> after the last change; see EpochChanged
        self._leaving: list[RegisteredWorker] = []  # leaving workers of the committed change
        self._coming: dict[RegisteredWorker, str] = {}  # workers that were started -> their URL; empty: unknown yet
        # Workers whose memory is not ready yet, and the message that requests it.
        self._preparing: dict[RegisteredWorker, PrepareStore] = {}
        self._deadline = self._paused_at = 0.0
        # Messages of the committed change, without the surviving KV.
        self.moves: list[tuple[RegisteredWorker, Reshard]] = []
        self._moved_bytes = 0
        self._outcome: ResizeResult | None = None
        self._on_result = True  # whether the caller needs the result
        self.dismissed: dict[RegisteredWorker, float] = {}  # dismissed workers, and when they must have ended
        self._stall_detector = StallDetector[RegisteredWorker](clock)

    def plan(self, count: int, replaced: Sequence[int] = (), weights: Sequence[float] = ()) -> ResizePlan:
        """Plan a change to ``count`` memory workers. For the same count, ``replaced``: workers that new ones replace;
        ``weights``: new weights. Raises ValueError if it is impossible, ResizeNeedsRestartError.
        """
        topology, binds = self._workers.topology, self._workers.memory_binds
        if topology.may_borrow:
            raise ValueError(conflict_text(SCALE, topology.loan_flag))
        check_resizable(self._config, same=bool(weights))
        size = topology.tensor_parallel_size
        if count < 1 or count % size:
            raise ValueError(f"--memory-workers {count}: it must be a multiple of --tensor-parallel-size {size}")
        parts = tuple(weights) or topology.memory_weights
        wanted = structs.replace(topology, memory_workers=count, memory_weights=parts)
        asked, had = self._config.devices.kv_bytes(), self._workers.kv_bytes
        backend = self._workers.backend
        by_rank = [binds_of(wanted, r, bind, backend, asked, sum(had[r])) for r, bind in enumerate(binds)]
        more = sum(bind.kv_bytes for rank in by_rank for bind in rank) - sum(map(sum, had))
        # Staying workers hold a layer twice while it moves.
        more += sum(b.kv_bytes // len(b.layers) for rank in by_rank for b in rank[: len(had[0])])
        # The old worker keeps its memory till then.
        more += sum(by_rank[w % len(by_rank)][w // len(by_rank)].kv_bytes for w in replaced)
        if not self._config.launch.may_span_hosts and more > (free := self.free()):
            raise ValueError(not_enough_memory_message(more, free))
        return ResizePlan(wanted, by_rank, self._capacity(by_rank))

    def plan_borrowed(self, coming: Sequence[int], leaving: Collection[int]) -> ResizePlan:
        """Plan a change to the present memory workers without ``leaving``, and with one on loan for each number of
        bytes in ``coming``. Each rank keeps as many workers as the others. Raises ValueError, ResizeNeedsRestartError.
        """
        check_resizable(self._config)
        cohort, size = self._workers, self._workers.topology.tensor_parallel_size
        by_rank = [
            [n for place, n in enumerate(had) if place * size + rank not in leaving] + list(coming[rank::size])
            for rank, had in enumerate(cohort.kv_bytes)
        ]
        wanted = structs.replace(cohort.topology, memory_workers=sum(map(len, by_rank)))
        binds = [
            [structs.replace(bind, kv_bytes=n) for bind, n in zip(made, kv_bytes, strict=True)]
            for rank, kv_bytes in enumerate(by_rank)
            for made in [binds_of(wanted, rank, cohort.memory_binds[rank], cohort.backend)]
        ]
        return ResizePlan(wanted, binds, self._capacity(binds, self._extra_bytes))

    def _capacity(self, by_rank: Sequence[Sequence[BindRequest]], more: int = 0) -> Capacity:
        """Return the capacity of all ranks' memory workers. ``more``: see ``check_capacity``. Raises ValueError."""
        size = len(by_rank)
        ranks = [
            combined_capacity(check_capacity(binds, more), lambda w, rank=rank: w * size + rank)  # type: ignore[misc]
            for rank, binds in enumerate(by_rank)
        ]
        return capacity_of_all_ranks(ranks)

    def begin(
        self,
        change: ResizePlan,
        leaving: Sequence[int] = (),
        coming: Sequence[RegisteredWorker] = (),
        *,
        on_result: bool = True,
        reason: str = "scale",
        leaves_by_itself: Evacuation | None = None,
    ) -> None:
        """Start the new workers, without waiting for them.

        ``leaving``: numbers of leaving memory workers; empty: the last ones. If the count stays, new workers replace
        them. ``coming``: workers that were started already. ``on_result``: whether ``take_outcome`` returns the result.
        ``leaves_by_itself``: an evacuation that precedes the change. Raises ValueError, ResizeNeedsRestartError,
        OSError.
        """
        there, count = self._registry.memory, change.topology.memory_workers
        gone, size = list(leaving) or list(range(count, len(there))), change.topology.tensor_parallel_size
        if self.in_progress:
            raise ValueError("memory workers come or go already: wait until they have")
        if len(there) - len(gone) > count or not set(gone) <= set(range(len(there))):
            raise ValueError(f"memory workers {gone} are to go, of {len(there)}, and {count} are to stay")
        fresh = gone if count == len(there) else range(len(order_after_removal(there, gone, size)), count)
        most = len(there) + len(fresh) if count == len(there) else max(count, len(there))
        if not self._workers.plan_resize(most):  # a leaving worker may die, and be replaced, before
            raise ResizeNeedsRestartError("its launcher starts no more workers while others run")
        self._state.enter(ResizeState.PREPARING)
        self.change, self._leaving_members, self._on_result, self._reason = change, gone, on_result, reason
        self._number += 1
        self._deadline = self._clock() + self._config.deadlines.start_timeout_s
        try:
            self._coming = dict.fromkeys(coming, "")
            for index in list(fresh)[len(coming) :]:
                self._coming[self._workers.start_extra("memory", index)] = ""
        except (OSError, ValueError) as error:
            self._fail(str(error), notify=False)  # else the next caller would get this result
            raise
        after = reorder_workers(there, gone, list(self._coming), size)
        places = [self._workers.storage.config_for(i, count, self._workers.identity) for i in range(count)]
        rooms = [PrepareStore(change.binds[i % size][i // size], places[i], self._number) for i in range(count)]
        self._preparing = dict(zip(after, rooms, strict=True))
        for member in (m for m in after if m not in self._coming):
            self._send(member, self._preparing[member])
        self._exits = leaves_by_itself

    @property
    def weights(self) -> list[float]:
        """Each memory worker's weight, in any unit."""
        return self._workers.topology.normalized_weights

    @property
    def copies_kv(self) -> bool:
        """Return whether memory workers copy KV to each other before some leave."""
        return self._exits is not None

    @property
    def in_progress(self) -> bool:
        """Return whether a change was requested and is not over."""
        return self._state.state is not ResizeState.IDLE

    @property
    def is_preparing(self) -> bool:
        """Return whether a requested change still waits for workers."""
        return self.change is not None and not self.is_ready()

    @property
    def _must_reconnect(self) -> bool:
        """True if all have to reconnect before the evacuation, so that workers can copy KV."""
        return self._exits is not None and self._state.state is ResizeState.PREPARING

    def is_ready(self) -> bool:
        """Return whether all coming workers are ready. The change fails if one cannot take part."""
        if self.change is None:
            return False
        for member in list(self._preparing):
            try:
                answer = self._answer_of(member)
            except LinkClosedError:
                answer = f"{member.handle.exit_reason() or 'closed its control link'} as it started"
            except TimeoutError:
                answer = "sent only part of a message"
            if answer:
                self._fail(f"{member.name}: {answer}")
                return False
        if not self._preparing:
            return self._exits is None or self._must_reconnect or self._exits.is_done()
        if self._clock() > self._deadline:
            limit = f"--start-timeout-s {self._config.deadlines.start_timeout_s:g}"
            self._fail(f"new memory workers took too long to start ({limit})")
        return False

    def commit(self, paused_at: float) -> Capacity | None:
        """Apply the change that is due, after all workers have quiesced. Returns the new capacity, or None."""
        self.new_shards = {}
        if self.change is None or self._must_reconnect or not self.is_ready():
            return None
        self._state.enter(ResizeState.MOVING)
        change, before, coming = self.change, self._registry.memory, self._coming
        self.change, self._coming, self._paused_at, self._moved_bytes = None, {}, paused_at, 0
        self._leaving, size = [before[i] for i in self._leaving_members], change.topology.tensor_parallel_size
        after = reorder_workers(before, self._leaving_members, list(coming), size)
        stay = [before.index(m) for m in after if m not in coming]
        self._workers.plan_resize(len(after), stay if len(after) != len(before) else ())
        seats = (
            after if self._exits is not None else before if self._leaving_members and len(after) == len(before) else []
        )
        self.new_shards = {i: seats[::size].index(m) for i, m in enumerate(before[::size]) if m in seats}
        if self._exits is not None:
            self._exits.finish()
        self._exits = None
        had = list(self._workers.memory_binds)
        for member in before:
            self._registry.remove(member)
        for index, member in enumerate(after):
            member.handle.index = index
            self._registry.append(member)
        self._workers.set_topology(change.topology, [[b.kv_bytes for b in r] for r in change.binds], coming)
        self.moves = [
            x for r in range(size) for x in self._orders(before[r::size], after[r::size], had[r], change.binds[r])
        ]
        log.info("memory workers: %d -> %d", len(before), len(after))
        return change.capacity

    def move_kv(self, keep: Sequence[SurvivingKv]) -> bool:
        """Move KV to its new places, if a change is in progress. Returns whether it is there; if not, the workers that
        lack it have none. Raises WorkersLostError.
        """
        moves, self.moves = self.moves, []
        leaving, self._leaving = (self._leaving, []) if moves else ([], self._leaving)
        try:
            # Also without KV: the prepared memory becomes the store.
            self._send_reshard(moves, leaving, list(keep))
            answers = self._answers([m for m, _ in moves if m not in leaving], leaving)
        finally:
            self._dismiss(leaving)
        for error in (a.error for a in answers if a.error):
            log.warning("KV could not be moved, and is computed again: %s", error)
        self._moved_bytes = sum(a.nbytes for a in answers)
        return not any(a.error for a in answers)

    def _send_reshard(
        self,
        moves: Sequence[tuple[RegisteredWorker, Reshard]],
        leaving: Sequence[RegisteredWorker],
        keep: list[SurvivingKv],
    ) -> None:
        """Send Reshard to all, even if one is lost: the old layout must not be used. Raises WorkersLostError."""
        lost: WorkersLostError | None = None
        for member, order in moves:
            send = self._send if member in leaving else self._registry.send
            try:
                send(member, structs.replace(order, epoch=self._registry.epoch, surviving=keep))
            except WorkersLostError as error:
                lost = lost or error
        if lost is not None:
            raise lost

    def _answers(self, owing: Sequence[RegisteredWorker], leaving: Sequence[RegisteredWorker]) -> list[ReshardDone]:
        """Return the replies of ``owing``, or those so far and an error if a leaving worker sends no more KV or a
        worker hangs.

        After the first reply the remaining ones may take as long again, or the time limit of a step. The hung worker is
        found when all quiesce. Raises WorkersLostError.
        """
        limits, answers, begun = self._config.deadlines, dict[RegisteredWorker, ReshardDone](), self._clock()
        deadline = begun + limits.start_timeout_s
        while owing := [m for m in owing if m not in answers]:
            answer, now = dict(self._registry.take_arrived(ReshardDone)), self._clock()
            answers |= answer
            deadline = min(deadline, now + max(now - begun, limits.step_timeout_s)) if answer else deadline
            stopped = self._stall_detector.update([m for m in leaving if m.handle.is_stopped])
            lost = dict.fromkeys(stopped, f"has been stopped for {STOPPED_S:g} s")
            lost |= dict.fromkeys([m for m in owing if m not in answers and now > deadline], "takes too long")
            if lost := lost | {m: fate for m in leaving if (fate := self._exit_reason(m)) is not None}:
                error = ", ".join(f"{m.name} {how}" for m, how in lost.items())
                return [*answers.values(), ReshardDone(epoch=self._registry.epoch, error=error)]
            if answers.keys().isdisjoint(owing):
                self._registry.listen(LISTEN_S)
        return list(answers.values())

    def _exit_reason(self, leaving: RegisteredWorker) -> str | None:
        """Return why a leaving worker sends no more KV; None: it does, or has sent all."""
        with suppress(LinkClosedError, TimeoutError):  # its process has ended, or will have
            answer = self._registry.receive_from(leaving)
            if isinstance(answer, ReshardDone) and answer.error:
                return f"gives no more: {answer.error}"
        return leaving.handle.exit_reason()

    def finish(self) -> None:
        """Complete the change after all have reconnected, or begin its evacuation."""
        if self._exits is not None and self._must_reconnect:
            self._state.enter(ResizeState.EVACUATING)
            self._exits.begin()
        elif self._state.state is ResizeState.MOVING:
            self._state.enter(ResizeState.IDLE)
            changed = ResizeResult("", self._clock() - self._paused_at, self._moved_bytes, self._reason)
            self.moved_bytes[self._reason] += changed.moved_bytes
            log.info("KV has moved: %d bytes, %.3f s", changed.moved_bytes, changed.pause_s)
            self._outcome = changed if self._on_result else None

    def take_outcome(self) -> ResizeResult | None:
        """Return the result of the last change, once it is over, and only once."""
        self.reap()
        outcome, self._outcome = self._outcome, None
        return outcome

    def reap(self) -> None:
        """Reap the processes of dismissed workers; those that take too long are killed."""
        now = self._clock()
        for member in [m for m, due in self.dismissed.items() if now > due or m.handle.exit_reason() is not None]:
            member.handle.join(0.0)
            del self.dismissed[member]

    def close(self) -> None:
        """End all workers that are no members. Idempotent."""
        self._dismiss([*self._coming, *self._leaving])
        for member, due in self.dismissed.items():
            member.handle.join(max(0.0, due - self._clock()))
        self._coming, self.change, self._leaving, self._leaving_members, self.dismissed = {}, None, [], [], {}

    def _orders(
        self, before: list[RegisteredWorker], after: list[RegisteredWorker], had: BindRequest, binds: list[BindRequest]
    ) -> list[tuple[RegisteredWorker, Reshard]]:
        """Return the messages to one rank's workers, without the surviving KV."""
        peers = before + [m for m in after if m not in before]
        peers.sort(
            key=lambda m: not self._workers.address_of(m).key
        )  # the later one connects, so guests need no other key
        addresses = [self._workers.address_of(m) for m in peers]
        return [
            (
                member,
                Reshard(
                    epoch=0,
                    bind=binds[after.index(member)] if member in after else None,
                    before=had.partition,
                    after=binds[0].partition,
                    surviving=[],
                    peers=visible_addresses(addresses[me], addresses),
                    own_index=me,
                    sources=[peers.index(m) for m in before],
                    targets=[peers.index(m) for m in after],
                    timeout_s=self._config.deadlines.step_timeout_s,
                    states_before=[mixer.shares for mixer in had.mixers],
                    states_after=[mixer.shares for mixer in binds[0].mixers],
                ),
            )
            for me, member in enumerate(peers)
        ]

    def _answer_of(self, worker: RegisteredWorker) -> str:
        """Read messages of a preparing worker. Returns why it cannot take part, or nothing. Raises LinkClosedError."""
        if worker not in self._coming:
            prepared = [x for x in worker.inbox if isinstance(x, StorePrepared)]
            for message in prepared:
                worker.inbox.remove(message)
            prepared = [x for x in prepared if x.resize_number == self._number]
            if prepared or worker not in self._registry.memory:  # a replacement of a dead worker begins anew
                del self._preparing[worker]
            return next((x.error for x in prepared), "")
        message = self._registry.receive_from(worker)
        if isinstance(message, MemoryReady):
            self._coming[worker] = message.url
            worker.link.send(self._preparing[worker])
        elif isinstance(message, StorePrepared):
            del self._preparing[worker]
            return message.error
        elif isinstance(message, TerminationNotice):  # handled once it has a place
            worker.inbox.append(message)
        return message.text if isinstance(message, Failed) else ""

    @staticmethod
    def _send(worker: RegisteredWorker, message: Any) -> None:
        with suppress(LinkClosedError):  # the reader of its link notices its end
            worker.link.send(message)

    def _fail(self, why: str, *, notify: bool = True) -> None:
        log.warning("memory workers stay as they are: %s", why)
        self._state.enter(ResizeState.IDLE)
        self._dismiss(self._coming)
        self._workers.plan_resize(len(self._registry.memory))
        for member in self._registry.memory:
            self._send(member, PrepareStore(None))
        self.change, self._leaving_members, self._coming, self._preparing = None, [], {}, {}
        if self._exits is not None:
            self._exits.cancel()
        self._exits = None
        self._outcome = ResizeResult(why, reason=self._reason) if notify and self._on_result else None

    def _dismiss(self, workers: Iterable[RegisteredWorker]) -> None:
        """End workers, without waiting until the host has their memory back."""
        for member in workers:
            self._send(member, Stop())
            member.link.close()
            self.dismissed[member] = self._clock() + JOIN_S
