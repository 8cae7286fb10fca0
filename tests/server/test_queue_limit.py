"""Places in the queue: one API key's requests leave room for another's.

Covers: lamina/server/errors.py.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lamina.server.errors import ApiError
from lamina.server.queue_limit import QueueLimit, QueueTicket

A, B, C = (name * 32 for name in (b"a", b"b", b"c"))
RUNNING, QUEUED = 4, 40


def limit(num_tenants: int) -> QueueLimit:
    return QueueLimit(RUNNING, QUEUED, 0, lambda reason: None, num_tenants)


def admit_all(room: QueueLimit, tenant: bytes) -> int:
    """Admit one completion after another until one is refused; return how many were admitted."""
    for count in range(1000):
        try:
            room.admit(1, tenant)
        except ApiError:
            return count
    raise AssertionError("the queue has no limit")


def test_one_key_alone_has_all_places() -> None:
    assert admit_all(limit(1), A) == RUNNING + QUEUED


def test_a_key_that_fills_the_queue_leaves_the_others_their_shares() -> None:
    room = limit(2)
    assert admit_all(room, A) == RUNNING + QUEUED - QUEUED // 4
    assert admit_all(room, B) == QUEUED // 4


def test_a_share_that_is_used_is_held_free_no_more() -> None:
    room = limit(2)
    for _ in range(QUEUED // 4):
        room.admit(1, B)
    assert admit_all(room, A) == RUNNING + QUEUED - QUEUED // 4


def test_a_request_that_never_fits_is_refused_for_good() -> None:
    room = limit(2)
    room.check(RUNNING + QUEUED - QUEUED // 4, A)
    with pytest.raises(ApiError, match="at most 34 fit") as error:
        room.check(RUNNING + QUEUED - QUEUED // 4 + 1, A)
    assert error.value.status == 400


def test_a_refusal_names_what_the_key_has() -> None:
    room = limit(3)
    admit_all(room, A)
    with pytest.raises(ApiError, match="32 completions of this API key"):
        room.check(1, A)
    room.check(1, B)


@given(st.lists(st.tuples(st.sampled_from([A, B, C]), st.integers(1, 9), st.booleans()), max_size=60))
def test_a_key_below_its_share_is_never_refused(steps: list[tuple[bytes, int, bool]]) -> None:
    room, share = limit(3), QUEUED // 6
    held = dict.fromkeys((A, B, C), 0)
    tickets = list[tuple[bytes, int, QueueTicket]]()
    for tenant, count, ends in steps:
        if ends and tickets:
            owner, given_back, ticket = tickets.pop(0)
            ticket.close()
            held[owner] -= given_back
            continue
        try:
            tickets.append((tenant, count, room.admit(count, tenant)))
            held[tenant] += count
        except ApiError:
            assert held[tenant] + count > share
        assert room.completions == sum(held.values()) <= RUNNING + QUEUED
