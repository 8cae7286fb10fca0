"""A model that cannot be served exactly is refused, with the layer and the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from model_table.tiny_models import build as build_tiny
from torch import nn

from lamina.models.convert import convert_model
from lamina.models.errors import UnsupportedModelError

SIZE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
GPT = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
MAMBA = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
T5 = {"vocab_size": 64, "d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4, "d_kv": 8}


def refused(model: nn.Module, words: str, max_model_len: int = 64) -> None:
    with pytest.raises(UnsupportedModelError, match=words) as caught:
        convert_model(model, max_model_len=max_model_len)
    assert "\n" not in str(caught.value)


def build(model: str, config: str, **options: Any) -> Any:
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**options))


@pytest.mark.long(but=["MambaForCausalLM-MambaConfig-options0-recurrent (layers alone|state in its cache)"])
@pytest.mark.parametrize(
    ("model", "config", "options", "words"),
    [
        ("MambaForCausalLM", "MambaConfig", MAMBA, "recurrent (layers alone|state in its cache)"),
        ("RwkvForCausalLM", "RwkvConfig", {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}, "layer 0"),
        ("T5ForConditionalGeneration", "T5Config", T5, "encoder-decoder"),
        ("LlamaModel", "LlamaConfig", SIZE, "no language-model head"),
        ("BertForMaskedLM", "BertConfig", {**SIZE, "num_key_value_heads": None}, "layer 0 .* is not causal"),
        ("OpenAIGPTLMHeadModel", "OpenAIGPTConfig", GPT, "layer 0"),
    ],
)  # fmt: skip
def test_refused_with_the_layer_and_the_reason(model: str, config: str, options: dict[str, Any], words: str) -> None:
    refused(build(model, config, **options), words)


def test_scales_by_positions_counted_inside_are_refused_from_where_they_matter() -> None:
    model = build(
        "Llama4ForCausalLM", "Llama4TextConfig", **{**SIZE, "num_hidden_layers": 1}, intermediate_size_mlp=48,
        num_local_experts=2, head_dim=8, no_rope_layers=[0], floor_scale=32, attention_chunk_size=64,
    )  # fmt: skip
    refused(model, "counts positions by itself.*within 32 tokens", max_model_len=32)
    assert len(convert_model(model, max_model_len=31).calls) == 1


def test_a_cache_that_comes_with_a_model_is_refused_since_it_decides_what_is_attended() -> None:
    """Unlimited-OCR keeps a window of the answer and all of the prompt: without a cache its attention has no window."""
    if not hasattr(transformers, "UnlimitedOcrConfig"):
        pytest.skip("this version of transformers has no such model")
    refused(build_tiny("unlimited_ocr"), "layer 0 .* keeps K and V in a cache of its own .*SlidingWindowLayer")


@pytest.mark.long
def test_chunks_shorter_than_the_longest_text_are_refused() -> None:
    model = build(
        "Llama4ForCausalLM", "Llama4TextConfig", **SIZE, intermediate_size_mlp=48, num_local_experts=2,
        attention_chunk_size=16, head_dim=8, layer_types=["full_attention", "chunked_attention"] * 2,
    )  # fmt: skip
    refused(model, r"layer 1 .*mask that is not causal with one window within 64 tokens")
    assert len(convert_model(model, max_model_len=16).calls) == 4


def test_masks_that_depend_on_data_are_refused() -> None:
    experts = {"is_moe": False, "num_experts": 2, "num_experts_per_tok": 1}
    refused(build("DogeForCausalLM", "DogeConfig", **SIZE, **experts), r"layer 0 .*self_attn.* alters its mask")


def test_a_mask_that_is_altered_beyond_some_length_is_refused() -> None:
    model = build("LlamaForCausalLM", "LlamaConfig", **SIZE)
    attention = model.model.layers[1].self_attn
    forward = attention.forward
    attention.forward = lambda *args, attention_mask, **kwargs: forward(
        *args, attention_mask=attention_mask[:, :, :, -32:].clone(), **kwargs
    )
    refused(model, r"layer 1 .*self_attn.* alters its mask")


def test_cross_attention_is_refused() -> None:
    refused(build("GPT2LMHeadModel", "GPT2Config", n_embd=32, n_layer=1, n_head=2, add_cross_attention=True), "cross-")


def test_quantised_models_are_refused() -> None:
    model = build("LlamaForCausalLM", "LlamaConfig", **SIZE)
    model.config.quantization_config = {"quant_method": "gptq"}
    refused(model, "is a quantised module .gptq.")


def test_a_module_that_is_no_hugging_face_model_is_refused() -> None:
    refused(nn.Linear(2, 2), "no config")


class Shifted(nn.Module):
    """Mixes each token with the one before it: state that lies outside of attention."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.roll(hidden, 1, dims=1) * (torch.arange(hidden.shape[1]) > 0)[:, None]


@pytest.mark.long
def test_tokens_that_meet_outside_of_attention_are_noticed() -> None:
    model = build("LlamaForCausalLM", "LlamaConfig", **SIZE)
    convert_model(model, max_model_len=64)
    model.model.layers[2].mlp = nn.Sequential(model.model.layers[2].mlp, Shifted())
    refused(model, "depend on each other outside of attention")


class Counted(nn.Module):
    """Positions counted inside, whatever position_ids say."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return self.inner(x, torch.arange(position_ids.shape[1])[None].expand_as(position_ids))


def test_positions_counted_inside_are_noticed() -> None:
    model = build("LlamaForCausalLM", "LlamaConfig", **{**SIZE, "initializer_range": 0.3})
    model.model.rotary_emb = Counted(model.model.rotary_emb)
    refused(model, "depend on each other outside of attention")
