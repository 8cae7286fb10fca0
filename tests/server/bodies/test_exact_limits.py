"""What waits, what is told and who speaks, to the exact number and word."""

from __future__ import annotations

import asyncio
import struct
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from lamina.request import SamplingParams
from lamina.server.admission import Admission
from lamina.server.errors import ApiError
from lamina.server.link.client import EngineClient
from lamina.server.link.messages import Add, Cancel
from lamina.server.link.reply_feed import ReplyFeed
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


class _Writer:
    def __init__(self) -> None:
        self.sent = b""

    def write(self, data: bytes) -> None:
        self.sent += data

    def messages(self) -> list[Any]:
        found, rest, decoder = [], self.sent, msgspec.msgpack.Decoder(Add | Cancel)
        while rest:
            (length,) = struct.unpack_from("<I", rest)
            found.append(decoder.decode(rest[4 : 4 + length]))
            rest = rest[4 + length :]
        return found


def test_the_engine_is_told_of_a_request_that_nobody_wants_any_more() -> None:
    async def work() -> list[Any]:
        writer: Any = _Writer()
        client = EngineClient(SimpleNamespace(), None)  # type: ignore[arg-type]
        client._writer, client._is_ready = writer, True
        key = client.add([1, 2], SamplingParams(), ReplyFeed(), SimpleNamespace())  # type: ignore[arg-type]
        client.cancel(key)
        client.cancel(key)  # once is enough
        client.cancel(key + 1)
        messages: list[Any] = writer.messages()
        return messages

    added, cancelled = asyncio.run(work())
    assert isinstance(added, Add)
    assert isinstance(cancelled, Cancel)
    assert cancelled.key == added.key
