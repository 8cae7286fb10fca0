"""Tiny random models of every family that is served, made so that a wrong attention cannot go unnoticed.

Windows are shorter than the texts, soft caps low enough to bite, query and key weights large enough that attention is
far from uniform. Seeds are chosen so that greedy decoding does not fall into a short loop.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from lamina.converter import SlicedProgram

VOCAB = 320
FIRST_TOKEN = 3  # below: bos, eos, pad
MAX_LEN = 256

# Names of projections that make q or k; a fused one makes v as well, which does no harm.
_QUERY_KEY = re.compile(r"\.(q_proj|k_proj|query_key_value|qkv_proj|c_attn|Wqkv|q_b_proj|kv_b_proj|query|key)\.weight$")
_QUERY_KEY_NORM = re.compile(r"\.(q|k|query|key)_?(layer)?norms?(\.norms\.\d+)?\.weight$")


@dataclass(frozen=True)
class Family:
    """One model. ``features``: what its attention layers use, of window, softcap, sinks, alibi."""

    name: str
    model: str  # class names in transformers
    config: str
    options: dict[str, Any] = field(default_factory=dict)
    features: frozenset[str] = frozenset()
    kv_heads: int = 4
    seed: int = 0
    sharpness: float = 2.0  # of the attention: factor on query and key weights
    embeddings: float = 0.3  # factor on the input embeddings
    reference: str = "eager"  # attention implementation of transformers to compare with

    def build(self) -> Any:
        """The model in fp32 and evaluation mode, the same on every call."""
        import transformers

        defaults = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
        config = getattr(transformers, self.config)(**{**defaults, **self.options})
        config._attn_implementation = self.reference
        config._experts_implementation = "eager"
        torch.manual_seed(self.seed)
        model = getattr(transformers, self.model)(config)
        enlarge(model, self.sharpness, self.embeddings)
        return model.eval().requires_grad_(False)


@torch.no_grad()
def enlarge(model: nn.Module, sharpness: float, embeddings: float) -> None:
    """Weights of unit gain, instead of the tiny ones of an untrained model whose layers hardly do anything."""
    for name, weight in model.named_parameters():
        if weight.dim() >= 2:
            inputs = weight.shape[-2] if _is_transposed(name) else weight.shape[-1]
            weight.normal_(std=1.2 * inputs**-0.5)
        elif name.endswith("bias") or "sinks" in name:
            weight.normal_(std=0.05 if "bias" in name else 0.5)
        if _QUERY_KEY.search(name):
            weight.mul_(sharpness)
        elif _QUERY_KEY_NORM.search(name):
            weight.add_(sharpness - 1.0)
    # Small next to what the layers add, or a model with tied embeddings repeats its last token.
    model.get_input_embeddings().weight.mul_(embeddings)
    for name, weight in model.named_parameters():
        if "embeddings_layernorm" in name:
            weight.mul_(embeddings)


Case = tuple[Family, Any, SlicedProgram]  # and its model, cut


def each_family(*names: str) -> pytest.MarkDecorator:
    """A test of the fixture ``case`` for every family, or for these. One conversion serves the tests of all files."""
    chosen = [f for f in FAMILIES if not names or f.name in names]
    assert len(chosen) >= len(names)
    return pytest.mark.parametrize("case", chosen, ids=[f.name for f in chosen], indirect=True, scope="session")


def _is_transposed(name: str) -> bool:
    """Weights stored as [inputs, outputs]: GPT-2's Conv1D and the experts of gpt-oss."""
    return "c_attn" in name or "c_proj" in name or "c_fc" in name or "experts." in name


_LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": MAX_LEN,
}
_GQA = {**_LLAMA, "num_attention_heads": 8, "num_key_value_heads": 4}
_GPT = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": MAX_LEN, "n_inner": 96}
_FALCON = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "ffn_hidden_size": 96,
    "max_position_embeddings": MAX_LEN,
}
_OPT = {
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_LEN,
    "word_embed_proj_dim": 64,
    "dropout": 0.0,
}
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_EXPERTS = {**_GQA, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_DEEPSEEK = {
    **_LLAMA,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
_WINDOW = frozenset({"window"})
_ALIBI = frozenset({"alibi"})

FAMILIES = [
    Family("opt", "OPTForCausalLM", "OPTConfig", _OPT),
    Family(
        "opt-post-ln",
        "OPTForCausalLM",
        "OPTConfig",
        {**_OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 32},
    ),
    Family("gpt2", "GPT2LMHeadModel", "GPT2Config", {**_GPT, **_NO_DROPOUT}),
    Family("llama-mha", "LlamaForCausalLM", "LlamaConfig", _LLAMA),
    Family("llama-gqa", "LlamaForCausalLM", "LlamaConfig", {**_GQA, "rope_parameters": _LLAMA3_ROPE}),
    Family("llama-tied", "LlamaForCausalLM", "LlamaConfig", {**_GQA, "tie_word_embeddings": True}),
    Family("mistral", "MistralForCausalLM", "MistralConfig", {**_GQA, "head_dim": 8, "sliding_window": 8}, _WINDOW),
    Family("qwen2", "Qwen2ForCausalLM", "Qwen2Config", _GQA),
    Family("qwen3", "Qwen3ForCausalLM", "Qwen3Config", {**_GQA, "head_dim": 16}),
    Family("gemma", "GemmaForCausalLM", "GemmaConfig", {**_GQA, "head_dim": 16}, embeddings=0.03),
    Family(
        "gemma2",
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**_GQA, "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 8, "attn_logit_softcapping": 1.5},
        frozenset({"window", "softcap"}),
        embeddings=0.03,
    ),
    Family(
        "gemma3",
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**_GQA, "num_hidden_layers": 6, "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 8},
        _WINDOW,
        embeddings=0.03,
    ),
    Family("phi", "PhiForCausalLM", "PhiConfig", _LLAMA),
    Family("phi3", "Phi3ForCausalLM", "Phi3Config", _GQA),
    Family("gpt-neox", "GPTNeoXForCausalLM", "GPTNeoXConfig", {k: v for k, v in _LLAMA.items() if "key" not in k}),
    Family("gptj", "GPTJForCausalLM", "GPTJConfig", {**_GPT, "rotary_dim": 8}),
    Family("codegen", "CodeGenForCausalLM", "CodeGenConfig", {**_GPT, "rotary_dim": 8}),
    Family(
        "gpt-neo",
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {
            "hidden_size": 64,
            "num_layers": 4,
            "num_heads": 4,
            "intermediate_size": 96,
            "attention_types": [[["global", "local"], 2]],
            "window_size": 8,
            "max_position_embeddings": MAX_LEN,
        },
        _WINDOW,
        sharpness=1.0,
    ),
    Family("gpt-bigcode", "GPTBigCodeForCausalLM", "GPTBigCodeConfig", {**_GPT, **_NO_DROPOUT}, kv_heads=1),
    Family("falcon-mqa", "FalconForCausalLM", "FalconConfig", _FALCON, kv_heads=1),
    Family(
        "falcon-new",
        "FalconForCausalLM",
        "FalconConfig",
        {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 4},
        seed=2,
    ),
    Family(
        "falcon-alibi",
        "FalconForCausalLM",
        "FalconConfig",
        {**_FALCON, "alibi": True, "multi_query": False, "parallel_attn": False, "num_kv_heads": 8},
        _ALIBI,
        kv_heads=8,
        seed=2,
        reference="sdpa",  # eager attention of transformers adds this family's ALiBi twice
    ),
    Family("bloom", "BloomForCausalLM", "BloomConfig", {"hidden_size": 64, "n_layer": 3, "n_head": 4}, _ALIBI, seed=3),
    Family(
        "mpt",
        "MptForCausalLM",
        "MptConfig",
        {"d_model": 48, "n_layers": 3, "n_heads": 6, "expansion_ratio": 2, "max_seq_len": MAX_LEN},
        _ALIBI,
        kv_heads=6,
    ),
    Family("starcoder2", "Starcoder2ForCausalLM", "Starcoder2Config", {**_GQA, "sliding_window": 8}, _WINDOW),
    Family("olmo2", "Olmo2ForCausalLM", "Olmo2Config", _GQA),
    Family("cohere", "CohereForCausalLM", "CohereConfig", {**_GQA, "logit_scale": 1.0, "use_qk_norm": True}),
    Family(
        "cohere2",
        "Cohere2ForCausalLM",
        "Cohere2Config",
        {**_GQA, "num_hidden_layers": 4, "head_dim": 8, "logit_scale": 1.0, "sliding_window": 8},
        _WINDOW,
    ),
    Family("granite", "GraniteForCausalLM", "GraniteConfig", {**_GQA, "attention_multiplier": 0.3}),
    Family("stablelm", "StableLmForCausalLM", "StableLmConfig", {**_GQA, "num_attention_heads": 4, "hidden_size": 64}),
    Family("nemotron", "NemotronForCausalLM", "NemotronConfig", {**_GQA, "head_dim": 8}, seed=1),
    Family("glm4", "Glm4ForCausalLM", "Glm4Config", {**_GQA, "head_dim": 16}),
    Family("smollm3", "SmolLM3ForCausalLM", "SmolLM3Config", {**_GQA, "num_hidden_layers": 4}),
    Family("mixtral", "MixtralForCausalLM", "MixtralConfig", {**_GQA, "num_local_experts": 4}),
    Family("qwen3-moe", "Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**_EXPERTS, "head_dim": 16, "num_experts": 4}),
    Family("olmoe", "OlmoeForCausalLM", "OlmoeConfig", {**_GQA, "num_experts": 4, "num_experts_per_tok": 2}),
    Family(
        "gpt-oss",
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            **_GQA,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "sliding_window": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        frozenset({"window", "sinks"}),
    ),
    Family("deepseek-v3", "DeepseekV3ForCausalLM", "DeepseekV3Config", _DEEPSEEK),
]
