"""Answers of many log-probabilities are counted before they are accepted, and made while others are served.

Covers: lamina/server/response/answer_memory.py, lamina/server/response/rows.py.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake import READY, FakeClient, http_of, make_service
from hypothesis import given
from hypothesis import strategies as st
from shipped import MODEL, ROOT
from test_flow import until
from test_journal_answers import KeptClient
from test_layers import ask, error_of, run

from lamina.request import SamplingParams
from lamina.server.call import Service
from lamina.server.engine_client.messages import Delta, Outputs, PromptTimes, detach, encode_scores
from lamina.server.errors import ApiError
from lamina.server.journal.journal import Journal
from lamina.server.journal.journal_records import AcceptedRecord
from lamina.server.memory_budget import MemoryBudget
from lamina.server.response import event_stream, rows
from lamina.server.response.answer_memory import answer_costs, reserve_answer
from lamina.server.response.rows import Rows, encode, pieces

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TALK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 200}
STRETCH_S = 0.1  # for which no other request may be kept waiting, of a slow processor's time
BEST = 21


class Scored(FakeClient):
    """Gives 200 tokens with 20 alternatives each, and the scores of a prompt, which may be long."""

    tokens = 200
    ready = msgspec.structs.replace(READY, max_model_len=1 << 15)

    def __init__(self) -> None:
        super().__init__()
        self.ready = Scored.ready

    def deltas_of(self, key: int, index: int, params: SamplingParams, *, last: bool) -> list[Delta]:
        return scored_deltas(key, index, params, len(self.added[key][0]), last=last)


@cache
def scores(number: int) -> msgspec.Raw:
    draw = random.Random(number)
    return encode_scores([(draw.randrange(5, 2000), -10 * draw.random(), n + 1) for n in range(BEST)])


def scored_deltas(key: int, index: int, params: SamplingParams, length: int, *, last: bool) -> list[Delta]:
    entries = None if params.logprobs is None else [scores(n) for n in range(Scored.tokens)]
    many = range(Scored.tokens // 2)
    first = Delta(
        key=key, index=index, token_ids=[5 + n for n in many], text="a" * 100, logprobs=entries and entries[:100]
    )
    if params.prompt_logprobs is not None and index == 0:
        of_prompt = [scores(n) for n in range(50)]
        first.prompt_logprobs = [encode_scores(None), *(of_prompt[n % 50] for n in range(length - 1))]
    rest = Delta(
        key=key, index=index, token_ids=[9 + n for n in many], text="é" * 100, logprobs=entries and entries[100:],
        finish_reason="length", times=PromptTimes(0.1, 0.1, 0.1) if last else None,
    )  # fmt: skip
    return [first, rest]


@contextmanager
def made_in_pieces(monkeypatch: pytest.MonkeyPatch, *, always: bool) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setattr(event_stream, "LARGE", 0 if always else 1 << 40)
        patched.setattr(rows, "PIECE", 100)
        patched.setattr(rows, "ROW_UNITS", 50)
        yield


plain = st.recursive(
    st.none() | st.integers(-(1 << 53), 1 << 53) | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3)
)
nested = st.recursive(
    plain | st.tuples(st.just("rows"), st.lists(plain, max_size=9), st.integers(1, 3000)),
    lambda inner: (
        st.dictionaries(st.text(max_size=5), inner, max_size=4)
        | st.tuples(st.just("deep"), st.lists(st.dictionaries(st.text(max_size=3), inner, max_size=3), max_size=3))
    ),
)


def lazy(value: Any) -> Any:
    """``value`` with Rows where it has pairs that say so."""
    match value:
        case ("rows", items, units):
            return Rows(iter(items), len(items), units)
        case ("deep", items):
            return Rows(map(lazy, items), len(items), deep=True)
        case dict():
            return {name: lazy(inner) for name, inner in value.items()}
    return value


def listed(value: Any) -> Any:
    match value:
        case ("rows", items, _):
            return items
        case ("deep", items):
            return [listed(item) for item in items]
        case dict():
            return {name: listed(inner) for name, inner in value.items()}
    return value


@given(nested)
def test_pieces_are_the_json_of_the_whole(value: Any) -> None:
    """The oracle is Python's own json."""
    wanted = json.dumps(listed(value), ensure_ascii=False, separators=(",", ":"))
    assert json.loads(b"".join(pieces(lazy(value)))) == json.loads(wanted)
    assert json.loads(encode(lazy(value))) == json.loads(wanted)


