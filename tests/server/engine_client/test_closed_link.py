"""A request that comes as the engine's link ends waits for the next engine."""

from __future__ import annotations

import asyncio
import socket

import uvloop
from fake import no_restarts
from test_engine_link import READY, Quiet, Silent

from lamina.protocol.control import ControlLink, Stop
from lamina.request import SamplingParams
from lamina.server.engine_client.engine_client import EngineClient
from lamina.server.engine_client.reply_queue import ReplyQueue


def test_a_request_is_kept_where_the_link_has_just_ended() -> None:
    """The process is known to have ended a while later; uvloop raises meanwhile."""

    async def add() -> int:
        here, there = socket.socketpair()
        engine = ControlLink(there, Stop)
        engine.send(READY)
        client = await EngineClient.connect(Silent(here), lambda progress: None, no_restarts())
        await client.close()
        assert isinstance(await asyncio.to_thread(engine.recv, 5.0), Stop)
        assert await asyncio.to_thread(there.recv, 1) == b"", "this side's end is closed"
        client.add([1, 2], SamplingParams(), ReplyQueue(), Quiet())
        return len(client.prompts.keys)

    assert uvloop.run(add()) == 1
