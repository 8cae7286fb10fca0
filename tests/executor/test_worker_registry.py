"""The workers that are named when workers end, in any order in which the driver notices.

Covers: lamina/executor/rendezvous.py, lamina/protocol/control.py.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest
from msgspec import structs

from lamina.config.flat_options import make_config
from lamina.config.partition import KvShards
from lamina.executor.rendezvous import merged_ready
from lamina.executor.worker_registry import RegisteredWorker, WorkerRegistry, WorkersLostError
from lamina.protocol.control import ChannelLost, ControlLink, Failed, Stats, StatsRequest, StepDone, Stop
from lamina.protocol.executor import WorkerError
from lamina.protocol.step_plan import BindReply, ProtocolError
from lamina.tools.plan.simulator.lossless import simulated_ready

SOON_S = 30.0  # on a busy machine


class Ended:
    """The handle of a worker that sends its last words and goes."""

    host = ""
    pid = 1
    is_stopped = False

    def __init__(self, role: str, *words: Failed | StepDone) -> None:
        self.role, self.index = role, 0
        self.sock, theirs = socket.socketpair()
        link = ControlLink(theirs, StatsRequest | Stop)
        for message in words:
            link.send(message)
        link.close()

    def exit_reason(self) -> str | None:
        return "ended"

    def join(self, timeout_s: float) -> None: ...


def members(
    *handles: Ended, on_tick: Callable[[], None] = lambda: None
) -> tuple[WorkerRegistry, list[RegisteredWorker]]:
    made = WorkerRegistry(lambda limit_s: None, lambda: None, on_tick=on_tick)
    return made, [made.add(handle) for handle in handles]


DONE = StepDone(batch=0, step=0, sampled_tokens=[])
MISSED = Failed(text="compute worker: memory worker 0 ended", caused_by_peer=True)
BROKEN = Failed(text="memory worker: out of order")


def send(pools: WorkerRegistry, member: RegisteredWorker) -> None:
    pools.send(member, StatsRequest())


def wait(pools: WorkerRegistry, member: RegisteredWorker) -> None:
    while True:
        pools.wait_for([member], StepDone, 1.0, "for a step")


Notice = Callable[[WorkerRegistry, RegisteredWorker], None]


@pytest.mark.parametrize("notice", [send, wait])
@pytest.mark.parametrize("swapped", [False, True])
def test_the_cause_is_named_not_who_missed_it(notice: Notice, swapped: bool) -> None:
    """The cause is also named where only sending fails, after messages that the driver has not read yet."""
    handles = [Ended("compute", DONE, MISSED), Ended("memory", BROKEN)]
    pools, (first, second) = members(*(handles[::-1] if swapped else handles))
    compute = second if swapped else first
    with pytest.raises(WorkersLostError, match=r"^memory worker: out of order$"):
        notice(pools, compute)
    assert set(pools.lost_workers) == {first, second}
    assert not pools.closed, "it reports, and ends nobody"


@pytest.mark.parametrize("notice", [send, wait])
def test_one_that_ended_without_a_word_is_named_by_its_fate(notice: Notice) -> None:
    pools, (lost, _) = members(Ended("compute"), Ended("memory", BROKEN))
    with pytest.raises(WorkersLostError, match=r"compute worker 0 .pid 1. ended$") as told:
        notice(pools, lost)
    assert (told.value.workers, told.value.is_certain) == ((lost,), True)


def test_of_two_that_are_lost_each_is_reported_and_nobody_waits_for_them() -> None:
    quiet, _told = socket.socketpair()
    pools, (first, second, alive) = members(Ended("compute"), Ended("memory"), Ended("prefill"))
    alive.link = ControlLink(quiet, StepDone)
    for _ in range(2):
        with pytest.raises(WorkersLostError, match=r"worker 0 .pid 1. ended$"):
            pools.check()
    pools.check()
    assert set(pools.lost_workers) == {first, second}
    for lost in (first, second):
        with pytest.raises(WorkersLostError, match=f"^{re.escape(lost.name)} ended$"):
            pools.wait_for([lost, alive], StepDone, 60.0, "for a step")


def test_one_that_stands_still_in_a_message_is_lost_also_while_it_is_asked_who_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lamina.executor.worker_registry.REST_S", 0.1)
    quiet, told = socket.socketpair()
    still = Stopped("memory")
    pools, (sayer, other) = members(Ended("compute"), still)
    sayer.link = ControlLink(quiet, ChannelLost)
    ControlLink(told, StatsRequest).send(ChannelLost(epoch=0, text="no way"))
    still.theirs.send(b"\x10")  # of a length
    with pytest.raises(WorkersLostError, match=r"^memory worker 0 .pid 1. sent only part of a message$") as loss:
        pools.check()
    assert loss.value.is_certain
    assert {*pools.lost_workers} == {other}


@pytest.mark.parametrize("notice", [send, wait])
def test_who_uses_a_link_as_another_thread_ends_all_workers_has_lost_nobody(
    notice: Notice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link ends between the look at the links and the message, or between two messages: no worker is to be replaced
    then.
    """
    quiet, told = socket.socketpair()
    pools, (member,) = members(Ended("compute"))
    member.link = ControlLink(quiet, StepDone | Stats)
    ControlLink(told, StatsRequest).send(Stats(values={}))

    name, ending = "send" if notice is send else "recv", threading.Thread(target=pools.shut_down, args=(0.0,))
    call = getattr(member.link, name)

    def ended_first(*asked: object, **named: object) -> object:
        if ending.ident is None:
            ending.start()
            ending.join(SOON_S)
        return call(*asked, **named)

    monkeypatch.setattr(member.link, name, ended_first)
    for ask in (notice, WorkerRegistry.has_message, WorkerRegistry.receive_from):
        with pytest.raises(WorkerError, match="^the workers have been ended$") as told_so:
            ask(pools, member)
        assert not isinstance(told_so.value, WorkersLostError)
    assert not pools.lost_workers


