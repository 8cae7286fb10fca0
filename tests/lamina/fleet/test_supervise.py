"""Losses made good, with real Members, Cohort and Supervisor over simulated workers: at each moment, also meanwhile."""

from __future__ import annotations

import re
from typing import Any

import pytest
from simulated import SimulatedWorker, World
from test_cohort import LIMIT_S, OPTIONS

from lamina.config import make_config
from lamina.fleet.cohort import Cohort
from lamina.fleet.members import LostError, Members
from lamina.fleet.supervise import RECENT_S, Supervisor
from lamina.protocol.control import ComputeReady, Connect, Failed, Halt, StartCompute, StartMemory, StepDone
from lamina.protocol.plan import Keep

KEEP = [Keep(4, 17), Keep(9, 3)]
NUM_WORKERS = 5
MOST = 5


class Run:
    """A fleet that runs, and its supervisor."""

    def __init__(self, seed: int = 0, **options: Any) -> None:
        told = {**OPTIONS, "transport": "shm", "start_timeout_s": LIMIT_S, "step_timeout_s": 5.0, **options}
        self.world, config = World(seed), make_config(told)
        self.members = Members(lambda s: None, lambda: None, self.world, self.world.clock)
        self.cohort = Cohort(
            config, self.members, lambda *_: None, clock=self.world.clock, launch=self.world.launch
        )  # fmt: skip
        self.supervisor = Supervisor(config, self.members, self.cohort, self.world.clock)
        self.cohort.start("a model")
        self.ready = self.cohort.connect()
        for worker in self.world.workers:
            worker.kept = {4: 20 + worker.index, 9: 3}

    def worker(self, number: int) -> SimulatedWorker:
        return self.world.workers[number]

    def loss(self) -> LostError:
        """The one that the driver sees."""
        for _ in range(100):
            try:
                self.members._read(0.1)
            except LostError as loss:
                return loss
        raise AssertionError("nobody was lost")

    def recover(self) -> tuple[list[dict[int, int]], ComputeReady]:
        """As the pools do, however often it takes."""
        loss = self.loss()
        while True:
            assert self.supervisor.can_replace, loss
            kept = self.supervisor.halt(loss)
            try:
                return kept, self.supervisor.resume(KEEP)
            except LostError as another:
                loss = another

    def now(self, role: str, index: int) -> SimulatedWorker:
        """Who has that place."""
        (member,) = (m for m in self.members if (m.handle.role, m.handle.index) == (role, index))
        worker: SimulatedWorker = member.handle  # type: ignore[assignment]
        return worker

    def check(self, ready: ComputeReady) -> None:
        """All places are taken, by workers that live and are of one view."""
        assert not self.members.lost
        assert len(list(self.members)) == NUM_WORKERS
        for member in self.members:
            worker = self.now(member.handle.role, member.handle.index)
            assert not worker.ended
            assert worker.view == ready.view == self.cohort.view


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
            assert [type(x) for x in worker.got[had:]] == [Halt, Connect], "it loads nothing again"
            assert worker.got[had].view < worker.got[had + 1].view == ready.view
    start = new.got[0]
    assert isinstance(start, StartMemory | StartCompute)
    assert start.name.endswith("-1"), "a name that nobody has had"
    meetings = [x for w in run.world.workers for x in w.got if isinstance(x, Connect) and x.view == ready.view]
    assert any(start.name in str(meeting) for meeting in meetings)
    for worker in (run.now("memory", 0), run.now("memory", 1)):
        assert worker.got[-1].keep == KEEP
    assert run.now("prefill", 0).got[-1].keep == []
    for worker in (run.now("compute", 0), run.now("compute", 1)):
        assert worker.got[-1].kv_bytes == [100, 200], "a new memory worker is to have as much as the one before"


