"""Recovery from losses at each moment, also during a recovery.

Covers: lamina/executor/degraded_replicas.py, lamina/executor/memory_worker_slots.py, lamina/executor/spare_workers.py,
lamina/executor/stall_detector.py, lamina/protocol/executor.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from engine_api import start_executor
from msgspec import structs
from simulated import SimulatedWorker, World
from test_worker_group import LIMIT_S, OPTIONS

from lamina.config.engine_config import KVOptions
from lamina.config.flat_options import make_config, replace_options, with_fewer_workers
from lamina.config.partition import PARTITIONS
from lamina.executor.elastic import MemoryResizer, ResizePlan, ResizeResult
from lamina.executor.launchers import HostLostError, local
from lamina.executor.memory_worker_slots import order_after_removal
from lamina.executor.restart_budget import WINDOW_S
from lamina.executor.stall_detector import STOPPED_S, StallDetector
from lamina.executor.supervisor import Supervisor
from lamina.executor.worker_executor import WorkerExecutor
from lamina.executor.worker_group import WorkerGroup
from lamina.executor.worker_registry import RETRY_S, RegisteredWorker, WorkerRegistry, WorkersLostError
from lamina.protocol.capacity import Capacity
from lamina.protocol.control import (
    ChannelLost,
    ComputeReady,
    Connect,
    Failed,
    LinkClosedError,
    Quiesce,
    StartCompute,
    StartMemory,
    StepDone,
)
from lamina.protocol.executor import EpochChanged, ReducedCapacityError, WorkerError
from lamina.protocol.reshard import PrepareStore, StorePrepared
from lamina.protocol.step_plan import BindRequest, LayerShape, SurvivingKv
from lamina.utils import proc

KEEP = [SurvivingKv(4, 17), SurvivingKv(9, 3)]
NUM_WORKERS = 5
MOST = 5


class Run:
    """A fleet that runs, and its supervisor."""

    def __init__(self, seed: int = 0, *, pools: bool = False, **options: Any) -> None:
        """``pools``: whether an executor has started it, which then watches it."""
        told = {**OPTIONS, "transport": "shm", "start_timeout_s": LIMIT_S, "step_timeout_s": 5.0, **options}
        self.world, self.config = World(seed), make_config(told)
        config = self.config
        self.on_tick: Callable[[], None] = lambda: None
        if pools:
            self.pools = start_executor(self.world, config)
            self.members, self.cohort, self.ready = self.pools.registry, self.pools.workers, self.pools.ready
            self.supervisor = self.pools.supervisor
        else:
            self.members = WorkerRegistry(lambda s: None, lambda: None, self.world, self.world.clock, self.tick)
            self.cohort = WorkerGroup(
                config, self.members, lambda *_: None, clock=self.world.clock, launch=self.world.launch
            )  # fmt: skip
            self.supervisor = Supervisor(config, self.members, self.cohort, self.world.clock)
            self.cohort.start("a model")
            self.ready = self.cohort.connect()
        for worker in self.world.workers:
            worker.kept = {4: 20 + worker.index, 9: 3}

    def worker(self, number: int) -> SimulatedWorker:
        return self.world.workers[number]

    def tick(self) -> None:
        self.on_tick()

    def loss(self) -> WorkersLostError:
        """The one that the driver sees."""
        for _ in range(100):
            try:
                self.members.listen(0.1)
            except WorkersLostError as loss:
                return loss
        raise AssertionError("nobody was lost")

    def recover(self) -> tuple[list[dict[int, int]], ComputeReady]:
        """Recovers as the pools do, as often as it takes."""
        loss = self.loss()
        while True:
            assert self.supervisor.is_recoverable(loss), loss
            kept = self.supervisor.quiesce(loss)
            try:
                return kept, self.whole(self.supervisor.resume(KEEP))
            except WorkersLostError as another:
                loss = another

    def whole(self, ready: ComputeReady) -> ComputeReady:
        """Once all replicas are there again."""
        while list(self.cohort.degraded):
            self.world.pass_until(self.world.now + 0.1, lambda: False)
            if self.cohort.degraded.is_any_loaded():
                self.supervisor.quiesce(None)
                ready = self.supervisor.resume(KEEP)
        return ready

    def now(self, role: str, index: int) -> SimulatedWorker:
        """Returns the worker that has that place, or loads for it."""
        there = [*self.members, *self.cohort.degraded]
        (member,) = (m for m in there if (m.handle.role, m.handle.index) == (role, index))
        worker: SimulatedWorker = member.handle  # type: ignore[assignment]
        return worker

    def check(self, ready: ComputeReady) -> None:
        """All places are taken, by workers that live and are of one epoch."""
        assert not self.members.lost_workers
        assert len(list(self.members)) == NUM_WORKERS
        for member in self.members:
            worker = self.now(member.handle.role, member.handle.index)
            assert not worker.ended
            assert worker.view == ready.epoch == self.cohort.epoch


@pytest.mark.parametrize("victim", range(NUM_WORKERS))
def test_another_takes_its_place_and_the_others_keep_what_they_have(victim: int) -> None:
    run = Run()
    lost, before = run.worker(victim), [len(w.got) for w in run.world.workers]
    lost.kill()
    kept, ready = run.recover()
    run.check(ready)
    new = run.now(lost.role, lost.index)
    assert new is not lost
    assert len(run.world.workers) == NUM_WORKERS + 1
    assert kept == [{} if w is lost else w.kept for w in run.world.workers if w.role == "memory"][:2]
    for worker, had in zip(run.world.workers, before, strict=False):
        if worker is not lost:
            changes = 2 if lost.role == "compute" else 1  # without it, and with the one in its place
            assert [type(x) for x in worker.got[had:]] == [Quiesce, Connect] * changes, "it loads nothing again"
            assert worker.got[-2].epoch < worker.got[-1].epoch == ready.epoch
    start = new.got[0]
    assert isinstance(start, StartMemory | StartCompute)
    assert start.name.endswith("-1"), "a name that nobody has had"
    meetings = [x for w in run.world.workers for x in w.got if isinstance(x, Connect) and x.epoch == ready.epoch]
    assert any(start.name in str(meeting) for meeting in meetings)
    for worker in (run.now("memory", 0), run.now("memory", 1)):
        assert worker.got[-1].surviving == KEEP
    assert run.now("prefill", 0).got[-1].surviving == []
    for worker in (run.now("compute", 0), run.now("compute", 1)):
        assert worker.got[-1].kv_bytes == [100, 200], "a new memory worker is to have as much as the one before"


@pytest.mark.parametrize("victim", range(NUM_WORKERS))
def test_a_spare_takes_the_place_and_a_new_one_is_started_behind_it(victim: int) -> None:
    run = Run(spare_compute=2, spare_memory=1)
    run.cohort.spare_workers.start_missing()
    run.world.pass_until(run.world.now + 10.0, lambda: False)  # they load
    spares, lost, now = run.world.workers[NUM_WORKERS:], run.worker(victim), run.world.now
    assert [w.role for w in spares] == ["compute", "compute", "memory"]
    assert not any(w.got[0].progress for w in spares[:2]), "nobody listens: they would wait for a reader"
    assert len({w.got[0].name for w in run.world.workers}) == NUM_WORKERS + 3
    lost.kill()
    _, ready = run.recover()
    run.check(ready)
    new = run.now(lost.role, lost.index)
    if lost.role == "prefill":
        assert new not in spares
        return
    assert new in spares
    assert run.world.now - now < 1.0, "it had loaded before"
    assert [type(x) for x in new.got] == [type(lost.got[0]), Connect]
    assert new.got[-1].replica == (lost.index if lost.role == "compute" else None)
    meetings = [x for w in run.world.workers for x in w.got if isinstance(x, Connect) and x.epoch == ready.epoch]
    assert any(f"{new.got[0].name}'" in str(meeting) for meeting in meetings)
    assert not any(f"{lost.got[0].name}'" in str(meeting) for meeting in meetings)
    others = run.world.workers[NUM_WORKERS + 3 :]
    assert [w.role for w in others] == [lost.role], "the spare has a successor, which loads meanwhile"
    assert [type(x) for x in others[0].got[:1]] in ([], [type(lost.got[0])])


def test_a_dead_spare_has_a_successor_at_once_as_often_as_recoveries_may_be() -> None:
    run = Run(spare_compute=1, spare_memory=1, max_recoveries=2)
    run.cohort.spare_workers.start_missing()
    run.supervisor.check_health([])
    assert len(run.world.workers) == NUM_WORKERS + 2, "those that live stay"
    for count in (3, 4):
        victim = run.world.workers[-1]
        victim.kill()
        run.supervisor.check_health([])
        (new,) = run.world.workers[NUM_WORKERS + count - 1 :]
        assert new.role == victim.role
        assert new in [m.handle for m in run.cohort.spare_workers]
    run.world.workers[-1].kill()
    for _ in range(3):
        run.supervisor.check_health([])
    assert len(run.world.workers) == NUM_WORKERS + 4, "one that dies whenever it starts is not started for ever"
    lost = WorkersLostError("gone", [run.members.memory[0]], ended=True)
    assert run.supervisor.is_recoverable(lost), "no spare's end has cost a recovery"
    run.world.now += WINDOW_S + 1.0
    run.supervisor.check_health([])
    assert len(run.world.workers) == NUM_WORKERS + 5
    assert not run.members.lost_workers


def test_a_spare_takes_the_memory_of_the_largest_place_and_another_where_that_is_another() -> None:
    run = Run(spare_compute=1, spare_memory=2)
    bind = bind_of(run)
    run.cohort.memory_binds = [bind]

    def asked() -> list[list[tuple[int, int]]]:
        """Returns, for each spare, the places whose memory it was asked to take."""
        run.world.pass_until(run.world.now + 10.0, lambda: False)
        rooms = [[x for x in w.got if isinstance(x, PrepareStore)] for w in run.world.workers[NUM_WORKERS:]]
        assert all(x.is_first_store for each in rooms for x in each), "nobody waits for an answer"
        return [[(x.bind.worker, x.bind.kv_bytes) for x in each if x.bind is not None] for each in rooms]

    run.cohort.spare_workers.start_missing()
    assert asked() == [[], [(1, 200)], [(1, 200)]], "a compute worker has no pool"
    run.cohort.memory_binds = [structs.replace(bind, epoch=9, replicas=1)]
    run.cohort.spare_workers.start_missing()
    assert asked() == [[], [(1, 200)], [(1, 200)]], "it is the same for whoever connects"
    run.cohort.kv_bytes = [[300, 150]]
    run.cohort.spare_workers.start_missing()
    assert asked() == [[], [(1, 200), (0, 300)], [(1, 200), (0, 300)]]


@pytest.mark.parametrize("place", ["10.0.0.7:0", "10.0.0.8:0"])
def test_a_spare_on_a_host_that_others_do_not_reach_takes_no_place_of_that_host(place: str) -> None:
    run, left = Run(spare_memory=1), list[tuple[str, int]]()
    run.world.avoid_host = lambda role, index: left.append((role, index))  # type: ignore[method-assign]
    run.cohort.spare_workers.start_missing()
    run.world.pass_until(run.world.now + 10.0, lambda: False)
    spare, lost = run.world.workers[-1], run.now("memory", 1)
    lost.host, spare.host = "10.0.0.7:0", place
    member = run.members.memory[1]
    member.unreachable_peer = True
    run.members.mark_lost(member, loss := WorkersLostError("others have lost their way to it", [member], ended=True))
    run.supervisor.quiesce(loss)
    run.whole(run.supervisor.resume(KEEP))
    assert left == [("memory", 1)]
    assert (run.now("memory", 1) is spare) == (place != lost.host)


def test_a_spare_that_comes_up_slowly_is_taken_in_once_it_has() -> None:
    run, slow = Run(spare_memory=1), [True]
    start = run.world.start_spare

    def later(role: str, number: int, threads: int = 0, wait_s: float = 0.0) -> SimulatedWorker | None:
        return None if slow[0] else start(role, number, threads)

    run.world.start_spare = later  # type: ignore[method-assign]
    run.cohort.spare_workers.start_missing()
    run.supervisor.check_health([])
    assert not list(run.cohort.spare_workers)
    slow[0] = False
    run.supervisor.check_health([])
    assert [m.handle.role for m in run.cohort.spare_workers] == ["memory"]
    run.supervisor.check_health([])
    assert len(run.world.workers) == NUM_WORKERS + 1


COMES: dict[str, Any] = {"it comes": 7.0, "it takes too long": None, "it does not come": OSError("no host has room")}


@pytest.mark.parametrize("comes", COMES)
def test_a_spare_that_still_comes_up_is_waited_for_as_it_is_there_sooner_than_another_one(comes: str) -> None:
    """It is waited for during half of the time that a start has: the other half is for the worker that is started in
    its stead.
    """
    run, waits = Run(spare_memory=1), list[float]()
    start, after = run.world.start_spare, COMES[comes]

    def later(role: str, number: int, threads: int = 0, wait_s: float = 0.0) -> SimulatedWorker | None:
        waits.append(wait_s)
        if wait_s and isinstance(after, OSError):
            raise after
        run.world.now += (after or wait_s) if wait_s else 0.0
        return start(role, number, threads) if wait_s and after else None

    run.world.start_spare = later  # type: ignore[method-assign]
    run.cohort.spare_workers.start_missing()
    run.worker(0).kill()
    _, ready = run.recover()
    run.check(ready)
    assert waits[:2] == [0.0, LIMIT_S / 2]
    assert not any(waits[2:])
    assert len(run.world.workers) == NUM_WORKERS + 1, "one takes the place, and nobody beside it"
    assert (run.now("memory", 0).index, ready.epoch) == (0, run.cohort.epoch)


def waits_for_spares(run: Run) -> list[float]:
    """Seconds of each wait for a spare, from here on; none ever comes up."""
    waits = list[float]()

    def later(role: str, number: int, threads: int = 0, wait_s: float = 0.0) -> None:
        waits.append(wait_s)

    run.world.start_spare = later  # type: ignore[assignment,method-assign]
    run.cohort.spare_workers.start_missing()
    return waits


def test_nobody_waits_for_a_spare_where_decoding_goes_on_with_other_replicas() -> None:
    run = Run(spare_compute=1)
    waits = waits_for_spares(run)
    run.now("compute", 0).kill()
    _, ready = run.recover()
    run.check(ready)
    assert not any(waits)


def test_nor_for_one_where_others_do_not_reach_the_host() -> None:
    """The spare may be coming up on that host."""
    run = Run(spare_memory=1)
    waits = waits_for_spares(run)
    member = run.members.memory[1]
    member.unreachable_peer = True
    run.members.mark_lost(member, loss := WorkersLostError("others have lost their way to it", [member], ended=True))
    run.supervisor.quiesce(loss)
    run.whole(run.supervisor.resume(KEEP))
    assert not any(waits)


def test_one_that_cannot_be_started_is_told_once_and_tried_again_behind_the_next_loss(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Run(spare_memory=1)
    right = run.world.start_spare

    def full(*asked: Any) -> Any:
        raise OSError("no host has room")

    run.world.start_spare = full  # type: ignore[method-assign]
    with caplog.at_level("WARNING"):
        run.worker(0).kill()
        run.recover()
        for _ in range(3):
            run.supervisor.check_health([])
    assert caplog.text.count("there are fewer spare workers than configured: no host has room") == 1
    run.world.start_spare = right  # type: ignore[method-assign]
    run.worker(1).kill()
    run.recover()
    assert [m.handle.role for m in run.cohort.spare_workers] == ["memory"]


@pytest.mark.parametrize("how", ["has failed", "has ended its link"])
def test_a_spare_that_is_about_to_end_takes_no_place(how: str) -> None:
    """Its process is still there: else its reason would be that of the run's end."""
    run = Run(spare_memory=1)
    run.cohort.spare_workers.start_missing()
    run.world.pass_until(run.world.now + 10.0, lambda: False)
    spare, (member,) = run.world.workers[-1], run.cohort.spare_workers
    if how == "has failed":
        spare.inbox.append(Failed(text="memory worker: no memory", user_error=True))
    else:
        member.link = LinkThatEnded(member.link)  # type: ignore[assignment]
    run.worker(0).kill()
    _, ready = run.recover()
    run.check(ready)
    assert run.now("memory", 0) is not spare
    assert spare.ended == "was killed by SIGKILL"


