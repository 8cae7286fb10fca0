"""Requests that would come later than is promised: status 429, what was expected, and when to come again.

Covers: lamina/server/response/event_stream.py.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fake import make_service
from sockets import Later
from test_engine_process import PARAMS, PROMPT, Bench
from test_exact_answers import spoken
from test_flow import until
from test_layers import run

from lamina.cli import launch
from lamina.config.flat_options import make_config
from lamina.request import ErrorOrigin, Refusal
from lamina.scheduler.conductor.overload import SloLimits
from lamina.server.engine_client.messages import AddPrompt, PromptRefused
from lamina.server.engine_client.open_prompts import PromptRefusedError
from lamina.server.response.event_stream import DONE, KEEP_ALIVE
from lamina.server.server_config import ServerConfig

LATE = Refusal("ttft", 3.25, 0.01, 1.2)
TOLD = {
    "message": "too late", "type": "rate_limit_error", "param": None, "code": "overloaded", "predicted_ttft_s": 3.25,
    "predicted_tbt_s": 0.01,
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["arrival", "first token"])
def test_a_request_that_comes_too_late_gets_status_429(stream: bool, when: str) -> None:
    client = Later()
    service = make_service(client, slo_ttft="2s")

    async def work() -> list[dict[str, Any]]:
        asked = asyncio.create_task(spoken(service, stream=stream))
        await until(lambda: client.added)
        if when == "arrival":
            client.fail(PromptRefusedError("too late", ErrorOrigin.LOAD, LATE))
        else:
            client.grow("", finish_reason="error", stop_reason="too late", blame=ErrorOrigin.LOAD, refusal=LATE)
        return await asked

    start, body, *_ = run(work())
    assert (start["status"], json.loads(body["body"])) == (429, {"error": TOLD})
    assert dict(start["headers"])[b"retry-after"] == b"2"
    reason = "ttft" if when == "arrival" else "ttft_after_prefill"
    counted = f'admission_rejections_total{{engine="0",model_name="tiny",reason="{reason}"}} 1.0'
    assert counted in service.metrics.render(vllm=False).decode()
    assert service.queue_limit.completions == 0
    assert not service.active_calls


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_for_which_nobody_lends_room_gets_status_503(stream: bool) -> None:
    client = Later()
    client.config = make_config({"partition": "spill", "borrow": "1GiB", "ledger": "h:1", "transport": "shm"})

    async def work() -> list[dict[str, Any]]:
        asked = asyncio.create_task(spoken(make_service(client), stream=stream))
        await until(lambda: client.added)
        client.grow("", finish_reason="error", stop_reason="no deployment has lent", blame=ErrorOrigin.LOAD)
        return await asked

    start, body, *_ = run(work())
    assert (start["status"], dict(start["headers"]).get(b"retry-after")) == (503, b"5")
    assert json.loads(body["body"])["error"]["code"] == "no_memory"


def test_a_stream_that_comes_in_time_is_whole() -> None:
    """It waits for its first token, and loses none."""
    client = Later()

    async def work() -> list[dict[str, Any]]:
        asked = asyncio.create_task(spoken(make_service(client, slo_tbt="50ms"), stream=True))
        await until(lambda: client.added)
        client.grow("ab")
        client.grow("cd", finish_reason="length")
        return await asked

    start, *parts, _ = run(work())
    assert start["status"] == 200
    text = b"".join(part["body"] for part in parts).decode()
    assert "ab" in text
    assert "cd" in text
    assert text.endswith("data: [DONE]\n\n")


def test_a_stream_that_waits_long_is_kept_alive_and_told_of_a_late_refusal() -> None:
    """Its head has left by then, so the refusal is its last event."""
    client, sent = Later(), list[dict[str, Any]]()
    service = make_service(client, slo_tbt="50ms", sse_keep_alive_s=0.01)

    async def work() -> None:
        asked = asyncio.create_task(spoken(service, sent, stream=True))
        await until(lambda: len(sent) > 3)
        client.grow("", finish_reason="error", stop_reason="too late", blame=ErrorOrigin.LOAD, refusal=LATE)
        await asked

    run(work())
    assert sent[0]["status"] == 200
    *silent, last, done, _ = [part["body"] for part in sent[1:]]
    assert {KEEP_ALIVE} == set(silent)
    assert json.loads(last.removeprefix(b"data: ")) == {"error": TOLD}
    assert done == DONE
    assert 'reason="ttft_after_prefill"} 1.0' in service.metrics.render(vllm=False).decode()
    assert service.queue_limit.completions == 0


def test_the_engines_loop_refuses_at_the_arrival_and_takes_whom_it_took_before() -> None:
    bench = Bench()
    promises = bench.engine.slo_admission
    promises.set_config(ServerConfig(slo_ttft="1s").conductor_config)
    promises.conductor.prefill_latency.model = promises.conductor.prefill_latency.model._replace(b=1.0)
    for key in (7, 8):
        bench.loop.take(AddPrompt(key, PROMPT, PARAMS))
    (refused,) = [m for m in bench.told() if isinstance(m, PromptRefused)]
    assert (refused.key, refused.blame) == (8, ErrorOrigin.LOAD)
    assert refused.refusal is not None
    assert refused.refusal.reason == "ttft"
    bench.loop.take(AddPrompt(9, PROMPT, PARAMS, accepted=True))
    assert {d.key for d in bench.work()} == {7, 9}
    bench.engine.release_idle_blocks()
    assert bench.loop.state().metrics["ttft_samples"] == 2
    assert promises.conductor.num_waiting == promises.conductor.decode_load_model.num_running == 0


def test_a_prompt_that_is_computed_and_cannot_be_decoded_ends_unless_it_was_taken_before() -> None:
    bench = Bench()
    promises = bench.engine.slo_admission
    promises.set_config(ServerConfig(slo_tbt="1us", overload="baseline").conductor_config)
    bench.loop.take(AddPrompt(7, PROMPT, PARAMS))
    while not promises.conductor.decode_load_model.num_running:
        bench.loop.advance()
    for _ in range(8):
        promises.on_round_done(1, 10.0, 1.0)
    bench.loop.take(AddPrompt(8, PROMPT, PARAMS))
    bench.loop.take(AddPrompt(9, PROMPT, PARAMS, accepted=True))
    ends = {d.key: d for d in bench.work() if d.finish_reason}
    assert {key: end.finish_reason for key, end in ends.items()} == {7: "length", 8: "error", 9: "length"}
    assert (ends[8].blame, ends[8].refusal and ends[8].refusal.reason) == (ErrorOrigin.LOAD, "tbt")
    counts = promises.counts()
    assert counts is not None
    assert counts.rejected_after_prefill_tokens == len(PROMPT)


def test_flags_say_what_is_promised() -> None:
    assert ServerConfig(slo_ttft="2s", slo_tbt="100ms").conductor_config.limits == SloLimits(2.0, 0.1)
    assert not ServerConfig().has_slo
    for wrong, said in (
        ({"slo_ttft": "2"}, "--slo ttft=2 is not a time"),
        ({"slo_tbt": "-1s"}, "--slo tbt=-1s is not a time"),
        ({"prefill_policy": "best"}, "--prefill-policy must be one of auto, mooncake, .*, not 'best'"),
        ({"kvcache_balancing_threshold": 0.5}, "--prefill-policy mooncake:threshold= must be at least 1, not 0.5"),
        ({"overload": "late"}, "--slo overload= must be one of baseline, early, predictive, not 'late'"),
    ):
        with pytest.raises(ValueError, match=said):
            ServerConfig(**wrong)  # type: ignore[arg-type]


def test_a_policy_is_of_prefill_workers(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["serve", "model", "--prefill-policy", "mooncake", "--dry-run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--prefill-policy needs --prefill-workers" in line


@pytest.mark.parametrize(("limits", "good"), [({"slo_ttft": "20s"}, 1.0), ({"slo_ttft": "1us"}, 0.0)])
def test_answers_in_time_are_counted(limits: dict[str, Any], good: float) -> None:
    service = make_service(**limits)
    start, *_ = run(spoken(service))
    assert start["status"] == 200
    text = service.metrics.render(vllm=False).decode()
    assert f'goodput_requests_total{{engine="0",model_name="tiny"}} {good}' in text


def test_gauges_tell_of_the_loads() -> None:
    bench = Bench()
    bench.engine.slo_admission.set_config(ServerConfig(slo_ttft="1s").conductor_config)
    bench.loop.take(AddPrompt(7, PROMPT, PARAMS))
    bench.work()
    service = make_service()
    assert "prefill_load" not in service.metrics.render(vllm=False).decode()
    service.client.state = bench.loop.state()
    text = service.metrics.render(vllm=False).decode()
    for name in ("prefill_load", "decode_load", "ttft_samples_total", "ttft_predicted_seconds_total"):
        assert f"lamina:{name}{{" in text
