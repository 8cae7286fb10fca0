"""The engine process's loop in this process: a real engine over a wire without workers, a real link to a server.

Covers: lamina/server/engine_client/live_request.py, lamina/server/engine_client/messages.py,
lamina/server/engine_client/rebalance.py.
"""

from __future__ import annotations

import gc
import logging
import queue
import socket
import struct
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from engine_api import make_engine
from fake_executor import EOS, VOCAB, FakeWire, Letters, continuation
from msgspec import ValidationError, structs
from msgspec.msgpack import decode, encode

from lamina.executor.elastic import ResizeResult
from lamina.protocol.control import EPOCH_BITS, ControlLink, LinkBrokenError, LinkClosedError, Quiesce, Stop
from lamina.request import ErrorOrigin, Logprob, ResumedCompletion, SamplingParams
from lamina.scheduler.sessions.cache_options import CacheOptions
from lamina.server.engine_client import engine_process, live_request
from lamina.server.engine_client.engine_client import FROM_ENGINE
from lamina.server.engine_client.engine_process import FROM_SERVER, EngineLoop
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
    ScaleMemory,
    WorkerCounters,
    encode_scores,
)
from lamina.server.engine_client.rebalance import REASON, Rebalancer

PROMPT = [1, 2, 3]
ADD = AddPrompt(7, PROMPT, SamplingParams(logprobs=0, prompt_logprobs=0))
PARAMS = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
SOON_S = 20.0


class Workers:
    """The part of WorkerExecutor that the loop uses, without the engine's wire."""

    def __init__(self, wire: FakeWire) -> None:
        self.ready = wire.ready
        self.pids = {"memory-0": 2, "compute-0": 1}
        self.hosts = {"memory-0": "10.0.0.3", "compute-0": "localhost"}
        self.asked = 0
        self.has_pending_stats = False
        self.stats: dict[str, dict[str, float]] | None = None
        self.is_recovering, self.borrower = False, None
        self.resizer = SimpleNamespace(take_outcome=lambda: None, moved_bytes={})

    def request_stats(self) -> None:
        self.asked += 1

    def collect_stats(self) -> dict[str, dict[str, float]] | None:
        found, self.stats = self.stats, None
        return found


class Bench:
    """A loop, and the server's end of its link."""

    def __init__(self, tokenizer: Any = None, wire: FakeWire | None = None, link: Any = None, **options: int) -> None:
        self.wire = wire or FakeWire()
        self.engine = make_engine(self.wire, **options)
        self.workers = Workers(self.wire)
        here, self.sock = socket.socketpair()
        self.server = ControlLink(self.sock, FROM_ENGINE)
        self.thread = threading.Thread(target=self._run)
        self.failure: str | None = None
        self.loop = EngineLoop(link or ControlLink(here, FROM_SERVER), self.engine, self.workers, tokenizer)  # type: ignore[arg-type]
        self.loop.report_workers()
        self.told()

    def _run(self) -> None:
        try:
            self.loop.run()
        except RuntimeError as error:
            self.failure = str(error)

    def told(self) -> list[Any]:
        """Messages for the server that this test has not taken yet."""
        found = []
        while True:
            try:
                found.append(self.loop.outbox.get_nowait())
            except queue.Empty:
                return found

    def work(self) -> list[Delta]:
        """Run until no work is left; returns the deltas."""
        while self.engine.has_work:
            self.loop.advance()
        return [d for m in self.told() if isinstance(m, Outputs) for d in m.deltas]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_deltas_add_up_to_each_completion_and_only_the_last_has_times(bench: Bench) -> None:
    for key, prompt in ((7, PROMPT), (9, [4, 5])):
        bench.loop.take(AddPrompt(key, prompt, PARAMS))
    added = [weakref.ref(live) for live in bench.loop.active.values()]
    deltas = bench.work()
    for key, prompt in ((7, PROMPT), (9, [4, 5])):
        mine = [d for d in deltas if d.key == key]
        assert [t for d in mine for t in d.token_ids] == continuation(prompt, 5)
        assert all(d.token_ids for d in mine)
        assert [d.finish_reason for d in mine] == [None] * (len(mine) - 1) + ["length"]
        assert [d.times is not None for d in mine] == [False] * (len(mine) - 1) + [True]
        times = mine[-1].times
        assert times is not None
        assert min(times.queue, times.prefill, times.decode) > 0, "by a clock that goes on at each look"
    gc.collect()
    assert [live() for live in added] == [None, None], "nothing is kept of them"


