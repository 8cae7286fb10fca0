"""Tokens of log-probabilities by their numbers."""

from __future__ import annotations

from typing import Any

from fake import WORD, FakeClient, make_service
from test_layers import ask

TALK = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "logprobs": True, "top_logprobs": 1}
NAME, OTHER = f"token_id:{WORD}", f"token_id:{WORD + 1}"


def answer(path: str, **body: Any) -> Any:
    service = make_service(FakeClient())
    response = ask("POST", path, service, json=body)
    assert response.status_code == 200
    return response.json()["choices"][0]["logprobs"]


def test_completions() -> None:
    found = answer("/v1/completions", prompt=[5, 6], max_tokens=2, logprobs=1, return_tokens_as_token_ids=True)
    assert found["tokens"] == [NAME, NAME]
    assert found["top_logprobs"] == [{OTHER: -1.0, NAME: -0.5}] * 2
    own = answer("/v1/completions", prompt=[5, 6], max_tokens=2, logprobs=1, return_tokens_as_token_ids=False)
    assert NAME not in own["tokens"]


def test_chat() -> None:
    found = answer("/v1/chat/completions", **TALK, return_tokens_as_token_ids=True)["content"]
    assert [(x["token"], bytes(x["bytes"]).decode(), x["top_logprobs"][0]["token"]) for x in found] == [
        (NAME, NAME, NAME)
    ] * 2
    assert answer("/v1/chat/completions", **TALK)["content"][0]["token"] != NAME
