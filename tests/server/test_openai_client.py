"""The real openai client against the real server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from running import MODEL, ROOT
from transformers import AutoTokenizer

if TYPE_CHECKING:
    from openai import OpenAI

pytestmark = pytest.mark.timeout(300)  # starting a server on a busy machine takes its time
GREEDY = {"model": "tiny", "temperature": 0.0, "max_tokens": 12}
TALK = [{"role": "user", "content": "Write a class."}]


@pytest.fixture(scope="module")
def tokenizer() -> object:
    return AutoTokenizer.from_pretrained(ROOT / MODEL)


def text_of(stream: object) -> str:
    return "".join(c.text for chunk in stream for c in chunk.choices)  # type: ignore[attr-defined]


def test_models(openai: OpenAI) -> None:
    from openai import NotFoundError

    models = openai.models.list().data
    assert [m.id for m in models] == ["tiny", "other"]
    assert models[0].max_model_len == 2048  # type: ignore[attr-defined]
    assert openai.models.retrieve("other").id == "other"
    with pytest.raises(NotFoundError):
        openai.models.retrieve("absent")
    with pytest.raises(NotFoundError):
        openai.completions.create(model="absent", prompt="x")


def test_a_stream_is_the_whole_in_pieces(openai: OpenAI) -> None:
    whole = openai.completions.create(prompt="class Stack:", **GREEDY)
    chunks = list(openai.completions.create(prompt="class Stack:", stream=True, **GREEDY))
    assert whole.choices[0].text == text_of(chunks)
    assert len(chunks) > 3
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert len({c.id for c in chunks}) == 1
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12


@pytest.mark.parametrize("most", [9, 2000, 2048])
def test_max_tokens_beyond_the_context_is_cut_to_what_fits(openai: OpenAI, most: int) -> None:
    from openai import BadRequestError

    body: Any = {"model": "tiny", "prompt": [5] * 2040, "extra_body": {"ignore_eos": True}}
    done = openai.completions.create(max_tokens=most, **body)
    assert done.usage is not None
    assert (done.choices[0].finish_reason, done.usage.completion_tokens) == ("length", 8)
    with pytest.raises(BadRequestError, match="2049 new tokens were asked for"):
        openai.completions.create(max_tokens=2049, **body)


def test_usage_comes_last_where_asked_for(openai: OpenAI) -> None:
    options = {"include_usage": True}
    *chunks, last = openai.completions.create(prompt="x", stream=True, stream_options=options, **GREEDY)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.total_tokens == last.usage.prompt_tokens + 12
    assert all(c.usage is None for c in chunks)
    always = {**options, "continuous_usage_stats": True}
    counts = [c.usage.completion_tokens for c in openai.completions.create(
        prompt="x", stream=True, stream_options=always, **GREEDY) if c.usage]  # fmt: skip
    assert counts == sorted(counts)
    assert counts[-1] == 12


def test_prompts_in_all_four_forms(openai: OpenAI, tokenizer: object) -> None:
    texts = ["import os\n", "class Stack:"]
    ids = [tokenizer(t)["input_ids"] for t in texts]  # type: ignore[operator]
    one = [openai.completions.create(prompt=p, **GREEDY).choices[0].text for p in texts]
    assert [c.text for c in openai.completions.create(prompt=texts, **GREEDY).choices] == one
    assert [c.text for c in openai.completions.create(prompt=ids, **GREEDY).choices] == one
    assert openai.completions.create(prompt=ids[0], **GREEDY).choices[0].text == one[0]


def test_several_completions_have_indices_by_prompt(openai: OpenAI) -> None:
    params = {"model": "tiny", "max_tokens": 6, "seed": 5, "n": 3}
    whole = openai.completions.create(prompt=["def f(", "class A"], **params)
    assert [c.index for c in whole.choices] == list(range(6))
    assert len({c.text for c in whole.choices[:3]}) > 1
    pieces = dict.fromkeys(range(6), "")
    for chunk in openai.completions.create(prompt=["def f(", "class A"], stream=True, **params):
        for choice in chunk.choices:
            pieces[choice.index] += choice.text
    assert [pieces[i] for i in range(6)] == [c.text for c in whole.choices]


def test_a_seed_repeats_and_another_does_not(openai: OpenAI) -> None:
    def draw(seed: int) -> str:
        return openai.completions.create(model="tiny", prompt="def f(", max_tokens=24, seed=seed).choices[0].text

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_chat_with_text_or_parts(openai: OpenAI) -> None:
    whole = openai.chat.completions.create(messages=TALK, **GREEDY)
    assert whole.choices[0].message.role == "assistant"
    parts = [{"role": "user", "content": [{"type": "text", "text": "Write a"}, {"type": "text", "text": "class."}]}]
    lines = [{"role": "user", "content": "Write a\nclass."}]
    joined = openai.chat.completions.create(messages=lines, **GREEDY).choices[0].message
    assert openai.chat.completions.create(messages=parts, **GREEDY).choices[0].message == joined
    chunks = list(openai.chat.completions.create(messages=TALK, stream=True, **GREEDY))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content


def test_chat_ends_with_the_context_where_no_limit_is_given(openai: OpenAI) -> None:
    whole = openai.chat.completions.create(
        model="tiny", messages=TALK, temperature=0, max_completion_tokens=4, logit_bias={"1": -100}
    )
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 4
    assert whole.choices[0].finish_reason == "length"


@pytest.mark.long
def test_a_long_conversation_has_the_tokens_of_its_template(openai: OpenAI, tokenizer: Any) -> None:
    """A text of over 8,192 characters goes to a process of its own."""
    talk = [{"role": "user", "content": "x = 1" + " " * 10_000 + "y"}]
    answer = openai.chat.completions.create(**{**GREEDY, "messages": talk})
    expected = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert answer.usage.prompt_tokens == len(expected)


def test_chat_logprobs(openai: OpenAI) -> None:
    choice = openai.chat.completions.create(
        messages=TALK, logprobs=True, top_logprobs=3, **{**GREEDY, "max_tokens": 3}
    ).choices[0]
    assert choice.logprobs is not None
    content = choice.logprobs.content or []
    assert len(content) == 3
    assert all(item.top_logprobs[0].logprob == item.logprob for item in content), "greedy takes the best"
    assert all(bytes(item.bytes or []).decode() == item.token for item in content)
    assert "".join(item.token for item in content) == choice.message.content


def test_stop_strings_and_ids(openai: OpenAI, tokenizer: object) -> None:
    plain = openai.completions.create(prompt="class Stack:", **GREEDY).choices[0].text
    stop = plain[4:6]
    cut = openai.completions.create(prompt="class Stack:", stop=[stop], **GREEDY).choices[0]
    assert cut.text == plain[: plain.index(stop)]
    assert cut.finish_reason == "stop"
    extra = {"include_stop_str_in_output": True}
    kept = openai.completions.create(prompt="class Stack:", stop=stop, extra_body=extra, **GREEDY).choices[0]
    assert kept.text == cut.text + stop


def test_null_means_the_default(openai: OpenAI) -> None:
    nulls = dict.fromkeys(("n", "stop", "top_p", "seed", "logprobs", "logit_bias", "stream_options", "best_of"))
    given = openai.completions.create(prompt="class A", extra_body=nulls, **GREEDY).choices[0].text
    assert given == openai.completions.create(prompt="class A", **GREEDY).choices[0].text


@pytest.mark.no_retry
@pytest.mark.long
def test_64_streams_at_once_equal_one_after_the_other(openai: OpenAI) -> None:
    """More than decode and wait at once are refused; those that come in give the tokens that they give alone."""
    prompts = [f"def f{i}(" for i in range(16)]
    alone = [openai.completions.create(prompt=p, **GREEDY).choices[0].text for p in prompts]
    with ThreadPoolExecutor(16) as pool:
        streams = [pool.submit(lambda p=p: text_of(openai.completions.create(prompt=p, stream=True, **GREEDY)))
                   for p in prompts]  # fmt: skip
        assert [s.result(60) for s in streams] == alone
