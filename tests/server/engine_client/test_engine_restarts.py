"""The server's end of the link when its engine dies: another engine gets the requests that there were, and readers
notice nothing.

Covers: lamina/server/engine_client/engine_requests.py, lamina/server/engine_client/reply_queue.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from test_engine_link import READY, Quiet
from test_flow import until

from lamina.config.engine_config import EngineConfig
from lamina.config.flat_options import flat_options, make_config
from lamina.executor.stall_detector import STOPPED_S
from lamina.protocol.control import MAX_FRAME, ControlLink, Failed, Stop
from lamina.request import ResumedCompletion, SamplingParams
from lamina.scheduler.sessions.cache_options import CacheOptions
from lamina.server.engine_client import engine_client
from lamina.server.engine_client.engine_client import JOIN_S, EngineBusyError, EngineClient, EngineGoneError
from lamina.server.engine_client.engine_restarts import EngineRestarts, PlanFailedError
from lamina.server.engine_client.messages import (
    AddPrompt,
    CancelPrompt,
    Delta,
    EngineDefect,
    EngineState,
    Outputs,
    PromptTimes,
    ResetPrefixCache,
    ScaleMemory,
    ScaleReply,
    SessionsReply,
    SessionsRequest,
    StartEngine,
    WorkerCounters,
    encode_scores,
)
from lamina.server.engine_client.reply_queue import ReplyQueue
from lamina.server.metrics.engine_metrics import EngineMetrics

LIMIT_S = 10.0
TIMES = PromptTimes(0.1, 0.1, 0.1)


def grown(key: int, index: int, tokens: list[int], text: str, scores: Any = None, **more: Any) -> Delta:
    """``scores``: of each token, not encoded."""
    logprobs = None if scores is None else [*map(encode_scores, scores)]
    return Delta(key=key, index=index, token_ids=tokens, text=text, logprobs=logprobs, **more)


class Scripted:
    """An engine that does as the test says; also its handle."""

    role, index, pid, host, is_stopped = "engine", 0, 1, "", False
    status = -signal.SIGKILL

    def __init__(self, most_bytes: int = MAX_FRAME) -> None:
        """``most_bytes``: of a message that it takes."""
        self.sock, theirs = socket.socketpair()
        messages = AddPrompt | CancelPrompt | ResetPrefixCache | SessionsRequest | ScaleMemory | Stop
        self.link = ControlLink(theirs, messages, most_bytes)
        self.joins: list[float] = []  # how long it was waited for

    def exit_reason(self) -> str | None:
        return "was killed by SIGKILL"

    def join(self, timeout_s: float) -> None:
        self.joins.append(timeout_s)
        if not timeout_s:
            self.link.close()

    def asked(self) -> Any:
        return self.link.recv(LIMIT_S)

    def say(self, *deltas: Delta) -> None:
        self.link.send(Outputs(list(deltas)))


class Engines:
    """The first engine, and those that are launched in its place."""

    def __init__(self, **options: Any) -> None:
        self.all, self.most_bytes = [Scripted()], MAX_FRAME
        self.all[0].link.send(READY)
        config = make_config({"transport": "shm", **options})
        self.restarts = EngineRestarts(StartEngine(model="m", tokenizer="", config=config), self.launch)
        self.refusal: Exception | None = None
        self.workers = list[int]()  # memory workers of those that were launched
        self.without = list[list[str]]()  # and the hosts where none of theirs may be

    def launch(self, start: StartEngine) -> Scripted:
        self.workers.append(start.config.topology.memory_workers)
        self.without.append(start.lost_hosts)
        if self.refusal is not None:
            raise self.refusal
        self.all.append(Scripted(self.most_bytes))
        return self.all[-1]

    async def next(self, client: EngineClient) -> Scripted:
        """Another engine, once it has been launched."""
        number = len(self.all)
        await until(lambda: len(self.all) > number or client.lost.is_set())
        return self.all[-1]


def play(work: Callable[[EngineClient, Engines], Awaitable[None]], **options: Any) -> None:
    async def run() -> None:
        engines = Engines(**options)
        client = await EngineClient.connect(engines.all[0], lambda progress: None, engines.restarts)
        try:
            await asyncio.wait_for(work(client, engines), 3 * LIMIT_S)
        finally:
            await client.close()
            for engine in engines.all:
                engine.link.close()

    asyncio.run(run())


async def all_of(replies: ReplyQueue, wanted: int) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    while sum(map(len, found.values())) < wanted:
        for delta in await asyncio.wait_for(replies.get(), LIMIT_S):
            found.setdefault(delta.index, []).extend(delta.token_ids)
    return found


def test_another_engine_is_told_all_that_readers_have() -> None:
    async def work(client: EngineClient, engines: Engines) -> None:
        first, replies, params = engines.all[0], ReplyQueue(), SamplingParams(n=2, logprobs=1, max_tokens=5)
        key = client.add([7, 8], params, replies, Quiet(), cache_options=CacheOptions(b"salt"))
        gone = client.add([9], SamplingParams(seed=3), ReplyQueue(), Quiet())
        ended = client.add([9], SamplingParams(), ReplyQueue(), Quiet())
        asked = [first.asked() for _ in range(3)]
        assert [a.resumed for a in asked] == [[], [], []]
        assert asked[0].params.seed is not None, "what the engine would draw, another one would draw otherwise"
        assert asked[0].params.seed != asked[2].params.seed
        assert asked[1].params.seed == 3
        first.say(
            grown(key, 0, [4, 5], "ab", [[(4, -1.0, 1), (6, -2.0, 1)], [(5, -0.5, 1)]]),
            grown(key, 1, [6], "c", [[(6, -3.0, 1)]], finish_reason="stop", stop_reason=6),
            grown(ended, 0, [1], "x", finish_reason="length", times=TIMES),
        )
        first.say(grown(key, 0, [3], "d", [[(3, -0.25, 1)]]))
        await until(lambda: client.prompts.keys == {key, gone})
        first.link.close()
        second = await engines.next(client)
        assert first.joins == [0.0], "it is ended by force, whatever it does"
        assert client.state is not None
        assert client.state.recovering
        client.cancel(gone)
        late = client.add([2], SamplingParams(), ReplyQueue(), Quiet())
        second.link.send(READY)
        again, new = await asyncio.to_thread(second.asked), await asyncio.to_thread(second.asked)
        assert msgspec.structs.replace(again, resumed=[], accepted=False) == asked[0]
        assert (again.accepted, new.accepted) == (True, False), "who was taken once is not refused for load"
        assert again.cache_options == CacheOptions(b"salt")
        assert again.resumed == [
            ResumedCompletion(index=0, token_ids=[4, 5, 3], num_chars=3),
            ResumedCompletion(index=1, token_ids=[6], num_chars=1, is_finished=True),
        ]
        assert (new.key, new.resumed) == (late, [])
        assert not client.state.recovering
        second.say(grown(key, 0, [2], "e", [[(2, -1.0, 1)]], finish_reason="length", times=TIMES))
        assert await all_of(replies, 5) == {0: [4, 5, 3, 2], 1: [6]}
        assert client.failure is None

    play(work)


def test_log_probabilities_that_readers_have_are_not_told_to_the_next_engine() -> None:
    """Log-probabilities of a long completion are more than a frame holds, and no engine can go on with a link that is
    broken.
    """

    async def work(client: EngineClient, engines: Engines) -> None:
        entry = [(token, -1.0, 1) for token in range(21)]
        key = client.add([7, 8], SamplingParams(logprobs=20), ReplyQueue(), Quiet())
        await asyncio.to_thread(engines.all[0].say, grown(key, 0, [4] * 1000, "", [entry] * 1000))
        engines.most_bytes = 1 << 14
        engines.all[0].link.close()
        second = await engines.next(client)
        second.link.send(READY)
        again = await asyncio.to_thread(second.asked)
        assert [len(told.token_ids) for told in again.resumed] == [1000]

    play(work)


def test_pages_are_forgotten_that_the_next_engine_would_find_beside_its_pools() -> None:
    """A reset that no engine has done is sent to the next one, before all prompts; one that is done is not."""

    async def work(client: EngineClient, engines: Engines) -> None:
        client.reset_prefix_cache()
        engines.all[0].link.close()  # it may have heard, or not
        second = await engines.next(client)
        key = client.add([7], SamplingParams(), ReplyQueue(), Quiet())
        second.link.send(READY)
        reset = await asyncio.to_thread(second.asked)
        assert isinstance(reset, ResetPrefixCache)
        assert (await asyncio.to_thread(second.asked)).key == key
        client.reset_prefix_cache()
        again = await asyncio.to_thread(second.asked)
        second.link.send(reset)
        second.link.close()
        third = await engines.next(client)
        client.reset_prefix_cache()
        third.link.send(READY)
        last = await asyncio.to_thread(third.asked)
        assert isinstance(last, ResetPrefixCache)
        assert last not in (reset, again), "one for both"
        assert (await asyncio.to_thread(third.asked)).key == key
        third.link.send(last)
        third.link.close()
        third = await engines.next(client)
        third.link.send(READY)
        assert (await asyncio.to_thread(third.asked)).key == key

    play(work)


def test_a_question_about_sessions_that_crosses_a_death_is_not_waited_for() -> None:
    """No other engine hears of it."""

    async def work(client: EngineClient, engines: Engines) -> None:
        asked = asyncio.create_task(client.query(SessionsRequest(0, b"tenant")))
        assert isinstance(await asyncio.to_thread(engines.all[0].asked), SessionsRequest)
        engines.all[0].link.close()
        with pytest.raises(EngineGoneError, match="was killed by SIGKILL"):
            await asyncio.wait_for(asked, LIMIT_S)
        await until(lambda: len(engines.all) > 1)
        second = engines.all[-1]
        second.link.send(READY)
        await until(lambda: client.is_ready)
        asked = asyncio.create_task(client.query(SessionsRequest(0, b"tenant")))
        number = (await asyncio.to_thread(second.asked)).number
        second.link.send(SessionsReply(number, []))
        assert await asyncio.wait_for(asked, LIMIT_S) == SessionsReply(number, [])

    async def last(client: EngineClient, engines: Engines) -> None:
        asked = asyncio.create_task(client.query(SessionsRequest(0, b"tenant")))
        await asyncio.to_thread(engines.all[0].asked)
        engines.all[0].link.send(Failed(text="out of order"))
        with pytest.raises(EngineGoneError, match="out of order"):
            await asyncio.wait_for(asked, LIMIT_S)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_client, "ANSWER_S", 10 * LIMIT_S)
        play(work)
        play(last)


READY_TWICE = msgspec.structs.replace(READY, num_blocks=[[5, 3], [4, 9]])
STATE = EngineState(running=1, waiting=2, free_blocks=[3, 2], evictable_blocks=[1, 1], steps=5)


@pytest.mark.parametrize("before", [None, STATE])
def test_what_is_known_while_another_one_starts(before: EngineState | None, caplog: pytest.LogCaptureFixture) -> None:
    """The last state, or that nothing runs and all blocks are free. The old link is shut."""
    logging.getLogger("lamina").propagate = True

    async def work(client: EngineClient, engines: Engines) -> None:
        first = engines.all[0]
        client.ready = READY_TWICE
        if before is not None:
            first.link.send(before)
            await until(lambda: client.state == before)
        with contextlib.suppress(OSError):
            first.sock.shutdown(socket.SHUT_RD)
        second = await engines.next(client)
        known = before or EngineState(running=0, waiting=0, free_blocks=[3, 4], steps=0)
        assert client.state == msgspec.structs.replace(known, recovering=True)
        await until(lambda: first.sock.fileno() < 0)
        key = client.add([7], SamplingParams(), ReplyQueue(), Quiet())
        client.cancel(key)
        second.link.send(READY_TWICE)
        await until(lambda: client.state == known)
        again = client.add([8], SamplingParams(), ReplyQueue(), Quiet())
        assert (await asyncio.to_thread(second.asked)).key == again, "nobody heard of the one that was cancelled"
        assert client.seconds_without_progress < LIMIT_S

    play(work)
    assert [r.getMessage() for r in caplog.records if r.name == "lamina.server.engine_client.engine_client"] == [
        "the engine process (pid 1) was killed by SIGKILL; another one replaces it, and all requests go on"
    ]


def test_the_log_says_that_requests_go_on_and_after_how_long(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted from the loss of the engine that served last: one that dies as it starts is a part of the pause."""
    logging.getLogger("lamina").propagate = True
    caplog.set_level(logging.INFO, logger="lamina")
    now = [100.0]
    monkeypatch.setattr("lamina.server.engine_client.engine_restarts.time", SimpleNamespace(monotonic=lambda: now[0]))

    async def work(client: EngineClient, engines: Engines) -> None:
        both = ReplyQueue()  # of a request with two prompts
        for replies in (both, both, ReplyQueue()):
            client.add([7], SamplingParams(), replies, Quiet())
        engines.all[0].link.close()
        second = await engines.next(client)
        now[0] += 2.0
        second.link.close()
        third = await engines.next(client)
        now[0] += 1.5
        third.link.send(READY)
        keys = {(await asyncio.to_thread(third.asked)).key for _ in range(3)}
        assert keys == {0, 1, 2}
        for key in (0, 1):
            client.cancel(key)
        third.link.close()
        (await engines.next(client)).link.send(READY)
        await until(lambda: client.state is not None and not client.state.recovering)

    play(work, max_recoveries=3)
    assert [r.getMessage() for r in caplog.records if r.levelname == "INFO"] == [
        "another engine continues 2 requests, 3.5 s after the last one ended",
        "another engine continues 1 request, 0.0 s after the last one ended",
    ]


