"""The output of a step may be more than a frame of the link holds, such as the log-probabilities of a long prompt."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.msgpack import decode, encode
from test_engine_link import READY, Quiet
from test_engine_process import Bench
from test_engine_restarts import LIMIT_S, Engines, grown, play

from lamina.protocol.control import ControlLink, Stop
from lamina.request import SamplingParams
from lamina.server.engine_client import output_parts
from lamina.server.engine_client.engine_client import FROM_ENGINE, EngineClient
from lamina.server.engine_client.messages import Outputs, encode_scores
from lamina.server.engine_client.output_parts import OutputAssembler, split_outputs
from lamina.server.engine_client.reply_queue import ReplyQueue

ENTRY: Any = [(1 << 17, -1.0, 1 << 17)] * 21


def many() -> Outputs:
    """The output of two prompts, which have the scores of their prompts with their first token."""
    scores = [*map(encode_scores, [None, *[ENTRY] * 6])]
    return Outputs(
        [
            grown(1, 0, [5], "é" * 40, [ENTRY], prompt_logprobs=scores, num_cached_tokens=2),
            grown(2, 0, [6], "b", [ENTRY], prompt_logprobs=[*scores, encode_scores(ENTRY)]),
            grown(2, 1, [7], "c", [ENTRY], finish_reason="stop"),
        ],
        num_tokens=9,
    )


@pytest.mark.parametrize("most", [1, 500, 1000, 1500, 2600, 5000])
def test_parts_are_short_and_the_whole_again(most: int) -> None:
    parts = list(split_outputs(many(), most))
    assert [part.has_more for part in parts] == [True] * (len(parts) - 1) + [False]
    assert len(parts) > 1
    assert max(len(encode(part)) for part in parts) <= max(most, 1200), "one token's are not parted"
    held = OutputAssembler()
    received = [held.add(decode(encode(part), type=Outputs)) for part in parts]
    assert received == [None] * (len(parts) - 1) + [many()]
    assert held.add(Outputs([])) == Outputs([]), "nothing is left of it"


def test_what_is_short_is_one_message() -> None:
    assert list(split_outputs(many())) == [many()]


def test_an_engine_parts_what_a_frame_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the server takes it for dead, and so the next one, which has the same prompt."""
    monkeypatch.setattr(output_parts, "MOST", 1 << 10)
    bench = Bench()
    bench.server = ControlLink(bench.sock, FROM_ENGINE, 1 << 12)
    bench.thread.start()
    bench.loop.outbox.put(many())
    held, whole = OutputAssembler(), None
    while whole is None:
        message = bench.server.recv(LIMIT_S)
        whole = held.add(message) if isinstance(message, Outputs) else None
    assert whole == many()
    bench.server.send(Stop())
    bench.thread.join(LIMIT_S)
    assert (bench.thread.is_alive(), bench.failure) == (False, None)


def test_readers_get_the_whole_and_nothing_of_an_engine_that_died_in_its_midst() -> None:
    async def work(client: EngineClient, engines: Engines) -> None:
        replies, meter = ReplyQueue(), Quiet()
        key = client.add([7], SamplingParams(n=2, logprobs=0), replies, meter)
        first, *_, last = split_outputs(Outputs([grown(key, n, [n], "a", [ENTRY]) for n in (0, 1)]), 1)
        engines.all[0].link.send(first)
        engines.all[0].link.close()
        second = await engines.next(client)
        second.link.send(READY)
        again = await asyncio.to_thread(second.asked)
        assert again.resumed == [], "nobody has what did not come whole"
        second.link.send(Outputs([grown(key, 0, [5], "a", [ENTRY])]))
        assert [d.token_ids for d in await asyncio.wait_for(replies.get(), LIMIT_S)] == [[5]]
        for part in (first, last):
            second.link.send(part)
        assert [d.token_ids for d in await asyncio.wait_for(replies.get(), LIMIT_S)] == [[0], [1]]

    play(work)