def test_who_has_the_last_answer_finds_gauges_of_an_idle_engine(bench: Bench) -> None:
    """vLLM's own tests look at once: a State comes before the last deltas of all work."""
    bench.loop.take(
        AddPrompt(7, PROMPT, SamplingParams(temperature=0.0, max_tokens=50))
    )  # ends by a token: a row too many
    bench.loop.take(AddPrompt(8, [5, EOS - 1], PARAMS))
    while bench.engine.has_work:
        before, last = None, None
        bench.loop.advance()
        bench.loop.report()
        for message in bench.told():
            before, last = (message, last) if isinstance(message, EngineState) and last is None else (before, message)
    assert isinstance(last, Outputs)
    assert isinstance(before, EngineState)
    assert (before.running, before.waiting, before.free_blocks) == (0, 0, [64])
    assert bench.engine.scheduler.num_running > 0, "it has not let go of the last one"


def test_each_step_says_how_many_tokens_it_has_brought(bench: Bench) -> None:
    bench.loop.take(AddPrompt(7, PROMPT, PARAMS))
    while bench.engine.has_work:
        bench.loop.advance()
    assert [m.num_tokens for m in bench.told() if isinstance(m, Outputs)] == [len(PROMPT) + 1, 1, 1, 1, 1]


def test_the_times_of_a_prompt_count_its_preemptions() -> None:
    bench = Bench(wire=FakeWire(num_blocks=34), max_num_seqs=8)
    for key in range(6):
        bench.loop.take(AddPrompt(key, [key, key + 1, key + 2] * 4, SamplingParams(max_tokens=40, ignore_eos=True)))
    counted = [d.times.preemptions for d in bench.work() if d.times]
    assert sum(counted) == bench.engine.scheduler.num_preemptions > 0


def test_behind_a_reset_no_kv_is_found() -> None:
    bench, found = Bench(enable_prefix_caching=True), []
    for key in range(4):
        if key == 2:
            bench.loop.take(ResetPrefixCache())
        bench.loop.take(AddPrompt(key, [5] * 30, PARAMS))
        found.append(next(d.num_cached_tokens for d in bench.work()))
    assert found == [0, 29, 0, 29]


def test_a_server_is_told_that_pages_are_forgotten() -> None:
    """One that dies before has the next engine do it."""
    bench = Bench(enable_prefix_caching=True)
    bench.loop.take(ResetPrefixCache(5))
    assert bench.told() == [ResetPrefixCache(5)]


def test_prompts_share_kv_within_a_salt_only() -> None:
    bench, found = Bench(enable_prefix_caching=True), []
    for key, salt in enumerate((b"a", b"b", b"a")):
        bench.loop.take(AddPrompt(key, [5] * 30, PARAMS, cache_options=CacheOptions(salt)))
        found.append(next(d.num_cached_tokens for d in bench.work()))
    assert found == [0, 0, 29]


