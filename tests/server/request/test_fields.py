"""Nothing is ignored in silence: fields that are unknown or not supported, templates, special tokens. No engine.

Covers: lamina/server/request/intake.py, lamina/server/request/sampling_request.py,
lamina/server/request/unsupported_fields.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake import RENDERER, FakeClient, http_of, make_service
from test_layers import ask, error_of, run

from lamina.cli.launch import main
from lamina.models.chat_template import render_chat
from lamina.models.tokenizer import token_ids
from lamina.server.request.prompt_processing import PromptProcessor
from lamina.server.request.unsupported_fields import IGNORED, UNSUPPORTED

TALK = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
TEXT = {"prompt": "hi", "max_tokens": 2}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
THINKING = "{% if enable_thinking %}T{% endif %}{{ reasoning_effort }}|{{ messages[0]['content'] }}"


def refused(path: str, body: dict[str, Any], service: Any = None) -> dict[str, Any]:
    response = ask("POST", path, service, json=body)
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert "\n" not in error["message"]
    return error


@pytest.mark.parametrize(
    ("path", "field", "value", "words"),
    [
        (COMPLETIONS, "temprature", 0.5, "did you mean temperature?"),
        (COMPLETIONS, "max_new_tokens", 5, "did you mean max_tokens?"),
        (COMPLETIONS, "messages", [], "unknown field 'messages'"),
        (CHAT, "num_predict", 5, "did you mean max_tokens?"),
        (CHAT, "system", "be brief", "unknown field 'system': leave it out;"),
        (CHAT, "json_mode", True, "unknown field 'json_mode': leave it out;"),
        (CHAT, "tool", [], "did you mean tools?"),
        (COMPLETIONS, "inputs", "x", "did you mean prompt?"),
        (CHAT, "prompt", "x", "unknown field 'prompt'"),
        (CHAT, "suffix", "x", "suffix is not supported by this server: leave it out"),
        (COMPLETIONS, "reasoning_effort", "high", "reasoning_effort is not supported"),
        (CHAT, "whatever", None, "--allow-unknown-fields"),
        (CHAT, "x" * 5000, 1, "unknown field 'xxx"),
        ("/tokenize", "priority", 1, "priority is not supported by this server: leave it out, or send 0"),
        (COMPLETIONS, "regex", "a+", "regex is not supported"),
        (CHAT, "guided_regex", "a+", 'not supported by this server: send "structured_outputs": {"regex": ...}'),
        (CHAT, "guided_json", {}, 'not supported by this server: send "structured_outputs": {"json": ...}'),
        (COMPLETIONS, "json_schema", "{}", "json_schema is not supported"),
        (COMPLETIONS, "grammar", "root", "grammar is not supported"),
        (COMPLETIONS, "typical_p", 0.5, "or send 1"),
        (COMPLETIONS, "length_penalty", 2, "or send 1"),
        (COMPLETIONS, "num_beams", 4, "or send 1"),
        (COMPLETIONS, "return_hidden_states", True, "or send false"),
        (COMPLETIONS, "tools", [{"type": "function", "function": {"name": "f" * 300}}], "tools is not supported"),
        (CHAT, "reasoning_effort", "high", "the model's chat template does not take it"),
        (CHAT, "lora_path", "x", "lora_path is not supported"),
        (CHAT, "stream_options", {"include_usge": True}, "did you mean stream_options.include_usage?"),
        ("/tokenize", "promt", "x", "did you mean prompt?"),
        ("/detokenize", "token", [1], "did you mean tokens?"),
    ],
)
def test_a_field_that_does_nothing_is_refused(path: str, field: str, value: Any, words: str) -> None:
    body = {**({"tokens": [5]} if path == "/detokenize" else TALK if path == CHAT else TEXT), field: value}
    if path == "/tokenize":
        body.pop("max_tokens")
    assert words in refused(path, body)["message"]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user", "content": "x", "contents": "y"}, "did you mean messages.content?"),
        ({"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}, "tool_calls.0.function must be given"),
        ({"role": "user", "content": [{"type": "text", "text": "x", "txet": "y"}]}, "messages.content.text?"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": "x" * 100_000}]}, "'image_url'"),
        ({"role": "user", "content": [[]]}, "Expected `object`"),
    ],
)
def test_fields_of_messages_are_looked_at_too(message: dict[str, Any], words: str) -> None:
    assert words in refused(CHAT, {"messages": [message]})["message"]


def test_unknown_fields_may_be_allowed_and_then_unsupported_ones_are_still_refused() -> None:
    service = make_service(allow_unknown_fields=True)
    assert ask("POST", CHAT, service, json={**TALK, "temprature": 1, "x": [[[]]] * 1000}).status_code == 200
    assert "functions" in refused(CHAT, {**TALK, "functions": [{}]}, service)["message"]


def test_values_that_ask_for_nothing_are_taken() -> None:
    """Clients send them for fields that their users have never heard of."""
    service = make_service()
    for value in (0, 1):
        fields = {k: v[min(value, len(v) - 1)] if v and value else None for k, v in UNSUPPORTED.items()}
        quiet = dict.fromkeys(IGNORED, "x")
        for path, body in ((CHAT, TALK), (COMPLETIONS, TEXT)):
            assert ask("POST", path, service, json={**body, **fields, **quiet}).status_code == 200
    nulls: dict[str, Any] = {"generation_config": None, "chat_template_kwargs": None, "reasoning_effort": None}
    more = {"top_logprobs": 0, "logprobs": False, "chat_template_kwargs": {}, "reasoning_effort": "none"}
    for fields in (nulls, more):
        assert ask("POST", CHAT, service, json={**TALK, **fields}).status_code == 200
    assert ask("POST", COMPLETIONS, service, json={**TEXT, "logprobs": False, "best_of": 1}).status_code == 200
    answer = ask("POST", CHAT, service, json=TALK).json()["choices"][0]["message"]
    extra = {"tool_calls": None, "function_call": None, "audio": None, "annotations": [], "reasoning_content": None}
    talk = [*TALK["messages"], {**answer, **extra}, {"role": "user", "content": "go on", "name": "me"}]  # type: ignore[misc]
    assert ask("POST", CHAT, service, json={"messages": talk}).status_code == 200, "an answer, sent back"


def test_true_and_false_may_be_texts() -> None:
    """Both kinds of value are taken as by vLLM; other texts are refused, and so are numbers that are texts."""
    client = FakeClient()
    for text in ("true", "false"):
        assert ask("POST", CHAT, make_service(client), json={**TALK, "ignore_eos": text, "logprobs": text}).is_success
    assert [params.ignore_eos for _, params in client.added] == [True, False]
    assert [params.logprobs is not None for _, params in client.added] == [True, False]
    for field, value in (("ignore_eos", "yes"), ("ignore_eos", ""), ("ignore_eos", 1), ("seed", "5")):
        assert refused(CHAT, {**TALK, field: value})["param"] == field


@pytest.mark.parametrize(("seed", "kind"), [(-(1 << 63) - 1, "greater_than_equal"), (1 << 63, "less_than_equal")])
def test_a_bound_is_told_by_the_word_that_clients_of_vllm_look_for(seed: int, kind: str) -> None:
    assert refused(CHAT, {**TALK, "seed": seed})["message"].endswith(f" ({kind})")


def test_the_openai_client_is_told_which_field_is_wrong() -> None:
    from openai import AsyncOpenAI, BadRequestError

    async def work() -> None:
        async with http_of(make_service()) as http:
            client = AsyncOpenAI(base_url="http://localhost/v1", api_key="none", max_retries=0, http_client=http)
            talk: Any = TALK["messages"]
            whole = await client.chat.completions.create(model="tiny", messages=talk, n=1, logprobs=False, tools=[])
            assert whole.choices[0].message.content == "abcd"
            with pytest.raises(BadRequestError) as error:
                await client.chat.completions.create(model="tiny", messages=talk, extra_body={"min_token": 1})
            assert (error.value.param, error.value.code) == ("min_token", "unknown_field")

    run(work())


def prompts_of(body: dict[str, Any], path: str = CHAT, template: str | None = None) -> list[list[int]]:
    client = FakeClient()
    service = make_service(client)
    if template is not None:
        service.prompt_processor.tokenizer.chat_template = template
        service.prompt_processor = PromptProcessor(
            service.prompt_processor.tokenizer, client.ready, RENDERER, service.prompt_processor.long_texts
        )
    assert ask("POST", path, service, json=body).status_code == 200
    return [ids for ids, _ in client.added]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "|hi"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "T|hi"),
        ({"chat_template_kwargs": {"enable_thinking": False, "absent": False}}, "|hi"),
        ({"reasoning_effort": "low"}, "low|hi"),
    ],
)
def test_what_a_template_takes_reaches_it(fields: dict[str, Any], text: str) -> None:
    tokenizer = make_service().prompt_processor.tokenizer
    assert prompts_of({**TALK, **fields}, template=THINKING) == [token_ids(tokenizer, text, add_special_tokens=False)]


def test_tools_and_their_choice_are_one_refusal() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    for body in ({"tool_choice": "required", "tools": tools}, {"tools": tools, "tool_choice": "required"}):
        error = refused(COMPLETIONS, {**TEXT, **body})
        assert error["param"] == "tools"
        assert error["message"] == "tools is not supported by this server: leave it out, and tool_choice with it"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('{"prompt": "caf\u00e9"}'.encode("latin-1"), "the body is not UTF-8: byte 0xe9 after b't\": \"caf'"),
        ('{"prompt": "a"}'.encode("utf-16"), "the body is not UTF-8: byte 0xff after b''"),
        (b"\xef\xbb\xbf" + b'{"prompt": "a"}', "the body begins with a byte order mark: leave it out"),
        (b'{"prompt": "a\\ud800b"}', "the body is not JSON: half of a surrogate pair, \\ud800"),
        (
            b'{"prompt": "a\\ud800b", "n": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]}',
            "the body is not JSON: half of a surrogate pair, \\ud800",
        ),
        (b'{"prompt": "a\\udc00b"}', "the body is not JSON: half of a surrogate pair, \\udc00"),
        (b'{"prompt": "a\xf0\x9f"}', "the body is not UTF-8"),
    ],
)
def test_a_body_in_another_encoding_is_refused_as_that(body: bytes, words: str) -> None:
    response = ask("POST", COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(words)
    assert (response.json()["error"]["param"], response.json()["error"]["code"]) == (None, "invalid_json")


@pytest.mark.parametrize("stream", [True, False])
def test_characters_that_end_a_line_are_escaped(stream: bool) -> None:
    class Lines(FakeClient):
        def deltas_of(self, *given: Any, **how: Any) -> Any:
            deltas = super().deltas_of(*given, **how)
            deltas[0].text = "a\u2028b\u2029c\u0085d\u2027"
            return deltas

    raw = ask("POST", COMPLETIONS, make_service(Lines()), json={**TEXT, "stream": stream}).content
    assert b"a\\u2028b\\u2029c\\u0085d\xe2\x80\xa7" in raw


@pytest.mark.parametrize("content", ["hi there", [{"type": "text", "text": "hi there"}]])
def test_a_template_of_parts_gets_parts(content: Any) -> None:
    template = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    tokenizer = make_service().prompt_processor.tokenizer
    wanted = token_ids(tokenizer, "hi there", add_special_tokens=False)
    assert prompts_of({"messages": [{"role": "user", "content": content}]}, template=template) == [wanted]


@pytest.mark.parametrize("template", ["{{ 1/0 }}", "{% for i in range(10**10) %}a{% endfor %}", "nobody"])
def test_what_a_template_raises_is_status_400(template: str) -> None:
    service = make_service()
    service.prompt_processor.tokenizer.chat_template = template
    response = ask("POST", CHAT, service, json=TALK)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("the chat template ")


@pytest.mark.parametrize("name", ["thinking", "tokenize", "chat_template", "messages", "tools", "return_dict"])
def test_what_a_template_does_not_take_is_refused(name: str) -> None:
    refused(CHAT, {**TALK, "chat_template_kwargs": {"add_generation_prompt": False}})  # which is no variable unset
    error = refused(CHAT, {**TALK, "chat_template_kwargs": {name: True}})
    assert error["param"] == "chat_template_kwargs"
    assert f"chat_template_kwargs.{name}: the model's chat template does not take it" in error["message"]


def test_parts_of_text_are_lines_and_names_go_to_the_template() -> None:
    tokenizer = make_service().prompt_processor.tokenizer
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]
    wanted = token_ids(
        tokenizer, render_chat(tokenizer, [{"role": "user", "content": "a\nb"}]), add_special_tokens=False
    )
    assert prompts_of({"messages": [{"role": "user", "content": parts}]}) == [wanted]
    named = prompts_of({"messages": [{"role": "user", "content": "", "name": "me"}]}, template="{{ messages[0].name }}")
    assert named == [token_ids(tokenizer, "me", add_special_tokens=False)]


@pytest.mark.parametrize(("role", "as_"), [("developer", "system"), ("system", "system"), ("user", "user")])
def test_a_developer_speaks_as_the_system_and_nobody_else_does(role: str, as_: str) -> None:
    """Models' templates know no developer."""
    tokenizer = make_service().prompt_processor.tokenizer
    wanted = token_ids(tokenizer, f"{as_}: be brief", add_special_tokens=False)
    messages, template = [{"role": role, "content": "be brief"}], "{{ messages[0].role }}: {{ messages[0].content }}"
    assert prompts_of({"messages": messages}, template=template) == [wanted]