def test_one_too_many_ends_it_and_names_the_option() -> None:
    async def work(client: EngineClient, engines: Engines) -> None:
        for _ in range(2):
            engine = engines.all[-1]
            engine.link.close()
            (await engines.next(client)).link.send(READY)
            await until(lambda: client.state is not None and not client.state.recovering)
        engines.all[-1].link.close()
        await until(client.lost.is_set)
        assert client.failure is not None
        assert client.failure.endswith("was killed by SIGKILL; --max-recoveries 2 allows no other one in ten minutes")
        assert len(engines.all) == 3

    play(work, max_recoveries=2)


def test_one_that_dies_whenever_it_starts_is_not_started_for_ever() -> None:
    async def work(client: EngineClient, engines: Engines) -> None:
        for _ in range(3):
            engine = engines.all[-1]
            engine.link.close()
            await engines.next(client)
        engines.all[-1].link.close()
        await until(client.lost.is_set)
        assert len(engines.all) == 4

    play(work, max_recoveries=3)


def final(how: Callable[[Engines], None], words: str, **options: Any) -> None:
    async def work(client: EngineClient, engines: Engines) -> None:
        replies = ReplyQueue()
        client.add([7], SamplingParams(), replies, Quiet())
        how(engines)
        await until(client.lost.is_set)
        assert client.failure is not None
        assert words in client.failure
        assert len(engines.all) == 1
        with pytest.raises(EngineGoneError) as told:
            await asyncio.wait_for(replies.get(), LIMIT_S)
        assert words in str(told.value)
        joins = list(engines.all[0].joins)
        await client.close()
        assert engines.all[0].joins == [*joins, JOIN_S], "it may still give back what it has"

    play(work, **options)


