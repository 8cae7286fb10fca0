"""AsyncLLM over an engine with a fake wire: many callers, one batch, and ends of every kind. No test sleeps.

Covers: lamina/engine/engine_thread.py.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_executor import FakeWire, continuation
from test_streams import FULL, FakeFront, tokens

from lamina import AsyncLLM, RequestOutput
from lamina.engine.streams import EngineRequest
from lamina.protocol.control import RunRound, StepDone
from lamina.protocol.executor import WorkerError

LIMIT_S = 20.0


class Wire(FakeWire):
    """``gate``: a step for each release, where it is closed. ``broken``: what the next step raises."""

    def __init__(self) -> None:
        super().__init__()
        self.gate: threading.Semaphore | None = None
        self.broken: Exception | None = None
        self.most_rows = 0

    def submit(self, new: RunRound) -> None:
        self.most_rows = max(self.most_rows, *(s.plan.num_rows for s in new.steps))
        super().submit(new)

    def wait(self) -> StepDone:
        if self.gate is not None and not self.gate.acquire(timeout=LIMIT_S):
            raise AssertionError("the test gave no step")
        if self.broken is not None:
            raise self.broken
        return super().wait()

    def check_workers(self) -> None:
        if self.broken is not None:
            raise self.broken

    def close(self) -> None:
        super().close()
        if self.gate is not None:
            self.broken = WorkerError("the wire was closed")
            self.gate.release()


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., AsyncLLM]]:
    monkeypatch.setattr("lamina.api.async_llm.Frontend", FakeFront)
    made = []

    def make(wire: Wire | None = None, **options: Any) -> AsyncLLM:
        made.append(AsyncLLM(wire or Wire(), **options))
        return made[-1]

    yield make
    for llm in made:
        llm.shutdown()
        assert not llm.engine_thread.thread.is_alive()


async def last(llm: AsyncLLM, prompt: list[int], count: int, name: str | None = None) -> RequestOutput:
    return [output async for output in llm.generate(prompt, tokens(count), name)][-1]


def test_a_tokenizer_that_fails_ends_its_own_request_alone(
    make: Callable[..., AsyncLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make()
    ask = FakeFront.engine_request

    def asks(front: FakeFront, prompt: Any, params: Any) -> EngineRequest:
        def fails() -> Any:
            raise IndexError("piece id is out of range.")

        asked = ask(front, prompt, params)
        return (
            EngineRequest(prompt=asked.prompt, params=asked.params, make_detokenizer=fails) if prompt == [7] else asked
        )

    monkeypatch.setattr(FakeFront, "engine_request", asks)

    async def both() -> RequestOutput:
        with pytest.raises(IndexError, match=r"^piece id is out of range\.$"):
            await last(llm, [7], 3)
        return await last(llm, [1, 2], 3)

    found = asyncio.run(asyncio.wait_for(both(), 30))  # a thread that died would answer no caller
    assert found.outputs[0].token_ids == continuation([1, 2], 3)


def idle(llm: AsyncLLM) -> threading.Event:
    """Set when the engine has nothing left."""
    event, settle = threading.Event(), llm.front.engine.release_idle_blocks

    def settled() -> None:
        settle()
        event.set()

    llm.front.engine.release_idle_blocks = settled  # type: ignore[method-assign]
    return event


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, LIMIT_S))


def test_many_callers_are_decoded_together(make: Callable[..., AsyncLLM]) -> None:
    wire = Wire()
    wire.gate = threading.Semaphore(0)
    llm = make(wire)
    prompts = [[i + 1, i + 2] for i in range(12)]

    async def all_of_them() -> list[RequestOutput]:
        streams = [llm.generate(p, tokens(9), f"r{i}") for i, p in enumerate(prompts)]
        assert wire.gate
        wire.gate.release(1000)

        async def end(stream: Any) -> RequestOutput:
            return [o async for o in stream][-1]

        return list(await asyncio.gather(*map(end, streams)))

    outputs = run(all_of_them())
    assert [o.outputs[0].token_ids for o in outputs] == [continuation(p, 9) for p in prompts]
    assert [o.request_id for o in outputs] == [f"r{i}" for i in range(12)]
    assert wire.most_rows >= 12
    assert not llm.live


def test_two_event_loops_share_one_engine(make: Callable[..., AsyncLLM]) -> None:
    llm, found = make(), []

    def caller(i: int) -> None:
        found.append((i, run(last(llm, [i], 30)).outputs[0].token_ids))

    threads = [threading.Thread(target=caller, args=(i,)) for i in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert sorted(found) == [(i, continuation([i], 30)) for i in range(1, 5)]


@pytest.mark.parametrize("end", ["break", "aclose", "cancel", "drop"])
def test_a_reader_that_goes_cancels_its_request(end: str, make: Callable[..., AsyncLLM]) -> None:
    wire = Wire()
    llm = make(wire)
    done = idle(llm)

    async def read(stream: Any, first: asyncio.Event) -> None:
        async for _ in stream:
            first.set()

    async def go() -> None:
        wire.gate = threading.Semaphore(4)  # some steps, far from all
        stream: Any = llm.generate([1, 2], tokens(100), "mine")
        if end == "break":
            async for _ in stream:
                break
        elif end == "aclose":
            await anext(stream)
            await stream.aclose()
            await stream.aclose()
            assert [o async for o in stream] == []
        elif end == "cancel":
            task = asyncio.create_task(read(stream, first := asyncio.Event()))
            await first.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        del stream
        gc.collect()
        assert not llm.live
        done.clear()
        wire.gate.release(10)  # for what is in flight, far from what 100 tokens take
        while not done.wait(0):
            await asyncio.to_thread(done.wait, LIMIT_S)

    run(go())
    assert not llm.front.engine.has_work
    assert llm.front.engine.free_blocks == FULL
    assert not llm.front.streams.collectors


def test_who_reads_slowly_gets_what_has_grown_and_no_queue(make: Callable[..., AsyncLLM]) -> None:
    wire = Wire()
    wire.gate = threading.Semaphore(5)  # not all of it, however late the reader is
    llm = make(wire)

    async def go() -> None:
        stream, done = llm.generate([1, 2], tokens(100)), idle(llm)
        once = await anext(stream)
        assert wire.gate
        wire.gate.release(200)
        await asyncio.to_thread(done.wait, LIMIT_S)
        assert len(stream.collector.grown) <= 1
        rest = [o async for o in stream]
        assert len(rest) == 1
        assert 1 <= len(once.outputs[0].token_ids) <= 5
        assert rest[0].outputs[0].token_ids == continuation([1, 2], 100)

    run(go())


def test_abort_ends_the_iterator_with_what_there_is(make: Callable[..., AsyncLLM]) -> None:
    wire = Wire()
    wire.gate = threading.Semaphore(5)
    llm = make(wire)

    async def go() -> list[RequestOutput]:
        outputs = []
        async for output in llm.generate([1, 2], tokens(100), "mine"):
            if not outputs:
                await llm.abort("yours")
                await llm.abort("mine")
                assert wire.gate
                wire.gate.release(1)
            outputs.append(output)
        return outputs

    outputs = run(go())
    assert outputs[-1].outputs[0].finish_reason == "abort"
    assert outputs[-1].finished
    assert outputs[-1].times.finished_s is not None
    ids = outputs[-1].outputs[0].token_ids
    assert 0 < len(ids) < 10
    assert ids == continuation([1, 2], len(ids))
    wire.gate.release(100)


def test_a_name_is_taken_until_its_request_ends(make: Callable[..., AsyncLLM]) -> None:
    wire = Wire()
    wire.gate = threading.Semaphore(0)
    llm = make(wire)

    async def go() -> None:
        stream = llm.generate([1], tokens(3), "mine")
        with pytest.raises(ValueError, match="request_id 'mine' is in use"):
            llm.generate([1], tokens(3), "mine")
        assert wire.gate
        wire.gate.release(1000)
        assert [o async for o in stream]
        assert (await last(llm, [1], 3, "mine")).request_id == "mine"

    run(go())


@pytest.mark.parametrize("prompt", [[1000], [1] * 128])
def test_a_bad_prompt_is_its_readers_alone(prompt: list[int], make: Callable[..., AsyncLLM]) -> None:
    llm = make()

    async def go() -> None:
        good = llm.generate([1], tokens(5))
        with pytest.raises(ValueError, match="vocabulary|--max-model-len"):
            await last(llm, prompt, 3)
        assert [o async for o in good][-1].outputs[0].token_ids == continuation([1], 5)

    run(go())


@pytest.mark.parametrize("bad", [([[1], [2]], None, "one prompt, not 2"), ([1], "hot", "must be a SamplingParams")])
def test_a_bad_call_is_refused_at_once(bad: Any, make: Callable[..., AsyncLLM]) -> None:
    with pytest.raises(ValueError, match=bad[2]):
        make().generate(bad[0], bad[1])


@pytest.mark.parametrize("error", [WorkerError("memory worker 1 (pid 7) was killed by SIGKILL"), KeyError("oh")])
def test_the_engines_death_wakes_everybody(error: Exception, make: Callable[..., AsyncLLM]) -> None:
    wire = Wire()
    wire.gate = threading.Semaphore(2)
    llm = make(wire)

    async def go() -> list[Any]:
        readers = [asyncio.create_task(last(llm, [i + 1], 50)) for i in range(5)]
        unread = llm.generate([1], tokens(50))
        await anext(llm.generate([1], tokens(50)))
        wire.broken = error
        assert wire.gate
        wire.gate.release(100)
        found = await asyncio.gather(*readers, return_exceptions=True)
        with pytest.raises(WorkerError):
            [o async for o in unread]
        assert [o async for o in unread] == []
        return found

    found = run(go())
    assert [type(e) for e in found] == [WorkerError] * 5
    assert all(str(error) in str(e) for e in found)
    assert llm.errored
    assert not llm.is_running
    assert str(error) in str(llm.dead_error)
    with pytest.raises(WorkerError):
        llm.generate([1])
    with pytest.raises(WorkerError):
        run(llm.check_health())
    assert wire.is_closed


def test_shutdown_ends_everybody_though_a_step_hangs(
    make: Callable[..., AsyncLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lamina.engine.engine_thread.JOIN_S", 0.05)
    wire = Wire()
    wire.gate = threading.Semaphore(0)
    llm = make(wire)

    async def go() -> None:
        async with llm:
            readers = [asyncio.create_task(last(llm, [i + 1], 50)) for i in range(5)]
            await asyncio.sleep(0)  # they ask
            await llm.check_health()
        for reader in readers:
            with pytest.raises(ValueError, match="this AsyncLLM is closed"):
                await reader

    run(go())
    llm.engine_thread.thread.join(LIMIT_S)
    assert wire.is_closed
    assert not llm.errored
    assert llm.is_stopped
    for call in (lambda: llm.generate([1]), lambda: run(llm.check_health())):
        with pytest.raises(ValueError, match="closed"):
            call()
    llm.shutdown()


def test_one_that_nobody_holds_ends(make: Callable[..., AsyncLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamina.api.async_llm.Frontend", FakeFront)
    wire = Wire()
    llm = AsyncLLM(wire)
    thread = llm.engine_thread.thread
    unread = llm.generate([1], tokens(3))
    del llm
    gc.collect()
    assert thread.is_alive(), "a stream holds it"
    del unread
    gc.collect()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert wire.is_closed


def test_a_worker_that_is_lost_while_nothing_is_decoded_is_noticed(
    make: Callable[..., AsyncLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lamina.engine.engine_thread.IDLE_S", 0.01)
    wire = Wire()
    llm = make(wire)
    run(last(llm, [1], 3))
    wire.broken = WorkerError("memory worker 0 (pid 7) was killed by SIGKILL")
    llm.engine_thread.thread.join(LIMIT_S)
    assert llm.errored


def test_behind_a_reset_nothing_is_found(make: Callable[..., AsyncLLM]) -> None:
    """Also of what runs while it comes."""

    async def work() -> None:
        wire = Wire()
        llm = make(wire, enable_prefix_caching=True)

        async def cached() -> int | None:
            outputs = [output async for output in llm.generate([5] * 30, tokens(3))]
            return outputs[-1].num_cached_tokens

        assert [await cached(), await cached()] == [0, 29]
        assert await llm.reset_prefix_cache()
        assert [await cached(), await cached()] == [0, 29]
        gate = wire.gate = threading.Semaphore(1)
        runs = llm.generate([5] * 30, tokens(9))
        await anext(runs)
        assert await llm.reset_prefix_cache()
        for _ in range(40):
            gate.release()
        assert [output async for output in runs]
        wire.gate = None
        gate.release()
        assert await cached() == 0
        llm.shutdown()
        with pytest.raises(ValueError, match="closed"):
            await llm.reset_prefix_cache()

    asyncio.run(asyncio.wait_for(work(), LIMIT_S))


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_priority_is_taken_where_it_counts(policy: str, make: Callable[..., AsyncLLM]) -> None:
    async def last(llm: AsyncLLM) -> list[int]:
        return [o async for o in llm.generate([5], tokens(3), priority=-2)][-1].outputs[0].token_ids

    if policy == "priority":
        assert asyncio.run(last(make(scheduling_policy=policy))) == continuation([5], 3)
    else:
        with pytest.raises(ValueError, match="^priority needs --scheduling-policy priority, because "):
            asyncio.run(last(make(scheduling_policy=policy)))