class LinkThatEnded:
    """Whose process has not ended yet."""

    ready, closed = True, False

    def __init__(self, link: Any) -> None:
        self.close = link.close

    def recv(self, timeout_s: float | None = None) -> Any:
        raise LinkClosedError("gone")


def test_spares_go_to_ranks_of_their_own_and_dead_ones_nowhere() -> None:
    run = Run(
        pipeline=1, prefill_workers=0, tensor_parallel_size=2, memory_workers=2, spare_compute=2, memory_weights=""
    )
    run.cohort.spare_workers.start_missing()
    run.world.pass_until(run.world.now + 10.0, lambda: False)
    spares, lost = run.world.workers[4:], run.now("compute", 1)
    assert [w.got[0].rank for w in spares] == [0, 1]
    lost.kill()
    run.recover()
    assert run.now("compute", 1) is spares[1]
    again = run.world.workers[-1]
    assert again.got == [] or again.got[0].rank == 1
    run.world.pass_until(run.world.now + 10.0, lambda: False)
    again.kill()  # a spare that has died meanwhile: no place is lost by it
    run.members.check()
    assert not run.members.lost_workers
    run.now("compute", 1).kill()
    run.recover()
    assert run.now("compute", 1) not in (again, *spares)
    links = [m.link for m in run.cohort.spare_workers]
    run.cohort.close()
    assert len(links) == 2
    assert all(link.closed for link in links)  # type: ignore[attr-defined]


