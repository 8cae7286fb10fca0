"""Room, slow readers, clients that leave, ends from outside. It needs no engine.

Covers: lamina/server/app.py, lamina/server/run.py.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from fake import FakeClient, http_of, make_service
from hypothesis import given
from hypothesis import strategies as st
from test_layers import JSON, ask, error_of, run

from lamina.server.app import make_app, with_middleware
from lamina.server.call import Service
from lamina.server.engine_client.messages import Delta, EngineState, decode_scores, encode_scores
from lamina.server.engine_client.reply_queue import ReplyQueue
from lamina.server.errors import ApiError
from lamina.server.run import HttpServer

BODY = {"prompt": [5, 6, 7], "max_tokens": 2}


def held() -> FakeClient:
    client = FakeClient()
    client.hold = True
    return client


def scope(body: bytes) -> dict[str, Any]:
    return {"type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions",
            "query_string": b"", "headers": [(b"content-type", b"application/json")], "http_version": "1.1",
            "scheme": "http", "server": ("test", 80), "client": ("test", 1), "root_path": ""}  # fmt: skip


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def test_above_the_queue_429_at_once_and_room_comes_back() -> None:
    service = make_service(held(), max_num_queued_reqs=2)

    async def work() -> None:
        async with http_of(service) as http:
            waiting = [asyncio.create_task(http.post("/v1/completions", json={**BODY, "n": 3})) for _ in range(2)]
            await until(lambda: service.queue_limit.completions == 6)
            refused = await http.post("/v1/completions", json=BODY)
            assert refused.status_code == 429
            assert refused.headers["retry-after"]
            assert error_of(refused)["type"] == "rate_limit_error"
            assert (await http.post("/v1/completions", content=b"{")).status_code == 429, "its body is not read"
            assert (await http.post("/tokenize", content=b"{", headers=JSON)).status_code == 400, "which needs no room"
            waiting[0].cancel()
            await until(lambda: service.queue_limit.completions == 3)
            assert service.client.cancelled == [0]
            waiting[1].cancel()
            await until(lambda: not service.active_calls)

    run(work())
    assert (service.queue_limit.completions, service.queue_limit.tokens) == (0, 0)
    assert ask("POST", "/v1/completions", service, json={**BODY, "n": 7}).status_code == 400, "it never could"
    text = ask("GET", "/metrics", service).text
    assert 'lamina:admission_rejections_total{engine="0",model_name="tiny",reason="requests"} 2.0' in text


def test_prompt_tokens_that_wait_are_bounded_too() -> None:
    service = make_service(held(), max_num_queued_tokens=5)

    async def work() -> None:
        async with http_of(service) as http:
            first = asyncio.create_task(http.post("/v1/completions", json=BODY))
            await until(lambda: service.queue_limit.tokens == 3)
            assert (await http.post("/v1/completions", json=BODY)).status_code == 429
            assert service.queue_limit.completions == 1
            first.cancel()
            await until(lambda: service.queue_limit.tokens == 0)

    run(work())


def test_draining_refuses_and_says_so() -> None:
    service = make_service()
    service.queue_limit.is_draining = True
    refused = ask("POST", "/v1/completions", service, json=BODY)
    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    assert ask("GET", "/health", service).status_code == 503


def test_the_log_says_how_to_end_at_once(caplog: pytest.LogCaptureFixture) -> None:
    service = make_service(shutdown_timeout=7.0)

    async def drain() -> None:
        server = HttpServer(service, lambda: None)
        server.on_signal()
        await until(lambda: server.should_exit)

    with caplog.at_level(logging.INFO):
        run(drain())
    assert "draining: 0 requests, at most 7 s; a second Ctrl-C" in caplog.text
    assert caplog.messages[-1] == "ending: all requests have their replies"
    assert service.queue_limit.is_draining


@pytest.mark.parametrize("second", [False, True])
def test_the_log_says_how_many_completions_a_drain_has_cut(second: bool, caplog: pytest.LogCaptureFixture) -> None:
    service = make_service(held(), shutdown_timeout=60.0 if second else 0.1)
    server = HttpServer(service, lambda: None)
    service.client.kill = lambda: None  # type: ignore[attr-defined]

    async def work() -> None:
        async with http_of(service) as http:
            asked = [asyncio.create_task(http.post("/v1/completions", json=BODY))]
            await until(lambda: service.active_calls)
            server.on_signal()
            if second:
                await until(lambda: "draining" in caplog.text)
                server.on_signal()
            await until(lambda: server.should_exit)
            assert [(await one).status_code for one in asked] == [503]

    with caplog.at_level(logging.INFO):
        run(work())
    told = [x for x in caplog.messages if x.startswith(("draining: 1 request, ", "ending", "second"))]
    assert len(told) == 2, caplog.messages
    assert told[1] == (
        "second signal: ending at once, 1 completion is cut" if second else "ending after 0.1 s: 1 completion is cut"
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_cancelled_at_once_and_told_apart(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("lamina").propagate = True
    caplog.set_level(logging.INFO, logger="lamina")
    service, leave = make_service(held()), asyncio.Event()
    body = json.dumps({**BODY, "stream": stream}).encode()
    messages = [{"type": "http.request", "body": body}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await leave.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        return

    async def work() -> None:
        app = with_middleware(make_app(service), service)
        task = asyncio.create_task(app(scope(body), receive, send))
        await until(lambda: service.active_calls)
        assert not service.client.cancelled
        leave.set()
        await asyncio.wait_for(task, 1)

    run(work())
    assert service.client.cancelled == [0]
    assert (service.queue_limit.completions, service.queue_limit.tokens, len(service.active_calls)) == (0, 0, 0)
    assert statuses(service, caplog) == [499]


def statuses(service: Service, caplog: pytest.LogCaptureFixture) -> list[int]:
    """Returns the statuses of requests, as the log has them, once the metrics have each of them too."""
    logged = [r.fields["status"] for r in caplog.records if r.getMessage() == "POST /v1/completions"]  # type: ignore[attr-defined]
    for status in logged:
        counted = f'http_requests_total{{handler="/v1/completions",method="POST",status="{status}"}} '
        assert f"{counted}{logged.count(status)}.0" in service.metrics.render(vllm=False).decode()
    return logged


def test_who_leaves_before_the_body_or_behind_the_end_is_told_apart_too(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("lamina").propagate = True
    caplog.set_level(logging.INFO, logger="lamina")
    service, left = make_service(), {"type": "http.disconnect"}
    body = json.dumps({**BODY, "stream": True}).encode()

    async def send(message: Any) -> None:
        return

    async def work(*messages: dict[str, Any]) -> None:
        asked = list(messages)

        async def receive() -> Any:
            return asked.pop(0) if asked else await asyncio.Event().wait()

        await asyncio.wait_for(with_middleware(make_app(service), service)(scope(body), receive, send), 5)

    run(work({"type": "http.request", "body": body[:5], "more_body": True}, left))
    run(work({"type": "http.request", "body": body}))
    assert statuses(service, caplog) == [499, 200]


def test_ended_from_outside_a_stream_says_why() -> None:
    service = make_service(held())

    async def work() -> str:
        async with http_of(service) as http:
            task = asyncio.create_task(http.post("/v1/completions", json={**BODY, "stream": True}))
            await until(lambda: service.active_calls)
            for call in list(service.active_calls):
                call.abort(ApiError(503, "the server is shutting down", code="shutting_down"))
            return (await task).text

    *_, error, done, _ = run(work()).split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "shutting_down"
    assert done == "data: [DONE]"
    assert set(service.client.cancelled) == {0}


def test_silence_is_filled_with_comments() -> None:
    service = make_service(held(), sse_keep_alive_s=0.02)

    async def work() -> str:
        async with http_of(service) as http:
            task = asyncio.create_task(http.post("/v1/completions", json={**BODY, "stream": True}))
            await until(lambda: service.active_calls)
            await asyncio.sleep(0.2)
            next(iter(service.active_calls)).abort(ApiError(503, "x"))
            return (await task).text

    assert run(work()).count(": keep-alive\n\n") >= 2


@pytest.mark.long
@given(st.lists(st.tuples(st.integers(0, 2), st.text(max_size=3), st.booleans()), min_size=1, max_size=20))
def test_what_a_slow_reader_takes_late_adds_up(parts: list[tuple[int, str, bool]]) -> None:
    async def work() -> dict[int, tuple[str, list[int]]]:
        replies, got = ReplyQueue(), dict[int, tuple[str, list[int]]]()
        for number, (index, text, take) in enumerate(parts):
            replies.push(
                Delta(key=0, index=index, token_ids=[number], text=text, logprobs=[encode_scores([(number, -1.0, 1)])])
            )
            if take or number == len(parts) - 1:
                for d in await replies.get():
                    before = got.get(d.index, ("", []))
                    got[d.index] = (before[0] + d.text, before[1] + d.token_ids)
                    assert [(decode_scores(x) or [(0,)])[0][0] for x in d.logprobs or []] == d.token_ids
        return got

    wanted: dict[int, tuple[str, list[int]]] = {}
    for number, (index, text, _) in enumerate(parts):
        before = wanted.get(index, ("", []))
        wanted[index] = (before[0] + text, [*before[1], number])
    assert run(work()) == wanted


def test_metrics_are_shown_under_both_names_and_only_if_they_exist() -> None:
    client = FakeClient()
    client.state = EngineState(
        running=1,
        waiting=2,
        free_blocks=[48],
        steps=10,
        metrics={
            "prefix_cache_queries": 9,
            "prefix_cache_hits": 4,
            "external_prefix_cache_queries": 5,
            "external_prefix_cache_hits": 2,
        },
    )
    client.cached = 1
    service = make_service(client, metrics_compat="vllm")
    ask("POST", "/v1/completions", service, json={**BODY, "n": 2})
    text = ask("GET", "/metrics", service).text
    for prefix in ("lamina:", "vllm:"):
        for line in ("num_requests_waiting{L} 2.0", "kv_cache_usage_perc{L} 0.25", "prompt_tokens_total{L} 3.0",
                     "generation_tokens_total{L} 4.0", "e2e_request_latency_seconds_count{L} 1.0",
                     "request_queue_time_seconds_sum{L} 0.001", "prefix_cache_queries_total{L} 9.0",
                     "prefix_cache_hits_total{L} 4.0", "prompt_tokens_cached_total{L} 1.0",
                     "request_max_num_generation_tokens_sum{L} 2.0",
                     "request_prefill_kv_computed_tokens_sum{L} 2.0",
                     "external_prefix_cache_queries_total{L} 5.0",
                     "external_prefix_cache_hits_total{L} 2.0"):  # fmt: skip
            assert prefix + line.replace("{L}", '{engine="0",model_name="tiny"}') in text
        named = '{engine="0",model_name="tiny",'
        for line in ('num_requests_waiting_by_reason{L}reason="capacity"} 2.0',
                     'prompt_tokens_by_source_total{L}source="local_compute"} 2.0',
                     'prompt_tokens_by_source_total{L}source="local_cache_hit"} 1.0'):  # fmt: skip
            assert prefix + line.replace("{L}", named) in text
    assert 'lamina:attention_message_bytes_total{engine="0",kind="q",model_name="tiny"} 20480.0' in text
    assert 'lamina:attention_wait_seconds_count{engine="0",model_name="tiny"} 40.0' in text
    assert "vllm:attention_wait" not in text
    assert "spec_decode" not in text
    assert "_created" not in text
    client.state, client.counters = None, {}
    bare = ask("GET", "/metrics", make_service(client)).text
    assert "num_requests_running" not in bare
    assert "vllm:" not in bare
