"""Who is named when workers end, whatever the order in which the driver notices."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from lamina.fleet.members import Member, Members, WorkerError
from lamina.protocol.control import AskStats, ControlLink, Failed, StepDone, Stop

SOON_S = 5.0


class Ended:
    """The handle of a worker that sends its last words and goes."""

    place = ""
    pid = 1

    def __init__(self, role: str, *words: Failed | StepDone) -> None:
        self.role, self.index = role, 0
        self.sock, theirs = socket.socketpair()
        link = ControlLink(theirs, AskStats | Stop)
        for message in words:
            link.send(message)
        link.close()

    def fate(self) -> str | None:
        return "ended"

    def join(self, timeout_s: float) -> None: ...


def members(*handles: Ended) -> tuple[Members, list[Member]]:
    made = Members(lambda limit_s: None, lambda: None)
    return made, [made.add(handle) for handle in handles]


DONE = StepDone(batch=0, step=0, drawn=[])
MISSED = Failed(text="compute worker: memory worker 0 ended", by_peer=True)
BROKEN = Failed(text="memory worker: out of order")


def send(pools: Members, member: Member) -> None:
    pools.send(member, AskStats())


def wait(pools: Members, member: Member) -> None:
    while True:
        pools.wait_for([member], StepDone, 1.0, "for a step")


Notice = Callable[[Members, Member], None]


@pytest.mark.parametrize("notice", [send, wait])
@pytest.mark.parametrize("swapped", [False, True])
def test_the_cause_is_named_not_who_missed_it(notice: Notice, swapped: bool) -> None:
    """Also where only sending fails, behind words that nobody has read yet."""
    handles = [Ended("compute", DONE, MISSED), Ended("memory", BROKEN)]
    pools, (first, second) = members(*(handles[::-1] if swapped else handles))
    compute = second if swapped else first
    with pytest.raises(WorkerError, match=r"^memory worker: out of order$"):
        notice(pools, compute)
    assert pools.closed


@pytest.mark.parametrize("notice", [send, wait])
def test_one_that_ended_without_a_word_is_named_by_its_fate(notice: Notice) -> None:
    pools, (lost, _) = members(Ended("compute"), Ended("memory", BROKEN))
    with pytest.raises(WorkerError, match="compute worker 0 .pid 1. ended; its pool cannot go on"):
        notice(pools, lost)


def test_what_a_user_can_put_right_is_a_value_error() -> None:
    pools, (lost,) = members(Ended("compute", Failed(text="--tensor-parallel-size 3: no", user_error=True)))
    with pytest.raises(ValueError, match="^--tensor-parallel-size 3: no$"):
        pools.send(lost, AskStats())


class Stopped(Ended):
    """Reads nothing and says nothing, as a process that was stopped; its socket has no more room."""

    def __init__(self, role: str) -> None:
        self.role, self.index = role, 0
        self.sock, self.theirs = socket.socketpair()

    def fill(self) -> None:
        with suppress(BlockingIOError):
            while True:
                self.sock.send(bytes(1 << 16), socket.MSG_DONTWAIT)

    def fate(self) -> str | None:
        return None


def test_one_that_takes_no_message_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamina.fleet.members.TAKE_S", 0.1)
    handle = Stopped("memory")
    pools, (member,) = members(handle)
    handle.fill()
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"^memory worker 0 .pid 1. stands still: it took no message for 0.1 s$"):
        pools.send(member, AskStats())
    assert pools.closed
    assert time.monotonic() - start < SOON_S


def test_nor_does_it_hold_up_the_end() -> None:
    handle = Stopped("memory")
    pools, _ = members(handle)
    handle.fill()
    start = time.monotonic()
    pools.close()
    assert time.monotonic() - start < SOON_S
