"""The thread that rings for kernels, from Python's threads: it rings what was asked, and outlives who still asks."""

from __future__ import annotations

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor
from time import monotonic

from wiring import SOON_S

from lamina.netstack.host.native_module import Ringer

NOTHING = 2**64 - 1  # kNoDoorbell
Word = ctypes.c_uint64


def test_it_rings_on_what_is_in_a_mailbox_until_that_is_removed() -> None:
    mailbox, doorbells, ringer = Word(NOTHING), (Word * 2)(), Ringer([])
    ringer.add(ctypes.addressof(mailbox), ctypes.addressof(doorbells), 8)
    for n in range(1, 5):
        mailbox.value, deadline = n, monotonic() + SOON_S
        while ringer.rung() < n and monotonic() < deadline:
            pass
        assert list(doorbells) == ([n, n - 1] if n % 2 else [n - 1, n]), "on two registers in turn"
    ringer.remove(ctypes.addressof(mailbox))
    mailbox.value = 9
    other, doorbell = Word(NOTHING), Word()
    ringer.add(ctypes.addressof(other), ctypes.addressof(doorbell), 0)
    other.value, deadline = 7, monotonic() + SOON_S
    while not doorbell.value and monotonic() < deadline:
        pass
    assert (doorbell.value, list(doorbells)) == (7, [3, 4])
    ringer.close()


def test_threads_that_ask_while_it_is_closed_are_served_or_told() -> None:
    """Calls leave Python's lock: the object they use stays until they are over."""
    for _ in range(20):
        ringer, ready = Ringer([]), threading.Barrier(4)
        with ThreadPoolExecutor(3) as pool:
            told = [pool.submit(until_told, ringer, ready) for _ in range(3)]
            ready.wait(SOON_S)
            ringer.close()
        assert [text.result(SOON_S) for text in told] == ["the ringer was closed"] * 3


def until_told(ringer: Ringer, ready: threading.Barrier) -> str:
    """The error with which adding and removing a mailbox ends."""
    mailbox, doorbell = Word(NOTHING), Word()
    ready.wait(SOON_S)
    try:
        while True:
            ringer.add(ctypes.addressof(mailbox), ctypes.addressof(doorbell), 0)
            mailbox.value = ringer.rung()
            ringer.remove(ctypes.addressof(mailbox))
    except ValueError as error:
        return str(error)
