"""Releases of transformers pass the KV cache by different names; a wrapped model does not depend on which one it is."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.modeling_outputs
from torch import Tensor
from transformers import Cache, DynamicCache, LlamaForCausalLM, UnbatchedClassifierFreeGuidanceLogitsProcessor
from transformers.utils import ModelOutput

import lamina
from lamina.models.cache_name import cache_name

MODEL = Path(__file__).resolve().parents[3] / "examples" / "tiny_lm" / "model"
IDS = torch.tensor([[320, 480, 7, 9]])
# past_key_values up to transformers 5.23, cache from 5.24, cache_params for recurrent models; the last is a guess.
NAMES = ["past_key_values", "cache", "cache_params", "kv_state"]


class Renaming(LlamaForCausalLM):  # type: ignore[misc]
    """A model whose ``generate`` passes its cache to the decoding loop as ``name``, with ``added`` after it."""

    name = ""
    added: typing.ClassVar[dict[str, Any]] = {}

    @functools.wraps(LlamaForCausalLM.generate)
    def generate(self, *args: Any, custom_generate: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
        def loop(model: Any, input_ids: Tensor, **inputs: Any) -> Any:
            assert custom_generate is not None
            spelled = {self.name if isinstance(v, Cache) else k: v for k, v in inputs.items()}
            assert self.name in spelled, "transformers makes a cache for each call"
            return custom_generate(model, input_ids=input_ids, **spelled, **self.added)

        return super().generate(*args, custom_generate=custom_generate and loop, **kwargs)


class Guidance(UnbatchedClassifierFreeGuidanceLogitsProcessor):  # type: ignore[misc]
    """transformers' own processor, which passes the cache of its own rows to the model as ``name``."""

    name = ""

    def get_unconditional_logits(self, input_ids: Tensor) -> Tensor:
        model = self.model
        own = {"past_key_values", "cache"}
        self.model = lambda ids, **options: model(ids, **{self.name if k in own else k: v for k, v in options.items()})
        try:
            logits: Tensor = super().get_unconditional_logits(input_ids)
        finally:
            self.model = model
        return logits


@pytest.fixture(scope="module")
def model() -> Any:
    return Renaming.from_pretrained(MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def split(model: Any) -> Iterator[Any]:
    with lamina.wrap(model, transport="loopback", max_model_len=128) as split:
        yield split


@pytest.fixture
def spell(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def spell(name: str, **added: Any) -> None:
        monkeypatch.setattr(Renaming, "name", name)
        monkeypatch.setattr(Guidance, "name", name)
        monkeypatch.setattr(Renaming, "added", added)

    return spell


@pytest.mark.parametrize("name", NAMES)
def test_the_cache_of_a_call_is_known_by_what_it_is(model: Any, split: Any, spell: Any, name: str) -> None:
    spell(name)
    for settings in ({}, {"cache_implementation": "static"}, {"no_repeat_ngram_size": 2}):
        settings |= {"max_new_tokens": 6}
        assert torch.equal(split.generate(IDS, **settings), model.generate(IDS, **settings))


@pytest.mark.parametrize("name", NAMES)
def test_guidance_goes_on_with_its_own_rows_by_any_name_of_the_cache(
    model: Any, split: Any, spell: Any, name: str
) -> None:
    spell(cache_name())
    settings = {"max_new_tokens": 6, "attention_mask": torch.ones_like(IDS)}
    expected = model.generate(IDS, logits_processor=[Guidance(2.0, model)], **settings)
    rows = split.llm.stats()["compute-0"]["rows"]
    spell(name)
    assert torch.equal(split.generate(IDS, logits_processor=[Guidance(2.0, model)], **settings), expected)
    # The prompt of four tokens, the processor's of one, and five more steps of both.
    assert split.llm.stats()["compute-0"]["rows"] == rows + 4 + 1 + 2 * 5
    assert not torch.equal(expected, model.generate(IDS, **settings)), "guidance changes something"


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_of_the_caller_is_refused_by_the_name_it_has(split: Any, spell: Any, name: str) -> None:
    spell("past_key_values")
    refused = f"generate does not take {name} here: the KV cache lies on the memory workers: pass the whole text"
    with pytest.raises(ValueError, match=refused) as caught:
        split.generate(IDS, max_new_tokens=2, **{name: DynamicCache()})
    assert "\n" not in str(caught.value)


def test_an_argument_that_says_nothing_is_harmless_and_any_other_is_refused(model: Any, split: Any, spell: Any) -> None:
    """Multimodal models of transformers add mm_encoder_outputs={} to a call with text alone."""
    expected = model.generate(IDS, max_new_tokens=3)
    for value in ({}, None, [], (), ModelOutput()):
        spell("cache", mm_encoder_outputs=value)
        assert torch.equal(split.generate(IDS, max_new_tokens=3), expected)
    for value in ({"image": 1}, [0], 0, False, torch.zeros(1), torch.tensor(0)):
        spell("cache", mm_encoder_outputs=value)
        with pytest.raises(ValueError, match="generate does not take mm_encoder_outputs here: leave it out"):
            split.generate(IDS, max_new_tokens=3)


def test_the_cache_is_named_in_an_output_as_the_installed_release_names_it(split: Any) -> None:
    output = split.generate(IDS, max_new_tokens=1, return_dict_in_generate=True)
    for name in {"past_key_values", cache_name()}:
        with pytest.raises(AttributeError, match=f"{name} is not here: the KV cache lies on the memory workers"):
            getattr(output, name)
    with pytest.raises(AttributeError, match="has no 'nonsense'"):
        _ = output.nonsense


def test_the_name_of_the_cache_is_read_from_the_installed_release(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_name() in inspect.signature(LlamaForCausalLM.forward).parameters

    @dataclass
    class Newer(ModelOutput):  # type: ignore[misc]
        logits: Tensor | None = None
        kv_state: Cache | None = None

    @dataclass
    class Bare(ModelOutput):  # type: ignore[misc]
        logits: Tensor | None = None

    try:
        for outputs in (Newer, Bare):
            monkeypatch.setattr(transformers.modeling_outputs, "CausalLMOutputWithPast", outputs)
            cache_name.cache_clear()
            if outputs is Newer:
                assert cache_name() == "kv_state"
            else:
                with pytest.raises(ImportError, match=rf"transformers {transformers.__version__} has no cache among"):
                    cache_name()
    finally:
        cache_name.cache_clear()
