"""Answers to the byte, counts to the token: whole, streamed, cut short. It needs no engine.

Covers: lamina/server/request/accepted_request.py, lamina/server/request/openai_protocol.py.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import httpx
import pytest
from fake import FakeClient, make_service
from sockets import Later
from test_flow import scope, until
from test_layers import ask, error_of, run

from lamina import __version__
from lamina.request import ErrorOrigin, SamplingParams
from lamina.server.app import make_app, with_middleware
from lamina.server.call import Call, Service
from lamina.server.engine_client.engine_client import EngineGoneError
from lamina.server.engine_client.open_prompts import PromptRefusedError
from lamina.server.errors import ApiError
from lamina.server.queue_limit import QueueLimit
from lamina.server.request.accepted_request import new_accepted_request
from lamina.server.request.openai_protocol import Sampling
from lamina.server.request.prompt_processing import Prompt

BODY = {"prompt": [5, 6, 7], "max_tokens": 2}
HEAD = {
    "id": "",
    "object": "text_completion",
    "created": 0,
    "model": "tiny",
    "system_fingerprint": f"lamina-{__version__}",
}
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def choice(index: int, text: str, **more: Any) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": None, "stop_reason": None, **more}


def whole_choice(index: int, text: str, **more: Any) -> dict[str, Any]:
    """It says what it could have and has not."""
    return {**choice(index, text, **more), "prompt_logprobs": None, "prompt_token_ids": None, "token_ids": None}


def events(*found: dict[str, Any]) -> bytes:
    """Lays events out as they should lie on the wire."""
    return b"".join(f"data: {json.dumps(x, separators=(',', ':'))}\n\n".encode() for x in found) + b"data: [DONE]\n\n"


async def spoken(service: Service, told: list[dict[str, Any]] | None = None, **fields: Any) -> list[dict[str, Any]]:
    """The ASGI messages of an answer, with what differs from one to the next made empty. ``told``: gets them as they
    are sent.
    """
    body = json.dumps({**BODY, **fields}).encode()
    asked = [{"type": "http.request", "body": body, "more_body": False}]
    sent = list[dict[str, Any]]() if told is None else told

    async def receive() -> dict[str, Any]:
        return asked.pop() if asked else await asyncio.Event().wait()  # type: ignore[return-value]

    async def send(message: Any) -> None:
        sent.append(message)

    await with_middleware(make_app(service), service)(scope(body), receive, send)
    for one in sent[1:]:
        for line in one["body"].split(b"\n\n"):
            if line.startswith(b"data: {") and b'"id"' in line:
                head = json.loads(line.removeprefix(b"data: "))
                for name, empty in (("id", ""), ("created", 0)):
                    one["body"] = one["body"].replace(json.dumps(head[name]).encode(), json.dumps(empty).encode())
    return sent


def test_a_stream_to_the_byte() -> None:
    start, *parts, end = run(spoken(make_service(), stream=True, n=2))
    headers = dict(start["headers"])
    assert headers.pop(b"x-request-id")
    assert headers == {
        b"cache-control": b"no-cache", b"x-accel-buffering": b"no", b"content-type": b"text/event-stream; charset=utf-8"
    }  # fmt: skip
    assert (start["type"], start["status"]) == ("http.response.start", 200)
    assert all(p["more_body"] for p in parts)
    assert end == {"type": "http.response.body", "body": b"", "more_body": False}
    wanted = [{**HEAD, "choices": [choice(i, "abcd", finish_reason="length")]} for i in range(2)]
    assert b"".join(p["body"] for p in parts) == events(*wanted)


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_whose_kv_was_there_are_counted(stream: bool) -> None:
    client = FakeClient()
    client.cached = 2
    fields = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    body = {"prompt": [[5, 6, 7], [5, 6, 8]], "max_tokens": 2, "n": 2, **fields}
    text = ask("POST", "/v1/completions", make_service(client), json=body).text
    found = json.loads(text.split("data: ")[-2] if stream else text)["usage"]
    counts = {"prompt_tokens": 6, "completion_tokens": 8, "total_tokens": 14}
    assert found == {**counts, "prompt_tokens_details": {"cached_tokens": 4}}


@pytest.mark.parametrize("always", [False, True])
def test_that_nothing_was_cached_is_told_where_the_server_is_asked_to(always: bool) -> None:
    service = make_service(enable_prompt_tokens_details=always)
    usage = ask("POST", "/v1/completions", service, json={"prompt": [5, 6], "max_tokens": 2}).json()["usage"]
    assert usage.get("prompt_tokens_details") == ({"cached_tokens": 0} if always else None)


@pytest.mark.parametrize("always", [None, False, True])
def test_usage_is_told_at_the_end_and_where_asked_for_with_every_chunk(always: bool | None) -> None:
    options = {"include_usage": True, **({} if always is None else {"continuous_usage_stats": always})}
    _, *parts, _ = run(spoken(make_service(), stream=True, stream_options=options))
    usage = USAGE if always else None
    wanted = {**HEAD, "choices": [choice(0, "abcd", finish_reason="length")], "usage": usage}
    assert b"".join(p["body"] for p in parts) == events(wanted, {**HEAD, "choices": [], "usage": USAGE})
    only = {"include_usage": False, "continuous_usage_stats": True}
    _, *parts, _ = run(spoken(make_service(), stream=True, stream_options=only))
    assert b"usage" not in b"".join(p["body"] for p in parts)


def test_usage_of_a_conversation_starts_at_no_token() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    talk = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "stream": True, "n": 2}
    response = ask("POST", "/v1/chat/completions", make_service(), json={**talk, "stream_options": options})
    found = [json.loads(e.removeprefix("data: ")) for e in response.text.split("\n\n")[:-2]]
    usages = [chunk["usage"] for chunk in found]
    assert [u["completion_tokens"] for u in usages[:2]] == [0, 0]
    assert found[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(u["total_tokens"] == u["prompt_tokens"] + u["completion_tokens"] for u in usages)
    assert usages[-1]["completion_tokens"] == 4


def test_a_conversation_is_opened_once_and_tokens_add_up() -> None:
    client = Later()
    service = make_service(client)

    async def work() -> list[Any]:
        asked = asyncio.create_task(_chat(service))
        for count, text in ((1, "x"), (2, "y")):
            await until(lambda: client.added)
            client.grow(text)
            await until(lambda count=count: [c.completion_tokens for c in service.active_calls] == [count])
        client.finish()
        return (await asked).text.split("\n\n")

    found = [json.loads(e.removeprefix("data: ")) for e in run(work())[:-2]]
    assert [c["choices"][0]["delta"] for c in found[:-1]] == [
        {"role": "assistant", "content": ""}, {"content": "x"}, {"content": "y"}, {"content": "abcd"}
    ]  # fmt: skip
    assert {c["object"] for c in found} == {"chat.completion.chunk"}
    assert found[-1]["usage"]["completion_tokens"] == 4


async def _chat(service: Service) -> httpx.Response:
    from fake import http_of

    talk = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
    async with http_of(service) as http:
        return await http.post(
            "/v1/chat/completions", json={**talk, "stream": True, "stream_options": {"include_usage": True}}
        )


def test_a_whole_answer() -> None:
    found = ask("POST", "/v1/completions", json={**BODY, "prompt": [[5, 6], [7]], "n": 2}).json()
    assert {**found, "id": "", "created": 0} == {
        **HEAD, "choices": [whole_choice(i, "abcd", finish_reason="length") for i in range(4)],
        "usage": {"prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11},
    }  # fmt: skip
    talk = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    assert ask("POST", "/v1/chat/completions", json=talk).json()["object"] == "chat.completion"


def test_a_prompt_alone_has_no_completion() -> None:
    found = ask("POST", "/v1/completions", json={"prompt": "x y", "max_tokens": 0, "echo": True}).json()
    assert (found["choices"], found["usage"]["completion_tokens"]) == (
        [whole_choice(0, "x y", finish_reason="length")],
        0,
    )


def test_who_leaves_before_a_whole_answer_gets_a_status_for_the_log() -> None:
    async def work() -> list[Any]:
        service = make_service(Later())
        body = json.dumps(BODY).encode()
        received = asyncio.Event()
        asked = [{"type": "http.disconnect"}, {"type": "http.request"}, {"type": "http.request", "body": body}]
        sent = list[Any]()

        async def receive() -> dict[str, Any]:
            if len(asked) < 3:
                await until(lambda: service.active_calls)
            return asked.pop()

        async def send(message: Any) -> None:
            sent.append(message)
            received.set()

        await asyncio.wait_for(with_middleware(make_app(service), service)(scope(body), receive, send), 5)
        assert not asked, "a message that is no end is passed over"
        return sent

    start, end = run(work())
    assert (start["status"], end["body"]) == (499, b"")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failure", "status", "told"),
    [
        (EngineGoneError("it fell"), 503, {"message": "the engine is gone: it fell", "code": "engine_gone",
                                           "type": "service_unavailable_error", "param": None}),
        (PromptRefusedError("top_k is too large", ErrorOrigin.CLIENT), 400,
         {"message": "top_k is too large", "code": "invalid_value", "type": "invalid_request_error", "param": "top_k"}),
        (PromptRefusedError("top_k is too large", ErrorOrigin.SERVER), 500,
         {"message": "top_k is too large", "code": "no_token", "type": "server_error", "param": None}),
    ],
    ids=["gone", "wrong", "failed"],
)  # fmt: skip
def test_an_engine_that_does_not_answer(failure: Exception, status: int, told: dict[str, Any], stream: bool) -> None:
    client = Later()

    async def work() -> list[dict[str, Any]]:
        asked = asyncio.create_task(spoken(make_service(client), stream=stream))
        await until(lambda: client.added)
        client.fail(failure)
        return await asked

    start, body, *_ = run(work())
    if stream:
        assert json.loads(body["body"].removeprefix(b"data: ")) == {"error": told}
    else:
        assert (start["status"], json.loads(body["body"])) == (status, {"error": told})
        assert dict(start["headers"]).get(b"retry-after") == (b"5" if status == 503 else None)


@pytest.mark.parametrize(
    ("blame", "status", "param", "code"),
    [
        (ErrorOrigin.CLIENT, 400, "min_p", "invalid_value"),
        (ErrorOrigin.SERVER, 500, None, "no_token"),
        (ErrorOrigin.LOAD, 503, None, "no_memory"),
    ],
)
def test_a_completion_that_ends_with_an_error(blame: ErrorOrigin, status: int, param: str | None, code: str) -> None:
    client = Later()

    async def work() -> list[dict[str, Any]]:
        asked = asyncio.create_task(spoken(make_service(client)))
        await until(lambda: client.added)
        client.grow("", finish_reason="error", stop_reason="min_p leaves nothing", blame=blame)
        return await asked

    start, body = run(work())
    error = json.loads(body["body"])["error"]
    assert (start["status"], error["param"], error["code"]) == (status, param, code)
    assert error["message"] == "min_p leaves nothing"
    assert dict(start["headers"]).get(b"retry-after") == (b"5" if status == 503 else None)


def test_a_completion_that_was_rebuilt_with_all_kv_says_so() -> None:
    client = Later()

    async def work() -> list[dict[str, Any]]:
        asked = asyncio.create_task(spoken(make_service(client)))
        await until(lambda: client.added)
        client.grow("a")
        client.grow("b", finish_reason="length", kv_rebuilt=True)
        return await asked

    _, body = run(work())
    (got,) = json.loads(body["body"])["choices"]
    assert got == {**whole_choice(0, "ab", finish_reason="length"), "kv_rebuilt": True}


def test_an_engine_that_was_gone_before() -> None:
    client = FakeClient()
    client.failure = "it fell"
    service = make_service(client)
    response = ask("POST", "/v1/completions", service, json=BODY)
    assert (response.status_code, response.headers["retry-after"]) == (503, "5")
    assert error_of(response)["message"] == "the engine is gone: it fell"
    assert error_of(response)["code"] == "engine_gone"
    assert service.queue_limit.completions == 0


def call(service: Service, *prompts: list[int], **params: Any) -> Call:
    found = SamplingParams(**params)
    ticket = service.queue_limit.admit(len(prompts) * found.n)
    record = new_accepted_request("cmpl", "tiny", found, Sampling.model_validate({}), b"")
    return Call(service, record, [Prompt(p, "") for p in prompts], ticket, 0.0)


def test_prompt_tokens_wait_until_their_own_first_token() -> None:
    async def work() -> None:
        client = Later()
        service = make_service(client)
        one = call(service, [1, 2, 3], [4, 5])
        assert (service.queue_limit.tokens, service.queue_limit.completions) == (5, 2)
        batches = one.batches()
        for waiting in (2, 2):
            client.grow("x", key=0)
            await anext(batches)
            assert service.queue_limit.tokens == waiting
        client.grow("x", key=1)
        await anext(batches)
        assert (service.queue_limit.tokens, one.completion_tokens) == (0, 3)
        client.finish(key=0)
        await anext(batches)
        assert service.queue_limit.completions == 1
        one.close()
        one.close()
        assert (service.queue_limit.tokens, service.queue_limit.completions, service.active_calls) == (0, 0, set())
        assert client.cancelled == [0, 1]

    run(work())


def test_a_call_that_is_closed_early_counts_as_aborted_and_another_does_not() -> None:
    service = make_service()
    assert ask("POST", "/v1/completions", service, json=BODY).status_code == 200
    assert 'finished_reason="abort"' not in service.metrics.render(vllm=False).decode()
    call(service, [1]).close()
    assert 'request_success_total{engine="0",finished_reason="abort",model_name="tiny"} 1.0' in (
        service.metrics.render(vllm=False).decode()
    )


def test_what_the_log_says_of_a_call() -> None:
    one = call(make_service(Later()), [1, 2], [3])
    counts = {"answer_id": one.record.log_name, "prompt_tokens": 3, "completion_tokens": 0}
    assert one.log_fields() == counts
    for meter, first_s in zip(one.meters, (0.25, 0.123456), strict=True):
        meter.first_s = first_s
    assert one.log_fields() == {**counts, "ttft_s": 0.1235}
    one.meters[1].first_s = None
    assert one.log_fields()["ttft_s"] == 0.25


def test_each_part_of_a_ticket_is_given_back_once() -> None:
    room = QueueLimit(2, 3, 100, lambda reason: None)
    ticket, other = room.admit(3), room.admit(1)
    ticket.set_prompt_tokens(7)
    ticket.on_completion_finished()
    ticket.on_first_token(2)
    assert (room.completions, room.tokens) == (3, 5)
    for _ in range(2):
        ticket.close()
        assert (room.completions, room.tokens) == (1, 0)
    other.close()
    assert room.completions == 0


def refused(work: Any, *given: int) -> dict[str, Any]:
    with pytest.raises(ApiError) as error:
        work(*given)
    return {"status": error.value.status, "retry_after_s": error.value.retry_after_s, **error.value.body["error"]}


def test_refusals_to_the_word() -> None:
    reasons = list[str]()
    room = QueueLimit(2, 3, 100, reasons.append)
    room.admit(3).set_prompt_tokens(100)
    overload = {"status": 429, "retry_after_s": 1, "type": "rate_limit_error", "param": None, "code": "overloaded"}
    requests = "too many requests are waiting: 1 of at most 3 completions (--max-num-queued-reqs); retry in 1 s"
    assert refused(room.check, 3) == {**overload, "message": requests}
    tokens = "too many requests are waiting: 100 of at most 100 prompt tokens (--limits queued-tokens=); retry in 1 s"
    assert refused(room.check_tokens, 1) == {**overload, "message": tokens}
    room.check(2)
    assert refused(room.check, 6) == {
        "status": 400, "retry_after_s": 0, "type": "invalid_request_error", "param": None,
        "code": "too_many_completions",
        "message": "6 completions in one request; at most 5 fit (--max-num-queued-reqs)",
    }  # fmt: skip
    assert room.is_draining is False
    room.is_draining = True
    assert refused(room.check, 1) == {
        "status": 503, "retry_after_s": 1, "message": "the server is shutting down",
        "type": "service_unavailable_error", "param": None, "code": "shutting_down",
    }  # fmt: skip
    assert reasons == ["requests", "tokens", "draining"]


def test_clients_come_later_the_more_completions_wait() -> None:
    room = QueueLimit(2, 200, 100, lambda reason: None)
    waits = list[int]()
    for _ in range(4):
        ticket = room.admit(50)
        waits.append(refused(room.check, 203 - room.completions)["retry_after_s"])
    assert waits == [25, 50, 60, 60]
    ticket.close()
    assert refused(room.check, 100)["retry_after_s"] == 60


def test_without_a_limit_any_number_of_tokens_may_wait_and_with_one_a_long_prompt_alone() -> None:
    room = QueueLimit(2, 3, 0, lambda reason: None)
    room.admit(1).set_prompt_tokens(10**9)
    room.admit(1).set_prompt_tokens(10**9)
    room = QueueLimit(2, 3, 100, lambda reason: None)
    first = room.admit(1)
    first.set_prompt_tokens(101)
    assert refused(room.check_tokens, 1)["status"] == 429
    first.close()
    room.check_tokens(101)


def test_silence_is_logged_for_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """A wait that ends well is one line."""
    logging.getLogger("lamina").propagate = True
    caplog.set_level(logging.INFO, logger="lamina")
    run(spoken(make_service(), stream=True))
    assert [r.getMessage() for r in caplog.records] == ["POST /v1/completions"]
