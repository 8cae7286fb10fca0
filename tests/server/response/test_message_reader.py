"""Reasoning and calls that a model writes by itself, through the server's routes: whole, and as a stream.

Covers: lamina/server/response/reasoning_count.py, lamina/server/reasoning_parsers/think_tags.py,
lamina/server/request/tool_request.py, lamina/server/reasoning_parsers/openai_gptoss.py,
lamina/server/reasoning_parsers/contract.py.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake import FakeClient, make_service
from msgspec.structs import replace
from test_layers import ask, error_of

from lamina.grammar.compiler import GrammarCompiler
from lamina.grammar.vocabulary import vocabulary_of
from lamina.request import SamplingParams
from lamina.server.engine_client.messages import Delta, PromptTimes

CHAT = "/v1/chat/completions"
TALK: Any = {"messages": [{"role": "user", "content": "hi"}]}
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL: Any = {"id": "call-1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
HERMES = 'Well.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>{"name": "g"}</tool_call>'
HM = "<|channel|>analysis<|message|>Hm."


class Scripted(FakeClient):
    """Writes a text, character by character, whose tokens are those of the tokenizer."""

    def __init__(self, text: str, reason: str = "stop") -> None:
        super().__init__()
        self.text, self.reason = text, reason
        self.tokenizer: Any = None

    def deltas_of(self, key: int, index: int, params: SamplingParams, *, last: bool) -> list[Delta]:
        ids = self.tokenizer.encode(self.text, add_special_tokens=False)
        grown = [self.tokenizer.decode(ids[:n]) for n in range(len(ids) + 1)]
        deltas = [
            Delta(key=key, index=index, token_ids=[token], text=grown[n + 1][len(grown[n]) :])
            for n, token in enumerate(ids)
        ]
        deltas[-1].finish_reason, deltas[-1].times = self.reason, PromptTimes(0.0, 0.0, 0.0) if last else None
        return deltas


def ask_both(text: str, reason: str = "stop", *, body: Any, **config: Any) -> tuple[dict[str, Any], list[Any]]:
    """Returns the whole answer, and the chunks of a stream."""
    client = Scripted(text, reason)
    service = make_service(client, **config)
    client.tokenizer = service.prompt_processor.tokenizer
    whole = ask("POST", CHAT, service, json={**TALK, **body})
    assert whole.status_code == 200, whole.text
    options = {"stream": True, "stream_options": {"include_usage": True}}
    lines = ask("POST", CHAT, service, json={**TALK, **body, **options}).text.split("\n\n")
    return whole.json(), [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def test_calls_that_the_model_writes() -> None:
    whole, chunks = ask_both(HERMES, body={"tools": [TOOL]}, tool_call_parser="hermes")
    (choice,) = whole["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Well."
    made = [call["function"] for call in choice["message"]["tool_calls"]]
    assert made == [{"name": "f", "arguments": '{"a": 1}'}, {"name": "g", "arguments": "{}"}]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Well."
    assert all(len(delta.get("tool_calls", ())) < 2 for delta in deltas), "some clients read no more of a chunk"
    pieces = [piece for delta in deltas for piece in delta.get("tool_calls", ())]
    assert [(piece["index"], piece["function"]["name"]) for piece in pieces if "id" in piece] == [(0, "f"), (1, "g")]
    for index, one in enumerate(made):
        given = "".join(piece["function"]["arguments"] for piece in pieces if piece["index"] == index)
        assert given == one["arguments"]
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"


def test_only_the_first_call_where_there_may_be_one() -> None:
    body = {"tools": [TOOL], "parallel_tool_calls": False}
    whole, _ = ask_both(HERMES, body=body, tool_call_parser="hermes")
    assert [call["function"]["name"] for call in whole["choices"][0]["message"]["tool_calls"]] == ["f"]


def test_a_call_that_is_cut_off_says_length() -> None:
    whole, _ = ask_both(HERMES[:50], "length", body={"tools": [TOOL]}, tool_call_parser="hermes")
    (choice,) = whole["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "Well.")
    (call,) = choice["message"]["tool_calls"]
    assert '{"a": 1}'.startswith(call["function"]["arguments"])


def test_calls_of_gpt_oss_after_its_reasoning() -> None:
    call = "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}"
    text = f"{HM}<|end|><|start|>assistant<|channel|>commentary<|message|>Well.<|end|>{call}"
    config = {"tool_call_parser": "openai", "reasoning_parser": "openai_gptoss"}
    whole, _ = ask_both(text, body={"tools": [TOOL]}, **config)
    (choice,) = whole["choices"]
    message = choice["message"]
    assert (message["reasoning"], message["content"], choice["finish_reason"]) == ("Hm.", "Well.", "tool_calls")
    assert [one["function"] for one in message["tool_calls"]] == [{"name": "f", "arguments": "{}"}]


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_structure_and_tools(choice: str) -> None:
    """Text has the structure, unless calls come. Calls that must come leave no place for it."""
    client = FakeClient()
    client.ready = replace(client.ready, end_token_ids=[1])
    service = make_service(client, tool_call_parser="hermes", reasoning_parser="qwen3")
    body: Any = {"tools": [TOOL], "tool_choice": choice, "response_format": {"type": "json_object"}}
    response = ask("POST", CHAT, service, json={**TALK, **body})
    assert response.status_code == 200, response.text
    asked = client.added[-1][1].structured_outputs
    assert asked is not None
    words = vocabulary_of(service.prompt_processor.tokenizer, client.ready.vocab_size, [1])
    matcher = GrammarCompiler(words).compile(asked.compiled or "")
    calls = '[{"name": "f", "parameters": {}}]' if choice == "required" else HERMES[6:]
    may = {'{"a": 1}': choice == "auto", calls: True, "Well.": False, f"<think> {{</think>\n{calls}": True}
    for text, is_right in may.items():
        tokens = service.prompt_processor.tokenizer.encode(text, add_special_tokens=False)
        matcher.reset()
        assert (matcher.validate_tokens(tokens) == len(tokens)) == is_right, text


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "f"}}])
def test_a_text_cut_off_in_the_mark_of_reasoning_is_nothing(choice: Any) -> None:
    client = Scripted("<thi", "length")
    client.ready = replace(client.ready, end_token_ids=[1])
    service = make_service(client, tool_call_parser="hermes", reasoning_parser="qwen3")
    client.tokenizer = service.prompt_processor.tokenizer
    (one,) = ask("POST", CHAT, service, json={**TALK, "tools": [TOOL], "tool_choice": choice}).json()["choices"]
    assert one["finish_reason"] == "length"
    assert not one["message"]["content"]
    assert "tool_calls" not in one["message"]


def test_a_parser_of_reasoning_for_a_model_without_its_marks_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    make_service(reasoning_parser="granite")
    assert not caplog.records, "its marks are plain text"
    make_service(reasoning_parser="qwen3")
    (record,) = caplog.records
    text = "--reasoning-parser qwen3: neither the chat template nor the vocabulary has <think> and </think>"
    assert record.getMessage().startswith(text)


def test_a_template_without_tools_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    client = FakeClient()
    client.ready = replace(client.ready, end_token_ids=[1])
    service = make_service(client)
    for _ in range(2):
        ask("POST", CHAT, service, json={**TALK, "tools": [TOOL], "tool_choice": "none"})
    assert not caplog.records
    for _ in range(2):
        assert ask("POST", CHAT, service, json={**TALK, "tools": [TOOL], "tool_choice": "required"}).status_code == 200
    (record,) = caplog.records
    assert record.getMessage().startswith("a request has tools, but the model's chat template leaves them out. ")


def test_without_tools_text_stays_text() -> None:
    for body in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        whole, _ = ask_both(HERMES, body=body, tool_call_parser="hermes")
        assert whole["choices"][0]["message"]["content"] == HERMES
        assert whole["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("name", "text", "reasoning", "content"),
    [
        ("qwen3", "<think>\nHm, a < b.\n\n</think>\n\nYes.", "Hm, a < b.", "Yes."),
        ("deepseek_r1", "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
        ("deepseek_r1", "<think>\nHm.\n</think>Yes.", "Hm.", "Yes."),
        ("qwen3", "Yes.", None, "Yes."),
        ("qwen3", "<thin Yes.", None, "<thin Yes."),
        ("qwen3", "<think>Hm", "Hm", ""),
        ("glm45", "<think>Hm.</think>\nYes.", "Hm.", "Yes."),
        ("glm45", "Yes.", None, "Yes."),
        ("minimax_m2", "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
        ("granite", "Here is my thought process: Hm. Here's my response: Yes.", "Hm.", "Yes."),
        ("granite", "Here is my answer.", None, "Here is my answer."),
        ("openai_gptoss", f"{HM}<|end|><|start|>assistant<|channel|>final<|message|>Yes.", "Hm.", "Yes."),
        ("openai_gptoss", "<|channel|>final <|constrain|>json<|message|>Yes.", None, "Yes."),
        ("openai_gptoss", HM, "Hm.", ""),
        ("openai_gptoss", "Yes.", None, "Yes."),
    ],
)
def test_reasoning_is_a_field_of_its_own(name: str, text: str, reasoning: str | None, content: str) -> None:
    whole, chunks = ask_both(text, body={}, reasoning_parser=name)
    message = whole["choices"][0]["message"]
    assert (message.get("reasoning"), message.get("reasoning_content")) == (reasoning, reasoning)
    assert message["content"] == content
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == (reasoning or "")
    assert "".join(delta.get("content") or "" for delta in deltas) == content
    used = [answer["usage"]["completion_tokens_details"]["reasoning_tokens"] for answer in (whole, chunks[-1])]
    total = whole["usage"]["completion_tokens"]
    assert used[0] == used[1]
    assert used[0] == 0 if reasoning is None else used[0] == total if not content else 0 < used[0] < total


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"tools": [{"type": "function"}]}, "tools.0.function", "tools.0.function must be given"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools.0.type", "tools.0.type must be 'function'"),
        ({"tools": [TOOL, TOOL]}, "tools", "tools has the function 'f' twice"),
        ({"tools": [TOOL], "tool_choice": "some"}, "tool_choice", "tool_choice must be none, auto, required or"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice",
         "tool_choice names 'g', which tools does not have"),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice needs tools"),
        ({"tools": [TOOL]}, "tools", "no tool parser reads this model's chat template"),
        ({"messages": [{"role": "tool", "tool_call_id": "x", "content": "y"}]}, "messages.0.tool_call_id",
         "messages.0.tool_call_id must be the id of a call"),
        ({"messages": [{"role": "user", "content": "y", "tool_calls": [CALL]}]}, "messages.0.tool_calls",
         "messages.0.tool_calls: only the assistant calls tools"),
        ({"messages": [{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "{"}}]}]},
         "messages", "messages.0.tool_calls.0.function.arguments must be a JSON object"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_line(body: dict[str, Any], param: str, words: str) -> None:
    response = ask("POST", CHAT, make_service(), json={**TALK, **body})
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == param
    assert error["message"].startswith(words)
    assert "\n" not in error["message"]


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}])
def test_templates_get_tools_and_arguments_as_objects(arguments: Any) -> None:
    client = FakeClient()
    service = make_service(client, tool_call_parser="hermes")
    tokenizer = service.prompt_processor.tokenizer
    tokenizer.chat_template = (
        "{{ tools[0].function.name if tools else '-' }}{% for m in messages %}|{{ m.content }}{{ m.tool_call_id }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}={{ c.function.arguments.a }}{% endfor %}{% endfor %}"
    )
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    talk = [*TALK["messages"], {"role": "assistant", "content": None, "tool_calls": [call]}]
    talk.append({"role": "tool", "tool_call_id": "call-1", "content": "two"})
    for choice, shown in (("auto", "f"), ("none", "-")):
        body = {"messages": talk, "tools": [TOOL], "tool_choice": choice}
        response = ask("POST", CHAT, service, json=body)
        assert response.status_code == 200, response.text
        assert tokenizer.decode(client.added[-1][0]) == f"{shown}|hi|f=1|twocall-1"
    for tools, shown in (([TOOL], "f"), ([], "-")):
        counted = ask("POST", "/tokenize", service, json={"messages": talk, "tools": tools}).json()
        assert tokenizer.decode(counted["tokens"]) == f"{shown}|hi|f=1|twocall-1"
    refused = ask("POST", "/tokenize", service, json={"prompt": "hi", "tools": [TOOL]})
    assert error_of(refused)["message"] == "tools belong to messages: send those, or leave tools out"
