"""Streams of an LLM whose engine has a fake wire: the order of outputs of each reader, and that nothing is
left over.
"""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
from fake_executor import FakeWire, Letters, continuation

from lamina import LLM, SamplingParams
from lamina.api.frontend import Frontend
from lamina.config.flat_options import make_config
from lamina.engine.engine import Engine
from lamina.engine.streams import EngineRequest, RequestOutputCollector, RequestStreams

FULL = (64,)  # blocks of the wire


class FakeFront(Frontend):
    """A front with everything but workers."""

    def __init__(
        self, model: Any, tokenizer: Any, progress: bool, options: dict[str, Any], engine_class: Any = Engine
    ) -> None:
        self.pools: Any = model
        self.engine = Engine(self.pools, make_config(options))
        self.tokenizer = tokenizer
        self.streams = RequestStreams(self.engine)

    def engine_request(self, prompt: str | list[int], params: SamplingParams) -> EngineRequest:
        assert isinstance(prompt, list)
        return EngineRequest(prompt=prompt, params=params, make_detokenizer=Letters)


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> LLM:
    monkeypatch.setattr("lamina.api.llm.Frontend", FakeFront)
    return LLM(FakeWire())


def tokens(count: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True, **more)


def test_streams_that_are_read_one_after_the_other_both_end(llm: LLM) -> None:
    first, second = llm.stream([[1, 2], [3]], tokens(9)), llm.stream([4, 5], tokens(12))
    found = {o.request_id: o for stream in (first, second) for o in stream}
    assert [o.outputs[0].token_ids for o in found.values()] == [
        continuation([1, 2], 9), continuation([3], 9), continuation([4, 5], 12)
    ]  # fmt: skip
    assert all(o.finished for o in found.values())


def test_none_is_queued_beside_one_that_a_tokenizer_cannot_show(llm: LLM) -> None:
    def fails() -> Any:
        raise IndexError("piece id is out of range.")

    asked = [
        EngineRequest(prompt=[1, 2], params=tokens(9), make_detokenizer=Letters),
        EngineRequest(prompt=[3], params=tokens(9), make_detokenizer=fails),
    ]
    with pytest.raises(IndexError):
        llm.front.streams.add(asked, RequestOutputCollector(2))
    assert llm.engine.scheduler.num_waiting == 0
    assert not llm.engine.has_work


def test_a_stream_queues_its_requests_at_the_call(llm: LLM) -> None:
    stream = llm.stream([1, 2], tokens(9))
    assert llm.engine.scheduler.num_waiting == 1
    assert llm.engine.has_work
    stream.close()
    assert not llm.engine.has_work


@pytest.mark.parametrize("read", [0, 1, 5])
@pytest.mark.parametrize("end", ["close", "drop", "with", "break"])
def test_a_stream_that_ends_early_leaves_nothing(llm: LLM, read: int, end: str) -> None:
    stream: Any = llm.stream([[1, 2]] * 3, tokens(30))
    for _ in range(read):
        next(stream)
    if end == "close":
        stream.close()
        stream.close()
        assert list(stream) == []
    elif end == "with":
        with stream:
            pass
    elif end == "break":
        for _ in stream:
            break
    del stream
    gc.collect()
    assert not llm.engine.has_work
    assert llm.engine.free_blocks == FULL
    assert llm.engine.scheduler.num_running == llm.engine.scheduler.num_waiting == 0
    assert not llm.front.streams.collectors


def test_who_looks_late_gets_one_output_with_all_that_has_grown(llm: LLM) -> None:
    slow = llm.stream([1, 2], tokens(20))
    once = next(slow)
    llm.generate([7], tokens(6))
    grown, after = next(slow), next(slow)
    counts = [len(o.outputs[0].token_ids) for o in (once, grown, after)]
    assert counts[0] == 1
    assert counts[1] > 3
    assert counts[2] == counts[1] + 1
    assert list(slow)[-1].outputs[0].token_ids == continuation([1, 2], 20)


def test_what_was_handed_out_changes_no_more(llm: LLM) -> None:
    stream = llm.stream([1, 2], tokens(12, logprobs=0, n=2, prompt_logprobs=0, seed=1))
    outputs, seen = [], []
    for output in stream:
        outputs.append(output)
        seen.append(repr(output))
    assert len(set(seen)) == len(seen) > 10
    assert [repr(o) for o in outputs] == seen
    for output in outputs:
        for o in output.outputs:
            assert o.logprobs is not None
            assert len(o.logprobs) == len(o.token_ids)
            assert Letters().push(o.token_ids) == o.text
    prompts = {id(o.prompt_token_ids) for o in outputs}
    assert len(prompts) == 1, "the prompt is shared"


