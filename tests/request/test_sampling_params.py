"""Penalties, bias, min_p and log-probabilities of the prompt: against formulas in fp64 and against transformers."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lamina import LLM, SamplingParams
from lamina.ops.sampling.sampler import Sampler
from lamina.ops.sampling.token_history import TokenHistories, logit_changes_of
from lamina.protocol.control import LogitsUpdate, Penalties, SamplingRequest
from lamina.request import CompletionOutput, ErrorOrigin
from lamina.scheduler.sampling_requests import sampling_request_of
from lamina.scheduler.sequence import Sequence

MODEL = Path(__file__).resolve().parents[2] / "examples" / "tiny_lm" / "model"
sample = Sampler(threads=1).sample
LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, 1.9])


def draw(**options: object) -> SamplingRequest:
    fields = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 7, "output_index": 0, "logprobs": -1, **options}
    return SamplingRequest(row=0, sequence=5, **fields)  # type: ignore[arg-type]


def adjust(**options: Any) -> LogitsUpdate:
    none = {"presence": 0.0, "frequency": 0.0, "repetition": 1.0, "logit_bias": {}, "prompt_token_ids": []}
    counts = Counter(options.pop("counts", {}))
    return LogitsUpdate(num_known_tokens=0, tokens=list(counts.elements()), penalties=Penalties(**{**none, **options}))


def token(draw: SamplingRequest, pending: dict[int, int] | None = None) -> int:
    seen = logit_changes_of(TokenHistories().note([], [draw]), pending or {})
    return sample(LOGITS[None], [draw], seen)[0].token_id


def test_presence_counts_once_and_frequency_each_time() -> None:
    assert token(draw(logits_update=adjust(presence=0.05, counts={0: 9}))) == 0, "2.0 - 0.05 is still the best"
    assert token(draw(logits_update=adjust(presence=0.2, counts={0: 1}))) == 5
    assert token(draw(logits_update=adjust(frequency=0.05, counts={0: 1}))) == 0
    assert token(draw(logits_update=adjust(frequency=0.05, counts={0: 9}))) == 5


def test_a_token_still_being_drawn_is_counted() -> None:
    penalty = adjust(presence=0.2)
    assert token(draw(logits_update=penalty)) == 0
    assert token(draw(logits_update=penalty, has_pending_token=True), {5: 0}) == 5


def test_repetition_divides_or_multiplies() -> None:
    assert token(draw(logits_update=adjust(repetition=1.2, prompt_token_ids=[0]))) == 5
    bias = {0: -100.0, 1: -100.0, 2: -100.0, 3: -2.9, 5: -100.0}
    assert token(draw(logits_update=adjust(repetition=3.0, prompt_token_ids=[4], logit_bias=bias))) == 3, (
        "-1.0 * 3 is below -2.9"
    )
    assert token(draw(logits_update=adjust(logit_bias=bias))) == 4, "the control"


def test_bias_and_bans_win_over_the_logits() -> None:
    assert token(draw(logits_update=adjust(logit_bias={4: 100.0}))) == 4
    assert token(draw(logits_update=adjust(logit_bias={4: 100.0}), banned_token_ids=[4])) == 0


@pytest.mark.parametrize(("min_p", "kept"), [(0.95, {0}), (0.9, {0, 5}), (0.36, {0, 1, 5}), (1.0, {0})])
def test_min_p_keeps_what_is_near_the_best(min_p: float, kept: set[int]) -> None:
    ratios = {i: math.exp(float(x) - 2.0) for i, x in enumerate(LOGITS)}
    assert kept == {i for i, r in ratios.items() if r >= min_p}
    assert {token(draw(temperature=1.0, min_p=min_p, output_index=i)) for i in range(300)} == kept


def test_a_known_token_is_reported_and_not_drawn() -> None:
    (drawn,) = sample(LOGITS[None], [draw(prompt_logprob_token=3, logprobs=2)])
    wanted = torch.log_softmax(LOGITS.double(), -1)
    assert drawn.token_id == 3
    assert [(i, rank) for i, _, rank in drawn.logprobs] == [(3, 5), (0, 1), (5, 2)]
    assert all(abs(value - float(wanted[i])) < 1e-6 for i, value, _ in drawn.logprobs)


@pytest.mark.parametrize(
    "bad", [{"min_p": 1.5}, {"presence_penalty": 3}, {"repetition_penalty": 0}, {"repetition_penalty": 5e-324},
            {"repetition_penalty": 1e300}, {"logit_bias": {1: 101}},
            {"logit_bias": {"x": 1}}, {"logit_bias": [1]},
            {"prompt_logprobs": -2}, {"frequency_penalty": float("nan")}]
)  # fmt: skip
def test_bad_values_are_named(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        SamplingParams(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [("top_k", "top_p"), ("top_k", "top_p", "top_p"), ("top_k", "top_p", "typical"), 5])
def test_an_order_of_filters_has_each_once(bad: object) -> None:
    with pytest.raises(ValueError, match="^filter_order must have each of min_p, top_k, top_p once, not"):
        SamplingParams(filter_order=bad)  # type: ignore[arg-type]


def test_the_order_of_filters_goes_into_the_draw() -> None:
    """P = (.5, .25, .15, ...), top_p .8, min_p .2: vLLM keeps two tokens, transformers three."""
    logits = torch.tensor([[0.5, 0.25, 0.15, 0.06, 0.04]]).log()
    kept = {}
    for order in (None, ["top_k", "top_p", "min_p"]):
        given = {} if order is None else {"filter_order": order}
        params = SamplingParams(top_p=0.8, min_p=0.2, **given)  # type: ignore[arg-type]
        sequence = Sequence(0, params, 1, [1], CompletionOutput(0), 300, frozenset(), num_output_placeholders=1)
        kept[str(order)] = set()
        for _ in range(200):
            kept[str(order)].add(sample(logits, [sampling_request_of(sequence, 0)])[0].token_id)
            sequence.tokens.append(0)
    assert list(kept.values()) == [{0, 1}, {0, 1, 2}]


@pytest.fixture(scope="module")
def llm() -> object:
    options = {"transport": "loopback", "memory_workers": 2, "dtype": "float32", "prefill_chunk": 16}
    with LLM(str(MODEL), **options) as made:
        yield made


def test_prompt_logprobs_equal_transformers(llm: LLM) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    prompts = [tokenizer(t)["input_ids"] for t in ("import os\nimport sys\n\n\ndef main():\n" * 3, "class A:", "x")]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=3))
    for ids, output in zip(prompts, outputs, strict=True):
        with torch.no_grad():
            wanted = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1)
        found = output.prompt_logprobs
        assert found is not None
        assert len(found) == len(ids)
        assert found[0] is None
        for position, entry in enumerate(found[1:]):
            assert entry is not None
            order = wanted[position].argsort(descending=True).tolist()
            assert list(entry) == list(dict.fromkeys([ids[position + 1], *order[:3]]))
            for token, scored in entry.items():
                assert abs(scored.logprob - float(wanted[position, token])) < 1e-4
                assert scored.rank == order.index(token) + 1
                assert scored.decoded_token == tokenizer.decode([token])


@pytest.fixture(params=["one replica", "two replicas", "prefill worker"])
def any_llm(request: pytest.FixtureRequest) -> Any:
    if request.param == "one replica":
        yield request.getfixturevalue("llm")
        return
    options = {"two replicas": {"pipeline": 3}, "prefill worker": {"prefill_workers": 1}}
    common = {"transport": "loopback", "memory_workers": 2, "dtype": "float32", "prefill_chunk": 16}
    with LLM(str(MODEL), **common, **options[request.param]) as made:
        yield made


@pytest.mark.long(but=["one replica"])
def test_penalties_through_the_pools(any_llm: LLM) -> None:
    """Against a loop over the whole model, greedy, token by token: also the token in flight is counted."""
    llm = any_llm
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    prompt = tokenizer("import os\n")["input_ids"]
    bias = {**dict.fromkeys(prompt, 4.0), 5: 3.0}
    params = SamplingParams(
        max_tokens=24, temperature=0.0, ignore_eos=True, presence_penalty=1.5, frequency_penalty=0.7,
        repetition_penalty=1.4, logit_bias=bias,
    )  # fmt: skip
    tokens: list[int] = []
    for _ in range(24):
        with torch.no_grad():
            row = model(torch.tensor([prompt + tokens])).logits[0, -1].double()
        for biased, value in bias.items():
            row[biased] += value
        for seen in {*prompt, *tokens}:
            row[seen] = row[seen] / 1.4 if row[seen] > 0 else row[seen] * 1.4
        for seen in set(tokens):
            row[seen] -= 1.5 + 0.7 * tokens.count(seen)
        tokens.append(int(row.argmax()))
    (output,) = llm.generate([prompt], params)
    assert output.outputs[0].token_ids == tokens
    (plain,) = llm.generate([prompt], SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True))
    assert plain.outputs[0].token_ids != tokens, "the control"


@pytest.mark.long(but=["one replica"])
def test_forbidden_tokens_through_the_pools(any_llm: LLM) -> None:
    """Against a loop over the whole model, greedy: words are matched with the token in flight, too."""
    llm = any_llm
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    prompt, count = tokenizer("import os\n")["input_ids"], 16
    greedy: dict[str, Any] = {"max_tokens": count, "temperature": 0.0, "ignore_eos": True}
    plain = llm.generate([prompt], SamplingParams(**greedy))[0].outputs[0].token_ids
    words = [plain[1:3], plain[4:7], plain[9:10]]
    allowed = sorted({*plain, *range(40, 140)})
    tokens: list[int] = []
    for _ in range(count):
        with torch.no_grad():
            row = model(torch.tensor([prompt + tokens])).logits[0, -1].double()
        banned = [t for t in range(len(row)) if t not in allowed or any([*tokens, t][-len(w) :] == w for w in words)]
        row[banned] = -math.inf
        tokens.append(int(row.argmax()))
    asked = SamplingParams(**greedy, bad_words_token_ids=words, allowed_token_ids=allowed, logprobs=0)
    (output,) = llm.generate([prompt], asked)
    assert output.outputs[0].token_ids == tokens
    assert any(entry[t].rank > 1 for t, entry in zip(tokens, output.outputs[0].logprobs or [], strict=True))
    asked.bad_words_token_ids = words[:1]
    others = llm.generate([prompt], asked)[0].outputs[0].token_ids
    assert plain != tokens != others != plain, "the control"


def test_bad_words_are_not_in_the_text(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    plain = llm.generate("class Stack:", params)[0].outputs[0]
    word = llm.tokenizer.decode(plain.token_ids[3:5])
    params.bad_words = [word]
    (without,) = llm.generate("class Stack:", params)[0].outputs
    assert word in plain.text
    assert word not in without.text


def test_all_log_probabilities_are_told_by_rank(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2, temperature=0.0, logprobs=-1, prompt_logprobs=-1)
    with pytest.raises(ValueError, match="logprobs must be at most 20, not -1"):
        llm.generate("class A", params)
    llm.front.max_logprobs = -1
    try:
        (output,) = llm.generate("class A", params)
    finally:
        llm.front.max_logprobs = 20
    vocabulary = llm.engine.worker_info.vocab_size
    for entry in [*(output.outputs[0].logprobs or []), *(output.prompt_logprobs or [])[1:]]:
        assert entry is not None
        assert sorted(x.rank for x in entry.values()) == list(range(1, vocabulary + 1))
        assert math.isclose(sum(math.exp(x.logprob) for x in entry.values()), 1.0, rel_tol=1e-4)
        values = [x.logprob for x in sorted(entry.values(), key=lambda x: x.rank)]
        assert values == sorted(values, reverse=True)
    chosen = [entry[t] for t, entry in zip(output.outputs[0].token_ids, output.outputs[0].logprobs or [], strict=True)]
    assert [x.rank for x in chosen] == [1, 1]
    assert output.outputs[0].cumulative_logprob == pytest.approx(sum(x.logprob for x in chosen))
    assert "".join(str(x.decoded_token) for x in chosen) == output.outputs[0].text


def test_nothing_that_is_allowed_is_left(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2, temperature=0.0, allowed_token_ids=[7], bad_words_token_ids=[[7]])
    (output,) = llm.generate("class A", params)
    assert (output.outputs[0].finish_reason, output.outputs[0].token_ids) == ("error", [])
    assert str(output.outputs[0].stop_reason).startswith("allowed_token_ids and bad_words forbid every token")


def test_stop_string_may_be_part_of_the_text(llm: LLM) -> None:
    params = {"max_tokens": 24, "temperature": 0.0}
    plain = llm.generate("class Stack:", SamplingParams(**params))[0].outputs[0].text
    stop = plain[5:8]
    without, within = (
        llm.generate("class Stack:", SamplingParams(**params, stop=stop, include_stop_str_in_output=x))[0].outputs[0]
        for x in (False, True)
    )
    assert stop not in without.text
    assert within.text == without.text + stop
    assert plain.startswith(within.text)
    assert within.stop_reason == stop


def test_chat_answers_one_conversation_or_several(llm: LLM) -> None:
    talk = [{"role": "user", "content": "hello"}]
    params = SamplingParams(max_tokens=4, temperature=0.0)
    (one,) = llm.chat(talk, params)
    two = llm.chat([talk, [{"role": "user", "content": "bye"}]], params)
    assert two[0].outputs[0].token_ids == one.outputs[0].token_ids
    assert len(two) == 2
    assert "<|user|>\nhello" in llm.tokenizer.decode(one.prompt_token_ids)


def test_who_is_to_blame_is_told(llm: LLM) -> None:
    (output,) = llm.generate([[5]], SamplingParams(allowed_token_ids=[5], bad_words_token_ids=[[5]]))
    assert (output.outputs[0].finish_reason, output.outputs[0].blame) == ("error", ErrorOrigin.CLIENT)
