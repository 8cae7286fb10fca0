"""An unread prompt is set aside: it leaves the engine, and goes on from its tokens once it is read."""

from __future__ import annotations

import asyncio

from test_engine_link import READY, Quiet
from test_engine_restarts import TIMES, Engines, grown, play
from test_flow import until
from test_trials import asked, fails

from lamina.request import SamplingParams
from lamina.server.engine_client.engine_client import EngineClient
from lamina.server.engine_client.messages import AddPrompt, CancelPrompt
from lamina.server.engine_client.open_prompts import MOST_UNREAD
from lamina.server.engine_client.reply_queue import ReplyQueue

TOKENS = list(range(10, 10 + MOST_UNREAD))


async def silence(replies: ReplyQueue, engines: Engines, client: EngineClient) -> AddPrompt:
    """A prompt that has left the engine, as its deltas are not read."""
    engine = engines.all[-1]
    client.add([7], SamplingParams(max_tokens=100), replies, Quiet())
    add = await asked(engine)
    engine.say(grown(add.key, 0, TOKENS, "x"))
    cancel = await asked(engine, CancelPrompt)
    assert cancel.key == add.key
    assert isinstance(add, AddPrompt)
    return add


def test_it_leaves_the_engine_and_goes_on_from_its_tokens() -> None:
    async def work(client: EngineClient, engines: Engines) -> None:
        replies = ReplyQueue()
        first = await silence(replies, engines, client)
        engine = engines.all[0]
        engine.say(grown(first.key, 0, [5], "late"))  # was under way
        assert [d.token_ids for d in await replies.get()] == [TOKENS]
        again = await asked(engine)
        assert again.key != first.key, "so that what was under way belongs to no prompt"
        assert [list(one.token_ids) for one in again.resumed] == [TOKENS]
        assert again.prompt == [7]
        assert again.accepted
        engine.say(grown(again.key, 0, [9], "y", finish_reason="length", times=TIMES))
        (end,) = await asyncio.wait_for(replies.get(), 10)
        assert (end.token_ids, end.finish_reason) == ([9], "length")

    play(work)


def test_one_that_is_read_stays() -> None:
    async def work(client: EngineClient, engines: Engines) -> None:
        replies, engine = ReplyQueue(), engines.all[0]
        client.add([7], SamplingParams(max_tokens=1000), replies, Quiet())
        add = await asked(engine)
        for _ in range(20):
            engine.say(grown(add.key, 0, TOKENS, "x"))
            (delta,) = await asyncio.wait_for(replies.get(), 10)
            assert delta.token_ids == TOKENS
        client.add([8], SamplingParams(), ReplyQueue(), Quiet())
        assert (await asked(engine)).prompt == [8], "no other message came before"

    play(work)


def test_one_that_ends_meanwhile_or_whose_client_leaves_is_forgotten() -> None:
    async def work(client: EngineClient, engines: Engines) -> None:
        gone, engine = ReplyQueue(), engines.all[0]
        await silence(gone, engines, client)
        (key,) = client.prompts.keys
        client.cancel(key)
        assert await gone.get()
        ended = ReplyQueue()
        client.add([8], SamplingParams(), ended, Quiet())
        add = await asked(engine)
        engine.say(grown(add.key, 0, TOKENS, "x"))
        engine.say(grown(add.key, 0, [9], "y", finish_reason="length", times=TIMES))
        await until(lambda: not client.prompts.keys)
        client.add([9], SamplingParams(), ReplyQueue(), Quiet())
        assert (await asked(engine)).prompt == [9], "nothing was cancelled or sent again"

    play(work)


def test_another_engine_gets_it_only_once_it_is_read() -> None:
    async def work(client: EngineClient, engines: Engines) -> None:
        replies = ReplyQueue()
        await silence(replies, engines, client)
        fails(engines.all[0], 1)
        await until(lambda: len(engines.all) > 1)
        second = engines.all[1]
        second.link.send(READY)
        client.add([8], SamplingParams(), ReplyQueue(), Quiet())
        assert (await asked(second)).prompt == [8]
        assert await replies.get()
        assert [list(one.token_ids) for one in (await asked(second)).resumed] == [TOKENS]

    play(work)
