"""A wrapped model generates as transformers does: the same call, the same tensor.

Covers: lamina/api/wrapped/generate_call.py, lamina/api/wrapped/unsupported_arguments.py,
lamina/api/wrapped/wrapped_model.py.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import lamina
from lamina.engine.request import Request
from lamina.protocol.control import NO_TOKEN, SampledToken

VOCAB = 96


def build() -> Any:
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=3, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(2)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(std=1.5 * weight.shape[1] ** -0.5)
    return model


@pytest.fixture(scope="module")
def model() -> Any:
    return build()


@pytest.fixture(scope="module")
def wrapped(model: Any) -> Iterator[Any]:
    with lamina.wrap(model, memory_workers=2, transport="loopback") as wrapped:
        yield wrapped


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    """Three prompts of 9, 4 and 1 tokens, padded on the left."""
    ids = torch.randint(4, VOCAB, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(9) >= torch.tensor([0, 5, 8])[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def test_greedy(model: Any, wrapped: Any, batch: dict[str, torch.Tensor]) -> None:
    for options in ({"max_new_tokens": 12}, {"max_length": 20}, {}):
        assert torch.equal(wrapped.generate(**batch, **options), model.generate(**batch, **options))


def test_end_tokens_and_padding(model: Any, wrapped: Any, batch: dict[str, torch.Tensor]) -> None:
    free = model.generate(**batch, max_new_tokens=16)
    ends = [int(free[0, 9 + 3]), int(free[1, 9 + 6])]
    for options in (
        {"eos_token_id": ends},
        {"eos_token_id": ends[0], "pad_token_id": 7},
        {"eos_token_id": ends, "min_new_tokens": 8},
        {"eos_token_id": ends, "min_length": 14},
    ):
        expected = model.generate(**batch, max_new_tokens=16, **options)
        assert torch.equal(wrapped.generate(**batch, max_new_tokens=16, **options), expected), options
    assert (model.generate(**batch, max_new_tokens=16, eos_token_id=ends)[0, -2:] == 0).all(), "some row is padded"


@pytest.mark.long(but=["1.3"])
@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_repetition_penalty(model: Any, wrapped: Any, batch: dict[str, torch.Tensor], penalty: float) -> None:
    """Without padding, which transformers takes for repeated too."""
    batch = {name: x[:1] for name, x in batch.items()}
    options = {"max_new_tokens": 40, "repetition_penalty": penalty}
    expected = model.generate(**batch, **options)
    assert torch.equal(wrapped.generate(**batch, **options), expected)
    assert not torch.equal(expected, model.generate(**batch, max_new_tokens=40)), "it changes something"


def test_an_end_token_of_the_model_that_its_vocabulary_lacks_ends_nothing(
    model: Any, wrapped: Any, batch: dict[str, torch.Tensor]
) -> None:
    saved = model.generation_config
    try:
        for ends in (VOCAB, [VOCAB, int(model.generate(**batch, max_new_tokens=4)[0, -1])]):
            model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=0)
            assert torch.equal(wrapped.generate(**batch, max_new_tokens=6), model.generate(**batch, max_new_tokens=6))
    finally:
        model.generation_config = saved


def test_prompts_padded_without_a_mask(model: Any, wrapped: Any, batch: dict[str, torch.Tensor]) -> None:
    ids = batch["input_ids"]
    assert torch.equal(wrapped.generate(ids, max_new_tokens=6), model.generate(ids, max_new_tokens=6))
    assert torch.equal(wrapped.generate(max_new_tokens=6), model.generate(max_new_tokens=6))


def test_guidance_takes_sequences_of_its_own_on_the_workers(
    model: Any, wrapped: Any, batch: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"max_new_tokens": 5, "guidance_scale": 1.8, "negative_prompt_ids": batch["input_ids"][:, -1:]}
    expected = model.generate(**batch, **options)
    rows = wrapped.llm.stats()["compute-0"]["rows"]

    @functools.wraps(model.forward)
    def not_here(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("attention in this process")

    monkeypatch.setattr(model, "forward", not_here)
    assert torch.equal(wrapped.generate(**batch, **options), expected)
    assert wrapped.llm.stats()["compute-0"]["rows"] == rows + 9 + 4 + 1 + 3 + 2 * 3 * 4
    monkeypatch.undo()
    assert not torch.equal(expected, model.generate(**batch, max_new_tokens=5)), "it changes something"


def test_no_bar_is_shown(
    wrapped: Any, batch: dict[str, torch.Tensor], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    wrapped.generate(**batch, max_new_tokens=2)
    assert capsys.readouterr().err == ""


def test_settings_come_from_call_then_config_then_model(
    model: Any, wrapped: Any, batch: dict[str, torch.Tensor]
) -> None:
    saved = model.generation_config
    try:
        model.generation_config = GenerationConfig(max_new_tokens=3, pad_token_id=0)
        assert wrapped.generate(**batch).shape == (3, 12)
        config = GenerationConfig(max_new_tokens=5)
        assert wrapped.generate(**batch, generation_config=config).shape == (3, 14)
        assert wrapped.generate(**batch, generation_config=config, max_new_tokens=7).shape == (3, 16)
        out = wrapped.generate(**batch, return_dict_in_generate=True)
        assert out.sequences.shape == (3, 12)
    finally:
        model.generation_config = saved


def test_sampling_is_repeatable_and_follows_its_filters(wrapped: Any, batch: dict[str, torch.Tensor]) -> None:
    options = {"max_new_tokens": 10, "do_sample": True, "num_return_sequences": 2}
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(wrapped.generate(**batch, temperature=1.5, **options))
    assert draws[0].shape == (6, 19)
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert not torch.equal(draws[0][0], draws[0][1])
    assert torch.equal(draws[0][:, :9], batch["input_ids"].repeat_interleave(2, 0))
    greedy = wrapped.generate(**batch, max_new_tokens=10)
    assert torch.equal(wrapped.generate(**batch, max_new_tokens=10, do_sample=True, top_k=1), greedy)


def test_streamers_get_the_prompt_and_every_token(wrapped: Any, batch: dict[str, torch.Tensor]) -> None:
    class Streamer:
        def __init__(self) -> None:
            self.put_values: list[list[int]] = []
            self.ended = False

        def put(self, value: torch.Tensor) -> None:
            self.put_values.append(value.flatten().tolist())

        def end(self) -> None:
            self.ended = True

    streamer, ids = Streamer(), batch["input_ids"][:1]
    out = wrapped.generate(ids, max_new_tokens=5, streamer=streamer)
    assert streamer.put_values == [ids[0].tolist(), *([t] for t in out[0, 9:].tolist())]
    assert streamer.ended
    several = Streamer()
    out = wrapped.generate(**batch, max_new_tokens=5, streamer=several)
    assert several.put_values == [batch["input_ids"].flatten().tolist(), *out[:, 9:].T.tolist()]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_beams": 4}, "num_beams=4: pass num_beams=1"),
        ({"generation_config": GenerationConfig(num_beams=4)}, "num_beams=4: pass num_beams=1"),
        ({"past_key_values": ()}, "does not take past_key_values here: the KV cache lies on the memory workers"),
        ({"inputs_embeds": torch.ones(3, 9, 32)}, "does not take inputs_embeds here: .* pass input_ids"),
        ({"custom_generate": print}, "does not take custom_generate here"),
        ({"assistant_model": 1}, "does not take assistant_model here: leave it out"),
        ({"synced_gpus": True}, "does not take synced_gpus here: .* leave it out"),
        ({"token_healing": True}, r"token_healing here: pass split.model.heal_tokens\(input_ids, tokenizer\)"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens here: leave it out"),
        ({"cache_implementation": "paged"}, 'cache_implementation="paged": leave it out'),
        ({"cache_implementation": "offloaded"}, 'cache_implementation="offloaded": leave it out'),
        ({"cache_implementation": "quantized"}, 'cache_implementation="quantized": pass kv_cache_dtype="int8"'),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions here: .* leave it out"),
        ({"position_ids": torch.ones(3, 9)}, "position_ids must count the tokens of each prompt from 0"),
        ({"max_new_tokens": 120}, "exceed the longest text of 128 tokens: lower max_new_tokens"),
        ({"attention_mask": torch.ones(3, 8)}, "does not fit"),
        ({"attention_mask": torch.tensor([[1] * 8 + [0]] * 3)}, "padding_side='left'"),
        ({"attention_mask": torch.tensor([[1, 0] * 4 + [1]] * 3)}, "padding_side='left'"),
        ({"input_ids": torch.ones(3, 9)}, r"\[batch, length\]"),
        ({"input_ids": torch.full((1, 2), VOCAB), "attention_mask": None}, "out of vocabulary"),
    ],
)
def test_what_cannot_be_obeyed_is_refused(
    wrapped: Any, batch: dict[str, torch.Tensor], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        wrapped.generate(**{**batch, **options})
    assert "\n" not in str(caught.value)


def test_the_model_is_still_itself(model: Any, wrapped: Any, batch: dict[str, torch.Tensor]) -> None:
    fresh = build()
    assert torch.equal(model.generate(**batch, max_new_tokens=4), fresh.generate(**batch, max_new_tokens=4))
    assert wrapped.config is model.config
    assert wrapped.device == torch.device("cpu")


def test_a_closed_wrapped_model_says_what_to_do(batch: dict[str, torch.Tensor]) -> None:
    with lamina.wrap(build(), memory_workers=1, transport="loopback") as split:
        assert split.generate(**batch, max_new_tokens=1).shape == (3, 10)
    with pytest.raises(ValueError, match=r"this wrapped model is closed: wrap the model again, or use split\.model"):
        split.generate(**batch, max_new_tokens=1)
    assert split.model.generate(**batch, max_new_tokens=1).shape == (3, 10), "the model stays usable"


def test_a_path_is_not_wrapped() -> None:
    with pytest.raises(ValueError, match="from_pretrained"):
        lamina.wrap("some/path")  # type: ignore[arg-type]


def test_filters_leave_what_transformers_leaves(model: Any, wrapped: Any) -> None:
    ids = torch.tensor([[5, 9, 17]])
    filters = {"top_k": 20, "top_p": 0.7, "min_p": 0.3}
    with torch.no_grad():
        scores = model(ids).logits[:, -1] / 1.5
    warpers = {"top_k": TopKLogitsWarper(20), "top_p": TopPLogitsWarper(0.7), "min_p": MinPLogitsWarper(0.3)}

    def left(*order: str) -> set[int]:
        found = scores
        for name in order:
            found = warpers[name](ids, found)
        return set(found[0].isfinite().nonzero()[:, 0].tolist())

    torch.manual_seed(0)
    options = {"max_new_tokens": 1, "do_sample": True, "num_return_sequences": 200, "temperature": 1.5}
    drawn = wrapped.generate(ids, **options, **filters)[:, -1]
    assert set(drawn.tolist()) == left("top_k", "top_p", "min_p")
    assert left("min_p", "top_k", "top_p") < left("top_k", "top_p", "min_p"), "the control"


def test_a_wrapped_model_bears_the_name_of_the_model_and_says_what_it_is(model: Any, wrapped: Any) -> None:
    assert type(wrapped).__name__ == "LlamaForCausalLM"
    with pytest.raises(AttributeError, match="no 'resize_token_embeddings': try split.model.resize_token_embeddings"):
        wrapped.resize_token_embeddings(5)
    with pytest.raises(ValueError, match=r"stays where it is, on cpu in torch.float32: .* model.to\(torch.float16\)"):
        wrapped.to(torch.float16)
    with pytest.raises(ValueError, match="call split.generate"):
        wrapped(torch.tensor([[1]]))
    with pytest.raises(AttributeError, match="past_key_values is not here: the KV cache lies on the memory workers"):
        _ = wrapped.generate(torch.tensor([[5]]), max_new_tokens=1, return_dict_in_generate=True).past_key_values
    with pytest.raises(ValueError, match=r"has no generate to wrap: use lamina.LLM\(model\)"):
        lamina.wrap(torch.nn.Linear(2, 2))


def test_logits_that_are_no_numbers_end_the_call_and_say_so(wrapped: Any) -> None:
    """The worker that samples reports them; the text so far is not taken for a whole one."""
    output = Request.append

    def fail(request: Any, sequence: Any, drawn: Any) -> None:
        output(
            request,
            sequence,
            SampledToken(drawn.sequence, NO_TOKEN if sequence.num_output_tokens == 2 else drawn.token_id),
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Request, "append", fail)
        with pytest.raises(ValueError, match="generate ended early: the largest logit is not a finite number"):
            wrapped.generate(torch.tensor([[5, 9]]), max_new_tokens=6)
    assert wrapped.generate(torch.tensor([[5, 9]]), max_new_tokens=6).shape == (1, 8)


def test_rows_beyond_what_decodes_at_once_are_refused_where_they_must_go_on_together(wrapped: Any) -> None:
    ids = torch.full((65, 1), 5)
    assert wrapped.generate(ids, max_new_tokens=2).shape == (65, 3)
    with pytest.raises(ValueError, match="65 rows cannot decode together, at most 64 .* max_num_seqs=65"):
        wrapped.generate(ids, max_new_tokens=2, no_repeat_ngram_size=2)