def test_what_was_done_before_counts_and_what_is_said_later_does_not() -> None:
    run = Run()
    done = StepDone(view=run.ready.view, batch=0, step=3, drawn=[])
    run.now("compute", 1).inbox.append(done)
    run.worker(0).kill()
    kept = run.supervisor.halt(run.loss())
    assert run.members.said(StepDone) == [done]
    assert run.members.said(StepDone) == []
    assert kept[1] == run.now("memory", 1).kept
    ready = run.supervisor.resume(KEEP)
    run.now("compute", 1).inbox.append(done)
    run.members.check()
    assert run.members.said(StepDone) == [], "it is of an older view"
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
        if run.members.lost or any(run.now(m.handle.role, m.handle.index).ended for m in run.members):
            _, ready = run.recover()  # it came behind the last word
        run.check(ready)
        moment += 1
    assert moment > 10


def test_one_that_still_loads_has_the_time_of_a_start_to_come_to_rest() -> None:
    run = Run()
    run.world.load_s = 20.0
    first = run.now("compute", 0)

    def before(now: int) -> None:
        if run.now("compute", 0) is not first and run.now("compute", 0).got and run.now("memory", 0) is run.worker(0):
            run.worker(0).kill()

    run.world.before = before
    first.kill()
    _, ready = run.recover()
    run.check(ready)
    assert len(run.world.workers) == NUM_WORKERS + 2, "the new compute worker is not taken for one that hangs"


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
    run.members.meanwhile = run.supervisor.look_round
    slow, stopped = run.worker(0), run.worker(1)
    slow.silent = stopped.silent = stopped.stopped = True
    began = run.world.now
    with pytest.raises(LostError, match=rf"^{re.escape(stopped.name)} has been stopped for 2 s$") as told:
        run.members.wait_for(run.members.compute, StepDone, 60.0, "for a step")
    assert run.world.now - began < 2.5
    assert run.supervisor.can_replace
    slow.silent = False
    run.supervisor.halt(told.value)
    run.check(run.supervisor.resume(KEEP))
    assert stopped.ended
    assert run.now("memory", 0) is slow


def test_one_that_was_stopped_and_goes_on_is_not_lost() -> None:
    run = Run()
    worker = run.worker(0)
    for _ in range(10):
        for stopped in (True, True, False):
            worker.stopped = stopped
            run.supervisor.look_round()
            run.world.now += 0.9
    run.world.now += 10.0
    worker.stopped = True
    run.supervisor.look_round()


def test_where_no_loss_can_be_made_good_one_that_is_stopped_is_waited_for() -> None:
    run = Run(max_recoveries=0)
    run.worker(0).stopped = True
    for _ in range(10):
        run.supervisor.look_round()
        run.world.now += 1.0


def test_a_way_that_has_ended_between_two_that_live_costs_the_compute_worker() -> None:
    run = Run()
    sayer = run.now("compute", 1)
    sayer.miss()
    loss = run.loss()
    assert str(loss) == f"{sayer.name} has lost its way to others: a peer is gone"
    run.supervisor.halt(loss)
    run.check(run.supervisor.resume(KEEP))
    assert sayer.ended


def test_one_that_says_why_it_has_failed_is_not_replaced() -> None:
    run = Run()
    run.worker(2).inbox.append(Failed(text="compute worker: RuntimeError: out of order"))
    loss = run.loss()
    assert str(loss) == "compute worker: RuntimeError: out of order"
    assert not run.supervisor.can_replace


@pytest.mark.parametrize("most", [0, 1, 3])
def test_so_many_losses_are_made_good_in_ten_minutes(most: int) -> None:
    run = Run(max_recoveries=most)
    for _ in range(most):
        run.now("memory", 0).kill()
        run.check(run.recover()[1])
    run.now("memory", 0).kill()
    loss = run.loss()
    assert not run.supervisor.can_replace
    assert re.fullmatch(r"memory worker 0 \(pid \d+\) was killed by SIGKILL", str(loss))
    run.world.now += RECENT_S + 1.0
    assert run.supervisor.can_replace == bool(most)


def test_where_nobody_can_be_started_again_the_loss_is_final() -> None:
    run = Run()
    run.world.restarts = False
    run.worker(0).kill()
    assert not run.supervisor.can_replace
