"""A call in a thread of its own during a meeting: its end is noticed, whichever side has left, and costs no
descriptor.
"""

from __future__ import annotations

import gc
import os
import select
import socket
import threading
from collections.abc import Callable, Generator
from time import monotonic

import pytest
from wiring import SOON_S

from lamina.netstack.bootstrap import background_call
from lamina.netstack.bootstrap.background_call import BackgroundCall, has_disconnected
from lamina.netstack.bootstrap.handshake import Wants, drive
from lamina.netstack.contract.fabric import ChannelTimeout


def descriptors() -> int:
    gc.collect()  # what tests before have left
    return len(os.listdir("/proc/self/fd"))


def is_over(call: BackgroundCall[int]) -> bool:
    poller = select.poll()
    poller.register(call, select.POLLIN)
    return bool(poller.poll(0))


def test_its_end_can_be_polled_for() -> None:
    may_end, before = threading.Event(), descriptors()
    call = BackgroundCall(lambda: may_end.wait(SOON_S) and 7, "test")
    assert not is_over(call)
    may_end.set()
    poller = select.poll()
    poller.register(call, select.POLLIN)
    assert poller.poll(SOON_S * 1000)
    assert call.result.done(), "readable means that there is a result"
    assert call.result.result() == 7
    call.close()
    assert descriptors() <= before  # threads of tests before may give some back meanwhile


def test_what_it_raises_is_its_result() -> None:
    call = BackgroundCall(lambda: 1 // 0, "test")
    with pytest.raises(ZeroDivisionError):
        call.result.result(SOON_S)
    call.close()


def test_one_that_nobody_waits_for_touches_no_other_descriptor() -> None:
    """Its own end of the pipe is the thread's; a number that was given back may be another file's by then."""
    may_end, before = threading.Event(), descriptors()
    call = BackgroundCall(lambda: may_end.wait(SOON_S), "test")
    call.close()
    with open(os.devnull) as other:
        may_end.set()
        assert call.result.result(SOON_S)
        for thread in threading.enumerate():
            if thread.name == "test":
                thread.join(SOON_S)
        os.fstat(other.fileno())
    assert descriptors() <= before  # threads of tests before may give some back meanwhile


def test_a_meeting_waits_for_it_and_has_what_it_makes() -> None:
    def meeting(call: Callable[[], int]) -> Generator[Wants, None, int]:
        return (yield from background_call.run_in_background(call, "test"))

    before = descriptors()
    assert drive(meeting(lambda: 7), "peer", deadline=monotonic() + SOON_S) == 7
    with pytest.raises(ZeroDivisionError):
        drive(meeting(lambda: 1 // 0), "peer", deadline=monotonic() + SOON_S)
    may_end = threading.Event()
    with pytest.raises(ChannelTimeout):
        drive(meeting(lambda: int(may_end.wait(SOON_S))), "peer", deadline=monotonic())
    may_end.set()
    for thread in threading.enumerate():
        if thread.name == "test":
            thread.join(SOON_S)
    assert descriptors() <= before  # threads of tests before may give some back meanwhile


def test_a_host_without_a_thread_for_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = descriptors()
    monkeypatch.setattr(background_call.threading.Thread, "start", full)
    with pytest.raises(OSError, match="no thread for lamina-test: can't start new thread"):
        BackgroundCall(lambda: 7, "lamina-test")
    assert descriptors() <= before  # threads of tests before may give some back meanwhile


def test_a_peer_hangs_up_whatever_it_has_said() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.send(b"unread")
        assert not has_disconnected(ours)
        theirs.shutdown(socket.SHUT_WR)
        assert has_disconnected(ours)