def test_what_is_said_under_an_older_view_is_dropped() -> None:
    """Before the epoch began and after; what knows no epoch is not."""
    quiet, told = socket.socketpair()
    pools, (member,) = members(Ended("compute"))
    member.link, theirs = ControlLink(quiet, StepDone | Stats), ControlLink(told, StatsRequest)
    done = [StepDone(epoch=view, batch=0, step=view, sampled_tokens=[]) for view in (1, 2, 1, 2)]
    theirs.send(done[0])
    assert not pools.take_arrived(Stats)
    pools.begin_epoch(2)
    for message in (*done[1:], Stats(values={})):
        theirs.send(message)
    assert [d for _, d in pools.take_arrived(StepDone)] == [done[1], done[3]]
    assert len(pools.take_arrived(Stats)) == 1


def test_what_a_user_can_put_right_is_a_value_error() -> None:
    pools, (lost,) = members(Ended("compute", Failed(text="--tensor-parallel-size 3: no", user_error=True)))
    with pytest.raises(ValueError, match="^--tensor-parallel-size 3: no$"):
        pools.send(lost, StatsRequest())


class Stopped(Ended):
    """Reads nothing and says nothing, as a process that was stopped; its socket has no more room."""

    def __init__(self, role: str) -> None:
        self.role, self.index = role, 0
        self.sock, self.theirs = socket.socketpair()

    def fill(self) -> None:
        with suppress(BlockingIOError):
            while True:
                self.sock.send(bytes(1 << 16), socket.MSG_DONTWAIT)

    def exit_reason(self) -> str | None:
        return None


def test_one_that_takes_no_message_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamina.executor.worker_registry.SEND_STALL_S", 0.1)
    handle = Stopped("memory")
    pools, (member,) = members(handle)
    handle.fill()
    start = time.monotonic()
    text = r"^memory worker 0 .pid 1. does not respond: it received no message for 0.1 s$"
    with pytest.raises(WorkersLostError, match=text):
        pools.send(member, StatsRequest())
    assert member in pools.lost_workers
    assert time.monotonic() - start < SOON_S


def test_nor_does_it_hold_up_the_end() -> None:
    handle = Stopped("memory")
    pools, _ = members(handle)
    handle.fill()
    start = time.monotonic()
    pools.shut_down(1.0)
    assert time.monotonic() - start < SOON_S


def test_answers_are_taken_without_waiting_and_others_stay() -> None:
    quiet, told = socket.socketpair()
    pools, (member,) = members(Ended("memory"))
    member.link, theirs = ControlLink(quiet, StepDone | Stats), ControlLink(told, StatsRequest)
    assert pools.take_arrived(Stats) == []
    theirs.send(DONE)
    theirs.send(Stats(values={"steps": 1.0}))
    assert [s.values for _, s in pools.take_arrived(Stats)] == [{"steps": 1.0}]
    assert pools.take_arrived(Stats) == []
    assert pools.wait_for([member], StepDone, 1.0, "for a step") == DONE


def test_who_waits_in_silence_looks_round_and_still_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet, _told = socket.socketpair()
    calls: list[int] = []
    pools, (member,) = members(Ended("memory"), on_tick=lambda: calls.append(1))
    member.link = ControlLink(quiet, StepDone)
    monkeypatch.setattr("lamina.executor.worker_registry.TICK_S", 0.01)
    with pytest.raises(WorkersLostError, match="took too long for a step"):
        pools.wait_for([member], StepDone, 0.1, "for a step")
    assert calls
    assert not pools.lost_workers, "it may answer yet"


@pytest.mark.parametrize("counts", [(0, 1), (2, 0)])
def test_each_prefill_worker_has_one_store_of_prompts(counts: tuple[int, int]) -> None:
    """Else the stores of several would be taken for one another's."""
    ready = simulated_ready(num_layers=1, num_blocks=9, block_size=4, max_len=9)
    store = BindReply(windows=[0], kv_shards=[KvShards()], stripe_blocks=0, num_blocks=[9])
    topology = make_config({"prefill_workers": 2}).topology
    one = [structs.replace(ready, prefill_stores=[store])] * 2
    assert merged_ready([ready, *one], topology).prefill_stores == [store, store]
    with pytest.raises(ProtocolError, match="not one each"):
        merged_ready([ready, *(structs.replace(ready, prefill_stores=[store] * count) for count in counts)], topology)
