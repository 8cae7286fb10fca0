"""Requests that do not say how to sample get what the model's own files say."""

from __future__ import annotations

from typing import Any

import pytest
from fake import make_service
from test_layers import ask

TALK = {"messages": [{"role": "user", "content": "hi"}]}
SAYS = {"temperature": 0.6, "top_k": 20, "max_tokens": 9}


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", TALK)])
def test_what_a_request_does_not_say(path: str, body: dict[str, Any]) -> None:
    service = make_service()
    service.defaults = SAYS
    for fields, expected in (
        ({}, (0.6, 20, 9)),
        ({"temperature": 0.0, "top_k": -1, "max_tokens": 4}, (0.0, -1, 4)),
        ({"max_tokens": 30}, (0.6, 20, 9)),  # a limit for all, as vLLM has it
    ):
        assert ask("POST", path, service, json={**body, **fields}).status_code == 200
        params = service.client.added[-1][1]
        assert (params.temperature, params.top_k, params.max_tokens) == expected, fields


def test_without_a_file_the_defaults_are_those_of_openai() -> None:
    service = make_service()
    assert ask("POST", "/v1/chat/completions", service, json=TALK).status_code == 200
    params = service.client.added[-1][1]
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (1.0, 1.0, 0, None)
