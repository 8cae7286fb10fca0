"""The server's end of the engine's link, message by message, with the other end in this process."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import socket
import struct
import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest
from fake import no_restarts
from test_engine_link import READY, Quiet
from test_flow import until

from lamina.protocol.control import MAX_FRAME, ControlLink, Failed, Progress, Stop
from lamina.request import ErrorOrigin, SamplingParams
from lamina.scheduler.sessions.cache_options import CacheOptions
from lamina.server.engine_client import engine_client as module
from lamina.server.engine_client import engine_watchdog
from lamina.server.engine_client.engine_client import EngineClient, EngineGoneError
from lamina.server.engine_client.messages import (
    AddPrompt,
    CancelPrompt,
    Delta,
    EngineReady,
    EngineState,
    Outputs,
    PromptRefused,
    PromptTimes,
    ResetPrefixCache,
    ScaleReply,
    WorkerCounters,
)
from lamina.server.engine_client.open_prompts import PromptRefusedError
from lamina.server.engine_client.reply_queue import ReplyQueue
from lamina.server.errors import ApiError
from lamina.server.operator_routes import workers_on_host

SOON_S = 20.0
PARAMS = SamplingParams(max_tokens=3, seed=1)
STATE = EngineState(running=1, waiting=2, free_blocks=[3], steps=5)


class Handle:
    """An engine process that ends when it is joined, or has ended so."""

    pid, status = 77, -signal.SIGKILL

    def __init__(self, sock: socket.socket, *fates: str | None) -> None:
        self.sock = sock
        self.joined = list[float]()
        self._fates = list(fates)

    def exit_reason(self) -> str | None:
        return self._fates.pop(0) if len(self._fates) > 1 else (self._fates or [None])[0]

    def join(self, timeout_s: float) -> None:
        self.joined.append(timeout_s)


class Meter:
    def __init__(self) -> None:
        self.seen = list[Delta]()

    def on_delta(self, delta: Delta) -> None:
        self.seen.append(delta)


class Bench:
    def __init__(self, *fates: str | None) -> None:
        ours, self.theirs = socket.socketpair()
        self.engine = ControlLink(self.theirs, AddPrompt | CancelPrompt | ResetPrefixCache | Stop)
        self.handle = Handle(ours, *fates)
        self.client: EngineClient

    async def connect(self, ready: EngineReady = READY) -> EngineClient:
        self.engine.send(ready)
        self.client = await EngineClient.connect(self.handle, lambda progress: None, no_restarts())
        return self.client


def run(work: Callable[[Bench], Coroutine[Any, Any, None]], *fates: str | None) -> None:
    bench = Bench(*fates)

    async def whole() -> None:
        try:
            await asyncio.wait_for(work(bench), SOON_S)
        finally:
            if hasattr(bench, "client"):
                await bench.client.close()

    asyncio.run(whole())
    bench.engine.close()


def delta(key: int, index: int = 0, **more: Any) -> Delta:
    return Delta(**{"key": key, "index": index, "token_ids": [1], "text": "a", **more})


def test_what_a_slow_reader_has_not_taken_is_added_up() -> None:
    replies, late = ReplyQueue(), PromptTimes(1.0, 2.0, 3.0)
    replies.push(delta(7, logprobs=[]))
    replies.push(delta(7, 1, text="z"))
    replies.push(delta(7, token_ids=[2, 3], text="bc", logprobs=[], finish_reason="stop", stop_reason=9, times=late,
                    blame=ErrorOrigin.CLIENT))  # fmt: skip

    async def work() -> None:
        assert await replies.get() == [
            delta(7, token_ids=[1, 2, 3], text="abc", logprobs=[], finish_reason="stop", stop_reason=9, times=late,
                  blame=ErrorOrigin.CLIENT),
            delta(7, 1, text="z"),
        ]  # fmt: skip
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(replies.get(), 0.05)
        replies.push(delta(7, text="d"))
        replies.fail(KeyError("why"))
        assert await replies.get() == [delta(7, text="d")]
        with pytest.raises(KeyError, match="why"):
            await asyncio.wait_for(replies.get(), SOON_S)

    asyncio.run(work())


def test_an_end_without_log_probabilities_leaves_those_that_were_held() -> None:
    replies = ReplyQueue()
    for index, (first, last) in enumerate(([[[(1, -0.5, 1)]], None], [None, [[(1, -0.5, 1)]]])):
        replies.push(delta(7, index, logprobs=first))
        replies.push(delta(7, index, token_ids=[], text="", logprobs=last, finish_reason="abort"))

    async def work() -> None:
        assert [d.logprobs for d in await replies.get()] == [[[(1, -0.5, 1)]], None]

    asyncio.run(work())


def test_an_end_is_waited_for_a_second_and_looked_at_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept, (ours, theirs) = [100.0], list[float](), socket.socketpair()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    class Clock:
        monotonic = staticmethod(lambda: now[0])

    Clock.sleep = staticmethod(sleep)  # type: ignore[attr-defined]
    monkeypatch.setattr(engine_watchdog, "time", Clock)
    assert engine_watchdog.exit_reason_of(Handle(ours, None)) == "closed its link"  # type: ignore[arg-type]
    assert sum(slept) == pytest.approx(1.0, abs=0.05)
    assert max(slept) < 0.1
    ours.close()
    theirs.close()


def test_a_start_is_followed_and_its_failure_told() -> None:
    async def work(bench: Bench) -> None:
        received = list[Progress]()
        for stage in ("loading", "cutting"):
            bench.engine.send(Progress(stage=stage, done=1, total=2))
        bench.engine.send(READY)
        bench.client = await EngineClient.connect(bench.handle, received.append, no_restarts())
        assert [p.stage for p in received] == ["loading", "cutting"]
        assert bench.client.ready == READY
        assert (bench.client.state, bench.client.counters, bench.client.failure) == (None, {}, None)

    run(work)
    for user_error, kind in ((True, ValueError), (False, EngineGoneError)):

        async def fails(bench: Bench, user_error: bool = user_error, kind: type[Exception] = kind) -> None:
            bench.engine.send(Failed(text="no weights", user_error=user_error))
            with pytest.raises(kind, match="^no weights$"):
                await EngineClient.connect(bench.handle, lambda progress: None, no_restarts())

        run(fails)


def test_prompts_are_added_cancelled_refused_and_ended_by_their_keys() -> None:
    async def work(bench: Bench) -> None:
        client = await bench.connect()
        feeds, meters = [ReplyQueue() for _ in range(4)], [Meter() for _ in range(4)]
        keys = [client.add([n], PARAMS, feeds[n], meters[n], cache_options=CacheOptions(bytes(n))) for n in range(4)]
        assert keys == [0, 1, 2, 3]
        sent = [await asyncio.to_thread(bench.engine.recv, SOON_S) for _ in range(4)]
        assert sent == [AddPrompt(n, [n], PARAMS, cache_options=CacheOptions(bytes(n))) for n in range(4)]
        client.cancel(1)
        for unknown in (1, 9):
            client.cancel(unknown)
        client.cancel(2)
        assert [await asyncio.to_thread(bench.engine.recv, SOON_S) for _ in range(2)] == [
            CancelPrompt(1),
            CancelPrompt(2),
        ]
        last = delta(0, text="b", times=PromptTimes(0.0, 0.0, 0.0))
        bench.engine.send(Outputs([delta(1), delta(0), delta(9), last, delta(0, text="too late")]))
        bench.engine.send(PromptRefused(8, "nobody", ErrorOrigin.CLIENT))
        bench.engine.send(PromptRefused(3, "too long", ErrorOrigin.SERVER))
        with pytest.raises(PromptRefusedError, match="^too long$") as refused:
            await feeds[3].get()
        assert refused.value.blame is ErrorOrigin.SERVER
        assert [d.text for d in await feeds[0].get()] == ["ab"]
        assert [[d.text for d in m.seen] for m in meters] == [["ab", "b"], [], [], []], "the first one has grown"
        bench.engine.send(Outputs([delta(3)]))
        bench.engine.send(STATE)
        await until(lambda: client.state == STATE)
        assert not meters[3].seen
        client.cancel(0)
        client.cancel(3)
        client.reset_prefix_cache()
        assert await asyncio.to_thread(bench.engine.recv, SOON_S) == ResetPrefixCache(1)
        client.add([4], PARAMS, ReplyQueue(), Quiet())
        assert await asyncio.to_thread(bench.engine.recv, SOON_S) == AddPrompt(4, [4], PARAMS)

    run(work)


def test_silence_lasts_from_the_last_state_or_output(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]

    async def work(bench: Bench) -> None:
        bench.engine.send(Progress(stage="loading", done=0, total=1))
        bench.engine.send(READY)
        bench.client = client = await EngineClient.connect(
            bench.handle, lambda _: now.__setitem__(0, 103.0), no_restarts()
        )
        assert client.seconds_without_progress == 0.0
        now[0] = 110.0
        assert client.seconds_without_progress == 7.0
        bench.engine.send(WorkerCounters({"memory-0": {"wait_s": 1.0}}))
        await until(lambda: client.counters == {"memory-0": {"wait_s": 1.0}})
        assert client.seconds_without_progress == 7.0
        bench.engine.send(STATE)
        await until(lambda: client.seconds_without_progress == 0.0)
        now[0] = 120.0
        bench.engine.send(Outputs([]))
        await until(lambda: client.seconds_without_progress == 0.0)

    class Clock:
        sleep = staticmethod(time.sleep)
        monotonic = staticmethod(lambda: now[0])

    monkeypatch.setattr(module, "time", Clock)
    run(work)


@pytest.mark.parametrize("fates", [(None, None, "was killed by SIGKILL"), ("was killed by SIGKILL",)])
def test_an_engine_that_goes_ends_all_that_waits(
    fates: tuple[str | None, ...], caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("lamina").propagate = True
    gone = "the engine process (pid 77) was killed by SIGKILL"

    async def work(bench: Bench) -> None:
        client = await bench.connect()
        feeds = [ReplyQueue(), ReplyQueue()]
        for replies in feeds:
            client.add([1], PARAMS, replies, Quiet())
        assert not client.lost.is_set()
        bench.engine.close()
        for replies in feeds:
            with pytest.raises(EngineGoneError, match=f"^{re.escape(gone)}$"):
                await replies.get()
        assert client.lost.is_set()
        assert client.failure == gone
        with pytest.raises(EngineGoneError, match=f"^{re.escape(gone)}$"):
            client.add([1], PARAMS, ReplyQueue(), Quiet())
        client.cancel(0)
        assert [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR] == [
            f"the engine is gone, requests get 503: {gone}"
        ]

    run(work, *fates)


def test_who_closes_its_link_and_does_not_end_is_told_so() -> None:
    async def work(bench: Bench) -> None:
        client = await bench.connect()
        began = time.monotonic()
        bench.engine.close()
        await until(client.lost.is_set)
        assert client.failure == "the engine process (pid 77) closed its link"
        assert time.monotonic() - began >= 0.9

    run(work)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (struct.pack("<I", MAX_FRAME + 1), f"the engine process sent a frame of {MAX_FRAME + 1} bytes"),
        (
            struct.pack("<I", 1) + b"\x01",
            "the engine process sent what is no message: ",
        ),
    ],
)
def test_nonsense_is_a_lost_engine(data: bytes, words: str) -> None:
    async def work(bench: Bench) -> None:
        client = await bench.connect()
        bench.theirs.sendall(data)
        await until(client.lost.is_set)
        assert (client.failure or "").startswith(words)

    run(work)


def test_an_engine_that_fails_says_why() -> None:
    async def work(bench: Bench) -> None:
        client = await bench.connect()
        bench.engine.send(Failed(text="a worker is lost"))
        await until(client.lost.is_set)
        assert client.failure == "a worker is lost"

    run(work)


def test_a_close_tells_the_engine_and_waits_for_it_and_is_no_loss(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("lamina").propagate = True

    async def work(bench: Bench) -> None:
        client = await bench.connect()
        replies = ReplyQueue()
        client.add([1], PARAMS, replies, Quiet())
        await client.close()
        assert bench.handle.joined == [module.JOIN_S]
        got = [await asyncio.to_thread(bench.engine.recv, SOON_S) for _ in range(2)]
        assert isinstance(got[1], Stop)
        await client.close()
        assert client.lost.is_set() is False

    run(work)
    assert not caplog.records


def test_a_kill_is_at_once_and_no_loss(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("lamina").propagate = True

    async def work(bench: Bench) -> None:
        client = await bench.connect()
        client.kill()
        assert bench.handle.joined == [0.0]
        bench.engine.close()
        await until(lambda: client.failure is not None)
        assert not client.lost.is_set()

    run(work, "was killed by SIGKILL")
    assert not caplog.records


def test_a_frame_of_the_largest_size_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    data = msgspec.msgpack.encode(STATE)

    async def work(bench: Bench) -> None:
        client = await bench.connect()
        monkeypatch.setattr(module, "MAX_FRAME", len(data))
        bench.theirs.sendall(struct.pack("<I", len(data)) + data)
        await until(lambda: client.state == STATE)

    run(work)


SPILLED = {"spilled_blocks": {"memory-1": 3.0, "memory-2": 3.0}}


def test_state_and_pool_are_of_the_same_memory_workers() -> None:
    """Memory workers on loan come and go, and their state is reported in several messages."""
    grown = msgspec.structs.replace(READY, num_blocks=[[1], [7, 5]], holders=[[0], [1, 2]])

    async def work(bench: Bench) -> None:
        client = await bench.connect()
        bench.engine.send(msgspec.structs.replace(STATE, free_blocks=[1, 2], metrics=SPILLED))
        await until(lambda: client.state is not None)
        assert client.state is not None
        assert client.state.free_blocks == [1], "another worker is not known yet"
        assert client.state.metrics == {}
        bench.engine.send(ScaleReply(ready=grown))
        await until(lambda: client.ready == grown)
        assert client.state.free_blocks == [1, 5]
        bench.engine.send(msgspec.structs.replace(STATE, free_blocks=[0, 2], metrics=SPILLED))
        await until(lambda: client.state is not None and client.state.free_blocks == [0, 2])
        assert client.state.metrics == SPILLED

    run(work)


def test_who_is_on_which_host_is_what_was_told_last() -> None:
    """So a host is drained by those that are there now, not by those that were lost there."""

    async def work(bench: Bench) -> None:
        client = await bench.connect(msgspec.structs.replace(READY, hosts={"memory-0": "10.0.0.3"}))
        bench.engine.send(WorkerCounters({}, [], {"memory-0": "10.0.0.4"}))
        bench.engine.send(WorkerCounters({"memory-0": {}}))
        await until(lambda: bool(client.counters))
        assert workers_on_host(client.ready, "10.0.0.4") == [0]
        with pytest.raises(ApiError, match="no worker is there; they are on 10.0.0.4"):
            workers_on_host(client.ready, "10.0.0.3")

    run(work)
