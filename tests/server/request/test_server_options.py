"""The effect of the server's flags on its answers, and what a request may forbid. No engine."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake import READY, FakeClient, make_service
from test_layers import ask, error_of

from lamina.server.app import make_app, with_middleware

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TALK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
TEXT: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 2}
ROUTES = [(COMPLETIONS, TEXT), (CHAT, TALK)]


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_usage_may_be_told_to_all(path: str, body: dict[str, Any]) -> None:
    for options in (None, {"include_usage": False}, {"continuous_usage_stats": True}):
        asked = {**body, "stream": True, "stream_options": options}
        for always in (True, False):
            text = ask("POST", path, make_service(enable_force_include_usage=always), json=asked).text
            last = json.loads(text.split("\n\n")[-3].removeprefix("data: "))
            assert (last["choices"] == []) is always
            chunks = text.count("data: {")
            assert text.count('"prompt_tokens":') == (chunks if always else 0), "as vLLM: in every one"


def test_usage_of_a_conversation_begins_with_no_token() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    text = ask("POST", CHAT, json={**TALK, "stream": True, "stream_options": options}).text
    first, *others = (json.loads(x.removeprefix("data: "))["usage"] for x in text.split("\n\n") if '"usage"' in x)
    assert first["completion_tokens"] == 0
    assert first["total_tokens"] == first["prompt_tokens"] > 0
    assert all(usage["completion_tokens"] == 2 for usage in others)


@pytest.mark.parametrize(("said", "by_id"), [(None, True), (True, True), (False, False)])
def test_tokens_may_have_numbers_by_default(said: bool | None, by_id: bool) -> None:
    service = make_service(return_tokens_as_token_ids=True)
    found = ask("POST", COMPLETIONS, service, json={**TEXT, "logprobs": 0, "return_tokens_as_token_ids": said}).json()
    assert found["choices"][0]["logprobs"]["tokens"][0].startswith("token_id:") is by_id


def test_the_tokenizer_is_shown_where_the_operator_says_so() -> None:
    assert ask("GET", "/tokenizer_info").status_code == 404
    service = make_service(enable_tokenizer_info_endpoint=True)
    found = ask("GET", "/tokenizer_info", service).json()
    tokenizer = service.prompt_processor.tokenizer
    assert found["tokenizer_class"] == type(tokenizer).__name__
    assert found["chat_template"] == tokenizer.chat_template
    assert not {"vocab_file", "merges_file", "tokenizer_file", "name_or_path"} & set(found)
    assert "/examples/" not in json.dumps(found), "no path of the server's machine"


def test_prefixes_are_reset_where_the_operator_says_so() -> None:
    client = FakeClient()
    assert ask("POST", "/reset_prefix_cache", make_service(client)).status_code == 404
    service = make_service(client, server_dev_mode=True)
    for query in ("", "?reset_running_requests=true&reset_external=true"):
        answer = ask("POST", f"/reset_prefix_cache{query}", service)
        assert (answer.status_code, answer.json()) == (200, {"success": True})
    assert client.resets == 2
    foreign = ask("POST", "/reset_prefix_cache", service, headers={"origin": "https://evil.example"})
    assert foreign.status_code == 403
    client.failure = "gone"
    assert ask("POST", "/reset_prefix_cache", service).status_code == 503
    assert client.resets == 2


def test_a_body_needs_a_type_and_none_needs_none() -> None:
    assert ask("POST", COMPLETIONS).status_code == 400, "nothing is no JSON"
    for body, headers in ((b"{}", {}), (b"", {"content-type": "text/plain"}), (b"{}", {"content-type": "text/plain"})):
        assert ask("POST", COMPLETIONS, content=body, headers=headers).status_code == 415


def test_a_proxy_may_put_a_path_before_all() -> None:
    service = make_service(root_path="/llm", api_key="k", server_dev_mode=True)
    key = {"authorization": "Bearer k"}
    for path in ("/v1/models", "/llm/v1/models", "/llm/v1/models/tiny"):
        assert ask("GET", path, service, headers=key).status_code == 200
        assert ask("GET", path, service).status_code == 401
    assert ask("GET", "/llm/health", service).status_code == 200
    assert ask("POST", "/llm/v1/completions", service, headers=key, json=TEXT).status_code == 200
    assert ask("GET", "/llmx/v1/models", service, headers=key).status_code == 404
    assert ask("GET", "/llm/openapi.json", service, headers=key).json()["servers"] == [{"url": "/llm"}]
    assert 'handler="/v1/completions"' in ask("GET", "/llm/metrics", service, headers=key).text


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_tokens_are_forbidden(path: str, body: dict[str, Any]) -> None:
    client = FakeClient()
    service = make_service(client)
    asked = {**body, "bad_words": ["def", "return"], "allowed_token_ids": [7, 9]}
    assert ask("POST", path, service, json=asked).status_code == 200
    params = client.added[0][1]
    assert params.allowed_token_ids == [7, 9]
    assert params.bad_words == ["def", "return"]
    words = params.bad_words_token_ids
    assert words
    assert {service.prompt_processor.tokenizer.decode(ids).strip() for ids in words} == {"def", "return"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids must have at least 1 item"),
        ({"allowed_token_ids": [5, 2048]}, "allowed_token_ids must lie in the vocabulary: 2048 is out of vocabulary"),
        ({"stop_token_ids": [-1]}, "stop_token_ids must lie in the vocabulary: -1 is out of vocabulary"),
        ({"bad_words": [""]}, "bad_words must not contain an empty string"),
        ({"bad_words": ["x"] * 301}, "bad_words must be at most 300 words"),
        ({"bad_words": ["x" * 257]}, "bad_words must have at most 256 characters each"),
        ({"logit_bias": {"bad1": 1, "5": 1, "bad2": 2}}, "logit_bias has the keys 'bad1', 'bad2': keys must be"),
        ({"logit_bias": {"9999": 1}}, "logit_bias has the key '9999': keys must be token ids below 2048"),
        ({"seed": 1 << 63}, "seed must be at "),
        ({"seed": -(1 << 63) - 1}, "seed must be at "),
        ({"logprob_token_ids": [5]}, "logprob_token_ids is not supported"),
    ],
)
@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_bad_values_are_named(path: str, body: dict[str, Any], fields: dict[str, Any], words: str) -> None:
    response = ask("POST", path, json={**body, **fields})
    assert response.status_code == 400
    assert error_of(response)["message"].startswith(words)
    assert error_of(response)["param"] == next(iter(fields))


@pytest.mark.parametrize(("most", "allowed"), [(20, False), (2047, False), (2048, True), (-1, True)])
def test_the_whole_vocabulary_has_to_be_allowed(most: int, allowed: bool) -> None:
    assert READY.vocab_size == 2048
    for path, fields in (
        (COMPLETIONS, {**TEXT, "logprobs": -1}),
        (COMPLETIONS, {**TEXT, "prompt_logprobs": -1}),
        (CHAT, {**TALK, "logprobs": True, "top_logprobs": -1}),
    ):
        client = FakeClient()
        response = ask("POST", path, make_service(client, max_logprobs=most), json=fields)
        assert response.status_code == (200 if allowed else 400)
        if allowed:
            params = client.added[0][1]
            assert -1 in (params.logprobs, params.prompt_logprobs)
        else:
            assert f"must be at most {most}, not 2048 (-1, the whole vocabulary)" in error_of(response)["message"]


def test_what_a_tokenizer_makes_of_a_text_may_be_longer_than_the_context() -> None:
    """Clients count, to know how much they have to leave out."""
    service = make_service()
    talk = {"messages": [{"role": "user", "content": "a b c " * 300}], "return_token_strs": True}
    found = ask("POST", "/tokenize", service, json=talk).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"]) > found["max_model_len"]
    assert ask("POST", "/tokenize", service, json={"prompt": "x y"}).json()["token_strs"] is None
    assert service.prompt_processor.tokenizer.convert_ids_to_tokens(found["tokens"][:9]) == found["token_strs"][:9]
    text = ask("POST", "/detokenize", service, json={"tokens": found["tokens"][:50]}).json()["prompt"]
    assert text == service.prompt_processor.tokenizer.decode(found["tokens"][:50])


def test_the_description_has_every_status_and_the_forms_of_a_prompt(tmp_path: Any) -> None:
    service = make_service(enable_tokenizer_info_endpoint=True, server_dev_mode=True)
    with_middleware(make_app(service), service)
    described = ask("GET", "/openapi.json", service).json()
    assert "``" not in json.dumps(described), "texts are Markdown"
    operations = {(path, method): o for path, each in described["paths"].items() for method, o in each.items()}
    for (path, method), operation in operations.items():
        if path == "/":
            continue
        statuses = set(operation["responses"])
        assert {"200", "401", "403", "500"} <= statuses, path
        if "requestBody" in operation:
            assert {"400", "404", "408", "413", "415"} <= statuses, path
        if path in (CHAT, COMPLETIONS) and method == "post":
            assert {"429", "503"} <= statuses
        for status, answer in operation["responses"].items():
            if int(status) >= 400 and status != "422":
                assert answer["content"]["application/json"]["schema"]["required"] == ["error"]
    schema = operations[COMPLETIONS, "post"]["requestBody"]["content"]["application/json"]["schema"]
    kinds = [form.get("items", {}).get("type", form["type"]) for form in schema["properties"]["prompt"]["anyOf"]]
    assert kinds == ["string", "integer", "string", "array"]


@pytest.mark.parametrize("bad", ["llm", "/llm/", "/"])
def test_a_root_path_begins_with_a_slash(bad: str) -> None:
    with pytest.raises(ValueError, match="^--root-path must begin with / "):
        make_service(root_path=bad)
