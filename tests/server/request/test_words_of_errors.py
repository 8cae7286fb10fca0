"""Words by which clients decide what to do next, as OpenAI's and vLLM's servers say them."""

from __future__ import annotations

from typing import Any

import pytest
from fake import make_service
from test_layers import ask, error_of

CONTEXT = "This model's maximum context length is 256 tokens. However, "
TURN = {"role": "user", "content": "x"}
# Of LiteLLM, in lower case: with one of them it falls back on a model with a longer context.
SIGNS = ("this model's maximum context length is", "model's maximum context limit", "exceed context limit")


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("completions", {"prompt": [5] * 256, "max_tokens": 7}, "prompt has 256 tokens. "),
        ("completions", {"prompt": [5] * 300}, "prompt has 300 tokens. "),
        ("completions", {"prompt": "x" * 100_000}, "prompt has 100000 characters, which cannot fit. "),
        ("completions", {"prompt": "x", "max_tokens": 257}, "257 new tokens were asked for. "),
        ("chat/completions", {"messages": [{"role": "user", "content": "a b " * 200}]}, "messages has "),
    ],
)
def test_what_is_too_long_is_told_in_the_words_that_clients_look_for(path: str, body: Any, words: str) -> None:
    error = error_of(ask("POST", f"/v1/{path}", make_service(), json=body))
    assert error["message"].startswith(CONTEXT + words)
    assert "Please reduce the length of" in error["message"]
    assert any(sign in error["message"].lower() for sign in SIGNS)
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"messages": []}, "messages must have at least 1 item, not 0"),
        ({}, "messages must be given"),
        ({"messages": None}, "messages must be a list"),
        ({"messages": [{"role": "", "content": "x"}]}, "messages.0.role must have at least 1 character"),
        ({"messages": [{"role": "tool", "content": "x"}]},
         "messages.0.tool_call_id must be the id of a call in an earlier message"),
        ({"messages": [TURN, {"role": "usr", "content": "x"}]},
         "messages.1.role must be one of system, developer, user, assistant, tool, not 'usr'"),
        ({"messages": [{"role": "function", "content": "x"}]},
         "messages.0.role: 'function' replies to a call of the old form: send role 'tool' with a tool_call_id"),
        ({"n": 0}, "n must be at least 1, not 0"),
        ({"temperature": 2.5}, "temperature must be at most 2, not 2.5"),
        ({"n": "1"}, "n must be an integer"),
        ({"temperature": "1"}, "temperature must be a number"),
        ({"ignore_eos": "yes"}, "ignore_eos must be true or false"),
        ({"stream": True, "stream_options": 5}, "stream_options must be an object"),
        ({"truncation_side": "up"}, "truncation_side must be 'left' or 'right'"),
        ({"stop": 5}, "stop must be a string or a list of strings"),
        ({"stop": ["x", 5]}, "stop must be a string or a list of strings"),
        ({"priority": 10**4000}, f"priority must be at most 9223372036854775807, not 1{'0' * 63}"),
        ({"kv_discard": [[5, 1]]},
         "kv_discard: [5, 1] is no range [first, end) of tokens, such as [128, 256]"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_is_told_as_what_it_must_be(body: Any, text: str) -> None:
    talk = {} if body == {} else {"messages": [TURN]}
    error = error_of(ask("POST", "/v1/chat/completions", make_service(), json={**talk, **body}))
    assert error["message"] == text
    assert error["param"] == text.replace(":", " ").split()[0]


def test_a_role_that_the_chat_template_names_is_taken() -> None:
    service, body = make_service(), {"messages": [TURN, {"role": "ipython", "content": "1"}], "max_tokens": 1}
    tokenizer = service.prompt_processor.tokenizer
    assert ask("POST", "/v1/chat/completions", service, json=body).status_code == 400
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'ipython' %}out: {% endif %}{{ m.content }}{% endfor %}"
    )
    assert ask("POST", "/v1/chat/completions", service, json=body).status_code == 200


@pytest.mark.parametrize("key", ["x", "2048", "-1", "1.5", "٣", "9" * 70])
def test_a_bad_key_of_logit_bias_is_named(key: str) -> None:
    body = {"prompt": "x", "logit_bias": {"5": 1, key: 1}}
    error = error_of(ask("POST", "/v1/completions", make_service(), json=body))
    assert error["message"] == f"logit_bias has the key {key[:64]!r}: keys must be token ids below 2048"
    assert error["param"] == "logit_bias"


def test_a_token_that_logit_bias_has_twice_is_refused() -> None:
    error = error_of(
        ask("POST", "/v1/completions", make_service(), json={"prompt": "x", "logit_bias": {"5": 1, "05": 2}})
    )
    assert error["message"] == "logit_bias has a token id twice"
