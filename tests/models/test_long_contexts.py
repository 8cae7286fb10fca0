"""Contexts longer than the configuration's, by rope scaling: all texts have the frequencies of the longest one.

The oracle is transformers with the frequencies fixed from the first token on. Its own switch within a text leaves K of
both kinds in the cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_table.tiny_models import enlarge
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lamina import LLM, SamplingParams

SHAPE: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": None, "pad_token_id": 2,
}  # fmt: skip
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
SHORT, LONG = list(range(5, 25)), list(range(5, 85))


def phi(path: Path) -> Any:
    shape = {**SHAPE, "max_position_embeddings": 256, "original_max_position_embeddings": 64}
    return saved(path, Phi3ForCausalLM(Phi3Config(**shape, rope_parameters=LONGROPE)))


def llama(path: Path, rope: dict[str, Any]) -> Any:
    return saved(path, LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=rope)))


def saved(path: Path, model: Any) -> Any:
    enlarge(model, seed=0)
    model.eval().save_pretrained(path)
    return model


def fixed(model: Any, length: int) -> Any:
    """Give ``model`` the frequencies of a text of ``length`` tokens, for all texts."""
    rotary = model.model.rotary_emb
    kind = rotary.rope_type
    rotary.inv_freq, _ = ROPE_INIT_FUNCTIONS[kind](model.config, torch.device("cpu"), seq_len=length)
    rotary.rope_type = "default"
    return model


def greedy(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def served(path: Path, prompts: list[list[int]], max_model_len: int = 0) -> list[list[int]]:
    params = SamplingParams(max_tokens=8, temperature=0.0)
    with LLM(str(path), transport="loopback", max_model_len=max_model_len) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


@pytest.mark.long
def test_longrope_takes_its_long_factors_once_by_the_length_that_is_asked_for(tmp_path: Path) -> None:
    model = phi(tmp_path)
    short = greedy(model, SHORT)
    assert served(tmp_path, [SHORT]) == [short]
    long = fixed(model, 65)
    assert served(tmp_path, [SHORT, LONG], 256) == [greedy(long, SHORT), greedy(long, LONG)]
    assert greedy(long, SHORT) != short, "the factors matter"


@pytest.mark.long
def test_dynamic_frequencies_are_those_of_the_length_that_is_asked_for(tmp_path: Path) -> None:
    model = llama(tmp_path, DYNAMIC)
    short = greedy(model, SHORT)
    assert served(tmp_path, [SHORT]) == [short]
    long = fixed(model, 200)
    assert served(tmp_path, [SHORT, LONG], 200) == [greedy(long, SHORT), greedy(long, LONG)]
    assert greedy(long, SHORT) != short, "the frequencies matter"


@pytest.mark.long
def test_yarn_extends_the_configuration(tmp_path: Path) -> None:
    model = llama(tmp_path, YARN)
    assert served(tmp_path, [SHORT, LONG], 256) == [greedy(model, SHORT), greedy(model, LONG)]
    with pytest.raises(ValueError, match=r"max_model_len=257 exceeds the model's own limit of 256 tokens; a rope"):
        served(tmp_path, [SHORT], 257)