@pytest.mark.parametrize(
    ("path", "body", "choices"),
    [
        (COMPLETIONS, {"prompt": [[5, 6], [7, 8, 9]], "max_tokens": 200, "n": 2, "logprobs": 20, "echo": True}, 4),
        (COMPLETIONS, {"prompt": [5, 6, 7], "max_tokens": 0, "logprobs": 20, "echo": True}, 1),
        (COMPLETIONS, {"prompt": "def f", "max_tokens": 200, "prompt_logprobs": 20, "return_token_ids": True}, 1),
        (COMPLETIONS, {"prompt": "def f", "max_tokens": 200, "n": 2}, 2),
        (CHAT, {**TALK, "logprobs": True, "top_logprobs": 20, "prompt_logprobs": 3, "n": 2,
                "return_token_ids": True}, 2),
        (CHAT, TALK, 1),
    ],
)  # fmt: skip
def test_an_answer_in_pieces_is_the_answer(
    path: str, body: dict[str, Any], choices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for always in (False, True):
        with made_in_pieces(monkeypatch, always=always):
            response = ask("POST", path, make_service(Scored()), json=body)
        assert response.status_code == 200, response.text
        assert ("content-length" in response.headers) is not always
        found.append({k: v for k, v in response.json().items() if k not in ("id", "created")})
    assert found[0] == found[1]
    assert len(found[0]["choices"]) == choices


@pytest.mark.parametrize("usage", [False, True])
def test_a_stream_in_pieces_is_the_stream(usage: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"prompt": [[5, 6], [7]], "max_tokens": 200, "logprobs": 20, "echo": True, "stream": True}
    body |= {"stream_options": {"include_usage": True, "continuous_usage_stats": True}} if usage else {}
    found = []
    for always in (False, True):
        with made_in_pieces(monkeypatch, always=always):
            text = ask("POST", COMPLETIONS, make_service(Scored()), json=body).text
        events = [json.loads(e.removeprefix("data: ")) for e in text.split("\n\n") if e.startswith("data: {")]
        found.append([{k: v for k, v in e.items() if k not in ("id", "created")} for e in events])
        assert text.endswith("data: [DONE]\n\n")
    assert found[0] == found[1]
    assert len(found[0]) == 2 + usage


class Timed(ThreadPoolExecutor):
    """Notes the seconds of the processor's time that each call takes."""

    def __init__(self) -> None:
        super().__init__(1)
        self.took: list[float] = []

    def submit(self, work: Any, /, *given: Any, **named: Any) -> Any:
        def timed() -> Any:
            began = time.thread_time()
            try:
                return work(*given, **named)
            finally:
                self.took.append(time.thread_time() - began)

        return super().submit(timed)


async def turns(took: list[float]) -> None:
    """Seconds of the processor's time of each turn of the event loop, until this is cancelled."""
    while True:
        began = time.thread_time()
        await asyncio.sleep(0.001)
        took.append(time.thread_time() - began)


async def answered(service: Service, body: dict[str, Any], here: list[float]) -> int:
    """Bytes of an answer. ``here``: gets the turns of the event loop meanwhile."""
    ticking = asyncio.create_task(turns(here))
    async with http_of(service) as http:
        response = await http.post(COMPLETIONS, json=body)
    ticking.cancel()
    assert response.status_code == 200
    return len(response.content)


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True])
def test_a_large_answer_keeps_no_other_request_waiting(stream: bool) -> None:
    """4 prompts of 2,000 tokens with 20 alternatives: their JSON was made in one go."""
    prompts = [[5 + (n + k) % 1900 for n in range(2000)] for k in range(4)]
    body = {"prompt": prompts, "max_tokens": 1, "logprobs": 20, "echo": True, "stream": stream}
    for _ in range(3):
        service, here, size = make_service(Scored()), list[float](), 0
        service.encoder = timed = Timed()
        size = run(answered(service, body, here))
        if max(*timed.took, *here) < STRETCH_S:
            break
    assert size > 5_000_000
    assert max(timed.took) < STRETCH_S, "pieces of the answer"
    assert max(here) < STRETCH_S, "turns of the event loop"


def test_log_probabilities_stay_encoded_in_memory() -> None:
    """Each of them took 150 bytes once it was decoded, and 500 in an answer under way."""
    entries = [scores(n) for n in range(2000)]
    frame = msgspec.msgpack.encode(Outputs([Delta(key=1, index=0, token_ids=[5] * 2000, text="", logprobs=entries)]))
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        (delta,) = msgspec.msgpack.decode(frame, type=Outputs).deltas
        detach(delta)
        del frame
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert delta.logprobs == entries
    assert (held - before) / (2000 * BEST) < 30


LENGTHS = [100, 50]


def accepted(kind: Any = "cmpl", *, echo: bool = False, **params: Any) -> AcceptedRecord:
    made = SamplingParams(**{"max_tokens": 10, **params})
    return AcceptedRecord(id="a", kind=kind, model="m", created=0, params=made, prompts=[], echo=echo)


@pytest.mark.parametrize(
    ("asked", "costs"),
    [
        (accepted(), {"prompt": 10 * 80}),
        (accepted(n=3), {"n": (3 * 20 - 10) * 80}),
        (accepted(max_tokens=None), {"prompt": (256 - 50 + 256 - 100 - (256 - 50)) * 80}),
        (accepted(logprobs=0), {"prompt": 800, "logprobs": 20 * 150}),
        (accepted(n=2, logprobs=4), {"n": (40 - 10) * 80, "logprobs": 40 * 5 * 150}),
        (accepted("chatcmpl", logprobs=4), {"prompt": 800, "top_logprobs": 20 * 5 * 150}),
        (accepted(logprobs=-1), {"prompt": 800, "logprobs": 20 * 2049 * 150}),
        (accepted(prompt_logprobs=2), {"prompt": 800, "prompt_logprobs": 150 * 3 * 40}),
        (accepted(echo=True, logprobs=1, prompt_logprobs=1),
         {"prompt": 800, "logprobs": 20 * 2 * 150, "echo": 150 * 2 * 40}),
    ],
)  # fmt: skip
def test_an_answer_costs_what_its_request_may_bring(asked: AcceptedRecord, costs: dict[str, int]) -> None:
    assert answer_costs(asked, LENGTHS, READY) == costs


