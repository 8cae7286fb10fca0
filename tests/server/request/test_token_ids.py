"""The fields of a request about tokens: their ids, the prompt's log-probabilities, a prompt that is cut. No engine."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake import READY, WORD, FakeClient, make_service
from test_layers import ask, error_of

from lamina.request import SamplingParams
from lamina.server.engine_client.messages import Delta, encode_scores

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TALK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
TEXT: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 2}
ROUTES = [(COMPLETIONS, TEXT), (CHAT, TALK)]


class Scoring(FakeClient):
    """Scores prompts, too: the token itself, which is none of the best, and the best."""

    def deltas_of(self, key: int, index: int, params: SamplingParams, *, last: bool) -> list[Delta]:
        deltas = super().deltas_of(key, index, params, last=last)
        if params.prompt_logprobs is not None and index == 0:
            best = [(40 + i, -0.1 * (i + 1), i + 1) for i in range(params.prompt_logprobs)]
            prompt = self.added[key][0]
            entries = [None, *([(token, -7.0, 99), *best] for token in prompt[1:])]
            deltas[0].prompt_logprobs = [*map(encode_scores, entries)]
        return deltas


def answer(path: str, body: dict[str, Any], service: Any = None) -> dict[str, Any]:
    response = ask("POST", path, service, json=body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def chunks(path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    lines = ask("POST", path, json={**body, "stream": True}).text.split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def test_token_ids_of_completions_and_of_their_prompts() -> None:
    body = {**TEXT, "prompt": [[5, 6, 7], [8]], "n": 2, "return_token_ids": True}
    choices = answer(COMPLETIONS, body)["choices"]
    assert [c["token_ids"] for c in choices] == [[WORD, WORD]] * 4
    assert [c["prompt_token_ids"] for c in choices] == [[5, 6, 7], [5, 6, 7], [8], [8]]
    firsts, each = dict[int, list[int]](), dict[int, list[int]]()
    for chunk in chunks(COMPLETIONS, body):
        (choice,) = chunk["choices"]
        each.setdefault(choice["index"], []).extend(choice["token_ids"])
        if "prompt_token_ids" in choice:
            assert choice["index"] not in firsts, "with the first chunk alone"
            firsts[choice["index"]] = choice["prompt_token_ids"]
    assert each == {key: [WORD, WORD] for key in range(4)}
    assert firsts == {0: [5, 6, 7], 1: [5, 6, 7], 2: [8], 3: [8]}


def test_token_ids_of_a_conversation() -> None:
    service = make_service()
    found = answer(CHAT, {**TALK, "n": 2, "return_token_ids": True}, service)
    prompt = service.client.added[0][0]  # type: ignore[attr-defined]
    assert found["prompt_token_ids"] == prompt
    assert [c["token_ids"] for c in found["choices"]] == [[WORD, WORD]] * 2
    *opening, one, other = chunks(CHAT, {**TALK, "n": 2, "return_token_ids": True})
    assert [c["prompt_token_ids"] for c in opening] == [prompt] * 2
    assert [c["choices"][0]["token_ids"] for c in (one, other)] == [[WORD, WORD]] * 2
    assert "prompt_token_ids" not in one


@pytest.mark.parametrize("asked", [None, False])
def test_without_a_word_there_are_none(asked: bool | None) -> None:
    """In whole answers null, by which vLLM's clients tell."""
    from openai.types import Completion
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    whole = answer(COMPLETIONS, {**TEXT, "return_token_ids": asked})
    (choice,) = whole["choices"]
    assert (choice["token_ids"], choice["prompt_token_ids"], choice["prompt_logprobs"]) == (None, None, None)
    talk = answer(CHAT, {**TALK, "return_token_ids": asked})
    assert (talk["choices"][0]["token_ids"], talk["prompt_token_ids"], talk["prompt_logprobs"]) == (None, None, None)
    for path, body in ROUTES:
        assert "token_ids" not in json.dumps(chunks(path, {**body, "return_token_ids": asked}))
    Completion.model_validate(whole)
    ChatCompletion.model_validate(talk)
    for chunk in chunks(CHAT, {**TALK, "return_token_ids": True}):
        ChatCompletionChunk.model_validate(chunk)