def test_a_reader_cannot_change_what_is_generated(llm: LLM) -> None:
    stream = llm.stream([1, 2, 3], tokens(9))
    for output in stream:
        last = list(output.outputs[0].token_ids)
        output.outputs[0].token_ids.clear()
        output.prompt_token_ids.clear()
    assert last == continuation([1, 2, 3], 9)


def test_a_paused_stream_holds_one_output(llm: LLM) -> None:
    paused = llm.stream([1, 2], tokens(60))
    next(paused)
    feed = paused.collector
    llm.generate([7], tokens(50))
    assert len(feed.grown) == 1
    assert len(next(paused).outputs[0].token_ids) > 40


def test_generate_beside_a_stream_leaves_it_alone(llm: LLM) -> None:
    stream = llm.stream([5, 6], tokens(25))
    next(stream)
    (done,) = llm.generate([9], tokens(4))
    assert done.outputs[0].token_ids == continuation([9], 4)
    assert list(stream)[-1].outputs[0].token_ids == continuation([5, 6], 25)
    assert llm.engine.free_blocks == FULL


def test_of_bad_prompts_none_is_queued(llm: LLM) -> None:
    with pytest.raises(ValueError, match="empty|vocabulary"):
        llm.stream([[1, 2], [1000]], tokens(3))
    assert not llm.engine.has_work
    assert llm.engine.scheduler.num_waiting == 0


def test_a_second_thread_is_refused_and_the_first_goes_on(llm: LLM) -> None:
    wire: Any = llm.pools
    inside, go_on = threading.Event(), threading.Event()
    wait = wire.wait

    def wait_for_us() -> Any:
        inside.set()
        assert go_on.wait(20)
        return wait()

    wire.wait = wait_for_us
    found: list[Any] = []
    spare = llm.stream([3], tokens(5))
    thread = threading.Thread(target=lambda: found.extend(llm.generate([1, 2], tokens(5))))
    thread.start()
    assert inside.wait(20)
    calls: list[Any] = [lambda: llm.generate([4]), lambda: llm.stream([4]), spare.__next__]
    while calls:
        with pytest.raises(RuntimeError, match="in use by another thread.*lamina.AsyncLLM"):
            calls.pop()()
    del spare
    gc.collect()  # a stream that is dropped meanwhile: with the end of the other's use
    go_on.set()
    thread.join(20)
    assert found[0].outputs[0].token_ids == continuation([1, 2], 5)
    assert not llm.engine.has_work
    assert llm.engine.free_blocks == FULL


def test_after_a_step_that_failed_the_llm_is_closed(llm: LLM) -> None:
    wire: Any = llm.pools

    def broken() -> Any:
        raise KeyboardInterrupt

    first, second = llm.stream([1, 2], tokens(9)), llm.stream([1, 2], tokens(9))
    wire.wait = broken
    with pytest.raises(KeyboardInterrupt):
        list(first)
    assert wire.is_closed
    with pytest.raises(ValueError, match="this LLM is closed"):
        next(second)


def test_a_feed_takes_turns_and_raises_last(llm: LLM) -> None:
    engine = llm.engine
    for count in (3, 2):  # one more than come, and as many
        streams, feed = RequestStreams(engine), RequestOutputCollector(count)
        streams.add([EngineRequest(prompt=[i + 1], params=tokens(3)) for i in range(2)], feed)
        while engine.has_work:
            assert streams.step() in ([], [feed], [feed, feed])
        feed.fail(ValueError("late"))
        assert len([o for o in (feed.get_nowait(), feed.get_nowait()) if o and o.finished]) == 2
        if count == 3:
            with pytest.raises(ValueError, match="late"):
                feed.get_nowait()
        else:
            assert feed.get_nowait() is None, "what is finished stays good, whatever ends the engine"


def test_prompts_that_come_alone_are_sampled_as_the_model_says(llm: LLM) -> None:
    llm.front.defaults = {"max_tokens": 3, "temperature": 0.5}
    assert llm.get_default_sampling_params() == SamplingParams(max_tokens=3, temperature=0.5)
    assert len(llm.generate([[1, 2]])[0].outputs[0].token_ids) == 3
    assert len(llm.generate([[1, 2]], SamplingParams(max_tokens=5))[0].outputs[0].token_ids) == 5
