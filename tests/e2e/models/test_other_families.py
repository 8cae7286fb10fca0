"""Architectures without a line of code of their own: each is served exactly, or refused with a reason. None runs wrong.

Tiny models are made from the default configuration of every causal LM in transformers, by overriding sizes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import MAX_LEN, enlarge
from test_families import RED, SHORT, LocalRunner, Memory, compare, controls, decode

from lamina.models.convert import convert_model, layer_shapes
from lamina.models.errors import UnsupportedModelError

TOLERANCE = 1e-3  # as in test_families, but with no seed chosen for calm numbers
MOST_WEIGHTS = 30_000_000

SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 16, "max_position_embeddings": MAX_LEN, "sliding_window": 8,
    "pad_token_id": 2, "bos_token_id": 0, "eos_token_id": 1, "is_decoder": True,
    "num_experts": 4, "num_local_experts": 4, "moe_num_experts": 4, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_topk": 2, "moe_k": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, "expert_ffn_hidden_size": 32, "intermediate_size_mlp": 96,
    "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12,
    "d_model": 64, "decoder_layers": 4, "decoder_attention_heads": 8, "decoder_ffn_dim": 96, "encoder_layers": 2,
    "encoder_attention_heads": 8, "encoder_ffn_dim": 96, "n_inner": 96, "n_embd": 64, "n_head": 8, "n_layer": 4,
    "n_positions": MAX_LEN, "attention_chunk_size": 2 * MAX_LEN, "type_vocab_size": 2,
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 320,
    "attention_dropout": 0.0, "hidden_dropout": 0.0, "dropout": 0.0, "hidden_dropout_prob": 0.0, "layerdrop": 0.0,
    "attention_probs_dropout_prob": 0.0, "activation_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}  # fmt: skip
# Sizes that a default configuration leaves open stay open: they follow from others.
FOLLOWING = ("sliding_window", "head_dim", "moe_intermediate_size", "shared_expert_intermediate_size")

SERVED = """
    afmoe apertus arcee aria_text beam biogpt bitnet cohere2_moe ctrl cwm deepseek_v2 emu3 ernie4_5
    ernie4_5_moe exaone4 exaone_moe flex_olmo flint fuyu gemma4_text glm glm4_moe glm4_moe_lite granite_swa
    granitemoe granitemoe_swa granitemoeshared hy_v3 hyperclovax jais2 kolibri1 laguna llama4_text mellum
    mimo_v2_flash minicpm3 minimax_m2 minimax_m3_vl_text ministral3 modernbert-decoder moshi nanochat olmo olmo3
    bert electra ernie persimmon phimoe qwen2_moe seed_oss solar_open vaultgemma
"""
REFUSED = """
    camembert roberta xlm-roberta
    axk2 bailing_hybrid bamba bart big_bird bigbird_pegasus blenderbot cpmant deepseek_v32 deepseek_v4 diffllama doge
    falcon_h1 falcon_mamba gemma4_unified glm_moe_dsa gpt_neox_japanese granitemoehybrid hy_v4 inkling_text
    inkling2_text jamba jetmoe kimi_linear lfm3 mamba marian mbart megatron-bert minimax mllama mvp nemotron_h
    olmo_hybrid openai-gpt pegasus plbart prophetnet qwen3_5_text qwen3_next recurrent_gemma rembert roformer rwkv
    trocr whisper xglm xlm xlnet xlstm xmod
"""


def sizes_for(config: Any) -> dict[str, Any]:
    """The sizes that this configuration has, each under one of its names."""
    own, aliases = config.to_dict(), config.attribute_map
    found = {k: v for k, v in SIZES.items() if k in own or k in aliases}
    found = {k: v for k, v in found.items() if aliases.get(k) not in found}
    for name in FOLLOWING:
        if name in own and own[name] is None:
            found.pop(name, None)
    if own.get("num_key_value_heads") is not None and own["num_key_value_heads"] == own.get("num_attention_heads"):
        found["num_key_value_heads"] = SIZES["num_attention_heads"]
    return found


def build(kind: str) -> Any:
    """A tiny model of an architecture by its model_type; skips what this table of sizes does not shrink."""
    from transformers import AutoConfig, AutoModelForCausalLM

    default = AutoConfig.for_model(kind)
    options = sizes_for(default)
    for name in default.sub_configs:
        part = getattr(default, name, None)
        if part is not None and name == "text_config":
            options[name] = {**sizes_for(part), "model_type": part.model_type}
    try:
        config = type(default)(**options)
        config._experts_implementation = "eager"
        with torch.device("meta"):
            plan = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    except Exception as error:  # noqa: BLE001 - sizes that do not fit each other in this version of transformers
        pytest.skip(f"no tiny {kind}: {error}")
    if sum(p.numel() for p in plan.parameters()) > MOST_WEIGHTS:
        pytest.skip(f"no tiny {kind}: the table does not shrink it")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    enlarge(model, sharpness=1.0, embeddings=0.3)
    return model.eval().requires_grad_(False)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", SERVED.split())
def test_served(kind: str) -> None:
    model = build(kind)
    program = convert_model(model, max_model_len=MAX_LEN)
    layers = layer_shapes(program)
    assert compare(model, decode(LocalRunner(program, Memory(layers)), SHORT)).error < TOLERANCE
    for name, wrong in controls(layers).items():
        error = compare(model, decode(LocalRunner(program, Memory(wrong)), SHORT)).error
        assert error > RED * TOLERANCE or name == "softcap", name  # default caps are too high to bite


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", REFUSED.split())
def test_refused(kind: str) -> None:
    model = build(kind)
    with pytest.raises(UnsupportedModelError) as caught:
        convert_model(model, max_model_len=MAX_LEN)
    assert "\n" not in str(caught.value)
