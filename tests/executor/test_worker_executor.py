"""The executor over simulated workers: a lost worker is replaced, and counters are read."""

from __future__ import annotations

import pytest
from engine_api import start_executor
from simulated import World
from test_worker_group import LIMIT_S, OPTIONS

from lamina.config.flat_options import make_config
from lamina.executor.worker_executor import WorkerExecutor
from lamina.executor.worker_registry import WorkersLostError
from lamina.protocol.control import Failed, RunRound, RunStep, Stats, StatsRequest, StepDone
from lamina.protocol.executor import WorkerError
from lamina.protocol.offload_messages import PagesExpired
from lamina.protocol.step_plan import LoadKv, StepPlan

STEP_S = 60.0


def pools_without_recovery() -> tuple[World, WorkerExecutor]:
    world, options = World(), {**OPTIONS, "transport": "shm", "start_timeout_s": LIMIT_S}
    return world, start_executor(world, make_config({**options, "step_timeout_s": STEP_S, "max_recoveries": 0}))


@pytest.mark.parametrize(
    ("word", "text", "kind"),
    [
        (
            None,
            r"^memory worker 0 \(pid 100\) ended; its pool cannot continue and was ended: start again$",
            WorkerError,
        ),
        (Failed(text="memory worker: out of order"), "^memory worker: out of order$", WorkerError),
        (Failed(text="--dtype: no", user_error=True), "^--dtype: no$", ValueError),
    ],
    ids=["ended", "failed", "user"],
)
def test_all_workers_end_if_one_is_lost(word: Failed | None, text: str, kind: type[Exception]) -> None:
    world, pools = pools_without_recovery()
    if word is not None:
        world.workers[0].inbox.append(word)
    world.workers[0].end("ended")
    with pytest.raises(kind, match=text) as told:
        pools.check_workers()
    assert type(told.value) is not WorkersLostError
    assert pools.is_closed
    world.pass_until(world.now + 1.0, lambda: False)
    assert all(worker.ended for worker in world.workers)


def test_a_start_says_which_workers_it_awaits_and_that_they_have_come() -> None:
    world, told = World(), list[tuple[str, int, int]]()
    config = make_config({**OPTIONS, "transport": "shm", "start_timeout_s": LIMIT_S, "memory_workers": 2})
    start_executor(world, config, lambda stage, done, total: told.append((stage, done, total)))
    stage = "connecting workers: waiting for 2 memory workers, 2 compute workers, 1 prefill worker"
    assert [each for each in told if each[0].startswith("connecting")] == [(stage, 0, 1), (stage, 1, 1)]


def test_counters_have_the_time_that_a_step_has() -> None:
    """A worker that stands still for less than that is no loss, however often it is asked."""
    world, pools = pools_without_recovery()
    late = world.workers[0]
    assert pools.collect_stats() is None
    late.silent = True
    pools.request_stats()
    world.pass_until(world.now + STEP_S - 1.0, lambda: False)
    pools.request_stats()
    world.pass_until(world.now + 0.5, lambda: False)
    assert pools.collect_stats() is None
    assert pools.has_pending_stats
    late.silent = False
    late.inbox.append(Stats(values={"steps": 2.0}))
    counters = pools.collect_stats()
    assert counters is not None
    assert counters["memory-0"] == {"steps": 2.0}
    assert sorted(counters) == sorted(pools.hosts)
    assert not pools.has_pending_stats
    assert pools.collect_stats() is None
    assert sum(isinstance(x, StatsRequest) for x in late.got) == 1, "it was asked once"
    late.silent = True
    pools.request_stats()
    world.pass_until(world.now + STEP_S + 2.0, lambda: False)
    with pytest.raises(WorkerError, match=r"memory worker 0 .*took too long .*--step-timeout-s 60"):
        pools.collect_stats()


def test_an_idle_engine_hears_once_which_pages_have_expired() -> None:
    world, pools = pools_without_recovery()
    assert pools.check_workers() is None
    memory = [worker for worker in world.workers if worker.role == "memory"]
    for number, worker in enumerate(memory):
        worker.inbox.append(PagesExpired(epoch=pools.ready.epoch, keys=[bytes([number]) * 32]))
        worker.inbox.append(PagesExpired(epoch=pools.ready.epoch - 1, keys=[b"old" * 11]))
    told = pools.check_workers()
    assert isinstance(told, PagesExpired)
    assert sorted(told.keys) == [bytes([number]) * 32 for number in range(len(memory))]
    assert pools.check_workers() is None


@pytest.mark.parametrize(("hangs", "what"), [("compute", "for a step"), ("memory", "for KV to be saved, loaded")])
def test_pages_that_expire_hide_no_worker_that_hangs(hangs: str, what: str) -> None:
    world, pools = pools_without_recovery()
    plan = StepPlan(batch=0, step=0, ops=[LoadKv(1, 1, 0, 1, [b"k" * 32])], rows=[])
    pools.submit(RunRound(round=0, steps=[RunStep(plan=plan, token_ids=[], sampling_requests=[])]))
    memory, compute = (next(w for w in world.workers if w.role == role) for role in ("memory", "compute"))
    epoch, began = pools.ready.epoch, world.now
    if hangs == "memory":
        compute.inbox.append(StepDone(epoch=epoch, batch=0, step=0, sampled_tokens=[]))
        assert isinstance(pools.wait(), StepDone)
    for second in range(1, 5 * int(STEP_S)):
        memory.say(PagesExpired(epoch=epoch, keys=[b"old" * 11]), float(second))

    def wait() -> None:
        while world.now < began + 4 * STEP_S:
            assert isinstance(pools.wait(), PagesExpired)

    with pytest.raises(WorkerError, match=f"took too long {what}"):
        wait()
    assert STEP_S <= world.now - began < STEP_S + 10.0