def test_one_completion_without_log_probabilities_needs_no_room() -> None:
    for tokens in (1, 100, None):
        assert sum(answer_costs(accepted(max_tokens=tokens), [100], READY).values()) == 0


@given(st.lists(st.tuples(st.integers(0, 400), st.booleans()), max_size=30))
def test_room_for_answers_is_never_given_twice(asked: list[tuple[int, bool]]) -> None:
    budget, held, refused = MemoryBudget(1000), list[Any](), list[str]()
    for nbytes, ends in asked:
        if ends and held:
            held.pop(0).close()
        free = 1000 - sum(holding.size for holding in held)
        if nbytes <= free:
            held.append(reserve_answer(budget, {"n": nbytes}, refused.append))
        else:
            with pytest.raises(ApiError, match="answer-total") as error:
                reserve_answer(budget, {"n": nbytes}, refused.append)
            assert error.value.status == 503
        assert budget.used == sum(holding.size for holding in held) <= 1000
    for holding in held:
        holding.close()
    assert budget.used == 0


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": [[5] * 250] * 200, "max_tokens": 1, "logprobs": 20, "echo": True}, "echo"),
        (COMPLETIONS, {"prompt": [[5]] * 200, "max_tokens": 250, "logprobs": 20}, "logprobs"),
        (COMPLETIONS, {"prompt": [[5] * 250] * 250, "max_tokens": 1, "prompt_logprobs": 5}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": [[5]] * 256, "max_tokens": 255, "n": 16}, "n"),
        (CHAT, {**TALK, "logprobs": True, "top_logprobs": 20, "n": 16}, "top_logprobs"),
    ],
)
def test_what_alone_would_take_too_much_is_refused_by_its_field(path: str, body: dict[str, Any], param: str) -> None:
    service = make_service(answer_total="5MB", max_num_queued_reqs=10_000)
    error = error_of(ask("POST", path, service, json=body))
    assert (error["param"], error["code"]) == (param, "answer_too_large")
    assert "--limits answer-total=" in error["message"]
    assert (service.answers.used, service.bodies.used, service.queue_limit.completions) == (0, 0, 0)


@pytest.mark.parametrize("stream", [False, True])
def test_room_is_taken_until_an_answer_is_sent_or_its_client_leaves(stream: bool) -> None:
    client = FakeClient()
    client.hold = True
    service = make_service(client, answer_total="5MB", max_num_queued_reqs=1000)
    body = {"prompt": [5, 6], "max_tokens": 200, "logprobs": 20, "stream": stream, "n": 4}

    async def work() -> None:
        async with http_of(service) as http:
            asked = [asyncio.create_task(http.post(COMPLETIONS, json=body))]
            await until(lambda: len(service.active_calls) == 1)
            assert service.answers.used > 2_500_000
            refused = await http.post(COMPLETIONS, json=body)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert error_of(refused)["code"] == "no_room_for_answer"
            client.hold = False
            plain = await http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 200})
            assert plain.status_code == 200, "one completion without log-probabilities needs no room"
            asked[0].cancel()
            await until(lambda: not service.active_calls)
            assert service.answers.used == 0
            assert (await http.post(COMPLETIONS, json=body)).status_code == 200

    run(work())
    assert service.answers.used == 0
    assert 'reason="answers"' in ask("GET", "/metrics", service).text


def test_answers_of_a_journal_are_made_while_others_are_served(tmp_path: Path) -> None:
    """Each reads a piece at a time, so that /health answers long before they are whole."""

    class Kept(KeptClient):
        def deltas_of(self, key: int, index: int, params: SamplingParams, *, last: bool) -> list[Delta]:
            return scored_deltas(key, index, params, 50, last=last)

    client = Kept()
    service = make_service(client, journal=str(tmp_path / "j"))
    service.journal = client.journal = Journal(service.config.journal, str(ROOT / MODEL), 64 << 20)
    body = {"prompt": [[5] * 50] * 8, "max_tokens": 200, "logprobs": 20, "echo": True}

    async def work() -> None:
        async with http_of(service) as http:
            first = await http.post(COMPLETIONS, json=body)
            assert first.status_code == 200
            path = f"{COMPLETIONS}/{first.json()['id']}"
            again = [asyncio.create_task(http.get(path)) for _ in range(4)]
            healthy = 0
            while not any(one.done() for one in again):
                assert (await http.get("/health")).status_code == 200
                healthy += 1
                await asyncio.sleep(0)  # nothing else lets the others have their turn: there is no network
            assert healthy > 20
            for one in again:
                assert (await one).json() == first.json()

    run(work())
    service.journal.close()
