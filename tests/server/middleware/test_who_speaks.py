"""The role that speaks after the messages of a conversation."""

from __future__ import annotations

from typing import Any

import pytest
from fake import FakeClient, make_service
from test_layers import ask, error_of

from lamina.models.tokenizer import token_ids

CHAT, TOKENIZE = "/v1/chat/completions", "/tokenize"
ASKED = [{"role": "user", "content": "hi"}]
BEGUN = [*ASKED, {"role": "assistant", "content": "I am"}]
CASES: list[tuple[dict[str, Any], str]] = [
    ({"messages": ASKED}, "<|user|>\nhi<|end|>\n<|assistant|>\n"),
    ({"messages": ASKED, "add_generation_prompt": None, "continue_final_message": None},
     "<|user|>\nhi<|end|>\n<|assistant|>\n"),
    ({"messages": ASKED, "add_generation_prompt": False}, "<|user|>\nhi<|end|>\n"),
    ({"messages": BEGUN, "continue_final_message": True}, "<|user|>\nhi<|end|>\n<|assistant|>\nI am"),
    ({"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": False},
     "<|user|>\nhi<|end|>\n<|assistant|>\nI am"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "text"), CASES)
def test_the_prompt_ends_where_the_request_says(body: dict[str, Any], text: str) -> None:
    service = make_service(FakeClient())
    expected = token_ids(service.prompt_processor.tokenizer, text, add_special_tokens=False)
    assert ask("POST", CHAT, service, json=body).status_code == 200
    assert service.client.added[-1][0] == expected
    assert ask("POST", TOKENIZE, service, json=body).json()["tokens"] == expected
    assert ask("POST", CHAT, service, json={**body, "add_special_tokens": True}).status_code == 200
    assert service.client.added[-1][0][-len(expected) :] == expected


def test_both_at_once_are_refused() -> None:
    body = {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": True}
    for path in (CHAT, TOKENIZE):
        error = error_of(ask("POST", path, make_service(), json=body))
        assert error["message"].startswith("continue_final_message and add_generation_prompt cannot both be true")
        assert error["param"] == "continue_final_message"
