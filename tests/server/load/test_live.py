"""Load, leaving clients and counts on the real server; nothing is held back afterwards."""

from __future__ import annotations

import asyncio
import json
import re

import httpx
import pytest
from running import Running, eventually

pytestmark = pytest.mark.timeout(300)  # starting a server on a busy machine takes its time
LONG = {"prompt": "class Stack:", "max_tokens": 1500, "ignore_eos": True, "stream": True}


def load(http: httpx.Client) -> dict[str, float]:
    found: dict[str, float] = http.get("/load").json()
    return found


def idle(http: httpx.Client) -> bool:
    now = load(http)
    return now["server_load"] == now["running"] == now["waiting"] == now["kv_usage"] == 0


def value(http: httpx.Client, name: str) -> float:
    return sum(
        float(v) for v in re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", http.get("/metrics").text, re.MULTILINE)
    )


@pytest.mark.no_retry
def test_a_closed_socket_frees_its_kv(http: httpx.Client) -> None:
    with http.stream("POST", "/v1/completions", json=LONG) as response:
        lines = response.iter_lines()
        next(lines)
        assert eventually(lambda: load(http)["kv_usage"] > 0, 10)
        assert load(http)["server_load"] == 1
    assert eventually(lambda: idle(http), 10)


@pytest.mark.long
def test_overload_is_refused_and_what_came_in_is_served(server: Running, http: httpx.Client) -> None:
    """8 decode, 24 wait; the 8 above are refused."""
    body = {"prompt": "def f(", "max_tokens": 40, "ignore_eos": True}

    async def work() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=server.url, timeout=90, limits=limits) as client:
            return await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(40)))

    answers = asyncio.run(work())
    refused = [a for a in answers if a.status_code == 429]
    assert 1 <= len(refused) <= 8, "those that come late may find room again"
    assert all(a.headers["retry-after"] for a in refused)
    assert all(a.json()["usage"]["completion_tokens"] == 40 for a in answers if a.status_code == 200)
    assert len(refused) + sum(a.status_code == 200 for a in answers) == 40
    assert eventually(lambda: idle(http), 10)


def test_counters_equal_what_clients_were_told(http: httpx.Client) -> None:
    names = ("lamina:prompt_tokens_total", "lamina:generation_tokens_total", "vllm:request_success_total")
    before = [value(http, n) for n in names]
    usages = [
        http.post("/v1/completions", json={"prompt": "x y z", "max_tokens": 3, "n": n}).json()["usage"] for n in (1, 2)
    ]
    after = [value(http, n) for n in names]
    wanted = [sum(u["prompt_tokens"] for u in usages), sum(u["completion_tokens"] for u in usages), 2]
    assert [a - b for a, b in zip(after, before, strict=True)] == wanted


def test_the_log_has_requests_and_a_status_line(server: Running, http: httpx.Client) -> None:
    http.post("/v1/completions", json={"prompt": "SECRET", "max_tokens": 2}, headers={"x-request-id": "my-id"})

    def lines() -> list[dict[str, object]]:
        return [json.loads(x) for x in server.log.read_text().splitlines() if x.startswith("{")]

    assert eventually(
        lambda: any(x.get("request_id") == "my-id" and x.get("completion_tokens") == 2 for x in lines()), 15
    )
    assert eventually(lambda: any(x["message"] == "status" and "attention_wait_us" in x for x in lines()), 15)
    assert "SECRET" not in server.log.read_text()
