"""A real engine process, with real workers, that a request makes fail: the request is refused, and others go on."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from fragile_engine import CRASH, ERROR, FATAL, HOW
from running import MODEL, ROOT, alive
from test_engine_link import Quiet

from lamina.config.flat_options import make_config
from lamina.executor.launchers import local
from lamina.request import SamplingParams
from lamina.server.engine_client.engine_client import EngineClient
from lamina.server.engine_client.engine_restarts import EngineRestarts
from lamina.server.engine_client.launch import launch_engine
from lamina.server.engine_client.messages import StartEngine
from lamina.server.engine_client.open_prompts import GUILTY
from lamina.server.engine_client.reply_queue import ReplyQueue

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]
SOON_S = 120.0
PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=40, ignore_eos=True)
INNOCENT = [[5, 6, n] for n in range(7, 11)]


async def answer(client: EngineClient, prompt: list[int]) -> tuple[list[int], Any]:
    """All tokens of a prompt, and its end."""
    replies, told = ReplyQueue(), list[int]()
    client.add(prompt, PARAMS, replies, Quiet(), name="cmpl-0123")
    while True:
        for delta in await asyncio.wait_for(replies.get(), SOON_S):
            told += delta.token_ids
            if delta.finish_reason is not None:
                return told, delta


@pytest.mark.parametrize("how", [ERROR, CRASH])
def test_one_that_makes_engines_fail_costs_two_and_others_are_answered_as_without_it(
    how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(local.ROLES, "engine", ("tests.server.engine_client.fragile_engine", "serve_engine"))
    monkeypatch.setenv(HOW, how)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(ROOT)
    logging.getLogger("lamina").propagate = True
    config = make_config({"dtype": "float32", "deterministic": True, "start_timeout_s": 200.0, "compute_threads": 1})
    start = StartEngine(model=MODEL, tokenizer="", config=config)
    launched = list[int]()

    def launch(start: StartEngine) -> Any:
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
    assert "request cmpl-0123 is refused for 600 s" in caplog.text