def test_what_was_done_before_counts_and_what_is_said_later_does_not() -> None:
    run = Run()
    done = StepDone(epoch=run.ready.epoch, batch=0, step=3, sampled_tokens=[])
    run.now("compute", 1).inbox.append(done)
    run.worker(0).kill()
    kept = run.supervisor.quiesce(run.loss())
    assert run.members.read_messages(StepDone) == [done]
    assert run.members.read_messages(StepDone) == []
    assert kept[1] == run.now("memory", 1).kept
    ready = run.supervisor.resume(KEEP)
    run.now("compute", 1).inbox.append(done)
    run.members.check()
    assert run.members.read_messages(StepDone) == [], "it is of an older epoch"
    run.check(ready)


@pytest.mark.parametrize("second", range(NUM_WORKERS))
@pytest.mark.parametrize("first", [0, 2, 4])
def test_another_loss_at_any_moment_meanwhile(first: int, second: int) -> None:
    """Also of the worker that has come in the place of the first."""
    moment = 0
    while True:
        run = Run(max_recoveries=10)
        began, hit = run.world.moments, False

        def before(now: int, run: Run = run, at: int = began + moment) -> None:
            nonlocal hit
            if now == at:
                hit = True
                place = run.worker(second)
                run.now(place.role, place.index).kill()

        run.worker(first).kill()
        run.world.before = before
        _, ready = run.recover()
        if not hit:
            break
        if run.members.lost_workers or any(run.now(m.handle.role, m.handle.index).ended for m in run.members):
            _, ready = run.recover()  # it came after the last message
        run.check(ready)
        moment += 1
    assert moment > 10


