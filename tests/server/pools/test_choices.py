"""The reason why a server has prompts computed where they are: an event for each in its trace, and words for people."""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests
from running import MODEL, Running

from lamina.cli.launch import main

PAGE, DOCUMENT, QUESTION, CHUNK = 16, 512, 100, 64


def prompt(number: int, question: int = QUESTION) -> list[int]:
    """A question about the document."""
    return [*(2 + (7 * t) % 300 for t in range(DOCUMENT)), *(2 + (11 * number + 5 * t) % 300 for t in range(question))]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Returns the trace of a server that has ended: a question alone, six at once, then one of few tokens; and one too
    late.
    """
    folder = tmp_path_factory.mktemp("choices")
    path = str(folder / "run.json")
    flags = ("--prefill-workers", "2", "--prefill-chunk", str(CHUNK), "--prefill-policy", "mooncake", "--trace", path)
    server = Running(folder / "log", *flags, "--slo", "ttft=1h", "--block-size", str(PAGE))
    try:

        def ask(tokens: list[int]) -> None:
            body = {"model": MODEL, "prompt": tokens, "max_tokens": 3, "temperature": 0}
            assert requests.post(f"{server.url}/v1/completions", json=body, timeout=120).ok

        ask(prompt(0))
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(ask, [prompt(n) for n in range(1, 7)]))
        ask(prompt(0, question=20))
        server.signal(signal.SIGTERM)
        assert server.wait(60) == 0
    finally:
        server.kill()
    return path


def told(trace: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert main(["timeline", trace, "--json"]) == 0
    choices: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["choices"]
    return choices


def test_a_request_has_one_event_with_its_way_and_the_prices_of_all(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    choices = told(trace, capsys)
    assert [c["event"] for c in choices] == ["choice"] * 8
    assert sorted(c["request"] for c in choices) == list(range(1, 9)), "0 was the server's own, at its start"
    first, *many, short = choices
    assert (first["by"], first["reason"], first["cached"]) == ("prefill-0", "new", 0)
    assert {c["by"] for c in many} == {"prefill-0", "prefill-1"}
    assert {"local match", "remote match"} <= {c["reason"] for c in many}
    for each in many:
        assert {w["by"] for w in each["prices"]} == {"prefill-0", "prefill-1"}, "no alternative is left out"
        assert [w["ttft_s"] for w in each["prices"]] == sorted(w["ttft_s"] for w in each["prices"])
        assert each["cached"] == DOCUMENT
    for fetched in (c for c in many if c["reason"] == "remote match"):
        assert fetched["source"] != fetched["by"]
        assert fetched["moved"] > 0
        assert fetched["transfer_s"] > 0
    assert (short["by"], short["lane_reason"]) == ("inline", "its beginning lies there")
    assert DOCUMENT <= short["cached"] < short["tokens"] <= short["cached"] + CHUNK
    assert short["prices"], "of prefill workers, which were not asked"
    for each in choices:
        assert each["batch_loads"][each["batch"]] == min(each["batch_loads"])
        assert each["memory"], "the memory workers that hold it"
        assert len(each["blocks_left"]) > 0


def test_people_can_read_it(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["timeline", trace]) == 0
    plain = capsys.readouterr().out
    assert "prompts, by the worker that computed them and the reason:" in plain
    assert "request 1" not in plain
    assert main(["timeline", trace, "--choices"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (first,) = (line for line in lines if line.startswith("request 1, "))
    assert f"{DOCUMENT + QUESTION} tokens: prefill-0, new, 0 tokens there, first token foreseen after" in first
    assert "; ways: prefill-0 new" in first
    assert sum(line.startswith("request ") for line in lines) == 8
