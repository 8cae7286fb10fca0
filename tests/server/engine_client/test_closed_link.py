"""A request that comes as the engine's link ends waits for the next engine."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import uvloop
from fake import no_restarts

from lamina.request import SamplingParams
from lamina.server.engine_client.engine_client import EngineClient
from lamina.server.engine_client.reply_queue import ReplyQueue


def test_a_request_is_kept_where_the_link_has_just_ended() -> None:
    """The process is known to have ended a while later; uvloop raises meanwhile."""

    async def add() -> int:
        here, there = socket.socketpair()
        client: Any = EngineClient(None, no_restarts())  # type: ignore[arg-type]
        client._reader, client._writer = await asyncio.open_connection(sock=here)
        client.prompts.resume()
        there.close()
        client._writer.close()
        await client._writer.wait_closed()
        client.add([1, 2], SamplingParams(), ReplyQueue(), None)
        return len(client.prompts.keys)

    assert uvloop.run(add()) == 1