def test_an_engine_that_says_why_it_ends_is_the_last_one() -> None:
    final(lambda engines: engines.all[0].link.send(Failed(text="memory worker 0: out of order")), "out of order")


def test_one_that_has_failed_by_a_defect_of_its_own_is_followed_by_another(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("lamina").propagate = True

    async def work(client: EngineClient, engines: Engines) -> None:
        key = client.add([7], SamplingParams(), ReplyQueue(), Quiet())
        first = engines.all[0]
        await asyncio.to_thread(first.asked)
        first.link.send(EngineDefect("engine: KeyError: 'x'"))
        second = await engines.next(client)
        second.link.send(READY)
        assert (await asyncio.to_thread(second.asked)).key == key
        second.link.send(EngineDefect("engine: KeyError: 'y'"))
        await until(client.lost.is_set)
        assert client.failure == "engine: KeyError: 'y'; --max-recoveries 1 allows no other one in ten minutes"

    play(work, max_recoveries=1)
    assert "engine: KeyError: 'x'; another one replaces it, and all requests go on" in caplog.text


Sizes = dict[str, Any]
FEWER: dict[str, tuple[Sizes, dict[str, int], Sizes, str]] = {
    "memory": ({"memory_workers": 3}, {"memory_workers": 2}, {"memory_workers": 2}, "--memory-workers 2"),
    "ranks": (  # of which each has as many
        {"memory_workers": 4, "tensor_parallel_size": 2}, {"memory_workers": 3}, {"memory_workers": 2},
        "--memory-workers 2",
    ),
    "prefill": ({"prefill_workers": 2}, {"prefill_workers": 1}, {"prefill_workers": 1}, "--prefill-workers 1"),
    "stages": (
        {"prefill_workers": 4, "prefill_pipeline": 2}, {"prefill_workers": 3}, {"prefill_workers": 2},
        "--prefill-workers 2",
    ),
    "no prefill": (
        {"prefill_workers": 2, "prefill_pipeline": 2, "prefill_kv_memory": "1GiB"}, {"prefill_workers": 1},
        {"prefill_workers": 0, "prefill_pipeline": 1},
        "--prefill-workers 0 --prefill-pipeline 1 --prefill-kv-memory auto",
    ),
    "both": (
        {"memory_workers": 2, "prefill_workers": 1}, {"memory_workers": 1, "prefill_workers": 0},
        {"memory_workers": 1, "prefill_workers": 0}, "--memory-workers 1 --prefill-workers 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FEWER)
def test_one_whose_workers_have_no_room_is_followed_by_one_with_fewer(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It starts as many workers as are left; workers of one tensor-parallel group start together or not at all.

    So it goes on after the next death, too.
    """
    options, left, wanted, words = FEWER[case]

    async def work(client: EngineClient, engines: Engines) -> None:
        key = client.add([7], SamplingParams(), ReplyQueue(), Quiet())
        engines.all[0].link.send(
            Failed(text="10.0.0.3 is lost, and no host has room", workers_that_fit=left, lost_hosts=["n3"])
        )
        second = await engines.next(client)
        assert client.state is not None
        assert client.state.recovering
        second.link.send(READY)
        assert (await asyncio.to_thread(second.asked)).key == key
        assert not client.lost.is_set()
        assert client.config is not None
        assert flat_options(client.config).items() >= wanted.items()
        second.link.close()
        await engines.next(client)
        assert engines.workers == [client.config.topology.memory_workers] * 2
        assert engines.without == [["n3"]] * 2
        assert f"the server continues with {words}: run `lamina-launch scale`" in caplog.text

    with caplog.at_level(logging.WARNING):
        play(work, **options)


def test_gauges_are_of_the_workers_that_the_next_engine_has() -> None:
    """Also before that says how many blocks are free: else /metrics fails, and the lines of the log end for good."""

    async def work(client: EngineClient, engines: Engines) -> None:
        client.ready = READY_TWICE
        engines.all[0].link.send(STATE)
        await until(lambda: client.state == STATE)
        engines.all[0].link.send(Failed(text="no host has room", workers_that_fit={"memory_workers": 1}))
        (await engines.next(client)).link.send(READY)
        await until(lambda: client.state is not None and not client.state.recovering)
        gauges = EngineMetrics(client, {"model_name": "m"})
        assert gauges.kv_usage == 0.0
        assert list(gauges.collect())

    play(work, memory_workers=2)


@pytest.mark.parametrize(
    ("options", "left"),
    [({}, 0), ({"tensor_parallel_size": 2}, 1), ({"partition": "head", "kv_parity": 1}, 1)],
    ids=["none is left", "too few for the ranks", "no parity of one"],
)
def test_where_nothing_can_go_on_with_those_that_are_left_it_is_the_last_one(
    options: dict[str, Any], left: int
) -> None:
    failed = Failed(text="no host has room", workers_that_fit={"memory_workers": left})
    final(lambda engines: engines.all[0].link.send(failed), "no host has room", memory_workers=2, **options)


def test_so_is_one_whose_workers_others_start() -> None:
    final(lambda engines: engines.all[0].link.close(), "was killed", launcher="static", transport="tcp")


def test_so_is_one_that_may_not_recover() -> None:
    final(lambda engines: engines.all[0].link.close(), "was killed", max_recoveries=0)


def test_so_is_one_in_whose_place_no_other_can_start() -> None:
    def how(engines: Engines) -> None:
        engines.refusal = OSError("no more processes")
        engines.all[0].link.close()

    final(how, "was killed by SIGKILL; another engine cannot start: no more processes")


def test_so_is_one_whose_restart_fails_in_a_way_that_nobody_expects() -> None:
    """Its readers get an error, and the server ends with status 1."""

    def how(engines: Engines) -> None:
        engines.refusal = RuntimeError("a mistake")
        engines.all[0].link.close()

    final(how, "cannot continue with its engine: RuntimeError: a mistake")


@pytest.mark.parametrize("idle", [True, False])
def test_one_that_is_stopped_is_replaced_whether_or_not_something_is_asked_of_it(idle: bool) -> None:
    """Else /health would say for ever that it makes no progress, and no request would show it."""

    async def work(client: EngineClient, engines: Engines) -> None:
        key = 0 if idle else client.add([7], SamplingParams(), ReplyQueue(), Quiet())
        engines.all[0].is_stopped = True
        began = time.monotonic()
        second = await engines.next(client)
        assert time.monotonic() - began >= STOPPED_S
        second.link.send(READY)
        if not idle:
            assert (await asyncio.to_thread(second.asked)).key == key

    play(work)


def test_one_that_never_gets_ready_is_not_waited_for_for_ever() -> None:
    async def work(client: EngineClient, engines: Engines) -> None:
        engines.all[0].link.close()
        await until(client.lost.is_set)
        assert (client.failure or "").endswith("another engine took too long to start (--start-timeout-s 0.1)")

    play(work, start_timeout_s=0.1)


def test_its_workers_have_gone_before_another_one_takes_their_memory() -> None:
    async def work(client: EngineClient, engines: Engines) -> None:
        worker = await asyncio.create_subprocess_exec("sleep", "60")
        engines.all[0].link.send(WorkerCounters({"memory-0": {}}, [worker.pid]))
        await until(lambda: bool(client.counters))
        engines.all[0].link.close()
        await until(lambda: bool(engines.all[0].joins))
        assert len(engines.all) == 1
        worker.kill()
        await worker.wait()
        await until(lambda: len(engines.all) == 2)

    play(work)


def with_workers(engines: Engines, count: int) -> EngineConfig:
    """With a pipeline too, so that no engine can change in place."""
    return make_config(flat_options(engines.restarts.config) | {"memory_workers": count, "pipeline": 2})


def test_by_plan_another_engine_goes_on_with_other_workers_and_no_recovery_is_spent() -> None:
    async def work(client: EngineClient, engines: Engines) -> None:
        replies = ReplyQueue()
        key = client.add([7], SamplingParams(), replies, Quiet())
        await asyncio.to_thread(engines.all[0].asked)
        changing = asyncio.create_task(client.replace_engine(with_workers(engines, 3)))
        assert isinstance(await asyncio.to_thread(engines.all[0].asked), Stop)
        with pytest.raises(EngineBusyError):
            await client.replace_engine(with_workers(engines, 4))
        engines.all[0].say(grown(key, 0, [5], "a"))  # what it had on its way is heard
        engines.all[0].link.close()
        second = await engines.next(client)
        assert not changing.done()
        second.link.send(READY)
        assert await changing >= 0.0
        add = await asyncio.to_thread(second.asked)
        assert (add.key, [told.token_ids for told in add.resumed]) == (key, [[5]])
        assert engines.workers == [3]

    play(work, max_recoveries=0)


def test_an_engine_that_fails_as_it_ends_by_plan_is_not_the_last_one(caplog: pytest.LogCaptureFixture) -> None:
    """Such as by a worker that fails in that moment, or by a trace that finds no room: another one comes anyway."""

    async def work(client: EngineClient, engines: Engines) -> None:
        key = client.add([7], SamplingParams(), ReplyQueue(), Quiet())
        await asyncio.to_thread(engines.all[0].asked)
        changing = asyncio.create_task(client.replace_engine(with_workers(engines, 3)))
        assert isinstance(await asyncio.to_thread(engines.all[0].asked), Stop)
        engines.all[0].link.send(Failed(text="memory worker 0: out of memory"))
        second = await engines.next(client)
        assert not client.lost.is_set()
        second.link.send(READY)
        assert await changing >= 0.0
        assert (await asyncio.to_thread(second.asked)).key == key
        assert engines.workers == [3]

    with caplog.at_level(logging.WARNING):
        play(work, max_recoveries=0)
    assert "the engine ends, as planned (memory worker 0: out of memory); another one" in caplog.text


@pytest.mark.parametrize("in_place", [True, False])
def test_memory_workers_alone_change_in_place_unless_the_engine_says_that_they_cannot(in_place: bool) -> None:
    async def work(client: EngineClient, engines: Engines) -> None:
        wanted = make_config(flat_options(engines.restarts.config) | {"memory_workers": 3})
        changing = asyncio.create_task(client.replace_engine(wanted))
        assert await asyncio.to_thread(engines.all[0].asked) == ScaleMemory(3)
        with pytest.raises(EngineBusyError):
            await client.replace_engine(wanted)
        if in_place:
            engines.all[0].link.send(ScaleReply(pause_s=0.25, ready=READY))
            assert await changing == 0.25
            assert engines.restarts.config == wanted
            return
        engines.all[0].link.send(ScaleReply(error="the store is on a GPU", in_place=False))
        assert isinstance(await asyncio.to_thread(engines.all[0].asked), Stop)
        engines.all[0].link.close()
        second = await engines.next(client)
        second.link.send(READY)
        assert await changing >= 0.0
        assert engines.workers == [3]

    play(work, max_recoveries=0)


def test_of_two_changes_that_come_at_once_one_is_refused_and_none_waits_forever() -> None:
    async def work(client: EngineClient, engines: Engines) -> None:
        wanted = make_config(flat_options(engines.restarts.config) | {"memory_workers": 3})
        both = [asyncio.create_task(client.replace_engine(wanted)) for _ in range(2)]
        assert await asyncio.to_thread(engines.all[0].asked) == ScaleMemory(3)
        engines.all[0].link.send(ScaleReply(pause_s=0.25, ready=READY))
        first, second = await asyncio.wait_for(asyncio.gather(*both, return_exceptions=True), LIMIT_S)
        assert first == 0.25
        assert isinstance(second, EngineBusyError)

    play(work, max_recoveries=0)


def test_an_engine_that_says_why_it_ends_answers_whoever_waits_for_a_change() -> None:
    """Else an operator would wait until the server has ended, and hear nothing then."""

    async def work(client: EngineClient, engines: Engines) -> None:
        wanted = make_config(flat_options(engines.restarts.config) | {"memory_workers": 3})
        changing = asyncio.create_task(client.replace_engine(wanted))
        assert await asyncio.to_thread(engines.all[0].asked) == ScaleMemory(3)
        engines.all[0].link.send(Failed(text="memory worker 0: no memory is left"))
        with pytest.raises(PlanFailedError, match="no memory is left"):
            await asyncio.wait_for(changing, LIMIT_S)
        assert client.lost.is_set()

    play(work)


def test_where_no_engine_starts_as_planned_one_goes_on_as_before() -> None:
    async def work(client: EngineClient, engines: Engines) -> None:
        before = engines.restarts.config.topology.memory_workers
        key = client.add([7], SamplingParams(), ReplyQueue(), Quiet())
        changing = asyncio.create_task(client.replace_engine(with_workers(engines, 3)))
        await until(lambda: engines.restarts.is_planned)
        engines.all[0].link.close()
        second = await engines.next(client)
        second.link.send(Failed(text="--kv-cache-memory-bytes: too little", user_error=True))
        third = await engines.next(client)
        third.link.send(READY)
        with pytest.raises(PlanFailedError, match="--kv-cache-memory-bytes: too little"):
            await changing
        assert (await asyncio.to_thread(third.asked)).key == key
        assert engines.workers == [3, before]
        assert client.failure is None

    play(work, max_recoveries=0)


def test_an_engine_that_does_not_end_as_planned_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamina.server.engine_client.engine_client.JOIN_S", 0.1)

    async def work(client: EngineClient, engines: Engines) -> None:
        changing = asyncio.create_task(client.replace_engine(with_workers(engines, 3)))
        second = await engines.next(client)
        second.link.send(READY)
        assert await changing >= 0.1

    play(work)


def test_a_change_that_nobody_has_asked_for_is_no_answer_to_whoever_waits_for_one() -> None:
    """Parts of the work may become others as an operator scales."""

    async def work(client: EngineClient, engines: Engines) -> None:
        wanted = make_config(flat_options(engines.restarts.config) | {"memory_workers": 3})
        changing = asyncio.create_task(client.replace_engine(wanted))
        assert await asyncio.to_thread(engines.all[0].asked) == ScaleMemory(3)
        fewer = msgspec.structs.replace(READY, num_blocks=[[7]])
        engines.all[0].link.send(ScaleReply(pause_s=0.5, ready=fewer, was_requested=False))
        await until(lambda: client.ready.num_blocks == [[7]])
        assert not changing.done()
        engines.all[0].link.send(ScaleReply(pause_s=0.25, ready=READY))
        assert await changing == 0.25

    play(work, max_recoveries=0)
