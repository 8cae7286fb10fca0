"""The limits of waiting requests, to the exact number."""

from __future__ import annotations

import pytest

from lamina.server.errors import ApiError
from lamina.server.queue_limit import QueueLimit


def admission(**limits: int) -> QueueLimit:
    known = {"max_running": 2, "max_queued": 3, "max_queued_tokens": 100, **limits}
    return QueueLimit(**known, refused=lambda reason: None)


def test_as_many_tokens_wait_as_are_allowed_and_not_one_more() -> None:
    room = admission()
    first, second, third = room.admit(1), room.admit(1), room.admit(1)
    first.set_prompt_tokens(60)
    second.set_prompt_tokens(40)
    assert room.tokens == 100
    with pytest.raises(ApiError, match="too many requests"):
        third.set_prompt_tokens(1)
    assert room.tokens == 100


def test_tokens_that_wait_no_more_make_room() -> None:
    room = admission()
    first, second = room.admit(1), room.admit(1)
    first.set_prompt_tokens(100)
    first.on_first_token(100)
    second.set_prompt_tokens(100)
    second.close()
    assert room.tokens == 0
    first.close()
    assert (room.tokens, room.completions) == (0, 0)


def test_as_many_completions_are_under_way_as_are_allowed_and_not_one_more() -> None:
    room = admission()
    ticket = room.admit(5)
    with pytest.raises(ApiError, match="too many requests"):
        room.admit(1)
    ticket.on_completion_finished()
    room.admit(1)
    assert room.completions == 5
