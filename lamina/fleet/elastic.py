"""Memory workers come or go while all others run on: one change of the view, in which KV moves and nothing is loaded.

Before any worker rests, the new workers are started, have imported all modules and taken their memory, and the staying
ones have taken memory for one layer more, since KV passes to its new layout layer by layer. Then all workers come to
rest, the engine lays its sequences out over the next members, these take their parts of the KV from the workers that
have it, and all meet anew. A leaving worker ends once its KV is confirmed elsewhere. Where a worker dies meanwhile, its
KV, and perhaps KV of others, is computed again: the change stands.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from msgspec import structs

from lamina.engine.exodus import Exodus
from lamina.engine.wire import Clock
from lamina.facts.room import free_bytes, too_little
from lamina.protocol.control import Failed, LinkClosedError, MemoryReady, Stop
from lamina.protocol.groups import Capacity, of_all_ranks, together
from lamina.protocol.options.engine import EngineConfig
from lamina.protocol.options.topology import TopologyOptions
from lamina.protocol.plan import Bind, Keep
from lamina.protocol.recut import Leaving, MakeRoom, Recut, Recutted, RoomMade

from .cohort import Cohort
from .members import JOIN_S, LostError, Member, Members
from .seats import NotInPlaceError, binds_of, bounds_of, check_in_place, known_to, seated, staying
from .standing import STOPPED_S, StandingStill

log = logging.getLogger(__name__)
LISTEN_S = 0.05  # to workers that move KV, before a look at workers that leave


class Change(NamedTuple):
    """What there is to be. ``binds``: rank -> of its memory workers."""

    topology: TopologyOptions
    binds: list[list[Bind]]
    capacity: Capacity


class Changed(NamedTuple):
    """What became of a change. ``error``: there was none, and why; ``pause_s``: in which no step was done."""

    error: str = ""
    pause_s: float = 0.0
    moved_bytes: int = 0
    reason: str = "scale"


class Elastic:
    """At most one change at a time. One thread uses it."""

    def __init__(
        self,
        config: EngineConfig,
        members: Members,
        cohort: Cohort,
        clock: Clock = time.monotonic,
        free: Callable[[], int] = free_bytes,
    ) -> None:
        """``free``: bytes that this host could give to processes."""
        self._config, self._members, self._cohort = config, members, cohort
        self._clock, self._free = clock, free
        self._more = config.topology.more_bytes(config.devices.kv_bytes())
        self.moved = Counter[str]()  # bytes of KV, by the reason of changes
        self._reason = ""  # of the change that was begun last
        self._change: Change | None = None  # asked for, and not under way yet
        self._number = 0  # of the last one
        self._going: list[int] = []  # memory workers, by that change
        self._exits: Exodus | None = None  # of that change
        self._to_meet = False  # before them: memory workers are to be able to copy
        self.stays: dict[int, int] = {}  # lanes of the last change, before and behind it; see ViewChanged
        self._leaving: list[Member] = []  # the same of the change that is under way
        self._coming: dict[Member, str] = {}  # workers that were started -> their URL; empty: unknown yet
        self._preparing: dict[Member, MakeRoom] = {}  # workers without their memory yet, and the order for it
        self._deadline = self._paused_at = 0.0
        self._moves: list[tuple[Member, Recut]] = []  # of the change that is under way, without what is kept
        self._moved_bytes = 0
        self._outcome: Changed | None = None
        self._told = True  # whether somebody wants it
        self._gone: dict[Member, float] = {}  # who was dismissed, and when it is to have ended
        self._standing = StandingStill[Member](clock)

    def plan(self, count: int, replaced: Sequence[int] = (), weights: Sequence[float] = ()) -> Change:
        """A change to ``count`` memory workers. For the same count, ``replaced``: workers that others replace;
        ``weights``: new parts of the work. Raises ValueError where that cannot be, NotInPlaceError.
        """
        topology, binds = self._cohort.topology, self._cohort.binds
        if topology.on_loan:
            raise ValueError(
                f"{topology.loan_flag}: memory workers come and go by what is lent, and nobody scales them beside that"
            )
        check_in_place(self._config, same=bool(weights))
        size = topology.tensor_parallel_size
        if count < 1 or count % size:
            raise ValueError(f"--memory-workers {count}: it must be a multiple of --tensor-parallel-size {size}")
        parts = tuple(weights) or topology.memory_weights
        wanted = structs.replace(topology, memory_workers=count, memory_weights=parts)
        asked, had = self._config.devices.kv_bytes(), self._cohort.kv_bytes
        backend = self._cohort.backend
        by_rank = [binds_of(wanted, r, bind, backend, asked, sum(had[r])) for r, bind in enumerate(binds)]
        more = sum(bind.kv_bytes for rank in by_rank for bind in rank) - sum(map(sum, had))
        # Staying workers hold a layer twice while it moves.
        more += sum(b.kv_bytes // len(b.layers) for rank in by_rank for b in rank[: len(had[0])])
        more += sum(by_rank[w % len(by_rank)][w // len(by_rank)].kv_bytes for w in replaced)  # it has its own till then
        if not self._config.launching.elsewhere and more > (free := self._free()):
            raise ValueError(too_little(more, free))
        ranks = [together(bounds_of(rank), lambda w, r=r: w * size + r) for r, rank in enumerate(by_rank)]  # type: ignore[misc]
        return Change(wanted, by_rank, of_all_ranks(ranks))

    def plan_loans(self, coming: Sequence[int], leaving: Collection[int]) -> Change:
        """A change to the present memory workers without ``leaving``, and with one on loan for each number of bytes in
        ``coming``. Raises ValueError, NotInPlaceError.
        """
        check_in_place(self._config)
        cohort, (bind,) = self._cohort, self._cohort.binds
        kv_bytes = [n for worker, n in enumerate(cohort.kv_bytes[0]) if worker not in leaving] + list(coming)
        wanted = structs.replace(cohort.topology, memory_workers=len(kv_bytes))
        made = binds_of(wanted, 0, bind, cohort.backend)
        binds = [structs.replace(each, kv_bytes=n) for each, n in zip(made, kv_bytes, strict=True)]
        return Change(wanted, [binds], together(bounds_of(binds, self._more)))

    def begin(
        self,
        change: Change,
        leaving: Sequence[int] = (),
        coming: Sequence[Member] = (),
        *,
        told: bool = True,
        reason: str = "scale",
        exits: Exodus | None = None,
    ) -> None:
        """Start the workers that come, without a wait. ``leaving``: memory workers that leave; empty: the last ones;
        where the number stays, others replace them. ``coming``: workers that were started already. ``told``: whether
        ``take_outcome`` is to give the outcome. ``exits``: moves of sequences before the change. Raises ValueError,
        NotInPlaceError, OSError.
        """
        there, count = self._members.memory, change.topology.memory_workers
        gone, size = list(leaving) or list(range(count, len(there))), change.topology.tensor_parallel_size
        if self._change is not None:
            raise ValueError("memory workers come or go already: wait until they have")
        if len(there) - len(gone) > count or not set(gone) <= set(range(len(there))):
            raise ValueError(f"memory workers {gone} are to go, of {len(there)}, and {count} are to stay")
        fresh = gone if count == len(there) else range(len(staying(there, gone, size)), count)
        most = len(there) + len(fresh) if count == len(there) else max(count, len(there))
        if not self._cohort.may_have(most):  # who is to go may die, and be replaced, before
            raise NotInPlaceError("its launcher starts no more workers while others run")
        self._change, self._number, self._going, self._told, self._reason = change, self._number + 1, gone, told, reason
        self._deadline = self._clock() + self._config.deadlines.start_timeout_s
        try:
            self._coming = dict.fromkeys(coming, "")
            for index in list(fresh)[len(coming) :]:
                self._coming[self._cohort.start_beside("memory", index)] = ""
        except (OSError, ValueError) as error:
            self._give_up(str(error), told=False)  # or an answer to the next one that asks
            raise
        after = seated(there, gone, list(self._coming), size)
        places = [self._cohort.tier.place(i, count, self._cohort.identity) for i in range(count)]
        rooms = [MakeRoom(change.binds[i % size][i // size], places[i], self._number) for i in range(count)]
        self._preparing = dict(zip(after, rooms, strict=True))
        for member in (m for m in after if m not in self._coming):
            self._tell(member, self._preparing[member])
        self._exits, self._to_meet = exits, exits is not None
        self._cohort.moving |= self._to_meet

    @property
    def weights(self) -> list[float]:
        """Each memory worker's part of the work, in any unit."""
        return self._cohort.topology.weights

    @property
    def under_way(self) -> bool:
        """Whether a change was asked for that is not over."""
        return bool(self._change or self._moves or self._paused_at)

    @property
    def preparing(self) -> bool:
        """Whether a change is to come for which not all are there yet."""
        return self._change is not None and not self.due()

    def due(self) -> bool:
        """Whether all who are to come are there, and may take part; who cannot ends the change."""
        if self._change is None:
            return False
        for member in list(self._preparing):
            try:
                said = self._said_by(member)
            except LinkClosedError:
                said = f"{member.handle.fate() or 'closed its control link'} as it started"
            except TimeoutError:
                said = "stands still in the midst of a message"
            if said:
                self._give_up(f"{member.name}: {said}")
                return False
        if not self._preparing:
            return self._to_meet or self._exits is None or self._exits.over()
        if self._clock() > self._deadline:
            limit = f"--start-timeout-s {self._config.deadlines.start_timeout_s:g}"
            self._give_up(f"new memory workers took too long to start ({limit})")
        return False

    def commit(self, paused_at: float) -> Capacity | None:
        """All workers are at rest: the change that is due holds from now on. None: no change is due."""
        self.stays = {}
        if self._change is None or self._to_meet or not self.due():
            return None
        change, before, coming = self._change, self._members.memory, self._coming
        self._change, self._coming, self._paused_at, self._moved_bytes = None, {}, paused_at, 0
        self._leaving, size = [before[i] for i in self._going], change.topology.tensor_parallel_size
        after = seated(before, self._going, list(coming), size)
        stay = [before.index(m) for m in after if m not in coming]
        self._cohort.may_have(len(after), stay if len(after) != len(before) else ())
        seats = after if self._exits is not None else before if self._going and len(after) == len(before) else []
        self.stays = {i: seats[::size].index(m) for i, m in enumerate(before[::size]) if m in seats}
        if self._exits is not None:
            self._exits.end()
        self._exits, self._cohort.moving = None, self._config.moves_stripes
        partitions = [bind.partition for bind in self._cohort.binds]
        for member in before:
            self._members.remove(member)
        for index, member in enumerate(after):
            member.handle.index = index
            self._members.append(member)
        self._cohort.take_up(change.topology, [[b.kv_bytes for b in r] for r in change.binds], coming)
        self._moves = [
            x
            for r in range(size)
            for x in self._orders(before[r::size], after[r::size], partitions[r], change.binds[r])
        ]
        log.info("memory workers: %d -> %d", len(before), len(after))
        return change.capacity

    def move(self, keep: Sequence[Keep]) -> bool:
        """Have KV moved to where it is to be, where a change is under way. Whether it is there; else all who lack it
        have none. Raises LostError.
        """
        moves, self._moves = self._moves, []
        leaving, self._leaving = (self._leaving, []) if moves else ([], self._leaving)
        try:
            self._order(moves, leaving, list(keep))  # of nothing, too: the memory that was made ready becomes the store
            answers = self._answers([m for m, _ in moves if m not in leaving], leaving)
        finally:
            self._dismiss(leaving)
        for error in (a.error for a in answers if a.error):
            log.warning("KV could not be moved, and is computed again: %s", error)
        self._moved_bytes = sum(a.nbytes for a in answers)
        return not any(a.error for a in answers)

    def _order(self, moves: Sequence[tuple[Member, Recut]], leaving: Sequence[Member], keep: list[Keep]) -> None:
        """Tell all, also where one is lost: nobody may go on with KV that lies as before. Raises LostError."""
        lost: LostError | None = None
        for member, order in moves:
            send = self._tell if member in leaving else self._members.send
            try:
                send(member, structs.replace(order, view=self._members.view, keep=keep))
            except LostError as error:
                lost = lost or error
        if lost is not None:
            raise lost

    def _answers(self, owing: Sequence[Member], leaving: Sequence[Member]) -> list[Recutted]:
        """Of all, or of those so far and an error where one that goes gives no more, or one hangs: behind the first
        answer it takes a step's time, and as long again. Who it is shows as all come to rest. Raises LostError.
        """
        limits, answers, begun = self._config.deadlines, dict[Member, Recutted](), self._clock()
        deadline = begun + limits.start_timeout_s
        while owing := [m for m in owing if m not in answers]:
            said, now = dict(self._members.arrived(Recutted)), self._clock()
            answers |= said
            deadline = min(deadline, now + max(now - begun, limits.step_timeout_s)) if said else deadline
            stopped = self._standing.look([m for m in leaving if m.handle.stopped])
            lost = dict.fromkeys(stopped, f"has been stopped for {STOPPED_S:g} s")
            lost |= dict.fromkeys([m for m in owing if m not in answers and now > deadline], "takes too long")
            if lost := lost | {m: fate for m in leaving if (fate := self._fate(m)) is not None}:
                error = ", ".join(f"{m.name} {how}" for m, how in lost.items())
                return [*answers.values(), Recutted(view=self._members.view, error=error)]
            if answers.keys().isdisjoint(owing):
                self._members.listen(LISTEN_S)
        return list(answers.values())

    def _fate(self, leaving: Member) -> str | None:
        """Why one that goes gives no more KV; None: it does, or has given all."""
        with suppress(LinkClosedError, TimeoutError):  # its process has ended, or will have
            said = self._members.hear(leaving)
            if isinstance(said, Recutted) and said.error:
                return f"gives no more: {said.error}"
        return leaving.handle.fate()

    def end(self) -> None:
        """All have met anew."""
        if self._to_meet and self._exits is not None:
            self._to_meet = False
            self._exits.begin()
        if self._paused_at:
            changed = Changed("", self._clock() - self._paused_at, self._moved_bytes, self._reason)
            self.moved[self._reason] += changed.moved_bytes
            log.info("KV has moved: %d bytes, %.3f s", changed.moved_bytes, changed.pause_s)
            self._outcome, self._paused_at = changed if self._told else None, 0.0

    def take_outcome(self) -> Changed | None:
        """Of the last change, once it is over, and once only."""
        self.reap()
        outcome, self._outcome = self._outcome, None
        return outcome

    def reap(self) -> None:
        """Wait for the processes of those that have gone; who takes long ends by force."""
        now = self._clock()
        for member in [m for m, due in self._gone.items() if now > due or m.handle.fate() is not None]:
            member.handle.join(0.0)
            del self._gone[member]

    def close(self) -> None:
        """End all who are not members. Idempotent."""
        self._dismiss([*self._coming, *self._leaving])
        for member, due in self._gone.items():
            member.handle.join(max(0.0, due - self._clock()))
        self._coming, self._change, self._leaving, self._going, self._gone = {}, None, [], [], {}

    def _orders(
        self, before: list[Member], after: list[Member], partition: Any, binds: list[Bind]
    ) -> list[tuple[Member, Recut]]:
        """Of one rank: who is told what, but for the KV that is kept."""
        peers = before + [m for m in after if m not in before]
        peers.sort(key=lambda m: not self._cohort.address_of(m).key)  # the later one connects: guests need no key
        addresses = [self._cohort.address_of(m) for m in peers]
        return [
            (
                member,
                Recut(
                    view=0,
                    bind=binds[after.index(member)] if member in after else None,
                    before=partition,
                    after=binds[0].partition,
                    keep=[],
                    peers=known_to(addresses[me], addresses),
                    me=me,
                    sources=[peers.index(m) for m in before],
                    targets=[peers.index(m) for m in after],
                    timeout_s=self._config.deadlines.step_timeout_s,
                ),
            )
            for me, member in enumerate(peers)
        ]

    def _said_by(self, member: Member) -> str:
        """What one that prepares has said; why it cannot, or nothing. Raises LinkClosedError."""
        if member not in self._coming:
            prepared = [x for x in member.inbox if isinstance(x, RoomMade)]
            for message in prepared:
                member.inbox.remove(message)
            prepared = [x for x in prepared if x.number == self._number]
            if prepared or member not in self._members.memory:  # a replacement of a dead worker begins anew
                del self._preparing[member]
            return next((x.error for x in prepared), "")
        message = self._members.hear(member)
        if isinstance(message, MemoryReady):
            self._coming[member] = message.url
            member.link.send(self._preparing[member])
        elif isinstance(message, RoomMade):
            del self._preparing[member]
            return message.error
        elif isinstance(message, Leaving):  # heeded once it has a place
            member.inbox.append(message)
        return message.text if isinstance(message, Failed) else ""

    @staticmethod
    def _tell(member: Member, message: Any) -> None:
        with suppress(LinkClosedError):  # its end is told to the listener of its link
            member.link.send(message)

    def _give_up(self, why: str, *, told: bool = True) -> None:
        log.warning("memory workers stay as they are: %s", why)
        self._dismiss(self._coming)
        self._cohort.may_have(len(self._members.memory))
        for member in self._members.memory:
            self._tell(member, MakeRoom(None))
        self._change, self._going, self._coming, self._preparing = None, [], {}, {}
        if self._exits is not None:
            self._exits.undo()
        self._exits, self._to_meet, self._cohort.moving = None, False, self._config.moves_stripes
        self._outcome = Changed(why, reason=self._reason) if told and self._told else None

    def _dismiss(self, members: Iterable[Member]) -> None:
        """Have them end; nobody waits until their memory is the host's again."""
        for member in members:
            self._tell(member, Stop())
            member.link.close()
            self._gone[member] = self._clock() + JOIN_S
