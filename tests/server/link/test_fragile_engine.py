"""A real engine process, with real workers, that a request makes fail: the request is refused, and others go on."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from fragile_engine import CRASH, ERROR, FATAL, HOW
from running import MODEL, ROOT, alive
from test_engine_link import Quiet

from lamina.config import make_config
from lamina.fleet.launchers import local
from lamina.request import SamplingParams
from lamina.server.link.client import EngineClient
from lamina.server.link.launch import launch_engine
from lamina.server.link.messages import Start
from lamina.server.link.open_prompts import GUILTY
from lamina.server.link.reply_feed import ReplyFeed
from lamina.server.link.restarts import EngineRestarts

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]
SOON_S = 120.0
PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=40, ignore_eos=True)
INNOCENT = [[5, 6, n] for n in range(7, 11)]


async def answer(client: EngineClient, prompt: list[int]) -> tuple[list[int], Any]:
    """All tokens of a prompt, and its end."""
    feed, told = ReplyFeed(), list[int]()
    client.add(prompt, PARAMS, feed, Quiet(), name="cmpl-0123")
    while True:
        for delta in await asyncio.wait_for(feed.take(), SOON_S):
            told += delta.tokens
            if delta.finish_reason is not None:
                return told, delta


@pytest.mark.parametrize("how", [ERROR, CRASH])
def test_one_that_makes_engines_fail_costs_two_and_others_are_answered_as_without_it(
    how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(local.ROLES, "engine", ("tests.server.link.fragile_engine", "serve_engine"))
    monkeypatch.setenv(HOW, how)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(ROOT)
    logging.getLogger("lamina").propagate = True
    config = make_config({"dtype": "float32", "deterministic": True, "start_timeout_s": 200.0, "compute_threads": 1})
    start = Start(model=MODEL, tokenizer="", config=config)
    launched = list[int]()

    def launch(start: Start) -> Any:
        handle = launch_engine(start)
        launched.append(handle.pid)
        return handle

    async def run() -> None:
        client = await EngineClient.connect(launch(start), lambda progress: None, EngineRestarts(start, launch))
        try:
            wanted = [await answer(client, prompt) for prompt in INNOCENT]
            *innocent, guilty = await asyncio.gather(
                *(answer(client, prompt) for prompt in INNOCENT), answer(client, [5, FATAL])
            )
            assert [tokens for tokens, _ in innocent] == [tokens for tokens, _ in wanted]
            assert {end.finish_reason for _, end in innocent} == {"length"}
            assert guilty[1].stop_reason == GUILTY
            assert len(launched) == 3
            again = await answer(client, [5, 6])
            assert again[1].finish_reason == "length"
            assert len(launched) == 3
        finally:
            await client.close()

    asyncio.run(run())
    assert alive(launched) == []
    assert ("was killed by SIGSEGV" in caplog.text) == (how == CRASH)
    assert "request cmpl-0123 is refused for good" in caplog.text
