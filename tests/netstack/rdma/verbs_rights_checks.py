"""The limits of a peer of the engine of verbs: little access, and little of our time; ``test_verbs_native`` runs this,
too.
"""

from __future__ import annotations

import ctypes

import pytest
from verbs_native_checks import Ends, ends  # noqa: F401 - a fixture
from verbs_without_nic import FAKE

from lamina import netstack

CREDIT = 1 << 31
LOCAL_WRITE, REMOTE_WRITE = 1, 2  # of ibv_access_flags


def test_nothing_is_open_for_more_than_to_be_written(ends: Ends) -> None:  # noqa: F811
    """No memory and no queue pair, since the process began: neither for reads, nor in another order."""
    assert FAKE.fake_granted() == LOCAL_WRITE | REMOTE_WRITE


def test_a_peer_that_floods_keeps_no_call_beyond_its_time(ends: Ends) -> None:  # noqa: F811
    """With what an honest one may say: the credit that is known. More of it is there as soon as some was taken."""
    FAKE.fake_flood(ends.number, ctypes.c_uint32(CREDIT), 20_000_000)
    with pytest.raises(netstack.ChannelTimeout):
        ends.b.wait_signal(timeout_s=0.05)
    assert FAKE.fake_floods(ends.number) > 0