@pytest.mark.parametrize(("path", "body"), [(CHAT, TALK), (COMPLETIONS, TEXT), ("/tokenize", {"prompt": "hi"})])
@pytest.mark.parametrize("special", [None, True, False])
def test_special_tokens_are_added_where_asked_for(path: str, body: dict[str, Any], special: bool | None) -> None:
    from tokenizers.processors import TemplateProcessing

    client = FakeClient()
    service = make_service(client)
    service.prompt_processor.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", 3)]
    )
    answer = ask("POST", path, service, json={**body, "add_special_tokens": special})
    ids = answer.json()["tokens"] if path == "/tokenize" else client.added[0][0]
    assert (ids[0] == 3) is (special if special is not None else path != CHAT)


@pytest.mark.parametrize("as_text", [True, False])
def test_a_generation_config_is_read(as_text: bool) -> None:
    client = FakeClient()
    config = {"do_sample": False, "max_new_tokens": 7, "top_k": 5, "transformers_version": "5", "num_beams": 1}
    body = {**TALK, "max_tokens": None, "generation_config": json.dumps(config) if as_text else config}
    assert ask("POST", CHAT, make_service(client), json=body).status_code == 200
    ((_, params),) = client.added
    assert (params.max_tokens, params.temperature, params.top_k) == (7, 0.0, 5)
    error = refused(CHAT, {**TALK, "generation_config": {**config, "num_beams": 4}})
    assert "generation_config.num_beams is not supported" in error["message"]
    assert "not JSON" in refused(CHAT, {**TALK, "generation_config": "{"})["message"]


@pytest.mark.parametrize(("text", "words"), [(None, "No such file"), ("{% for %}", "line 1"), (b"\xff", "UTF-8")])
def test_a_template_file_that_is_none_is_told_at_once(
    text: str | bytes | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.jinja"
    if text is not None:
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    assert main(["serve", "absent", "--chat-template", str(path), "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"--chat-template {path}" in said
    assert words in said


def test_a_body_for_another_path_says_which() -> None:
    said = refused(CHAT, {"prompt": "x"})
    assert (said["message"], said["param"]) == ("messages is missing; prompt belongs to /v1/completions", "messages")
    said = refused(COMPLETIONS, {"messages": TALK["messages"]})
    assert said["message"] == "prompt is missing; messages belongs to /v1/chat/completions"


def test_a_value_to_send_instead_is_json() -> None:
    said = refused(COMPLETIONS, {**TEXT, "use_beam_search": True})["message"]
    assert said == "use_beam_search is not supported by this server: leave it out, or send false"