def test_one_that_cannot_end_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that the kernel holds ends some time after its kill: the driver does not wait once for each other
    worker.
    """
    run = Run()
    fenced, right = list[RegisteredWorker](), run.members.fence
    monkeypatch.setattr(run.members, "fence", lambda member: (fenced.append(member), right(member))[1])
    lost = run.members.memory
    for member in lost:
        run.now("memory", member.handle.index).kill()
    run.recover()
    assert sorted(fenced, key=lost.index) == lost


def test_one_that_still_loads_has_the_time_of_a_start_to_come_to_rest() -> None:
    run = Run()
    run.world.load_s = 20.0
    first = run.now("prefill", 0)

    def before(now: int) -> None:
        if run.now("prefill", 0) is not first and run.now("prefill", 0).got and run.now("memory", 0) is run.worker(0):
            run.worker(0).kill()

    run.world.before = before
    first.kill()
    _, ready = run.recover()
    run.check(ready)
    assert len(run.world.workers) == NUM_WORKERS + 2, "the new prefill worker is not taken for one that hangs"


def test_one_that_does_not_come_to_rest_is_replaced_too() -> None:
    run = Run()
    hung = run.worker(1)
    hung.silent = True
    run.worker(0).kill()
    _, ready = run.recover()
    run.check(ready)
    assert hung.ended == "was killed by SIGKILL"
    assert run.now("memory", 1) is not hung


def test_one_that_is_stopped_is_lost_soon_and_one_that_is_slow_is_not() -> None:
    run = Run(step_timeout_s=60.0)
    run.on_tick = lambda: run.supervisor.check_health(list(run.members))
    slow, stopped = run.worker(0), run.worker(1)
    slow.silent = stopped.silent = stopped.is_stopped = True
    began = run.world.now
    words = rf"^{re.escape(stopped.name)} has been stopped for 1.75 s while it is waited for, (\d\.\d\d) s at most$"
    with pytest.raises(WorkersLostError, match=words) as told:
        run.members.wait_for(run.members.compute, StepDone, 60.0, "for a step")
    took = run.world.now - began
    assert took < 2.5
    found_s = float(re.search(words, str(told.value))[1])  # type: ignore[index]
    assert found_s >= took - 0.01, "it stood still all the time"
    assert run.supervisor.is_recoverable(told.value)
    slow.silent = False
    run.supervisor.quiesce(told.value)
    run.check(run.supervisor.resume(KEEP))
    assert stopped.ended
    assert run.now("memory", 0) is slow


def test_one_that_was_stopped_and_goes_on_is_not_lost() -> None:
    run = Run()
    worker = run.worker(0)
    for _ in range(10):
        for stopped in (True, True, False):
            worker.is_stopped = stopped
            run.supervisor.check_health(list(run.members))
            run.world.now += 0.9
    run.world.now += 10.0
    worker.is_stopped = True
    run.supervisor.check_health(list(run.members))


def test_how_long_one_was_waited_for_is_told_by_the_looks_around_it() -> None:
    now = 100.0
    standing = StallDetector[str](lambda: now)
    for _ in range(12):  # it is stopped, and no worker waits for it
        assert standing.update([]) == []
        now += 0.25
    free = now - 0.25
    while not standing.update(["it"]):
        now += 0.25
    assert standing.longest_stall_s("it") == now - free <= STOPPED_S + 0.25
    now += 10.0
    standing.update(["it"])
    assert standing.longest_stall_s("it") == 10.0, "whoever looks seldom knows little"


def test_one_that_is_slowed_down_by_signals_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool such as cpulimit slows it down: each look may find it stopped, and it has run in between."""
    now, spent = 100.0, 7
    monkeypatch.setattr(local, "start", lambda *asked, **env: (SimpleNamespace(pid=5), None))
    monkeypatch.setattr(proc, "cpu_ns_if_stopped", lambda pid: spent)
    standing, worker = StallDetector[str](lambda: now), local.ProcessWorker("memory", 0)
    for _ in range(40):
        assert standing.update(["it"] if worker.is_stopped else []) == []
        now, spent = now + 0.25, spent + 1
    begun = now
    while not standing.update(["it"] if worker.is_stopped else []):
        now += 0.25
    assert now - begun <= STOPPED_S + 0.25, "now it stands still"


def test_where_no_loss_can_be_made_good_one_that_is_stopped_is_waited_for() -> None:
    run = Run(max_recoveries=0)
    run.worker(0).is_stopped = True
    for _ in range(10):
        run.supervisor.check_health(list(run.members))
        run.world.now += 1.0


def test_a_way_that_has_ended_between_two_that_live_costs_the_compute_worker() -> None:
    run = Run()
    sayer = run.now("compute", 1)
    sayer.miss(sayer.view)
    loss = run.loss()
    assert str(loss) == f"{sayer.name} cannot reach other workers: a peer is gone"
    run.supervisor.quiesce(loss)
    run.check(run.whole(run.supervisor.resume(KEEP)))
    assert sayer.ended


def test_a_memory_worker_that_lives_and_is_named_twice_goes_itself() -> None:
    """Others would be replaced for ever.

    No report has named the worker that takes its place, and old reports do not count.
    """
    run = Run(max_recoveries=9)

    def goes(number: int) -> str:
        """Returns the worker that goes, when a compute worker has lost its channel to the second memory worker."""
        sayer, other = run.now("compute", number), run.now("memory", 1)
        name = run.members.worker_names[other]
        sayer.inbox.append(ChannelLost(epoch=sayer.view, text="no way", peer=name))
        loss = run.loss()
        run.supervisor.quiesce(loss)
        run.check(run.whole(run.supervisor.resume(KEEP)))
        assert bool(sayer.ended) != bool(other.ended)
        return "memory" if other.ended else "compute"

    assert [goes(0), goes(1), goes(1)] == ["compute", "memory", "compute"]
    run.world.now += RETRY_S
    assert [goes(1), goes(1)] == ["compute", "memory"]


def test_where_one_lacks_what_it_should_have_all_meet_anew_and_nobody_is_replaced() -> None:
    run = Run(max_recoveries=2)
    everybody = list(run.members)
    for _ in range(2):
        asker = run.now("prefill", 0)
        asker.inbox.append(ChannelLost(epoch=run.cohort.epoch, text="no such tokens", missing_kv=True))
        _, ready = run.recover()
        run.check(ready)
        assert list(run.members) == everybody
    run.now("prefill", 0).inbox.append(ChannelLost(epoch=run.cohort.epoch, text="no such tokens", missing_kv=True))
    loss = run.loss()
    assert not run.supervisor.is_recoverable(loss), "not for ever"
    assert "no such tokens" in str(loss)
    assert "--max-recoveries 2" in run.supervisor.exit_message(loss)


def test_where_a_parity_worker_has_lost_a_link_all_meet_anew_and_nobody_is_replaced() -> None:
    run = Run(max_recoveries=1)
    everybody = list(run.members)
    run.now("memory", 1).inbox.append(ChannelLost(epoch=run.cohort.epoch, text="a part is damaged", is_serving=True))
    loss = run.loss()
    assert "has lost a channel to another memory worker: a part is damaged" in str(loss)
    run.supervisor.quiesce(loss)
    run.check(run.whole(run.supervisor.resume(KEEP)))
    assert list(run.members) == everybody


def test_a_worker_whose_end_has_cost_a_parity_worker_its_link_is_the_one_that_is_replaced() -> None:
    run = Run(max_recoveries=1)
    everybody, dead = list(run.members), run.now("memory", 1)
    run.now("memory", 0).inbox.append(ChannelLost(epoch=run.cohort.epoch, text="it is gone", is_serving=True))
    dead.kill()
    loss = run.loss()
    assert "it is gone" not in str(loss)
    run.supervisor.quiesce(loss)
    run.check(run.whole(run.supervisor.resume(KEEP)))
    assert sum(old is not new for old, new in zip(everybody, run.members, strict=True)) == 1


def test_who_loses_its_way_to_one_that_lacks_something_is_not_replaced() -> None:
    """The one that lacks it ends its channels: the others may be heard before it."""
    run = Run()
    everybody, view = list(run.members), run.cohort.epoch
    run.now("compute", 0).miss(view)
    run.now("prefill", 0).inbox.append(ChannelLost(epoch=view, text="no such tokens", missing_kv=True))
    _, ready = run.recover()
    run.check(ready)
    assert list(run.members) == everybody