@pytest.mark.parametrize("had", range(5))
def test_what_a_reader_has_of_another_engine_is_not_told_again(had: int) -> None:
    """The second completion has come to its end, and its reader knows."""
    bench, tokens = Bench(), continuation(PROMPT, 5)
    told = [
        ResumedCompletion(index=0, token_ids=tokens[:had]),
        ResumedCompletion(index=1, token_ids=tokens, is_finished=True),
    ]
    bench.loop.take(AddPrompt(7, PROMPT, replace(PARAMS, n=2), told))
    deltas = bench.work()
    assert {d.index for d in deltas} == {0}
    assert [t for d in deltas for t in d.token_ids] == tokens[had:]
    assert [d.finish_reason for d in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert deltas[-1].times is not None
    assert not bench.loop.active


def test_a_prompt_that_has_come_to_its_end_elsewhere_is_refused(bench: Bench) -> None:
    bench.loop.take(
        AddPrompt(7, PROMPT, PARAMS, [ResumedCompletion(index=0, token_ids=continuation(PROMPT, 5), is_finished=True)])
    )
    (refused,) = bench.told()
    assert (refused.key, refused.blame) == (7, ErrorOrigin.SERVER)
    assert not bench.engine.has_work


def test_a_prompt_that_has_all_tokens_is_told_its_end_alone(bench: Bench) -> None:
    """A case: after a server's death, by a server with a smaller --max-model-len."""
    bench.loop.take(AddPrompt(7, PROMPT, PARAMS, [ResumedCompletion(index=0, token_ids=continuation(PROMPT, 5))]))
    (last,) = bench.work()
    assert (last.key, last.index, last.token_ids, last.finish_reason) == (7, 0, [], "length")
    assert not bench.engine.has_work


def test_times_are_from_arrival_to_first_row_to_first_token_to_last() -> None:
    def told() -> PromptTimes | None:
        ended = output("x", finished=True, times=times, num_preemptions=2)
        ended.outputs[0].finish_reason = "length"
        return live_request.ActivePrompt(ADD, 1).deltas(ended)[-1].times

    times = SimpleNamespace(arrival_s=1.0, scheduled_s=3.0, first_token_s=7.0, last_token_s=15.0)
    assert told() == PromptTimes(2.0, 4.0, 8.0, 2)
    times.scheduled_s = None
    assert told() == PromptTimes(6.0, 0.0, 8.0, 2)
    times.first_token_s = times.last_token_s = None
    assert told() == PromptTimes(0.0, 0.0, 0.0, 2)


def test_text_and_log_probabilities_come_in_pieces_too(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def letters(tokenizer: Any, prompt: list[int], *, skip_special_tokens: bool) -> Letters:
        made.append((tokenizer, prompt, skip_special_tokens))
        return Letters()

    monkeypatch.setattr("lamina.models.tokenizer.Detokenizer", letters)
    bench = Bench("a tokenizer")
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, n=2, skip_special_tokens=False)
    bench.loop.take(AddPrompt(7, PROMPT, params))
    deltas = bench.work()
    for index in range(2):
        mine = [d for d in deltas if d.index == index]
        assert "".join(d.text for d in mine) == Letters().push(continuation(PROMPT, 4))
        assert all(d.logprobs is None for d in mine)
    assert [d.times is not None for d in deltas].count(True) == 1, "with the last of the whole prompt"
    assert made == [("a tokenizer", PROMPT, False)] * 2


def output(*texts: str, **changes: Any) -> Any:
    """An engine's output, with a token for each letter of each completion."""
    entry = {3: Logprob(-0.5, 1)}
    outputs = [
        SimpleNamespace(index=i, token_ids=list(map(ord, text)), text=text, logprobs=[entry] * len(text),
                        finish_reason=None, stop_reason=None, blame=None, refusal=None, kv_rebuilt=False)
        for i, text in enumerate(texts)
    ]  # fmt: skip
    times = SimpleNamespace(arrival_s=1.0, scheduled_s=3.0, first_token_s=7.0, last_token_s=15.0)
    given = {
        "outputs": outputs,
        "finished": False,
        "times": times,
        "prompt_logprobs": None,
        "prompt_token_ids": PROMPT,
        "num_cached_tokens": 0,
        "num_preemptions": 0,
        **changes,
    }
    return SimpleNamespace(**{**given, **changes})


def test_what_a_delta_says() -> None:
    prompt = live_request.ActivePrompt(ADD, 1)
    scored = [None, {5: Logprob(-1.0, 1)}]
    (first, other) = prompt.deltas(output("ab", "x", prompt_logprobs=scored, num_cached_tokens=32))
    assert first == Delta(
        key=7, index=0, token_ids=[97, 98], text="ab", logprobs=[encode_scores([(3, -0.5, 1)])] * 2,
        prompt_logprobs=[encode_scores(None), encode_scores([(5, -1.0, 1)])], num_cached_tokens=32,
    )  # fmt: skip
    assert other == Delta(key=7, index=1, token_ids=[120], text="x", logprobs=[encode_scores([(3, -0.5, 1)])])
    (second,) = prompt.deltas(output("abc", "x", prompt_logprobs=scored, num_cached_tokens=32))
    assert second == Delta(key=7, index=0, token_ids=[99], text="c", logprobs=[encode_scores([(3, -0.5, 1)])]), (
        "what is of the prompt once"
    )
    last = output("abc", "xy", finished=True)
    for one, (reason, why, blame) in zip(
        last.outputs, [("stop", 5, None), ("error", "why", ErrorOrigin.CLIENT)], strict=True
    ):
        one.finish_reason, one.stop_reason, one.blame, one.kv_rebuilt = reason, why, blame, reason == "error"
    (ended, failed) = prompt.deltas(last)
    assert (ended.token_ids, ended.text, ended.finish_reason, ended.stop_reason, ended.times) == (
        [],
        "",
        "stop",
        5,
        None,
    )
    assert (failed.token_ids, failed.finish_reason, failed.stop_reason, failed.blame) == (
        [121],
        "error",
        "why",
        "client",
    )
    assert (ended.kv_rebuilt, failed.kv_rebuilt) == (False, True)
    assert failed.times == PromptTimes(2.0, 4.0, 8.0)
    assert prompt.deltas(last) == [], "what has ended is not told again"


def test_the_scores_of_a_prompt_wait_for_its_first_completion() -> None:
    prompt = live_request.ActivePrompt(ADD, 1)
    scored = [None, {5: Logprob(-1.0, 1)}]
    (second,) = prompt.deltas(output("", "x", prompt_logprobs=scored))
    assert (second.index, second.prompt_logprobs) == (1, None)
    (first,) = prompt.deltas(output("a", "x", prompt_logprobs=scored))
    assert (first.index, first.prompt_logprobs) == (0, [encode_scores(None), encode_scores([(5, -1.0, 1)])])


def test_a_cancelled_prompt_is_ended_and_nothing_more_is_told_of_it(bench: Bench) -> None:
    bench.loop.take(AddPrompt(7, PROMPT, PARAMS))
    bench.loop.take(AddPrompt(8, [4, 5], PARAMS))
    bench.loop.advance()
    bench.loop.take(CancelPrompt(7))
    bench.loop.take(CancelPrompt(7))
    bench.loop.take(CancelPrompt(99))
    assert {d.key for d in bench.work()} == {8}
    bench.engine.release_idle_blocks()
    assert not bench.wire.stored
    assert bench.engine.free_blocks == (64,)


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [([], PARAMS, "the decoder prompt cannot be empty"), ([VOCAB], PARAMS, f"token id {VOCAB} is out of vocabulary")],
)
def test_who_is_to_blame_for_a_prompt_that_cannot_be_served(
    bench: Bench, prompt: list[int], params: SamplingParams, words: str
) -> None:
    bench.loop.take(AddPrompt(7, prompt, params))
    (refused,) = bench.told()
    assert isinstance(refused, PromptRefused)
    assert (refused.key, refused.blame) == (7, ErrorOrigin.CLIENT)
    assert words in refused.text
    assert not bench.engine.has_work
    assert not bench.loop.active


