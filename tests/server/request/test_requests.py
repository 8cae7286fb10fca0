"""Fields of requests: what is refused, what is ignored, what becomes of the rest. It needs no engine."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake import FakeClient, make_service
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_layers import JSON, ask, error_of

from lamina.request import ErrorOrigin
from lamina.server.engine_client.messages import Delta

HUGE = 2**63
TALK = {"messages": [{"role": "user", "content": "hi"}]}
COMPLETION_ERRORS: list[dict[str, Any]] = [
    {"n": 0}, {"n": -1}, {"n": 17}, {"n": 129}, {"n": HUGE}, {"n": 1.5}, {"n": "2"}, {"n": True},
    {"best_of": 3}, {"logprobs": 21}, {"logprobs": -1}, {"logprobs": True},
    {"logit_bias": {str(i): 1 for i in range(301)}}, {"logit_bias": {"x": 1}}, {"logit_bias": {"2048": 1}},
    {"logit_bias": {"-1": 1}}, {"logit_bias": {"1": 101}}, {"logit_bias": [1]}, {"logit_bias": {"1": "a"}},
    {"temperature": -1}, {"temperature": 2.1}, {"temperature": "1"}, {"top_p": 1.1}, {"top_p": -0.1},
    {"top_k": -2}, {"top_k": 2**40}, {"min_p": 2}, {"presence_penalty": 3}, {"frequency_penalty": -3},
    {"kv_sparsity": "some"}, {"kv_sparsity": True}, {"repetition_penalty": 0}, {"repetition_penalty": 5e-324},
    {"min_tokens": 3, "max_tokens": 2}, {"min_tokens": 10**6, "max_tokens": None},
    {"max_tokens": 0}, {"max_tokens": -1}, {"max_tokens": HUGE}, {"max_tokens": 257},
    {"prompt": ""}, {"prompt": []}, {"prompt": [[]]}, {"prompt": None}, {"prompt": {}}, {"prompt": ["a", 1]},
    {"prompt": [-1]}, {"prompt": [2048]}, {"prompt": [2**40]}, {"prompt": [True]}, {"prompt": [1.5]},
    {"prompt": [[1], ["a"]]}, {"prompt": ["a"] * 257}, {"prompt": "x" * 100_000}, {"prompt": [1] * 256},
    {"stop": [""]}, {"stop": ["a"] * 17}, {"stop": "a" * 257}, {"stop": 5}, {"stop": [5]},
    {"stop_token_ids": [2048]}, {"stop_token_ids": ["a"]}, {"stream": "yes"},
    {"stream_options": {"include_usage": True}},
    {"suffix": "x"}, {"seed": "x"}, {"user": 5}, {"prompt_embeds": "x"}, {"guided_json": {}}, {"echo": 1},
]  # fmt: skip
CHAT_ERRORS: list[dict[str, Any]] = [
    {"messages": []}, {"messages": "hi"}, {"messages": [{"role": "user"}, 5]}, {"messages": [{"content": "x"}]},
    {"messages": [{"role": "tool", "content": "x"}]}, {"messages": [{"role": "", "content": "x"}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://h/x"}}]}]},
    {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
    {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]}]},
    {"tools": [{"type": "function"}]}, {"tool_choice": "required"}, {"functions": [{}]},
    {"response_format": {"type": "json_schema", "json_schema": {}}}, {"response_format": {"type": "json_object"}},
    {"chat_template": "{{ 1 }}"}, {"chat_template_kwargs": {"a": 1}}, {"modalities": ["audio"]}, {"audio": {}},
    {"top_logprobs": 2}, {"top_logprobs": 21, "logprobs": True}, {"logprobs": 1}, {"max_completion_tokens": 0},
    {"max_tokens": 0}, {"max_completion_tokens": 257}, {"messages": [{"role": "user", "content": "x" * 100_000}]},
]  # fmt: skip


@pytest.fixture(scope="module")
def service() -> Any:
    return make_service()


@pytest.mark.parametrize("fields", COMPLETION_ERRORS, ids=lambda f: json.dumps(f)[:40])
def test_completions_refuse(fields: dict[str, Any], service: Any) -> None:
    before = len(service.client.added)
    response = ask("POST", "/v1/completions", service, json={"prompt": "x", "max_tokens": 2, **fields})
    assert response.status_code == 400
    error = error_of(response)
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert len(service.client.added) == before, "nothing reaches the engine"
    assert "a" * 50 not in error["message"]


@pytest.mark.parametrize("top_k", [-2, 2**31, 2**62])
def test_a_number_out_of_range_is_told_the_range(top_k: int, service: Any) -> None:
    """The message for 2**31 was that it is too small."""
    answer = ask("POST", "/v1/completions", service, json={"prompt": "x", "top_k": top_k})
    assert (answer.status_code, error_of(answer)["param"]) == (400, "top_k")
    assert "-1" in error_of(answer)["message"] or "2147483647" in error_of(answer)["message"]


@pytest.mark.parametrize("fields", CHAT_ERRORS, ids=lambda f: json.dumps(f)[:40])
def test_chat_refuses(fields: dict[str, Any], service: Any) -> None:
    response = ask("POST", "/v1/chat/completions", service, json={**TALK, **fields})
    assert response.status_code == 400
    assert error_of(response)["param"] is not None


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "none"}, {"tools": []}, {"response_format": {"type": "text"}}, {"response_format": None},
        {"tools": None}, {"n": 2.0}, {"store": False}, {"metadata": {"a": "b"}}, {"tool_choice": "auto"},
        {"top_p": 0}, {"seed": -5}, {"stop": None}, {"messages": [{"role": "developer", "content": "be brief"}]},
    ],
)  # fmt: skip
def test_chat_takes(fields: dict[str, Any], service: Any) -> None:
    assert ask("POST", "/v1/chat/completions", service, json={**TALK, **fields}).status_code == 200


def test_parameters_reach_the_engine_under_their_names() -> None:
    client = FakeClient()
    fields = {
        "n": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "max_tokens": 7, "min_tokens": 3,
        "stop": ["a"], "stop_token_ids": [9], "ignore_eos": True, "seed": 11, "presence_penalty": 0.5,
        "frequency_penalty": 0.25, "repetition_penalty": 1.5, "include_stop_str_in_output": True,
        "skip_special_tokens": False, "logprobs": 2, "kv_sparsity": "none",
    }  # fmt: skip
    body = {"prompt": [5, 6], "logit_bias": {"7": 1.5}, "echo": True, **fields}
    assert ask("POST", "/v1/completions", make_service(client), json=body).status_code == 200
    ((prompt, params),) = client.added
    assert prompt == [5, 6]
    assert {name: getattr(params, name) for name in fields} == fields
    assert params.logit_bias == {7: 1.5}
    assert params.prompt_logprobs == 2


@pytest.mark.parametrize(("seed", "given"), [(-1, None), (7, 7), (None, None)])
def test_a_seed_of_minus_one_is_none(seed: int | None, given: int | None) -> None:
    client = FakeClient()
    for path, body in (("/v1/completions", {"prompt": [5]}), ("/v1/chat/completions", TALK)):
        assert ask("POST", path, make_service(client), json={**body, "seed": seed}).status_code == 200
    assert [params.seed for _, params in client.added] == [given] * 2


JSONS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=4), x, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(
    ["prompt", "messages", "n", "stop", "logit_bias", "logprobs", "top_logprobs", "max_tokens", "seed", "stream",
     "stream_options", "temperature", "top_k", "echo", "tools", "response_format", "model", "tokens", "best_of"]
)  # fmt: skip


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]),
    st.dictionaries(NAMES, JSONS, max_size=4),
    st.booleans(),
)
def test_no_field_breaks_the_server(service: Any, path: str, fields: dict[str, Any], good: bool) -> None:
    body = {**({"prompt": "x", **TALK} if good else {}), **fields}
    response = ask("POST", path, service, content=json.dumps(body).encode(), headers=JSON)
    assert response.status_code in (200, 400, 404), response.text


def test_a_request_without_a_token_is_an_error_of_the_server() -> None:
    client = FakeClient()
    reason = "min_tokens and its like at the beginning of a text mean nothing"
    client.deltas_of = lambda key, index, params, last: [  # type: ignore[method-assign]
        Delta(
            key=key,
            index=index,
            token_ids=[],
            text="",
            finish_reason="error",
            stop_reason=reason,
            blame=ErrorOrigin.SERVER,
        )
    ]
    service = make_service(client)
    answer = ask("POST", "/v1/completions", service, json={"prompt": "x"})
    assert answer.status_code == 500
    assert error_of(answer)["message"] == reason
    streamed = ask("POST", "/v1/completions", service, json={"prompt": "x", "stream": True})
    assert reason in streamed.text
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert not service.active_calls


def test_a_parameter_that_leaves_no_token_is_an_error_of_the_client() -> None:
    client = FakeClient()
    reason = "min_tokens 3 bans the stop tokens so far, and the model gives no other token"
    client.deltas_of = lambda key, index, params, last: [  # type: ignore[method-assign]
        Delta(
            key=key,
            index=index,
            token_ids=[],
            text="",
            finish_reason="error",
            stop_reason=reason,
            blame=ErrorOrigin.CLIENT,
        )
    ]
    answer = ask("POST", "/v1/completions", make_service(client), json={"prompt": "x"})
    assert answer.status_code == 400
    assert (error_of(answer)["message"], error_of(answer)["param"]) == (reason, "min_tokens")