FAILURE = "compute worker: RuntimeError: out of order"


def test_one_that_says_why_it_has_failed_is_replaced_unless_another_one_has_said_the_same() -> None:
    """Such as one whose device has an error; with a defect, or too little memory, the next one fails as well."""
    run = Run()
    for text in (FAILURE, "compute worker: RuntimeError: something else"):
        run.now("compute", 0).inbox.append(Failed(text=text))
        run.check(run.recover()[1])
    run.now("compute", 1).inbox.append(Failed(text=FAILURE))
    loss = run.loss()
    assert str(loss) == FAILURE
    assert not run.supervisor.is_recoverable(loss)
    assert run.supervisor.exit_message(loss) == FAILURE
    run.world.now += WINDOW_S + 1.0
    assert run.supervisor.is_recoverable(loss)


def test_two_that_say_the_same_at_once_are_replaced() -> None:
    """Ranks that fail together send the same error."""
    run = Run()
    for index in range(2):
        run.now("compute", index).inbox.append(Failed(text=FAILURE))
    run.check(run.recover()[1])


def test_one_that_has_failed_counts_as_a_recovery() -> None:
    run = Run(max_recoveries=0)
    run.now("memory", 0).inbox.append(Failed(text="memory worker: RuntimeError: out of order"))
    loss = run.loss()
    assert not run.supervisor.is_recoverable(loss)
    assert run.supervisor.exit_message(loss) == "memory worker: RuntimeError: out of order"


def test_one_that_says_the_same_as_the_one_in_whose_place_it_has_come_is_not_replaced() -> None:
    """Once it has started, and before all have met: no more of them are started, one after the other."""
    run = Run()
    first, new = run.now("memory", 0), NUM_WORKERS

    def before(now: int) -> None:
        for worker in run.world.workers[new:]:
            if not worker.ended and any(isinstance(message, Connect) for message in worker.got):
                worker.inbox.append(Failed(text=FAILURE))

    run.world.before = before
    first.inbox.append(Failed(text=FAILURE))
    with pytest.raises(AssertionError, match=rf"^WorkersLostError\(.{FAILURE}.\)"):
        run.recover()
    assert len(run.world.workers) == NUM_WORKERS + 1


def test_one_that_has_come_and_fails_otherwise_is_replaced_also_where_others_die_as_all_come_to_rest() -> None:
    run = Run()
    first, prefill = run.now("memory", 0), run.now("prefill", 0)

    def before(now: int) -> None:
        new = run.now("memory", 0)
        if new is not first and any(isinstance(message, Connect) for message in new.got):
            new.inbox.append(Failed(text="memory worker: RuntimeError: something else"))
            run.world.before = lambda now: prefill.kill() if new.ended else None

    run.world.before = before
    first.inbox.append(Failed(text=FAILURE))
    run.check(run.recover()[1])
    assert prefill.ended


def test_one_that_fails_as_it_starts_is_not_replaced() -> None:
    """The next one would fail as well."""
    run = Run()
    first = run.now("memory", 0)

    def before(now: int) -> None:
        new = run.now("memory", 0)
        if new is not first and not new.got:
            new.inbox.append(Failed(text="memory worker: RuntimeError: no memory"))

    run.world.before = before
    first.kill()
    with pytest.raises(AssertionError, match=r"^WorkersLostError\(.memory worker: RuntimeError: no memory.\)"):
        run.recover()


@pytest.mark.parametrize("most", [0, 1, 3])
def test_so_many_losses_are_made_good_in_ten_minutes(most: int) -> None:
    run = Run(max_recoveries=most)
    for role in ("memory", "compute", "prefill")[:most]:
        run.now(role, 0).kill()
        run.check(run.recover()[1])
    run.now("memory", 1).kill()
    loss = run.loss()
    assert not run.supervisor.is_recoverable(loss)
    limit = f", as --max-recoveries {most} allows no more in ten minutes," if most else ""
    assert run.supervisor.exit_message(loss) == f"{loss}; its pool cannot continue{limit} and was ended: start again"
    assert re.fullmatch(r"memory worker 1 \(pid \d+\) was killed by SIGKILL", str(loss))
    run.world.now += WINDOW_S + 1.0
    assert run.supervisor.is_recoverable(loss) == bool(most)


def test_who_is_lost_as_the_pools_start_is_lost_by_no_limit() -> None:
    """No worker is replaced then, however many may be.

    An error that one worker reports, such as too little memory, stands alone.
    """
    run = Run()
    run.now("memory", 0).inbox.append(Failed(text=FAILURE))
    assert run.supervisor.exit_message(run.loss()) == FAILURE
    run = Run()
    run.now("memory", 0).kill()
    loss = run.loss()
    assert run.supervisor.exit_message(loss) == f"{loss}; its pool cannot continue and was ended: start again"


def test_where_nobody_can_be_started_again_the_loss_is_final() -> None:
    run = Run()
    run.world.restarts = False
    run.worker(0).kill()
    loss = run.loss()
    assert not run.supervisor.is_recoverable(loss)
    assert run.supervisor.exit_message(loss) == f"{loss}; its pool cannot continue and was ended: start again"


def no_room(role: str, index: int, threads: int = 0) -> Any:
    raise HostLostError(f"10.0.0.3 is lost, and {role} worker {index} was there: no host has room", {"n3", "n1"})


FEWER: list[tuple[list[int], dict[str, int], str]] = [
    ([0], {"memory_workers": 1}, "--memory-workers 1"),
    ([0, 1], {"memory_workers": 0}, ""),
    ([4], {"prefill_workers": 0}, "--prefill-workers 0"),
    ([0, 4], {"memory_workers": 1, "prefill_workers": 0}, "--memory-workers 1 --prefill-workers 0"),
    ([0, 2, 3], {}, ""),
]


@pytest.mark.parametrize(("victims", "left", "words"), FEWER)
def test_a_run_without_room_for_workers_says_how_many_are_left(
    victims: list[int], left: dict[str, int], words: str
) -> None:
    """The error counts memory workers (0, 1) and prefill workers (4), but not where no compute worker is left (2, 3).
    It also says where another run could go on: a user of lamina.LLM starts it.
    """
    run, pools = pools_of()
    run.world.start = no_room  # type: ignore[method-assign]
    for victim in victims:
        run.worker(victim).kill()
    changed = pools.wait()
    assert isinstance(changed, EpochChanged)
    with pytest.raises(WorkerError, match="a lost worker could not be replaced: 10.0.0.3 is lost") as told:
        pools.resume(KEEP)
    assert (told.value.workers_that_fit if isinstance(told.value, ReducedCapacityError) else {}) == left
    said = f"; there is space for a run with {words} at most" if words else ""
    assert str(told.value).endswith(f"no host has room{said}")
    assert not left or told.value.lost_hosts == ["n1", "n3"]  # type: ignore[attr-defined]
    assert pools.is_closed