def test_scores_of_prompts_have_vllms_form() -> None:
    wanted = {"6": {"logprob": -7.0, "rank": 99, "decoded_token": "!"},
              "40": {"logprob": -0.1, "rank": 1, "decoded_token": "C"},
              "41": {"logprob": -0.2, "rank": 2, "decoded_token": "D"}}  # fmt: skip
    texts = make_service().token_texts
    for token, entry in wanted.items():
        entry["decoded_token"] = texts(int(token))[0]
    body = {**TEXT, "prompt": [[5, 6], [6]], "n": 2, "prompt_logprobs": 2}
    choices = answer(COMPLETIONS, body, make_service(Scoring()))["choices"]
    assert [c["prompt_logprobs"] for c in choices] == [[None, wanted]] * 2 + [[None]] * 2
    assert list(choices[0]["prompt_logprobs"][1]) == ["6", "40", "41"], "itself, then the best"
    talk = answer(CHAT, {**TALK, "prompt_logprobs": 0}, make_service(Scoring()))
    assert talk["prompt_logprobs"][0] is None
    assert all(
        next(iter(entry.values()))["logprob"] == -7.0 and len(entry) == 1 for entry in talk["prompt_logprobs"][1:]
    )


def test_an_echo_with_logprobs_scores_the_prompt_as_its_own_number_says() -> None:
    client = Scoring()
    body = {**TEXT, "echo": True, "logprobs": 1}
    (choice,) = answer(COMPLETIONS, body, make_service(client))["choices"]
    assert [len(x) for x in choice["logprobs"]["top_logprobs"][1:]] == [2, 2, 2, 2]
    assert len(choice["prompt_logprobs"][1]) == 2
    answer(COMPLETIONS, {**body, "prompt_logprobs": 3}, make_service(client))
    assert [params.prompt_logprobs for _, params in client.added] == [1, 3]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt_logprobs": 21}, "prompt_logprobs must be at most 20, not 21"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs is not available with stream: true"),
        ({"prompt_logprobs": "x"}, "prompt_logprobs must be "),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be at least 1, or -1"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens must be "),
        ({"truncate_prompt_tokens": 257}, "truncate_prompt_tokens 257 exceeds the context of 256 tokens"),
        ({"truncate_prompt_tokens": 5, "truncation_side": "top"}, "truncation_side must be "),
        ({"return_token_ids": 1}, "return_token_ids must be "),
    ],
)
@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_bad_values_are_named(path: str, body: dict[str, Any], fields: dict[str, Any], words: str) -> None:
    response = ask("POST", path, json={**body, **fields})
    assert response.status_code == 400
    assert error_of(response)["message"].startswith(words)
    assert error_of(response)["param"] == next(iter(fields)) if len(fields) == 1 else True


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 2}, slice(-2, None)),
        ({"truncate_prompt_tokens": 2, "truncation_side": "left"}, slice(-2, None)),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, slice(0, 2)),
        ({"truncate_prompt_tokens": 256 - 2, "truncation_side": "right"}, slice(0, 254)),
        ({"truncate_prompt_tokens": -1}, slice(-254, None)),
        ({"truncate_prompt_tokens": -1, "max_tokens": 100}, slice(-156, None)),
        ({"truncate_prompt_tokens": None, "prompt": [1] * 9}, slice(0, 9)),
    ],
)
def test_a_prompt_is_cut(fields: dict[str, Any], kept: slice) -> None:
    prompt = list(range(5, 305)) * 7
    client = FakeClient()
    body = {**TEXT, "prompt": prompt, **fields}
    answer(COMPLETIONS, body, make_service(client))
    assert client.added[0][0] == (body["prompt"])[kept]


def test_a_conversation_is_cut_too() -> None:
    client = FakeClient()
    service = make_service(client)
    talk = {**TALK, "messages": [{"role": "user", "content": "a b c " * 300}]}
    answer(CHAT, {**talk, "truncate_prompt_tokens": 9}, service)
    answer(CHAT, {**talk, "truncate_prompt_tokens": -1, "max_tokens": None}, service)
    cut, most = (prompt for prompt, _ in client.added)
    assert len(cut) == 9
    assert len(most) == READY.max_model_len - 1
    assert most[-9:] == cut, "the end is what is left"
    response = ask("POST", CHAT, service, json=talk)
    assert error_of(response)["code"] == "context_length_exceeded"


