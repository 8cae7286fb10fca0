"""The checks of every request: keys, limits of bodies, ids, errors in OpenAI's envelope. It needs no engine.

Covers: lamina/server/info_routes.py, lamina/server/metrics/engine_metrics.py, lamina/server/metrics/http_metrics.py,
lamina/server/metrics/request_log.py, lamina/server/middleware/auth.py, lamina/server/openapi.py,
lamina/server/optional_routes.py.
"""

from __future__ import annotations

import asyncio
import base64
import contextvars
import itertools
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

import httpx
import msgspec
import pytest
from fake import FakeClient, http_of, make_service
from prometheus_client.parser import text_string_to_metric_families
from starlette.routing import Route

from lamina.observe.log_lines import REQUEST_ID, LogFormatter
from lamina.server.app import make_app
from lamina.server.engine_client.messages import EngineState
from lamina.server.metrics.engine_metrics import EngineMetrics

T = TypeVar("T")
GOOD = {"prompt": "x", "max_tokens": 2}
JSON = {"content-type": "application/json"}


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 30))


def ask(method: str, path: str, service: Any = None, **options: Any) -> httpx.Response:
    async def work() -> httpx.Response:
        async with http_of(service or make_service()) as http:
            return await http.request(method, path, **options)

    return run(work())


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"]
    return error


def test_every_route_but_health_needs_a_key() -> None:
    service = make_service(api_key="one,two")
    open_to_keys = [r for r in routes(make_app(service)) if r.path not in ("/", "/health", "/ping")]
    assert {"/v1/completions", "/metrics", "/openapi.json", "/v1/models/{model:path}"} <= {r.path for r in open_to_keys}
    paths = [*(r.path for r in open_to_keys), "/health/", "/nothing"]
    wrong = [{}, {"authorization": "Bearer three"}, {"authorization": "Basic one"}]

    async def work() -> None:
        async with http_of(service) as http:
            for path, headers, method in itertools.product(paths, wrong, ("GET", "POST")):
                response = await http.request(method, path, headers=headers)
                assert response.status_code == 401, (method, path, headers)
                assert error_of(response)["code"] == "invalid_api_key"

    run(work())
    assert [ask("GET", path, service).status_code for path in ("/", "/health", "/ping")] == [200] * 3
    for key in ("one", "two"):
        assert ask("GET", "/v1/models", service, headers={"authorization": f"Bearer {key}"}).status_code == 200