@pytest.mark.parametrize(
    ("options", "left", "words"),
    [
        ({"memory_weights": "2,1"}, {"memory_workers": 1}, "--memory-weights names 2 weights for --memory-workers 1"),
        ({"memory_workers": 4, "tensor_parallel_size": 2}, {"memory_workers": 3}, ""),
        ({"memory_workers": 4, "tensor_parallel_size": 2}, {"memory_workers": 1}, "--memory-workers must be at least"),
        ({"prefill_workers": 4, "prefill_pipeline": 2}, {"prefill_workers": 1}, ""),
    ],
)
def test_a_run_is_told_of_sizes_that_it_could_have(options: dict[str, Any], left: dict[str, int], words: str) -> None:
    """Not of a number of workers with which nothing would start."""
    config = make_config({"transport": "shm", "memory_workers": 2, **options})
    if words:
        with pytest.raises(ValueError, match=words):
            with_fewer_workers(config, left)
    else:
        sizes = with_fewer_workers(config, left)
        assert all(sizes[name] <= count for name, count in left.items())
        assert replace_options(config, sizes)


def test_a_run_whose_workers_that_are_left_cannot_do_it_says_why() -> None:
    run, pools = pools_of(memory_weights="2,1")
    run.world.start = no_room  # type: ignore[method-assign]
    run.worker(0).kill()
    assert isinstance(pools.wait(), EpochChanged)
    with pytest.raises(ReducedCapacityError, match="is lost") as told:
        pools.resume(KEEP)
    why = "--memory-weights names 2 weights for --memory-workers 1"
    assert str(told.value).endswith(f"; no run can continue with --memory-workers 1, which is left: {why}")