def test_a_prompt_that_fails_in_the_engine_takes_nobody_with_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("lamina").propagate = True

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no text today")

    bench = Bench("a tokenizer")
    with monkeypatch.context() as patch:
        patch.setattr("lamina.models.tokenizer.Detokenizer", fail)
        bench.loop.take(AddPrompt(7, PROMPT, PARAMS))
    (refused,) = bench.told()
    assert refused == PromptRefused(7, "the engine could not add the prompt: no text today", ErrorOrigin.SERVER)
    assert not bench.engine.has_work
    assert [(r.getMessage(), r.exc_info is not None) for r in caplog.records] == [("a prompt could not be added", True)]


def test_so_does_one_that_fails_at_the_tokens_that_another_engine_has_told(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench("a tokenizer")

    class Pieces:
        def __init__(self, *_: object, **__: object) -> None: ...

        def push(self, token_ids: list[int]) -> str:
            raise RuntimeError("no such token")

    with monkeypatch.context() as patch:
        patch.setattr("lamina.models.tokenizer.Detokenizer", Pieces)
        bench.loop.take(AddPrompt(7, PROMPT, PARAMS, [ResumedCompletion(index=0, token_ids=[5])], accepted=True))
    (refused,) = bench.told()
    assert refused == PromptRefused(7, "the engine could not add the prompt: no such token", ErrorOrigin.SERVER)
    assert not bench.engine.has_work


def test_a_link_that_fails_ends_the_loop_and_says_why(bench: Bench) -> None:
    cause = ValueError("a bad frame")
    with pytest.raises(RuntimeError, match="its link to the server has failed: a bad frame") as failed:
        bench.loop.take(cause)
    assert failed.value.__cause__ is cause


def test_all_that_waits_is_taken_before_a_step_and_an_idle_engine_waits_for_a_message(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in (7, 8):
        bench.loop.inbox.put(AddPrompt(key, PROMPT, PARAMS))
    bench.loop.take_messages()
    assert sorted(bench.loop.active) == [7, 8]
    bench.loop.take_messages()  # it has work: it does not wait
    for key in (7, 8):
        bench.loop.take(CancelPrompt(key))
    waits: list[float] = []

    class Inbox:
        def get(self, timeout: float) -> Any:
            waits.append(timeout)
            raise queue.Empty

        def get_nowait(self) -> Any:
            raise queue.Empty

    monkeypatch.setattr(bench.loop, "inbox", Inbox())
    bench.loop.take_messages()
    assert waits == [engine_process.IDLE_S]
    bench.workers.has_pending_stats = True
    bench.loop.take_messages()
    assert waits[1:] == [engine_process.HEALTH_CHECK_S], "one that does not answer is looked at more often"
    bench.loop.take(Stop())
    bench.loop.take_messages()
    assert len(waits) == 2, "not behind a Stop"


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock of the loop, to be set."""
    clock = [100.0]
    monkeypatch.setattr(engine_process.time, "monotonic", lambda: clock[0])
    return clock


def test_a_state_is_due_at_the_beginning_of_work_at_its_end_and_now_and_then_while_steps_are_done(
    bench: Bench, now: list[float]
) -> None:
    bench.loop.report()
    assert bench.told() == [], "idle as it was"
    bench.loop.take(AddPrompt(7, PROMPT, SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True)))
    bench.loop.report()
    (state,) = bench.told()
    assert state.metrics["prefix_cache_queries"] == 0
    without = structs.replace(state, metrics={})
    assert without == EngineState(running=0, waiting=1, free_blocks=[64], steps=0, evictable_blocks=[0])
    now[0] += engine_process.STATE_S + 0.01
    bench.loop.report()
    assert bench.told() == [], "no step was done"
    bench.loop.advance()
    bench.told()
    bench.loop.report()
    (state,) = bench.told()
    assert (state.running, state.waiting, state.steps) == (1, 0, 1)
    assert state.free_blocks[0] < 64
    bench.loop.advance()
    bench.told()
    bench.loop.report()
    assert bench.told() == [], "not so soon"
    now[0] += 0.09
    bench.loop.report()
    (state,) = bench.told()
    assert state.steps == 2, "gauges follow within a tenth of a second"
    bench.loop.take(CancelPrompt(7))
    bench.loop.report()
    (state,) = bench.told()
    assert state.steps == 2, "it is idle now"


def test_workers_are_asked_every_second_or_so_and_their_answers_are_told(bench: Bench, now: list[float]) -> None:
    for ask, passed in ((1, 0.0), (1, engine_process.COUNTERS_S - 0.01), (2, 0.02), (2, 0.0)):
        now[0] += passed
        bench.loop.report()
        assert bench.workers.asked == ask
    bench.workers.stats = {"memory-0": {"steps": 1.0}}
    bench.loop.report()
    counters, state = bench.told()
    assert counters == WorkerCounters({"memory-0": {"steps": 1.0}}, [2, 1])
    assert isinstance(state, EngineState), "idle, and all have answered"
    bench.workers.stats = {"memory-0": {"steps": 1.0}}
    bench.loop.report()
    assert [type(m) for m in bench.told()] == [WorkerCounters, EngineState], "though none had anything to do"


def test_workers_that_have_met_are_told_before_they_have_answered(running: Bench) -> None:
    """The start of another engine waits for them too, and a replaced worker may be on another host."""
    assert until(running.server, WorkerCounters) == WorkerCounters({}, [2, 1], running.workers.hosts)
    running.workers.pids = {"memory-0": 3, "compute-0": 1}
    running.workers.hosts = {"memory-0": "10.0.0.4", "compute-0": "localhost"}
    running.workers.ready = structs.replace(running.workers.ready, epoch=running.workers.ready.epoch + 2)
    assert until(running.server, WorkerCounters) == WorkerCounters({}, [3, 1], running.workers.hosts)


@pytest.mark.parametrize(("reason", "asked"), [("scale", True), ("borrow", True), (REASON, False)])
def test_a_change_of_memory_workers_is_told_with_what_there_is_then(reason: str, asked: bool, bench: Bench) -> None:
    left = [ResizeResult("", 0.25, 7, reason)]
    bench.workers.resizer.take_outcome = lambda: left.pop() if left else None
    bench.loop.report()
    told, state = bench.told()
    assert (told.error, told.pause_s, told.was_requested) == ("", 0.25, asked)
    assert told.ready.num_blocks == bench.loop.ready().num_blocks
    assert isinstance(state, EngineState)


def test_counters_go_to_whoever_weighs_memory_workers_by_them(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(Rebalancer, "update", lambda _, counters: seen.append(counters))
    bench.loop.report()
    bench.workers.stats = {"memory-0": {"attend_s": 1.0}}
    bench.loop.report()
    assert seen == [{"memory-0": {"attend_s": 1.0}}]


def test_at_its_time_nothing_is_due_yet(bench: Bench, now: list[float]) -> None:
    loop = bench.loop
    now[0] = engine_process.COUNTERS_S
    loop.report()
    assert bench.workers.asked == 0
    now[0] = 0.0
    loop.take(AddPrompt(7, PROMPT, PARAMS))
    loop.report()
    loop.advance()
    bench.told()
    now[0] = engine_process.STATE_S
    loop.report()
    assert bench.told() == []
    now[0] *= 1.01
    bench.workers.stats = {}
    loop.report()
    assert [type(m) for m in bench.told()] == [WorkerCounters, EngineState], (
        "a step was done, though no worker says more"
    )


def test_while_a_step_runs_a_state_is_due_where_a_worker_has_gone_on(bench: Bench, now: list[float]) -> None:
    bench.loop.take(AddPrompt(7, PROMPT, PARAMS))
    bench.loop.report()
    bench.told()
    kinds = []
    for steps in (1.0, 1.0, 2.0):
        bench.workers.stats = {"memory-0": {"steps": steps}}
        bench.loop.report()
        kinds.append([type(m).__name__ for m in bench.told()])
    assert kinds == [["WorkerCounters", "EngineState"], ["WorkerCounters"], ["WorkerCounters", "EngineState"]]


def test_what_a_server_is_told_of_the_engine(bench: Bench) -> None:
    bench.wire.ready.summary.update({"q_bytes": [8, 8], "kv_bytes": [4, 4], "o_bytes": [16, 16]})
    assert bench.loop.ready() == EngineReady(
        vocab_size=VOCAB, max_model_len=128, max_num_seqs=bench.engine.config.batching.max_num_seqs, dtype="float32",
        block_size=4, num_blocks=[[64]], holders=[[0]], attention_calls_per_step=2, max_tokens_that_fit=2.0,
        end_token_ids=bench.wire.ready.eos_token_ids,
        row_bytes={"q": 16, "kv": 8, "o": 32}, workers=["compute-0", "memory-0"], hosts=bench.workers.hosts,
    )  # fmt: skip


@pytest.fixture
def running(bench: Bench) -> Iterator[Bench]:
    """The loop, on a thread of its own."""
    bench.thread.start()
    yield bench
    bench.server.close()
    bench.thread.join(SOON_S)
    assert not bench.thread.is_alive()


def until(link: ControlLink, kind: type) -> Any:
    while not isinstance(message := link.recv(timeout_s=SOON_S), kind):
        pass
    return message


def test_a_server_gets_all_of_a_prompt_over_the_link_and_stops_the_loop(running: Bench) -> None:
    assert until(running.server, EngineReady).vocab_size == VOCAB
    running.server.send(AddPrompt(7, PROMPT, PARAMS))
    tokens: list[int] = []
    while len(tokens) < 5:
        tokens += [t for d in until(running.server, Outputs).deltas for t in d.token_ids]
    assert tokens == continuation(PROMPT, 5)
    assert EOS not in tokens
    running.server.send(Stop())
    running.thread.join(SOON_S)
    assert running.failure is None


def test_the_end_of_the_link_ends_the_loop(running: Bench) -> None:
    until(running.server, EngineReady)
    running.server.close()
    running.thread.join(SOON_S)
    assert not running.thread.is_alive()
    assert running.failure is None


def test_an_engine_whose_views_have_no_numbers_any_more_ends_without_a_word(running: Bench) -> None:
    """So its server starts another one, which goes on with all: two numbers for each change are soon used up where
    memory is borrowed and given back. At the end of them no worker would take a Connect.
    """
    running.server.send(AddPrompt(7, PROMPT, PARAMS))
    until(running.server, Outputs)
    running.workers.ready = structs.replace(running.workers.ready, epoch=engine_process.LAST_EPOCH)
    running.thread.join(SOON_S)
    assert not running.thread.is_alive()
    assert running.failure is None
    with pytest.raises(ValidationError):
        decode(encode(Quiesce(epoch=1 << EPOCH_BITS)), type=Quiesce)


def test_what_cannot_be_read_ends_the_loop_loudly(running: Bench) -> None:
    until(running.server, EngineReady)
    running.sock.sendall(struct.pack("<I", 3) + b"\xc1\xc1\xc1")
    running.thread.join(SOON_S)
    assert "its link to the server has failed" in running.failure


def test_a_frame_that_cannot_be_ends_the_loop_loudly(running: Bench) -> None:
    until(running.server, EngineReady)
    running.sock.sendall(struct.pack("<I", 1 << 31))
    running.thread.join(SOON_S)
    assert "its link to the server has failed" in running.failure


@pytest.mark.parametrize("error", [LinkBrokenError("a bad frame"), KeyError("whatever else"), LinkClosedError("gone")])
def test_the_reader_tells_the_loop_how_it_ended(error: Exception) -> None:
    def recv() -> None:
        raise error

    link = SimpleNamespace(recv=recv, send=lambda _: None)
    loop = Bench(link=link).loop
    if type(error) is LinkClosedError:
        loop.run()
        return
    with pytest.raises(RuntimeError, match="its link to the server has failed") as failed:
        loop.run()
    assert failed.value.__cause__ is error


def test_the_threads_of_a_link_have_its_name_and_hold_nobody_up(running: Bench) -> None:
    running.server.send(AddPrompt(7, PROMPT, PARAMS))
    until(running.server, Outputs)
    assert len([t for t in threading.enumerate() if t.name == "lamina-link" and t.daemon]) >= 2


def test_a_server_that_reads_nothing_does_not_hold_up_the_end(running: Bench) -> None:
    until(running.server, EngineReady)
    running.loop.outbox.put(PromptRefused(1, "x" * (1 << 22), ErrorOrigin.SERVER))
    running.server.send(Stop())
    running.thread.join(SOON_S)
    assert not running.thread.is_alive()


def test_what_cannot_be_sent_ends_the_loop_loudly(running: Bench) -> None:
    until(running.server, EngineReady)
    running.loop.outbox.put(object())
    running.thread.join(SOON_S)
    assert "its link to the server has failed" in running.failure


def test_of_workers_that_have_become_fewer_since_none_goes_by_a_number_from_before(bench: Bench) -> None:
    """Two drains are requested at once: the second one's worker has gone, and another one has its number."""
    begun = list[Any]()
    bench.workers.resizer.plan, bench.workers.resizer.begin = begun.append, begun.append
    bench.loop.take(ScaleMemory(1, [0]))
    (said,) = bench.told()
    assert (said.error, said.in_place) == ("memory workers 0 to 0 exist now: request it again", True)
    assert not begun
