"""The limits of waiting requests, error texts and roles, to the exact number and word."""

from __future__ import annotations

import pytest

from lamina.server.admission import Admission
from lamina.server.errors import ApiError
from lamina.server.request.prompts import _plain
from lamina.server.request.protocol import Message


def admission(**limits: int) -> Admission:
    known = {"max_running": 2, "max_queued": 3, "max_queued_tokens": 100, **limits}
    return Admission(**known, refused=lambda reason: None)


def test_as_many_tokens_wait_as_are_allowed_and_not_one_more() -> None:
    room = admission()
    first, second, third = room.enter(1), room.enter(1), room.enter(1)
    first.wait_with(60)
    second.wait_with(40)
    assert room.tokens == 100
    with pytest.raises(ApiError, match="too many requests"):
        third.wait_with(1)
    assert room.tokens == 100


def test_tokens_that_wait_no_more_make_room() -> None:
    room = admission()
    first, second = room.enter(1), room.enter(1)
    first.wait_with(100)
    first.started(100)
    second.wait_with(100)
    second.close()
    assert room.tokens == 0
    first.close()
    assert (room.tokens, room.completions) == (0, 0)


def test_as_many_completions_are_under_way_as_are_allowed_and_not_one_more() -> None:
    room = admission()
    ticket = room.enter(5)
    with pytest.raises(ApiError, match="too many requests"):
        room.enter(1)
    ticket.finished()
    room.enter(1)
    assert room.completions == 5


def test_a_developer_speaks_as_the_system_and_nobody_else_does() -> None:
    """Models' templates know no developer."""
    roles = {role: _plain(Message(role=role, content="be brief"))["role"] for role in ("developer", "system", "user")}
    assert roles == {"developer": "system", "system": "system", "user": "user"}