def test_a_replica_without_room_is_done_without_for_good(caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    start = run.world.start
    run.world.start = no_room  # type: ignore[method-assign]
    run.now("compute", 0).kill()
    with caplog.at_level("WARNING"):
        run.supervisor.quiesce(run.loss())
        ready = run.supervisor.resume(KEEP)
    assert "no host has room: decoding continues without it" in caplog.text
    assert [m.handle.index for m in run.members.compute] == [1]
    assert ready.replicas == 1
    assert not list(run.cohort.degraded)
    assert not run.cohort.degraded.is_any_loaded()
    run.world.start = start  # type: ignore[method-assign]
    run.now("memory", 0).kill()
    run.supervisor.quiesce(run.loss())
    assert run.supervisor.resume(KEEP).replicas == 1
    run.now("compute", 1).kill()  # the last one
    run.supervisor.quiesce(run.loss())
    assert run.supervisor.resume(KEEP).replicas == 1


@pytest.mark.parametrize("second", [1, 2, 4])
def test_two_that_die_count_as_one_whenever_the_second_is_noticed(second: int) -> None:
    """Both count as one until all have reconnected, also where that is the last recovery that may be."""
    moment = 0
    while True:
        run = Run(max_recoveries=1)
        began, victim = run.world.moments, run.worker(second)

        def before(now: int, at: int = began + moment, victim: SimulatedWorker = victim) -> None:
            if now == at:
                victim.kill()

        run.worker(0).kill()
        run.world.before = before
        _, ready = run.recover()
        if not victim.ended or run.now(victim.role, victim.index) is victim:
            break  # it died after the last message
        run.check(ready)
        moment += 1
    assert moment > 10
    run.now("memory", 0).kill()
    assert not run.supervisor.is_recoverable(run.loss())


def test_one_that_dies_whenever_it_starts_is_not_replaced_for_ever() -> None:
    run = Run(max_recoveries=3)
    seen = {id(w) for w in run.world.workers}

    def before(now: int) -> None:
        for worker in run.world.workers:
            if id(worker) not in seen and worker.got:
                worker.kill()

    run.world.before = before
    run.worker(0).kill()
    with pytest.raises(AssertionError, match=r"memory worker 0 .* was killed by SIGKILL"):
        run.recover()
    assert len(run.world.workers) == NUM_WORKERS + 3


def test_one_that_owes_nothing_may_stand_still() -> None:
    """However long; and it has the whole time once it owes something."""
    run = Run()
    owing, idle = run.members.memory, run.members.prefill[0]
    worker = run.now("prefill", 0)
    worker.is_stopped = True
    for _ in range(10):
        run.supervisor.check_health(owing)
        run.world.now += 0.9
    for _ in range(3):
        run.supervisor.check_health([*owing, idle])
        run.world.now += 0.45 * STOPPED_S
    with pytest.raises(WorkersLostError, match=f"^{re.escape(worker.name)} has been stopped"):
        run.supervisor.check_health([*owing, idle])


@pytest.mark.parametrize("role", ["compute", "prefill"])
def test_one_that_hangs_is_replaced_once_it_is_late(role: str) -> None:
    """And one that was only slow stays."""
    run = Run()
    hung = run.now(role, 0)
    hung.silent = True
    (member,) = (m for m in run.members if m.handle is hung)
    with pytest.raises(WorkersLostError, match="took too long for a step") as told:
        run.members.wait_for([member, run.members.compute[1]], StepDone, 5.0, "for a step")
    assert run.supervisor.is_recoverable(told.value)
    kept = run.supervisor.quiesce(told.value)
    assert kept == [w.kept for w in run.world.workers[:2]]
    run.check(run.whole(run.supervisor.resume(KEEP)))
    assert hung.ended == "was killed by SIGKILL"
    assert len(run.world.workers) == NUM_WORKERS + 1


def test_where_all_meet_too_slowly_and_nobody_hangs_the_run_ends() -> None:
    """They would be as late once more."""
    run = Run()
    run.now("memory", 0).kill()
    run.supervisor.quiesce(run.loss())
    run.cohort.replace()
    late = run.members.timeout_error(run.members.compute[:1], "to start")
    assert run.supervisor.is_recoverable(late)
    with pytest.raises(WorkersLostError, match=r"took too long to start, and no worker hangs$") as told:
        run.supervisor.quiesce(late)
    assert not run.supervisor.is_recoverable(told.value)
    assert run.supervisor.exit_message(told.value) == str(told.value)


def test_a_replacement_that_takes_too_long_to_start_ends_the_run() -> None:
    run = Run()
    run.world.load_s = LIMIT_S + 1.0
    run.now("prefill", 0).kill()
    run.supervisor.quiesce(run.loss())
    with pytest.raises(WorkersLostError, match=r"took too long to start") as told:
        run.supervisor.resume(KEEP)
    assert not run.supervisor.is_recoverable(told.value)


def test_decoding_goes_on_with_the_replicas_that_are_left() -> None:
    """Decoding goes on while another replica loads and then comes in; the first replica that is left gets number 0."""
    run = Run()
    first, second = run.now("compute", 0), run.now("compute", 1)
    run.world.load_s, began = 20.0, run.world.now
    first.kill()
    run.supervisor.quiesce(run.loss())
    ready = run.supervisor.resume(KEEP)
    assert run.world.now - began < 5.0, "nobody waits for a start"
    meeting = second.got[-1]
    assert (ready.replicas, meeting.replicas, meeting.replica, meeting.next_replica) == (1, 1, 0, None)
    assert run.now("prefill", 0).got[-1].replicas == 1
    assert not run.cohort.degraded.is_any_loaded()
    again = run.whole(ready)
    assert again.replicas == run.now("compute", 0).got[-1].replicas == 2
    assert [run.now("compute", i).got[-1].replica for i in (0, 1)] == [0, 1]
    run.check(again)


def test_where_no_replica_is_left_all_wait_for_one() -> None:
    run = Run()
    for index in (0, 1):
        run.now("compute", index).kill()
    run.loss()
    with suppress(WorkersLostError):
        run.members.listen(0.1)
    run.supervisor.quiesce(run.loss())
    ready = run.supervisor.resume(KEEP)
    assert ready.replicas == 1
    run.check(run.whole(ready))


def one_loads() -> tuple[Run, WorkerExecutor, SimulatedWorker]:
    """A fleet that goes on without a replica that was killed, and who loads to take its place."""
    run, pools = pools_of()
    run.world.load_s = 20.0
    run.now("compute", 0).kill()
    assert isinstance(pools.check_workers(), EpochChanged)
    pools.resume(KEEP)
    return run, pools, run.now("compute", 0)


def test_a_replica_that_dies_as_it_loads_has_a_successor_and_one_that_says_why_ends_the_run() -> None:
    run, pools, loads = one_loads()
    loads.kill()
    loads.exit_reason = lambda: None  # type: ignore[method-assign] # it can be waited for a moment later
    run.world.pass_until(run.world.now + 1.0, lambda: False)
    assert isinstance(pools.check_workers(), EpochChanged), "what it costs is counted"
    pools.resume(KEEP)
    after = run.now("compute", 0)
    assert after is not loads
    assert pools.check_workers() is None, "it costs one recovery"
    after.inbox.append(Failed(text="no room for the weights"))
    with pytest.raises(WorkerError, match="^compute worker 0 .*: no room for the weights$"):
        pools.check_workers()


def test_a_replica_that_stands_still_in_a_message_has_a_successor(monkeypatch: pytest.MonkeyPatch) -> None:
    run, _, loads = one_loads()
    with monkeypatch.context() as patch:
        patch.setattr(run.members, "receive_from", stand_still)
        with pytest.raises(WorkersLostError, match="sent only part of a message") as told:
            run.cohort.degraded.is_any_loaded()
    assert told.value.is_certain
    run.cohort.degraded.rejoin()
    assert loads.ended
    assert run.now("compute", 0) is not loads


def stand_still(member: RegisteredWorker) -> None:
    raise TimeoutError


def change_to(run: Run, count: int) -> ResizePlan:
    topology = structs.replace(run.config.topology, memory_workers=count)
    return ResizePlan(topology, [[bind_of(run)] * count], Capacity([], [], 0, False, [], [], []))


def bind_of(run: Run) -> BindRequest:
    return BindRequest(
        worker=0, partition=PARTITIONS["head"]([2], [1.0, 1.0], 1), layers=[LayerShape(2, 2, 8, 8, b"")],
        dtype="float32", kv=KVOptions(), kv_bytes=100, max_rows=4, max_model_len=128, epoch=run.ready.epoch,
        replicas=2, prefill_workers=1,
    )  # fmt: skip


def test_one_that_is_to_come_and_stands_still_in_a_message_ends_the_change(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    elastic = MemoryResizer(run.config, run.members, run.cohort, run.world.clock)
    elastic.begin(change_to(run, 3))
    monkeypatch.setattr(run.members, "receive_from", stand_still)
    assert not elastic.is_ready()
    outcome = elastic.take_outcome()
    assert outcome is not None
    assert outcome.error.endswith("sent only part of a message")
    assert not elastic.in_progress


def test_room_that_was_made_for_another_change_is_none() -> None:
    """The earlier change was given up, and its answers come late: neither its yes nor its no counts for this change."""
    run = Run()
    elastic, (stays, _) = MemoryResizer(run.config, run.members, run.cohort, run.world.clock), run.members.memory
    elastic.begin(change_to(run, 1))
    run.world.now += LIMIT_S + 1.0
    assert not elastic.is_ready()
    assert not elastic.in_progress
    elastic.begin(change_to(run, 1))
    stays.inbox += [StorePrepared("no memory", 1), StorePrepared("", 1)]
    assert not elastic.is_ready()
    assert elastic.is_preparing
    assert not stays.inbox
    stays.inbox.append(StorePrepared("", 2))
    assert elastic.is_ready()


def test_a_change_is_over_once_all_have_connected_with_moved_kv_and_no_other_begins_before() -> None:
    run = Run()
    elastic = MemoryResizer(run.config, run.members, run.cohort, run.world.clock)
    run.cohort.memory_binds = [bind_of(run)]
    elastic.begin(change_to(run, 1))
    elastic.finish()  # all have connected again after a loss: the change still waits for the room
    assert elastic.is_preparing
    with pytest.raises(ValueError, match="memory workers come or go already"):
        elastic.begin(change_to(run, 1))
    run.members.memory[0].inbox.append(StorePrepared("", 1))
    assert elastic.commit(run.world.now) is not None
    assert elastic.in_progress
    assert not elastic.is_preparing
    assert elastic.commit(run.world.now) is None, "another loss changes nothing"
    with pytest.raises(ValueError, match="memory workers come or go already"):
        elastic.begin(change_to(run, 1))
    elastic.finish()
    assert not elastic.in_progress
    assert elastic.take_outcome() == ResizeResult(reason="scale")


def test_one_that_goes_and_is_stopped_holds_nobody_up(caplog: pytest.LogCaptureFixture) -> None:
    """It is no member any more, and the others would wait for its KV until a step is late."""
    run = Run(step_timeout_s=60.0)
    elastic = MemoryResizer(run.config, run.members, run.cohort, run.world.clock)
    stays, goes = run.members.memory
    run.cohort.memory_binds = [bind_of(run)]
    elastic.begin(change_to(run, 1))
    stays.inbox.append(StorePrepared("", 1))
    assert elastic.commit(run.world.now) is not None
    run.now("memory", 0).silent = run.worker(1).is_stopped = True
    began = run.world.now
    assert not elastic.move_kv(KEEP)
    assert f"{goes.name} has been stopped for {STOPPED_S:g} s" in caplog.text
    assert STOPPED_S <= run.world.now - began <= STOPPED_S + 0.5


def test_a_replica_that_is_started_as_the_pools_end_is_ended_too() -> None:
    run = Run()
    start = run.world.start

    def start_late(role: str, index: int, threads: int = 0) -> SimulatedWorker:
        started = start(role, index)
        run.members.shut_down(0.0)
        run.cohort.close()
        return started

    run.world.start = start_late  # type: ignore[method-assign]
    run.now("compute", 0).kill()
    run.supervisor.quiesce(run.loss())
    with pytest.raises(WorkerError, match="have been ended"):
        run.supervisor.resume(KEEP)
    assert all(worker.ended for worker in run.world.workers)


def pools_of(**options: Any) -> tuple[Run, WorkerExecutor]:
    """A fleet that runs, and its pools, whose capacity each epoch keeps."""
    run = Run(pools=True, **options)
    run.world.blocks = 10
    return run, run.pools


def test_who_asks_for_counters_before_all_go_on_costs_no_other_recovery() -> None:
    """Another thread may do so at any moment; a worker that is lost then is another matter."""
    run, pools = pools_of()
    run.worker(0).kill()
    assert isinstance(pools.check_workers(), EpochChanged)
    assert sorted(pools.stats()) == ["compute-0", "compute-1", "memory-1", "prefill-0"]
    ready = pools.resume(KEEP)
    assert isinstance(ready, ComputeReady)
    run.check(ready)
    assert len(run.world.workers) == NUM_WORKERS + 1
    run.now("memory", 0).kill()
    assert isinstance(pools.check_workers(), EpochChanged)
    run.worker(1).kill()
    assert sorted(pools.stats()) == ["compute-0", "compute-1", "prefill-0"]
    again = pools.resume(KEEP)
    assert isinstance(again, EpochChanged)
    assert len(run.world.workers) == NUM_WORKERS + 1, "nobody meets before that one has been fenced"
    assert again.surviving == [{}, {}]
    ready = pools.resume([])
    assert isinstance(ready, ComputeReady)
    run.check(ready)


@pytest.mark.parametrize("number", range(NUM_WORKERS))
def test_one_that_is_stopped_while_idle_is_lost_once_it_is_asked_for_its_counters(number: int) -> None:
    """A server asks every second. No worker is lost where no server asks."""
    run, pools = pools_of()
    victim = run.worker(number)
    victim.is_stopped = victim.silent = True
    for _ in range(40):
        run.world.pass_until(run.world.now + 0.25, lambda: False)
        assert pools.check_workers() is None
    pools.request_stats()
    change, looked, asked = None, 0.0, run.world.now
    while change is None:
        run.world.pass_until(run.world.now + 0.25, lambda: False)
        looked, change = run.world.now, pools.check_workers()
    assert STOPPED_S <= looked - asked <= STOPPED_S + 0.5
    ready = pools.resume(KEEP)
    assert isinstance(ready, ComputeReady)
    if victim.role != "compute":  # else the other replica goes on alone until there is a second one
        run.check(ready)
    assert victim.ended == "was killed by SIGKILL"
    assert not pools.has_pending_stats


def test_one_that_was_stopped_while_idle_has_no_counters_and_is_no_loss() -> None:
    run, pools = pools_of()
    run.worker(0).is_stopped = run.worker(0).silent = True
    assert sorted(pools.stats()) == ["compute-0", "compute-1", "memory-1", "prefill-0"]
    pools.request_stats()
    run.world.pass_until(run.world.now + 100.0, lambda: False)
    assert pools.collect_stats() is None
    assert pools.check_workers() is None
    assert not run.members.lost_workers


@pytest.mark.parametrize("how", ["asked beside", "asked"])
def test_one_that_answers_nothing_while_idle_is_replaced(how: str) -> None:
    """Its process is not stopped: it hangs, or its host is gone."""
    run, pools = pools_of()
    run.worker(0).silent = True
    if how == "asked beside":
        pools.request_stats()
        run.world.pass_until(run.world.now + 100.0, lambda: False)
        assert pools.collect_stats() is None
    else:
        assert sorted(pools.stats()) == ["compute-0", "compute-1", "memory-1", "prefill-0"]
    change = pools.check_workers()
    assert isinstance(change, EpochChanged)
    run.check(pools.resume([]))
    assert run.worker(0).ended


def test_one_that_is_stopped_while_others_are_replaced_is_found_soon() -> None:
    """It owes an answer to each message."""
    run, pools = pools_of(step_timeout_s=60.0)
    idle = run.now("prefill", 0)
    run.worker(0).kill()
    change = pools.check_workers()
    assert isinstance(change, EpochChanged)
    idle.is_stopped = idle.silent = True
    began = run.world.now
    change = pools.resume(KEEP)
    assert isinstance(change, EpochChanged)
    assert run.world.now - began < 4.0, "the start of a worker, and 2.5 s"
    assert idle.ended
    run.check(pools.resume(KEEP))


@pytest.mark.parametrize("where", ["resume", "halt"])
def test_a_replacement_that_cannot_start_ends_the_run_with_its_line(where: str) -> None:
    """Also where it says so while another loss brings it to rest. No user asked for it: it is no ValueError."""
    run, pools = pools_of()
    first = run.now("prefill", 0)
    said = False

    def before(now: int) -> None:
        nonlocal said
        new = run.now("prefill", 0)
        if new is first or not new.got or said:
            return
        if where == "halt" and not run.worker(0).ended:
            run.worker(0).kill()
        elif where == "resume" or any(isinstance(x, Quiesce) and x.epoch == 3 for x in run.worker(1).got):
            said = True
            new.inbox.append(Failed(text="--compute-device cuda: no GPU", user_error=True))

    run.world.load_s = 20.0
    run.world.before = before
    first.kill()
    assert isinstance(pools.check_workers(), EpochChanged)
    with pytest.raises(WorkerError, match="^a lost worker could not be replaced: --compute-device cuda: no GPU$"):
        pools.resume(KEEP)
    assert said
    assert pools.is_closed


def test_who_stays_keeps_its_rank() -> None:
    """Memory worker w is rank w mod 2's."""
    run = Run(pipeline=1, prefill_workers=0, tensor_parallel_size=2, memory_workers=6, memory_weights="")
    there = run.members.memory
    assert order_after_removal(there, [], 2) == there
    assert order_after_removal(there, [0, 3], 2) == [there[2], there[1], there[4], there[5]]
    assert order_after_removal(there, [1, 2], 2) == [there[0], there[3], there[4], there[5]]
    with pytest.raises(ValueError, match="memory workers 0, 2 cannot go: .*each rank must keep as many"):
        order_after_removal(there, [2, 0], 2)
    assert order_after_removal(there, [2, 0], 1) == [there[1], *there[3:]]


@pytest.mark.parametrize("end", ["dies", "fails"])
def test_one_on_loan_costs_no_recovery_however_it_ends(end: str) -> None:
    run = Run(max_recoveries=0)
    lost = run.worker(1)
    assert lost.role == "memory"
    next(m for m in run.members if m.handle is lost).on_loan = True
    if end == "dies":
        lost.kill()
    else:
        lost.say(Failed(text="memory worker: it is on loan and has gone", user_error=True))
    _, ready = run.recover()
    run.check(ready)
    assert run.now("memory", 1) is not lost
    run.worker(0).kill()
    assert not run.supervisor.is_recoverable(run.loss()), "of this host's own none may be lost"
