"""A worker group's start and its epochs, with real WorkerRegistry over simulated workers: losses at each moment, late
answers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import combinations

import pytest
from simulated import SimulatedWorker, World

from lamina.config.flat_options import make_config
from lamina.executor.worker_group import WorkerGroup
from lamina.executor.worker_registry import WorkerRegistry, WorkersLostError
from lamina.protocol.control import ComputeReady, Connect, StartCompute, StartMemory, Stop

LIMIT_S = 30.0
SOON_S = 2.0
OPTIONS = {"memory_workers": 2, "pipeline": 3, "prefill_workers": 1, "memory_weights": "measured"}
NUM_WORKERS = 5


class Fleet:
    """A worker group of simulated workers."""

    def __init__(self, seed: int = 0) -> None:
        self.world, config = World(seed), make_config({**OPTIONS, "transport": "shm", "start_timeout_s": LIMIT_S})
        self.members = WorkerRegistry(lambda s: None, lambda: None, self.world, self.world.clock)
        self.stages = list[str]()
        self.cohort = WorkerGroup(
            config, self.members, lambda stage, *_: self.stages.append(stage), clock=self.world.clock,
            launch=self.world.launch,
        )  # fmt: skip

    def start(self) -> ComputeReady:
        self.cohort.start("a model")
        return self.cohort.connect()

    def start_and_look(self) -> None:
        """At the end it looks at what has come since: the last moment of a start is after its last answer."""
        self.start()
        self.members.check()

    def loss(self) -> WorkersLostError | None:
        """Returns the loss of a start; None where it is done."""
        try:
            self.start()
        except WorkersLostError as error:
            return error
        return None

    def worker(self, number: int) -> SimulatedWorker:
        return self.world.workers[number]

    def check_nobody_was_ended(self) -> None:
        assert not self.members.closed
        for member in self.members:
            assert not member.link.closed  # type: ignore[attr-defined]
        assert not any(isinstance(x, Stop) for w in self.world.workers for x in w.got)


def moments(seed: int) -> int:
    """Returns the moments of a start in which nothing goes wrong."""
    fleet = Fleet(seed)
    fleet.start()
    return fleet.world.moments


def starts(seed: int, disturb: Callable[[Fleet], None]) -> Iterator[Fleet]:
    """Fleets that are not started yet; at each moment of a start, ``disturb`` is called."""
    for at in range(moments(seed)):
        fleet = Fleet(seed)

        def before(moment: int, fleet: Fleet = fleet, at: int = at) -> None:
            if moment == at:
                disturb(fleet)

        fleet.world.before = before
        yield fleet


def test_all_load_once_and_meet_as_often_as_they_are_told_to() -> None:
    fleet = Fleet()
    first = fleet.start()
    second = fleet.cohort.connect()
    assert (first.epoch, second.epoch) == (1, 2)
    assert fleet.stages == ["starting workers", "starting workers", "loading"], "the first has a beginning and an end"
    for worker in fleet.world.workers:
        kinds = [type(x) for x in worker.got]
        assert kinds.count(StartMemory if worker.role == "memory" else StartCompute) == 1
        assert [x.epoch for x in worker.got if isinstance(x, Connect)] == [1, 2]


def test_a_connect_says_whom_to_meet() -> None:
    fleet = Fleet()
    fleet.start()
    meeting = {w.role + str(w.index): w.got[-1] for w in fleet.world.workers}
    names = meeting["memory0"].joining_names
    assert [n[:9] for n in names] == ["compute-0", "compute-1", "prefill-0"]
    assert meeting["memory1"].joining_names == names
    for here, other in ((0, 1), (1, 0)):
        mine = meeting[f"compute{here}"]
        assert (mine.previous_replica, mine.next_replica.name, mine.rank_addresses) == (names[other], names[other], [])
        assert mine.next_replica.url == f"sim://{names[other]}/ring"
    for worker in ("compute0", "compute1", "prefill0"):
        assert [(a.url, a.name[:8]) for a in meeting[worker].memory_addresses] == [
            (f"sim://{a.name}", f"memory-{i}") for i, a in enumerate(meeting[worker].memory_addresses)
        ]
        assert len(meeting[worker].memory_addresses) == 2


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("victim", range(NUM_WORKERS))
def test_a_loss_at_any_moment_of_a_start_is_reported_and_ends_nobody(victim: int, seed: int) -> None:
    """With its fate, and soon; also where those that missed it say so first."""
    for fleet in starts(seed, lambda fleet: fleet.worker(victim).kill()):
        with pytest.raises(WorkersLostError) as told:
            fleet.start_and_look()
        assert str(told.value) == f"{fleet.worker(victim).name} was killed by SIGKILL"
        assert [m.handle for m in told.value.workers] == [fleet.worker(victim)]
        fleet.check_nobody_was_ended()
        assert fleet.world.now < SOON_S + SOON_S


@pytest.mark.parametrize("pair", list(combinations(range(NUM_WORKERS), 2)), ids=str)
def test_two_that_are_lost_at_once_are_both_reported(pair: tuple[int, int]) -> None:
    def kill(fleet: Fleet) -> None:
        for number in pair:
            fleet.worker(number).kill()

    for fleet in starts(0, kill):
        with pytest.raises(WorkersLostError) as told:
            fleet.start_and_look()
        for _ in range(NUM_WORKERS):
            with suppress(WorkersLostError):
                fleet.members.check()
        victims = [fleet.worker(number) for number in pair]
        assert str(told.value) in [f"{v.name} was killed by SIGKILL" for v in victims]
        reported = {m.handle: str(e) for m, e in fleet.members.lost_workers.items()}
        for victim in victims:
            assert reported[victim] == f"{victim.name} was killed by SIGKILL"  # type: ignore[index]
        fleet.check_nobody_was_ended()


@pytest.mark.parametrize("victim", range(NUM_WORKERS))
def test_one_that_says_nothing_any_more_is_named_at_the_deadline(victim: int) -> None:
    """It may fall silent at any moment, but not after its last message. No worker is lost: it may answer yet."""

    def silence(fleet: Fleet) -> None:
        fleet.worker(victim).silent = True

    late = 0
    for fleet in starts(0, silence):
        if (error := fleet.loss()) is not None:
            late += 1
            began = fleet.world.now - LIMIT_S
            assert str(error) == f"{fleet.worker(victim).name} took too long to start (--start-timeout-s 30)"
            assert 0.0 <= began < SOON_S + SOON_S
            assert not fleet.members.lost_workers
        fleet.check_nobody_was_ended()
    assert late >= moments(0) // 4


def test_a_late_answer_of_an_older_view_is_dropped() -> None:
    """It comes while those of the newer epoch are awaited, and before them."""
    fleet = Fleet()
    fleet.cohort.start("a model")
    first = next(w for w in fleet.world.workers if w.role == "compute")
    first.late_s = LIMIT_S + 0.5
    with pytest.raises(WorkersLostError, match=f"^{re.escape(first.name)} took too long"):
        fleet.cohort.connect()
    first.late_s = 1.0
    ready = fleet.cohort.connect()
    assert (ready.epoch, ready.num_blocks) == (2, [[20]])
    assert fleet.world.now > LIMIT_S + 1.0
    assert not fleet.members.lost_workers
    fleet.check_nobody_was_ended()


def test_what_came_under_an_older_view_and_was_not_taken_is_dropped() -> None:
    """The second compute worker has answered when the first is given up."""
    fleet = Fleet()
    fleet.cohort.start("a model")
    first, second = (w for w in fleet.world.workers if w.role == "compute")
    first.late_s = LIMIT_S + 0.5
    with pytest.raises(WorkersLostError):
        fleet.cohort.connect()
    (member,) = (m for m in fleet.members if m.handle is second)
    assert [x.epoch for x in member.inbox] == [1]
    fleet.members.begin_epoch(2)
    assert not member.inbox


def test_the_end_is_said_by_whoever_decides_it() -> None:
    fleet = Fleet()
    fleet.start()
    fleet.members.shut_down(1.0)
    fleet.world.pass_until(fleet.world.now + 1.0, lambda: False)
    assert all(isinstance(w.got[-1], Stop) for w in fleet.world.workers)
