"""Log-likelihoods of prompts, as evaluation harnesses ask for them, against transformers."""

from __future__ import annotations

import httpx
import pytest
import torch
from running import MODEL, ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.timeout(300)  # starting a server on a busy machine takes its time
TEXT = "def main():\n    return 0\n"


def reference(ids: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(ROOT / MODEL, dtype=torch.float32)
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1)


def test_echoed_prompts_are_scored(http: httpx.Client) -> None:
    tokenizer = AutoTokenizer.from_pretrained(ROOT / MODEL)
    ids = tokenizer(TEXT)["input_ids"]
    body = {"prompt": [ids], "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True, "seed": 1234}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    logprobs, wanted = choice["logprobs"], reference(ids)
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert len(logprobs["tokens"]) == len(ids) + 1
    for at, (token, found) in enumerate(zip(ids[1:], logprobs["token_logprobs"][1:], strict=False)):
        assert abs(found - float(wanted[at, token])) < 1e-4
        greedy = int(wanted[at].argmax()) == token
        assert (found == max(logprobs["top_logprobs"][at + 1].values())) == greedy
    for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
        assert choice["text"].startswith(token, offset)


def test_prompt_logprobs_have_the_ranks_of_all_tokens(http: httpx.Client) -> None:
    tokenizer = AutoTokenizer.from_pretrained(ROOT / MODEL)
    ids = tokenizer(TEXT)["input_ids"]
    body = {"prompt": [ids], "max_tokens": 1, "temperature": 0, "prompt_logprobs": 2}
    first, *entries = http.post("/v1/completions", json=body).json()["choices"][0]["prompt_logprobs"]
    assert first is None
    for at, (entry, wanted) in enumerate(zip(entries, reference(ids), strict=False)):
        token = ids[at + 1]
        assert next(iter(entry)) == str(token)
        found = entry[str(token)]
        assert abs(found["logprob"] - float(wanted[token])) < 1e-4
        better = int((wanted > wanted[token] + 1e-5).sum())
        equal = int(((wanted - wanted[token]).abs() <= 1e-5).sum())
        assert better < found["rank"] <= better + equal
        assert {e["rank"] for e in entry.values()} >= {1, 2}
        assert len(entry) == (2 if found["rank"] <= 2 else 3)


def test_forbidden_tokens_are_not_chosen(http: httpx.Client) -> None:
    tokenizer = AutoTokenizer.from_pretrained(ROOT / MODEL)
    body = {"prompt": "def f(", "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}

    def chosen(**fields: object) -> list[int]:
        answer = http.post("/v1/completions", json={**body, **fields}).json()
        return list(answer["choices"][0]["token_ids"])

    plain = chosen()
    word = tokenizer.decode(plain[:1])
    assert plain[0] not in chosen(bad_words=[word])
    assert set(chosen(allowed_token_ids=[7, 9])) <= {7, 9}


def test_nothing_but_the_prompt(http: httpx.Client) -> None:
    body = {"prompt": TEXT, "max_tokens": 0, "logprobs": 0, "echo": True}
    answer = http.post("/v1/completions", json=body).json()
    assert answer["choices"][0]["text"] == TEXT
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"]
    refused = http.post("/v1/completions", json={"prompt": TEXT, "max_tokens": 0})
    assert refused.status_code == 400


def test_text_of_incomplete_characters(http: httpx.Client) -> None:
    """Tokens that are parts of a character have texts and bytes of their own, and offsets that fit the text."""
    text = "x = '\u00fc\U0001f600'"
    body = {"prompt": text, "max_tokens": 0, "logprobs": 0, "echo": True}
    logprobs = http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    assert any(t.startswith("bytes:") for t in logprobs["tokens"])
    raw = b"".join(
        bytes(int(x, 16) for x in t.removeprefix("bytes:").split("\\x")[1:]) if t.startswith("bytes:") else t.encode()
        for t in logprobs["tokens"]
    )
    assert raw.decode() == text


def test_tokens_there_and_back(http: httpx.Client) -> None:
    tokens = http.post("/tokenize", json={"prompt": TEXT}).json()
    assert tokens["count"] == len(tokens["tokens"])
    assert tokens["max_model_len"] == 2048
    assert http.post("/detokenize", json={"tokens": tokens["tokens"]}).json()["prompt"] == TEXT
    talk = http.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]}).json()["tokens"]
    assert "<|assistant|>" in http.post("/detokenize", json={"tokens": talk}).json()["prompt"]