def basic(user: str, password: str) -> dict[str, str]:
    return {"authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


def test_a_browser_opens_the_documentation_with_a_key_as_its_password() -> None:
    service = make_service(api_key="one,a:b")
    for path in ("/docs", "/openapi.json"):
        closed = ask("GET", path, service)
        assert closed.status_code == 401
        assert closed.headers["www-authenticate"].startswith("Basic realm=")
        for key in ("one", "a:b"):
            assert ask("GET", path, service, headers=basic("any", key)).status_code == 200
            assert ask("GET", path, service, headers={"authorization": f"Bearer {key}"}).status_code == 200
        for wrong in (
            basic("one", ""),
            basic("any", "two"),
            {"authorization": "Basic one"},
            {"authorization": "Basic"},
        ):
            assert ask("GET", path, service, headers=wrong).status_code == 401


def test_no_other_route_takes_a_key_that_a_browser_sends_by_itself() -> None:
    service = make_service(api_key="one")
    for route in routes(make_app(service)):
        if route.path not in ("/", "/health", "/ping", "/docs", "/openapi.json"):
            for method in route.methods or ():
                answer = ask(method, route.path, service, headers=basic("any", "one"))
                assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer"), route.path


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison that accepts everything would let anyone in: nothing else asks for the key."""
    monkeypatch.setattr("hmac.compare_digest", lambda one, other: len(one) == len(other))
    wrong = {"authorization": "Bearer three"}
    assert ask("GET", "/v1/models", make_service(api_key="one"), headers=wrong).status_code == 200


def routes(app: Any) -> list[Route]:
    found: list[Route] = []
    pending = list(app.routes)
    while pending:
        route = pending.pop()
        nested = getattr(route, "routes", None) or getattr(getattr(route, "original_router", None), "routes", None)
        pending += nested or []
        if getattr(route, "path", None) and not nested:
            found.append(route)
    return found


@pytest.mark.parametrize(
    ("status", "body", "headers"),
    [
        (413, b'"' + b"x" * 2000 + b'"', JSON),
        (400, b"{", JSON),
        (400, b"", JSON),
        (400, b"[1]", JSON),
        (400, b'"text"', JSON),
        (400, b'{"prompt": "\\ud800"}', JSON),
        (400, b'{"prompt": NaN}', JSON),
        (400, b"\xff\xfe", JSON),
        (400, b"[" * 100 + b"]" * 100, JSON),
        (400, b'{"prompt":' + b"[" * 80 + b"1" + b"]" * 80 + b"}", JSON),
        (415, json.dumps(GOOD).encode(), {"content-type": "text/plain"}),
        (415, json.dumps(GOOD).encode(), {}),
        (415, json.dumps(GOOD).encode(), {**JSON, "content-encoding": "gzip"}),
    ],
)
def test_bodies_out_of_bounds(status: int, body: bytes, headers: dict[str, str]) -> None:
    response = ask("POST", "/v1/completions", make_service(max_body="1KB"), content=body, headers=headers)
    assert response.status_code == status
    assert error_of(response)["type"] == "invalid_request_error"


def test_a_body_that_never_ends() -> None:
    async def forever() -> Any:
        yield b"{"
        await asyncio.sleep(60)

    service = make_service(body_timeout_s=0.1)
    response = ask("POST", "/v1/completions", service, content=forever(), headers=JSON)
    assert response.status_code == 408
    assert error_of(response)["code"] == "timeout"


def test_paths_and_methods_that_are_not_there() -> None:
    assert error_of(ask("GET", "/nothing"))["code"] == "not_found"
    assert error_of(ask("GET", "/v1/completions"))["code"] == "method_not_allowed"
    slash = ask("POST", "/llm/v1/completions/", make_service(root_path="/llm"), json=GOOD)
    assert slash.status_code == 404, "a redirect would lose the prefix and the scheme"
    assert error_of(slash)["message"] == "there is no such route: did you mean /v1/completions?"


def test_docs_is_a_page_of_all_routes_without_scripts() -> None:
    page = ask("GET", "/docs")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert page.headers["content-security-policy"] == "default-src 'none'"
    assert "<td>POST<td><code>/v1/chat/completions</code><td>Complete a conversation." in page.text
    assert "<script" not in page.text


def test_odd_methods_add_no_series_of_metrics() -> None:
    service = make_service()
    ask("POST", "/v1/completions", service, json=GOOD)
    before = service.metrics.render(vllm=True).count(b"http_request")
    for method in ("BREW", "PROPFIND", "LOCK", "X" * 30, "TRACE"):
        assert ask(method, "/v1/completions", service).status_code in (405, 501)
    assert service.metrics.render(vllm=True).count(b"http_request") == before > 5


@pytest.mark.parametrize(
    ("given", "echoed"), [("abc-1.2_3", True), ("a b", False), ("x" * 129, False), ("h:80", False)]
)
def test_request_ids_are_echoed_where_harmless(given: str, echoed: bool) -> None:
    response = ask("GET", "/version", headers={"x-request-id": given})
    assert (response.headers["x-request-id"] == given) is echoed


def test_cors_only_where_asked_for() -> None:
    headers = {"origin": "https://a.example", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in ask("OPTIONS", "/v1/completions", headers=headers).headers
    service = make_service(allowed_origins="https://a.example", api_key="k")
    response = ask("OPTIONS", "/v1/completions", service, headers=headers)
    assert response.headers["access-control-allow-origin"] == "https://a.example"
    assert ask("OPTIONS", "/v1/completions", service, headers={**headers, "origin": "https://b"}).status_code == 400


def test_a_failure_is_an_envelope_and_goes_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakeClient):
        def add(self, *args: Any, **options: Any) -> int:
            raise KeyError("secret")

    logging.getLogger("lamina").propagate = True
    response = ask("POST", "/v1/completions", make_service(Broken()), json=GOOD)
    assert response.status_code == 500
    assert "secret" not in response.text
    assert error_of(response)["type"] == "server_error"
    assert any(r.exc_info for r in caplog.records)


def test_log_lines_bear_the_request_and_never_its_text(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("lamina").propagate = True
    caplog.set_level(logging.INFO, logger="lamina")
    lines: list[dict[str, Any]] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(json.loads(LogFormatter(as_json=True).format(record)))

    handler = Collect()
    logging.getLogger("lamina").addHandler(handler)
    service, body = (
        make_service(allow_unknown_fields=True),
        {**GOOD, "prompt": "PRIVATE", "whatever": "PRIVATE", "user": "PRIVATE"},
    )
    try:
        headers = {"x-request-id": "r1"}
        answers = [ask("POST", "/v1/completions", service, json=body, headers=headers) for _ in range(2)]
    finally:
        logging.getLogger("lamina").removeHandler(handler)
    assert "PRIVATE" not in json.dumps(lines)
    assert {line["request_id"] for line in lines} == {"r1"}
    requests = [line for line in lines if line["message"] == "POST /v1/completions"]
    assert [r["completion_tokens"] for r in requests] == [2, 2]
    told, ids = [r["answer_id"] for r in requests], [answer.json()["id"] for answer in answers]
    assert all(re.fullmatch("cmpl-[0-9a-f]{12}", begins) for begins in told), told
    assert [one.startswith(begins) for begins, one in zip(told, ids, strict=True)] == [True, True]
    assert not any(one in json.dumps(lines) for one in ids), "by it anybody gets the answer of a journal"
    assert len([line for line in lines if "whatever" in line["message"]]) == 1, "said once"


@pytest.mark.parametrize(("request_id", "behind"), [(None, ""), ("r1", " request_id=r1")])
def test_a_line_of_text_ends_with_its_request_if_it_has_one_and_a_traceback_is_behind_it(
    request_id: str | None, behind: str
) -> None:
    def line() -> str:
        if request_id is not None:
            REQUEST_ID.set(request_id)
        error = ValueError("why")
        record = logging.LogRecord("lamina", logging.ERROR, "", 0, "%s it", ("broke",), (ValueError, error, None))
        record.fields = {"status": 500}
        return LogFormatter(as_json=False).format(record)

    first, *rest = contextvars.Context().run(line).splitlines()
    assert first.endswith(f" ERROR broke it status=500{behind}")
    assert rest == ["ValueError: why"]


@pytest.mark.parametrize(
    ("method", "path", "named", "headers"),
    [
        ("POST", "/v1/completions", "/v1/completions", {"authorization": "Bearer k", **JSON}),
        ("POST", "/v1/completions", "/v1/completions", JSON),
        ("GET", "/v1/models/mine", "/v1/models/{model:path}", {}),
        ("GET", "/nothing", "unmatched", {"authorization": "Bearer k"}),
    ],
    ids=["malformed", "no key", "no key for a part", "no route"],
)
def test_what_a_layer_answers_is_logged_by_its_route(
    method: str, path: str, named: str, headers: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("lamina").propagate = True
    caplog.set_level(logging.INFO, logger="lamina")
    service = make_service(api_key="k")
    ask(method, path, service, content=b"{", headers=headers)
    assert [r.message for r in caplog.records if r.name == "lamina.server.metrics.request_log"] == [f"{method} {named}"]
    assert f'handler="{named}"' in ask("GET", "/metrics", service, headers={"authorization": "Bearer k"}).text


def test_health_and_load_tell_the_truth() -> None:
    client = FakeClient()
    service = make_service(client, health_timeout_s=4.0)
    assert [ask("GET", path, service).status_code for path in ("/health", "/ping")] == [200, 200]
    client.seconds_without_progress = 4.1
    assert ask("GET", "/health", service).status_code == 503
    client.seconds_without_progress, client.failure = 0.0, "lost"
    assert ask("GET", "/health", service).json() == {"status": "lost"}
    assert ask("POST", "/v1/completions", service, json=GOOD).status_code == 503
    assert ask("GET", "/load", service).json() == {"server_load": 0, "running": 1, "waiting": 2, "kv_usage": 0.25}


def test_blocks_of_an_unequal_memory_worker_are_counted_in_full() -> None:
    """A sequence takes as many on each holder of a group, so the larger one has more left."""
    found = {
        (s.labels["worker"], s.labels["state"]): s.value
        for family in EngineMetrics(FakeClient(), {}).collect()  # type: ignore[arg-type]
        for s in family.samples
        if s.name == "lamina:kv_blocks"
    }
    assert found == {
        ("memory-0", "used"): 16, ("memory-0", "free"): 48, ("memory-1", "used"): 16, ("memory-1", "free"): 64,
    }  # fmt: skip


def test_kept_and_dropped_blocks_are_told_by_tier_of_layers() -> None:
    client = FakeClient()
    names = ("lamina:kv_sparse_blocks_in_use", "lamina:kv_evicted_by_sparsity_blocks_total")

    def found() -> dict[tuple[str, ...], float]:
        samples = (s for f in EngineMetrics(client, {}).collect() for s in f.samples)  # type: ignore[arg-type]
        return {(s.name, *s.labels.values()): s.value for s in samples if s.name in names}

    assert found() == {}, "nobody loses any"
    blocks: dict[str, Any] = {
        "num_blocks": [[60], [90, 80], [70]],
        "holders": [[0], [0, 1], [0]],
        "sparse": [False, True, False],
    }
    client.ready = msgspec.structs.replace(client.ready, **blocks)
    client.state = EngineState(
        running=1, waiting=0, free_blocks=[50, 75, 69], steps=1, metrics={"kv_evicted_by_sparsity_blocks": 40}
    )
    assert found() == {(names[0], "full"): 11, (names[0], "sparse"): 5, (names[1],): 40}


def test_the_cache_says_how_many_tokens_and_sequences_fit() -> None:
    client = FakeClient()
    client.ready = msgspec.structs.replace(client.ready, max_tokens_that_fit=8.5)
    info = next(f for f in EngineMetrics(client, {}).collect() if f.name == "lamina:cache_config")  # type: ignore[arg-type]
    labels = info.samples[0].labels
    assert (labels["kv_cache_max_concurrency"], labels["kv_cache_size_tokens"]) == ("8.50", str(256 * 17 // 2))


def test_vllms_names_have_steps_and_preemptions() -> None:
    service = make_service(metrics_compat="vllm")
    service.metrics.on_step(7)
    service.metrics.on_step(1)
    ask("POST", "/v1/completions", service, json=GOOD)
    text = ask("GET", "/metrics", service).text
    values = {s.name: s.value for f in text_string_to_metric_families(text) for s in f.samples}
    assert (values["vllm:iteration_tokens_total_count"], values["vllm:iteration_tokens_total_sum"]) == (2, 8)
    assert values["vllm:request_num_preemptions_count"] == 1


def test_answers_bear_no_id_where_nobody_wants_one() -> None:
    """Answers have no id, as in vLLM, unless --enable-request-id-headers asks for it."""
    service = make_service(enable_request_id_headers=False)
    assert "x-request-id" not in ask("GET", "/health", service, headers={"x-request-id": "mine"}).headers


def test_heads_are_answered_as_their_gets() -> None:
    """Balancers ask so for /health."""
    for path in ("/health", "/v1/models", "/metrics", "/v1/models/tiny", "/", "/openapi.json"):
        whole, head = ask("GET", path), ask("HEAD", path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == str(len(whole.content))
    assert ask("HEAD", "/nothing").status_code == 404
    assert ask("HEAD", "/v1/completions").status_code == 405


def test_a_wrong_method_is_told_the_right_one() -> None:
    for path, method, allowed in (("/v1/completions", "GET", "POST"), ("/health", "POST", "GET, HEAD")):
        response = ask(method, path, json={})
        assert response.status_code == 405
        assert response.headers["allow"] == allowed
        assert allowed in error_of(response)["message"]


def test_the_line_of_a_refused_request_says_who_asked_for_what_and_why(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("lamina").propagate = True
    service = make_service(root_path="/llm")
    with caplog.at_level(logging.INFO, "lamina"):
        ask("POST", "/llm/v1/completions", service, json={"prompt": "x", "temprature": 1})
        ask("GET", "/nothing%20here", service)
        ask("GET", "/v1/models", make_service(api_key="k"))
    fields = [record.fields for record in caplog.records if hasattr(record, "fields")]
    for each in fields:
        assert each.pop("seconds") >= 0
    assert fields == [
        {
            "status": 400,
            "path": "/llm/v1/completions",
            "client": "127.0.0.1",
            "code": "unknown_field",
            "param": "temprature",
            "error": "unknown field 'temprature': did you mean temperature? Correct it or leave it out; a server with "
            "--allow-unknown-fields ignores it",
        },
        {"status": 404, "path": "/nothing%20here", "client": "127.0.0.1", "code": "not_found",
         "error": "there is no such route"},
        {"status": 401, "path": "/v1/models", "client": "127.0.0.1", "code": "invalid_api_key",
         "error": "a valid API key is needed: send the header Authorization: Bearer KEY"},
    ]  # fmt: skip


@pytest.mark.parametrize("key", ["", "k"])
def test_metrics_need_the_operators_key_where_there_is_one(key: str) -> None:
    service = make_service(api_key=key, admin_key="admin")
    for given, status in ((None, 401), ("k", 401), ("admin", 200)):
        headers = {} if given is None else {"authorization": f"Bearer {given}"}
        assert ask("GET", "/metrics", service, headers=headers).status_code == status
    assert ask("GET", "/metrics").status_code == 200


def test_warnings_and_uncaught_exceptions_are_json() -> None:
    program = (
        "import sys, threading, warnings, logging; from lamina.observe.log_lines import set_up_server_log;"
        "set_up_server_log(as_json=True, level='warning'); logging.getLogger('lamina').info('no');"
        "warnings.warn('old'); logging.getLogger('other').warning('theirs');"
        "t = threading.Thread(target=lambda: 1 / 0); t.start(); t.join(); raise ValueError('end')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["level"] for line in lines] == ["WARNING", "WARNING", "ERROR", "ERROR"]
    assert ["old" in lines[0]["message"], lines[1]["message"]] == [True, "theirs"]
    assert [lines[n]["exception"].splitlines()[-1] for n in (2, 3)] == [
        "ZeroDivisionError: division by zero",
        "ValueError: end",
    ]
    assert done.returncode == 1


def test_a_server_logs_json_if_the_environment_says_so() -> None:
    program = (
        "import logging; from lamina.observe.log_lines import log_as_told, set_up_server_log;"
        "log_as_told('lamina-launch'); set_up_server_log(as_json=False); logging.getLogger('lamina').info('hello')"
    )
    for value, is_json in (("1", True), ("0", False)):
        environment = {**os.environ, "LAMINA_LOG_JSON": value}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=60
        )
        assert done.stderr.startswith("{") is is_json, done.stderr