def test_an_echo_shows_what_is_left_of_a_prompt() -> None:
    service = make_service()
    body = {"prompt": "def f(x): return x", "max_tokens": 2, "echo": True, "truncate_prompt_tokens": 3}
    (choice,) = answer(COMPLETIONS, body, service)["choices"]
    prompt = service.client.added[0][0]  # type: ignore[attr-defined]
    assert len(prompt) == 3
    assert choice["text"] == service.prompt_processor.tokenizer.decode(prompt) + "abcd"


def test_alternatives_come_in_vllms_order() -> None:
    """The token itself first: also where another one is likelier, and in the place of the last where it is none of the
    best.
    """

    class Drawing(FakeClient):
        def deltas_of(self, key: int, index: int, params: SamplingParams, *, last: bool) -> list[Delta]:
            best = [(8, -1.0, 1), (9, -2.0, 2)]
            entries = [encode_scores([(9, -2.0, 2), *best]), encode_scores([(7, -3.0, 3), *best])]
            return [Delta(key=key, index=0, token_ids=[9, 7], text="ab", logprobs=entries, finish_reason="length")]

    fields = {"return_tokens_as_token_ids": True}
    body = {**TALK, "logprobs": True, "top_logprobs": 2, **fields}
    (choice,) = answer(CHAT, body, make_service(Drawing()))["choices"]
    found = [[x["token"] for x in item["top_logprobs"]] for item in choice["logprobs"]["content"]]
    assert found == [["token_id:9", "token_id:8"], ["token_id:7", "token_id:8"]]
    (choice,) = answer(COMPLETIONS, {**TEXT, "logprobs": 2, **fields}, make_service(Drawing()))["choices"]
    named = [["token_id:9", "token_id:8"], ["token_id:7", "token_id:8", "token_id:9"]]
    assert [list(x) for x in choice["logprobs"]["top_logprobs"]] == named


def test_an_echo_of_token_ids_has_its_special_tokens() -> None:
    service = make_service(Scoring())
    tokenizer = service.prompt_processor.tokenizer
    ids = [3, *tokenizer("def f", add_special_tokens=False)["input_ids"]]
    assert tokenizer.decode(ids) != tokenizer.decode(ids, skip_special_tokens=True), "the first one is special"
    (choice,) = answer(COMPLETIONS, {"prompt": ids, "max_tokens": 2, "echo": True, "logprobs": 0}, service)["choices"]
    assert choice["text"] == tokenizer.decode(ids) + "abcd"
    offsets, names = choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"]
    assert offsets[: len(ids) + 1] == [len("".join(names[:n])) for n in range(len(ids) + 1)]


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_conversations_echo_is_the_assistants_final_message(goes_on: bool) -> None:
    said = {"role": "assistant", "content": [{"type": "text", "text": "I say"}, {"type": "text", "text": "so: "}]}
    body = {**TALK, "messages": [*TALK["messages"], said], "echo": True, "n": 2, "continue_final_message": goes_on}
    assert [c["message"]["content"] for c in answer(CHAT, body)["choices"]] == ["I say\nso: abcd"] * 2
    texts, roles = {0: "", 1: ""}, []
    for chunk in chunks(CHAT, body):
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        roles += [choice["index"]] * ("role" in choice["delta"])
    assert texts == {0: "I say\nso: abcd", 1: "I say\nso: abcd"}
    assert roles == [0, 1], "each begins once"


@pytest.mark.parametrize("more", [{"echo": False}, {"echo": None}, {}])
def test_nothing_is_echoed_where_nobody_asks(more: dict[str, Any]) -> None:
    said = {"role": "assistant", "content": "so: "}
    body = {**TALK, "messages": [*TALK["messages"], said], **more}
    assert answer(CHAT, body)["choices"][0]["message"]["content"] == "abcd"
    assert answer(CHAT, {**TALK, "echo": True})["choices"][0]["message"]["content"] == "abcd", "the user spoke last"
