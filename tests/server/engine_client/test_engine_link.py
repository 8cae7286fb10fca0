"""The engine process and the server's end of its link: progress, bad weather, who is to blame. A real engine.

Covers: lamina/executor/counter_collection.py.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import pytest
from fake import no_restarts
from running import MODEL, ROOT

from lamina.config.flat_options import make_config
from lamina.executor.counter_collection import has_progress
from lamina.protocol.control import ControlLink, Stop
from lamina.request import ErrorOrigin, SamplingParams
from lamina.server.engine_client.engine_client import EngineClient
from lamina.server.engine_client.launch import launch_engine
from lamina.server.engine_client.messages import (
    AddPrompt,
    CancelPrompt,
    Delta,
    EngineReady,
    EngineState,
    Outputs,
    StartEngine,
)
from lamina.server.engine_client.open_prompts import PromptRefusedError
from lamina.server.engine_client.reply_queue import ReplyQueue

pytestmark = pytest.mark.timeout(300)  # starting an engine on a busy machine takes its time
SLICE_S = 0.3  # five of them are a step
CONFIG = make_config({"dtype": "float32", "memory_workers": 2, "start_timeout_s": 200.0, "compute_threads": 1})


class Quiet:
    """A meter that measures nothing."""

    def on_delta(self, delta: Delta) -> None: ...


class Watched(EngineClient):
    """Remembers all messages."""

    def _handle_message(self, message: Any) -> None:
        self.__dict__.setdefault("seen", []).append(message)
        super()._handle_message(message)


def with_engine(monkeypatch: pytest.MonkeyPatch, work: Callable[[Any], Awaitable[None]]) -> None:
    monkeypatch.setenv("LAMINA_EMULATE", f'{{"slice_s": [{SLICE_S}]}}')
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(ROOT)
    handle = launch_engine(StartEngine(model=MODEL, tokenizer="", config=CONFIG))

    async def run() -> None:
        client = await Watched.connect(handle, lambda progress: None, no_restarts())
        try:
            await work(client)
        finally:
            await client.close()

    asyncio.run(run())


@pytest.mark.long
def test_an_engine_in_bad_weather(monkeypatch: pytest.MonkeyPatch) -> None:
    """One engine for all of it, as a start takes seconds."""

    async def work(client: Any) -> None:
        await progress_is_told_while_a_step_runs(client)
        await who_is_to_blame_is_said(client)
        await a_message_that_cannot_be_read_ends_the_engine(client)

    with_engine(monkeypatch, work)


async def progress_is_told_while_a_step_runs(client: Any) -> None:
    """Else a server whose steps take long is ill half of the time."""
    replies = ReplyQueue()
    client.add([5, 6], SamplingParams(max_tokens=2, ignore_eos=True), replies, Quiet())
    ended = False
    while not ended:
        ended = any(d.finish_reason for d in await asyncio.wait_for(replies.get(), 60))
    told = [m for m in client.seen if isinstance(m, EngineState) and m.running]
    again = [now for before, now in pairwise(told) if now.steps == before.steps]
    assert again, "nothing was heard but the ends of steps"


async def who_is_to_blame_is_said(client: Any) -> None:
    for prompt, params, blame in (
        ([5] * 5000, SamplingParams(), ErrorOrigin.CLIENT),
        ([5], SamplingParams(stop_token_ids=[1 << 20]), ErrorOrigin.CLIENT),
    ):
        replies = ReplyQueue()
        client.add(prompt, params, replies, Quiet())
        with pytest.raises(PromptRefusedError) as refused:
            await asyncio.wait_for(replies.get(), 30)
        assert refused.value.blame is blame


async def a_message_that_cannot_be_read_ends_the_engine(client: Any) -> None:
    client.handle.sock.send(struct.pack("<I", 3) + b"\xc1\xc1\xc1")
    await asyncio.wait_for(client.lost.wait(), 60)
    assert "link to the server has failed" in client.failure
    await asyncio.to_thread(client.handle.join, 30.0)
    assert client.handle.exit_reason() is not None, "it has ended"


class Silent:
    """A handle of no process."""

    role, index, pid, host, status = "engine", 0, 1, "", None

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def exit_reason(self) -> str | None:
        return None

    def join(self, timeout_s: float) -> None: ...


READY = EngineReady(
    vocab_size=9, max_model_len=9, max_num_seqs=1, dtype="float32", block_size=1, num_blocks=[[1]], holders=[[0]],
    attention_calls_per_step=1, row_bytes={}, workers=[],
)  # fmt: skip


def test_an_answer_that_the_server_cannot_handle_is_an_error_of_its_request_alone() -> None:
    ours, theirs = socket.socketpair()
    engine = ControlLink(theirs, AddPrompt | CancelPrompt | Stop)

    class Broken(Quiet):
        def on_delta(self, delta: Delta) -> None:
            raise KeyError("a metric")

    async def work() -> None:
        engine.send(READY)
        client = await EngineClient.connect(Silent(ours), lambda progress: None, no_restarts())
        bad, good = ReplyQueue(), ReplyQueue()
        keys = [client.add([1], SamplingParams(), bad, Broken()), client.add([1], SamplingParams(), good, Quiet())]
        engine.send(Outputs([Delta(key=key, index=0, token_ids=[1], text="a") for key in keys]))
        with pytest.raises(PromptRefusedError, match="KeyError") as failed:
            await asyncio.wait_for(bad.get(), 5)
        assert failed.value.blame is ErrorOrigin.SERVER
        assert [delta.text for delta in await asyncio.wait_for(good.get(), 5)] == ["a"]
        told = [await asyncio.to_thread(engine.recv, 5) for _ in range(3)]
        assert told[2] == CancelPrompt(keys[0]), "the engine need not go on with it"
        assert client.failure is None
        await client.close()

    asyncio.run(work())
    engine.close()


def test_to_wait_is_not_to_go_on() -> None:
    before = {"compute-0": {"wait_s": 1.0, "slice_s": 2.0}, "memory-0": {"bytes_received": 5.0, "wait_s": 0.5}}
    waiting = {"compute-0": {"wait_s": 3.0, "slice_s": 2.0}, "memory-0": {"bytes_received": 5.0, "wait_s": 2.5}}
    assert not has_progress(before, waiting)
    assert has_progress(before, {**waiting, "memory-0": {"bytes_received": 6.0, "wait_s": 0.5}})
    assert has_progress({}, before)
