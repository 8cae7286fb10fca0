"""The names that scripts for vLLM read and set."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import pytest
from engine_api import make_engine, run
from fake_executor import FakeWire, continuation
from test_streams import FakeFront

from lamina import LLM, SamplingParams
from lamina.api.frontend import Frontend, metrics_of, our_option_names
from lamina.request import CompletionOutput, Logprob, RequestOutput, RequestTimes


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> LLM:
    monkeypatch.setattr("lamina.api.llm.Frontend", FakeFront)
    return LLM(FakeWire())


def test_parameters_can_be_set_and_are_checked_as_a_request_begins() -> None:
    front = FakeFront(FakeWire(), None, False, {})
    params = SamplingParams(max_tokens=3, stop_token_ids=[4], logit_bias={1: 2.0})
    asked = Frontend.engine_request(front, [1, 2], params)
    params.max_tokens, params.temperature = 5, 0.5
    assert params.stop_token_ids is not None
    params.stop_token_ids.append(9)
    assert (asked.params.max_tokens, asked.params.temperature, asked.params.stop_token_ids) == (3, 1.0, [4])
    again = Frontend.engine_request(front, [1, 2], params)
    assert (again.params.max_tokens, again.params.temperature, again.params.stop_token_ids) == (5, 0.5, [4, 9])
    params.top_p = 7.0
    with pytest.raises(ValueError, match=r"top_p must lie in \(0, 1\], not 7.0"):
        Frontend.engine_request(front, [1, 2], params)


def test_a_clone_shares_nothing() -> None:
    params = SamplingParams(stop=["a"], stop_token_ids=[4], logit_bias={1: 2.0}, seed=-1)
    clone = params.clone()
    assert clone == params
    assert clone.seed is None
    assert clone.stop is not params.stop
    assert clone.stop_token_ids is not params.stop_token_ids
    assert clone.logit_bias is not params.logit_bias


def test_the_end_of_a_long_prompt_is_kept_and_tokens_need_no_text() -> None:
    tokenizer: Any = object()
    front = FakeFront(FakeWire(), tokenizer, False, {})
    prompt = [5, 6, 7, 8]
    assert Frontend.engine_request(front, prompt, SamplingParams(truncate_prompt_tokens=3)).prompt == [6, 7, 8]
    assert Frontend.engine_request(front, prompt, SamplingParams(truncate_prompt_tokens=9)).prompt == prompt
    assert Frontend.engine_request(front, prompt, SamplingParams()).make_detokenizer is not None
    assert Frontend.engine_request(front, prompt, SamplingParams(detokenize=False)).make_detokenizer is None
    with pytest.raises(ValueError, match="truncate_prompt_tokens must be at least 1, or -1 for as many as fit, not 0"):
        SamplingParams(truncate_prompt_tokens=0)
    with pytest.raises(ValueError, match="stop strings need text: leave out detokenize=False"):
        SamplingParams(detokenize=False, stop="x")


def test_outputs_have_their_names() -> None:
    one = CompletionOutput(
        0, token_ids=[3, 4], logprobs=[{3: Logprob(-0.5, 4), 9: Logprob(-0.1, 1)}, {4: Logprob(-0.25, 1)}]
    )
    assert one.cumulative_logprob == -0.75
    assert not one.finished()
    assert (Logprob(-0.5).rank, Logprob(-0.5, 2, "x")) == (None, Logprob(logprob=-0.5, rank=2, decoded_token="x"))
    ended = CompletionOutput(0, finish_reason="stop")
    assert ended.finished()
    assert ended.cumulative_logprob is None
    times = RequestTimes(1.0, 2.0, 3.0, 4.0, 5.0)
    found = RequestOutput(1, None, [1], [one], times).metrics
    names = ("arrival_time", "first_scheduled_time", "first_token_time", "last_token_time", "finished_time")
    assert [getattr(found, name) for name in names] == [1.0, 2.0, 3.0, 4.0, 5.0]


class Bar:
    made: ClassVar[list[Bar]] = []

    def __init__(self, **options: Any) -> None:
        self.options, self.count, self.closed = options, 0, False
        self.made.append(self)

    def update(self) -> None:
        self.count += 1

    def close(self) -> None:
        self.closed = True


def test_a_bar_counts_prompts_that_are_done(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, params = [[1, 2], [3], [4, 5]], SamplingParams(max_tokens=3)
    expected = [continuation(p, 3) for p in prompts]
    assert [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=Bar)] == expected
    (bar,) = Bar.made
    assert (bar.options["total"], bar.count, bar.closed) == (3, 3, True)
    llm.generate(prompts, params)
    assert capsys.readouterr().err == "", "no terminal"


def test_a_terminal_gets_a_bar_unless_it_is_not_wanted(
    llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    llm.generate([[1, 2], [3]], SamplingParams(max_tokens=3))
    shown = capsys.readouterr().err
    assert "Processed prompts: 100%" in shown
    assert "2/2" in shown
    llm.generate([[1, 2]], SamplingParams(max_tokens=3), use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_a_chat_may_go_on_with_its_last_message(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []

    def template(tokenizer: Any, messages: Any, **options: Any) -> list[int]:
        told.append(options)
        return [1, 2]

    monkeypatch.setattr(llm.renderer, "render", template)
    llm.front.tokenizer = object()
    talk, params = [{"role": "assistant", "content": "I"}], SamplingParams(max_tokens=1)
    llm.chat(talk, params)
    llm.chat(talk, params, add_generation_prompt=False, continue_final_message=True, chat_template_kwargs={"a": 1})
    assert told == [
        {"add_generation_prompt": True, "content_format": "auto"},
        {"a": 1, "add_generation_prompt": False, "continue_final_message": True, "content_format": "auto"},
    ]
    with pytest.raises(ValueError, match="continue_final_message needs add_generation_prompt=False"):
        llm.chat(talk, params, continue_final_message=True)


def test_a_chat_may_have_a_template_and_tools_of_its_own(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    class Tokenizer:
        chat_template = None

        def apply_chat_template(self, messages: Any, **options: Any) -> Any:
            assert options["chat_template"] == "{{ tools }}"
            return f"{len(options['tools'])} {messages[0]['content']}"

        def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
            assert text == "2 I"
            assert not options["add_special_tokens"]
            return {"input_ids": [2, 1]}

    llm.front.tokenizer = Tokenizer()
    monkeypatch.setattr(type(llm.front), "engine_request", Frontend.engine_request)
    talk, params = [{"role": "user", "content": "I"}], SamplingParams(max_tokens=1, detokenize=False)
    (done,) = llm.chat(talk, params, chat_template="{{ tools }}", tools=[{}, {}])
    assert done.prompt_token_ids == [2, 1]
    assert done.prompt == "2 I", "the rendered text"


def test_what_is_not_here_is_refused_by_name_where_it_asks_for_something(llm: LLM) -> None:
    params = SamplingParams(max_tokens=1)
    assert llm.generate([1, 2], params, lora_request=None, tokenization_kwargs={})
    with pytest.raises(ValueError, match="lora_request is not served here: merge the adapter"):
        llm.generate([1, 2], params, lora_request=object())
    with pytest.raises(ValueError, match="prompt_token_ids is not served here: pass token ids as prompts"):
        llm.generate([1, 2], params, prompt_token_ids=[[1]])
    with pytest.raises(TypeError, match=r"LLM.generate takes no argument 'use_tqmd'"):
        llm.generate([1, 2], params, use_tqmd=False)
    with pytest.raises(AttributeError, match="LLM has no 'beam_search': take n of SamplingParams"):
        llm.beam_search([1, 2], params)
    with pytest.raises(AttributeError, match="LLM has no 'nothing'$"):
        llm.nothing  # noqa: B018 - it is looked for
    assert not hasattr(llm, "encode")


@pytest.mark.parametrize("priority", [None, 1, [0, 2], (3, 1)])
def test_a_priority_changes_no_token(priority: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lamina.api.llm.Frontend", FakeFront)
    llm = LLM(FakeWire(), scheduling_policy="priority")
    found = llm.generate([[1, 2], [3]], SamplingParams(max_tokens=3), priority=priority)
    assert [o.outputs[0].token_ids for o in found] == [continuation([1, 2], 3), continuation([3], 3)]


def test_a_priority_is_refused_where_all_wait_their_turn(llm: LLM) -> None:
    with pytest.raises(ValueError, match="^priority needs --scheduling-policy priority, because "):
        llm.generate([[1, 2], [3]], SamplingParams(max_tokens=3), priority=[0, 2])
    assert not llm.engine.has_work


@pytest.mark.parametrize(
    ("priority", "words"),
    [
        ([0], "1 priorities for 2 prompts: pass one number, or one for each"),
        ([], "0 priorities for 2 prompts: pass one number, or one for each"),
        ("high", "priority must be a whole number, or a list with one for each prompt, not 'high'"),
        ([0, 0.5], "priority must be a whole number, or a list with one for each prompt, not [0, 0.5]"),
    ],
)
def test_a_priority_that_is_none_is_refused(llm: LLM, priority: Any, words: str) -> None:
    with pytest.raises(ValueError) as refused:
        llm.generate([[1, 2], [3]], SamplingParams(max_tokens=3), priority=priority)
    assert str(refused.value) == words
    assert not llm.engine.has_work


@pytest.mark.parametrize(("given", "meant"), [("half", "float16"), ("float", "float32"), ("bfloat16", "bfloat16")])
def test_a_dtype_may_have_their_name(given: str, meant: str) -> None:
    assert our_option_names({"dtype": given, "pipeline": 2}) == {"dtype": meant, "pipeline": 2}
    assert our_option_names({}) == {}


def test_refusals_have_the_words_that_their_clients_look_for(llm: LLM) -> None:
    params, limit = SamplingParams(max_tokens=3), llm.engine.worker_info.max_model_len
    for prompt, words in (
        ([1] * limit, f"This model's maximum context length is {limit} tokens"),
        (
            [1] * limit,
            rf"The decoder prompt \(length {limit}\) plus the number of requested output tokens \(at least 1\) ",
        ),
        ([97], "token id 97 is out of vocabulary: it has 97 tokens"),
    ):
        with pytest.raises(ValueError, match=words):
            llm.generate([prompt], params)
    with pytest.raises(ValueError, match="the decoder prompt cannot be empty: it needs at least one token"):
        llm.engine.check([], params)
    with pytest.raises(ValueError, match="min_tokens must be greater than or equal to 0, not -1"):
        SamplingParams(min_tokens=-1)
    with pytest.raises(ValueError, match="min_tokens must be less than or equal to max_tokens 3, not 4"):
        SamplingParams(min_tokens=4, max_tokens=3)


def test_metrics_have_the_names_that_scripts_look_for() -> None:
    engine = make_engine(FakeWire(num_blocks=34), max_num_seqs=8)

    def read() -> dict[str, float]:
        return {m.name: m.value for m in metrics_of(engine)}

    assert read() == dict.fromkeys(read(), 0.0)
    for i in range(6):
        engine.add([i, i + 1, i + 2] * 4, SamplingParams(max_tokens=40, ignore_eos=True))
    assert read()["vllm:num_requests_waiting"] == 6.0
    engine.step()
    assert 0.0 < read()["vllm:kv_cache_usage_perc"] < 1.0
    assert read()["vllm:num_requests_running"] == 6.0
    run(engine)
    assert read()["vllm:num_preemptions"] == engine.scheduler.num_preemptions > 0
    assert read()["vllm:num_requests_running"] == read()["vllm:kv_cache_usage_perc"] == 0.0


def test_an_llm_gives_metrics(llm: LLM) -> None:
    assert "vllm:num_preemptions" in {m.name for m in llm.get_metrics()}
