"""A server tries the prompts of a failed engine one by one: messages sent and withdrawn, and the ends that count."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest
from test_engine_link import READY, Quiet
from test_engine_restarts import LIMIT_S, TIMES, Engines, Scripted, grown, play
from test_flow import until

from lamina.request import ErrorOrigin, SamplingParams
from lamina.server.engine_client.engine_client import EngineClient
from lamina.server.engine_client.messages import AddPrompt, CancelPrompt, EngineDefect, PromptRefused
from lamina.server.engine_client.open_prompts import GUILTY, PromptRefusedError
from lamina.server.engine_client.reply_queue import ReplyQueue
from lamina.server.engine_client.suspects import PROOF

BROKEN = EngineDefect("engine: KeyError: 'x'")


async def asked(engine: Scripted, kind: type = AddPrompt) -> Any:
    message = await asyncio.to_thread(engine.asked)
    assert isinstance(message, kind)
    return message


async def ended(replies: ReplyQueue) -> Any:
    """Returns how its prompt ended, once it has."""
    while True:
        for delta in await asyncio.wait_for(replies.get(), LIMIT_S):
            if delta.finish_reason is not None:
                return delta


def fails(engine: Scripted, how: object) -> None:
    """Ends with an exception that it reports, or with that status and no message."""
    if how == "told":
        engine.link.send(BROKEN)
    else:
        assert isinstance(how, int)
        engine.status = how
        engine.link.close()


async def one_prompt(client: EngineClient, engines: Engines, hows: list[object]) -> tuple[ReplyQueue, int]:
    """A prompt in engines that end one after the other."""
    replies = ReplyQueue()
    key = client.add([7], SamplingParams(), replies, Quiet())
    for how in hows:
        engine = engines.all[-1]
        await asked(engine)
        count = len(engines.all)
        fails(engine, how)
        await until(lambda n=count: len(engines.all) > n or client.lost.is_set())
        engines.all[-1].link.send(READY)
    return replies, key


@pytest.mark.parametrize("how", ["told", 1, -signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS], ids=str)
def test_a_prompt_with_which_two_engines_failed_is_refused(how: object) -> None:
    async def work(client: EngineClient, engines: Engines) -> None:
        replies, _ = await one_prompt(client, engines, [how, how])
        end = await ended(replies)
        assert (end.finish_reason, end.stop_reason, end.blame) == ("error", GUILTY, ErrorOrigin.SERVER)
        key = client.add([8], SamplingParams(), ReplyQueue(), Quiet())
        assert (await asked(engines.all[-1])).key == key, "the third engine has others alone"

    play(work)


@pytest.mark.parametrize("how", [0, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT], ids=str)
def test_engines_that_others_end_do_not_count(how: object) -> None:
    async def work(client: EngineClient, engines: Engines) -> None:
        _, key = await one_prompt(client, engines, [how] * 4)
        assert (await asked(engines.all[-1])).key == key

    play(work)


def test_an_end_in_between_that_does_not_count_changes_nothing() -> None:
    async def work(client: EngineClient, engines: Engines) -> None:
        replies, _ = await one_prompt(client, engines, ["told", -signal.SIGKILL, -signal.SIGKILL, "told"])
        assert (await ended(replies)).stop_reason == GUILTY

    play(work)


def test_an_engine_that_ends_by_plan_does_not_count() -> None:
    async def work(client: EngineClient, engines: Engines) -> None:
        _, key = await one_prompt(client, engines, ["told"])
        await asked(engines.all[-1])
        engines.restarts.plan(engines.restarts.config)
        fails(engines.all[-1], 1)
        await until(lambda: len(engines.all) == 3)
        engines.all[-1].link.send(READY)
        assert (await asked(engines.all[-1])).key == key

    play(work)


def test_suspects_are_tried_alone_and_newcomers_wait_until_all_are_cleared() -> None:
    """The prompt on trial is withdrawn as soon as it is cleared, and later messages about it are old."""

    async def work(client: EngineClient, engines: Engines) -> None:
        feeds = [ReplyQueue() for _ in range(4)]
        first, second = (client.add([n], SamplingParams(max_tokens=99), feeds[n], Quiet()) for n in range(2))
        for _ in range(2):
            await asked(engines.all[0])
        engines.all[0].say(grown(second, 0, [1, 2], "ab"))
        await asyncio.wait_for(feeds[1].wait_any(), LIMIT_S)
        engines.all[0].link.send(BROKEN)
        engine = await engines.next(client)
        late = client.add([2], SamplingParams(), feeds[2], Quiet())
        gone = client.add([3], SamplingParams(), feeds[3], Quiet())
        engine.link.send(READY)
        assert (await asked(engine)).key == first, "it has no token yet"
        client.cancel(gone)
        engine.say(grown(first, 0, [*range(PROOF)], "x" * PROOF))
        assert (await asked(engine, CancelPrompt)).key == first
        trial = await asked(engine)
        assert (trial.key, [told.token_ids for told in trial.resumed]) == (second, [[1, 2]])
        engine.say(grown(first, 0, [98, 99], "yz"))  # after its withdrawal
        engine.say(grown(second, 0, [*range(PROOF)], "x" * PROOF))
        again, new = await asked(engine), await asked(engine)
        assert again.key not in (first, second), "by another name, as the old one may still be answered"
        assert [told.token_ids for told in again.resumed] == [[*range(PROOF)]]
        assert (again.prompt, new.key) == ([0], late)
        engine.say(grown(again.key, 0, [50], "z", finish_reason="length", times=TIMES))
        found = list[int]()
        while len(found) < PROOF + 1:
            found += [t for delta in await asyncio.wait_for(feeds[0].get(), LIMIT_S) for t in delta.token_ids]
        assert found == [*range(PROOF), 50]
        assert client.prompts.keys == {second, late}
        client.cancel(second)
        assert (await asked(engine, CancelPrompt)).key == second

    play(work)


def test_a_suspect_that_the_engine_refuses_is_tried_no_more() -> None:
    async def work(client: EngineClient, engines: Engines) -> None:
        feeds = [ReplyQueue() for _ in range(2)]
        first, second = (client.add([n], SamplingParams(), feeds[n], Quiet()) for n in range(2))
        for _ in range(2):
            await asked(engines.all[0])
        engines.all[0].link.send(BROKEN)
        engine = await engines.next(client)
        engine.link.send(READY)
        assert (await asked(engine)).key == first
        engine.link.send(PromptRefused(first, "too long", ErrorOrigin.CLIENT))
        assert (await asked(engine)).key == second
        with pytest.raises(PromptRefusedError, match="too long"):
            await asyncio.wait_for(feeds[0].get(), LIMIT_S)

    play(work)


def test_prompts_deep_in_the_queue_are_no_suspects() -> None:
    """An engine computes so many at once, those of the lowest priority numbers first; none of the others is tried."""

    async def work(client: EngineClient, engines: Engines) -> None:
        keys = [client.add([n], SamplingParams(), ReplyQueue(), Quiet()) for n in range(3)]
        for _ in keys:
            await asked(engines.all[0])
        engines.all[0].link.send(BROKEN)
        engine = await engines.next(client)
        engine.link.send(READY)
        assert READY.max_num_seqs == 1
        assert (await asked(engine)).key == keys[0]
        engine.say(grown(keys[0], 0, [1], "a", finish_reason="stop", times=TIMES))
        assert [(await asked(engine)).key for _ in range(2)] == keys[1:]

    play(work)
