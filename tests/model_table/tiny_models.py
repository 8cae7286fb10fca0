"""Tiny random models of every causal language model of transformers, and of every image-text model's text part.

Sizes are chosen by the names that configurations have for them. Weights are large enough for every part to reach the
logits, so that a part that is left out changes tokens.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

VOCAB, POSITIONS, WINDOW, LAYERS = 320, 256, 8, 4
LARGEST = 50_000_000  # weights; a configuration with more was not shrunk
FULL, SLIDING = "full_attention", "sliding_attention"
MIXED = [SLIDING, FULL] * 2
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS, "head_dim": 16,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": POSITIONS, "sliding_window": WINDOW,
    "pad_token_id": 2, "bos_token_id": 0, "eos_token_id": 1, "is_decoder": True,
    "num_experts": 4, "num_local_experts": 4, "moe_num_experts": 4, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_topk": 2, "moe_k": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, "expert_ffn_hidden_size": 32, "intermediate_size_mlp": 96,
    "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12,
    "d_model": 64, "decoder_layers": LAYERS, "decoder_attention_heads": 8, "decoder_ffn_dim": 96, "encoder_layers": 2,
    "encoder_attention_heads": 8, "encoder_ffn_dim": 96, "n_inner": 96, "n_embd": 64, "n_head": 8, "n_layer": LAYERS,
    "n_positions": POSITIONS, "attention_chunk_size": 2 * POSITIONS, "type_vocab_size": 2,
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB,
    "attention_dropout": 0.0, "hidden_dropout": 0.0, "dropout": 0.0, "hidden_dropout_prob": 0.0, "layerdrop": 0.0,
    "attention_probs_dropout_prob": 0.0, "activation_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "attn_pdrop": 0.0, "embedding_dropout": 0.0,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_num_heads": 8, "mamba_head_dim": 16,
    "ssm_state_size": 16, "n_groups": 1, "mamba_n_groups": 1, "chunk_size": 8, "mamba_chunk_size": 8,
    "state_size": 16, "conv_L_cache": 3, "lru_width": 64, "num_heads": 8, "attention_head_dim": 16,
    "embedding_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 96, "num_layers": LAYERS, "dim_ff": 96, "dim_head": 16,
    "index_n_heads": 4, "index_head_dim": 16, "index_topk": 16, "o_lora_rank": 16, "o_groups": 2,
    "num_kv_shared_layers": 0, "emb_dim": 64, "n_layers": LAYERS, "n_heads": 8, "dff": 96, "hidden_dim": 64,
    "moe_shared_expert_intermediate_size": 32, "shared_intermediate_size": 32, "global_head_dim": 16,
}  # fmt: skip
# Sizes that a configuration may state as None, to follow from others.
FOLLOWING = (
    "sliding_window", "head_dim", "moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank",
    "attention_chunk_size", "embedding_size", "global_head_dim", "intermediate_size",
)  # fmt: skip
LAYER_LISTS = (
    "layer_types", "layers_block_type", "mlp_layer_types", "block_types", "layer_type_list", "indexer_types",
    "hybrid_layer_ids",
)  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14, "depth": 1, "num_heads": 2, "embed_dim": 32, "out_hidden_size": 64, "num_channels": 3,
    "text_hidden_size": 64, "video_temporal_patch_size": 2,
    "d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 64, "output_dim": 64,
    "downsample_hidden_size": 16,
}  # fmt: skip
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# What some kinds need in addition, so that their parts fit together.
SETTINGS: dict[str, dict[str, Any]] = {
    "bloom": {"hidden_size": 64, "n_layer": LAYERS, "n_head": 4},
    "mpt": {"d_model": 48, "n_layers": 3, "n_heads": 6, "expansion_ratio": 2, "max_seq_len": POSITIONS,
            "attn_config": {"attn_pdrop": 0}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 4, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "bamba": {"attn_layer_indices": [1, 3]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "lfm2": {"layer_types": ["conv", FULL] * 2},
    "lfm2_moe": {"layer_types": ["conv", FULL] * 2},
    "paddleocr_vl_text": {"rope_parameters": {**DEFAULT_ROPE, "mrope_section": [2, 3, 3]}},
    "hunyuan_vl_text": {"head_dim": 16, "rope_parameters": {**DEFAULT_ROPE, "mrope_section": [2, 2, 2, 2]}},
    "mistral4": {"head_dim": 8},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [32, 32], "rope_parameters": {**DEFAULT_ROPE, "mrope_section": [1, 1, 2]},
    },
    "chameleon": {"vocabulary_map": {"<image>": 4, "IMGIMGA": 5}},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 7, "vision_end_token_id": 8},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 7, "vision_end_token_id": 8},
    "gpt_neo": {"num_layers": LAYERS, "num_heads": 4, "attention_types": [[["global", "local"], 2]], "window_size": 8},
    "stablelm": {"num_attention_heads": 8},
    "gptj": {"rotary_dim": 8},
    "codegen": {"rotary_dim": 8},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 4, "ffn_hidden_size": 96, "hidden_size": 64},
    "cohere": {"logit_scale": 1.0},
    "cohere2": {"logit_scale": 1.0},
    "gemma": {"num_key_value_heads": 4},
    "gemma2": {"attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 24},
    "gpt_oss": {"rope_parameters": DEFAULT_ROPE},
    "dots1": {"n_shared_experts": 1, "layer_types": [FULL, FULL, SLIDING, SLIDING]},
    "cohere_compass_text": {
        "num_key_value_heads": 4, "layer_types": MIXED, "logit_scale": 1.0,
        "rope_parameters": {FULL: DEFAULT_ROPE, SLIDING: DEFAULT_ROPE},
    },
    "hunyuan_v1_dense": {"num_key_value_heads": 4, "head_dim": 16},
    "hunyuan_v1_moe": {"num_key_value_heads": 4, "head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "ministral": {"head_dim": 16, "layer_types": MIXED},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "num_key_value_heads": 4},
    "qwen2": {"use_sliding_window": False},
    "laguna": {"layer_types": MIXED},
    "mellum": {"layer_types": MIXED},
    "helium": {"head_dim": 8},
    "axk1": {"head_dim": 8},
    "deepseek_v3": {"head_dim": 8},
    "longcat_flash": {"head_dim": 8},
    "youtu": {"head_dim": 8},
    "janus_vqgan": {"base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1, "latent_channels": 32},
    "janus_vision_model": {"projection_dim": 64},
    "emu3": {"vocabulary_map": {"<image>": 4, "<|extra_200|>": 5, "<|visual token 000000|>": 6}},
    "emu3_vqgan": {"base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1, "codebook_size": 64},
    "timm_wrapper": {"model_args": {"embed_dim": 32}},
    "granite4_vision": {
        "downsample_rate": "1/2", "deepstack_layer_map": [[-1, 0]], "spatial_target_layers": [0, 1, 2, 3],
    },
    "granite4_vision_text": {"head_dim": 16},
    "blip_2_qformer": {"num_attention_heads": 2, "hidden_size": 64},
    "qwen4_exp_text": {
        "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 16,
        "indexer_compress_ratio": 4, "hc_lowrank": 16, "ple_embed_dim": 16, "ngram_vocab_size_base": 320,
        "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 1,
    },
    "dots3_note_text": {
        "num_attention_heads": 8, "num_key_value_heads": 8, "per_layer_config": {}, "head_dim": 24,
        "layer_types": ["indexed_attention", SLIDING] * 2,
    },
    "glm5_next_text": {"qk_rope_head_dim": 0, "linear_num_heads": 4, "linear_head_dim": 16, "head_dim": 0},
    "step3p5": {
        "sliding_window": WINDOW, "layer_types": MIXED, "share_expert_dim": 32, "num_sliding_attention_heads": 8,
        "rope_parameters": {FULL: DEFAULT_ROPE, SLIDING: DEFAULT_ROPE},
    },
    "molmo2_vision": {"image_size": [28, 28], "num_position_embeddings": 4, "num_key_value_heads": 2, "head_dim": 16},
    "molmo2_adapter": {
        "vision_feature_layer": [0], "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
        "text_hidden_size": 64, "intermediate_size": 64, "hidden_size": 32,
    },
    "muse_spark_text": {"moe_hidden_size": 64, "layer_rope_theta": [10000.0, 0] * 2, "layer_types": MIXED},
    "muse_spark_audio": {"patch_sizes": [4], "hidden_sizes": [32], "depths": [1], "out_hidden_size": 64},
    "cosmos3_edge_text": {"rope_parameters": {**DEFAULT_ROPE, "mrope_section": [4, 2, 2]}},
    "dots3_note": {"per_layer_config": {}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", *["sparse"] * 3], "n_group": 1, "topk_group": 1},
    "diffusion_gemma_text": {"top_k_experts": 2, "num_experts": 4, "moe_intermediate_size": 32, "per_layer_config": {}},
    "zamba2": {"hybrid_layer_ids": [1, 3], "layers_block_type": ["linear_attention", "hybrid"] * 2},
}  # fmt: skip
# Sections of M-RoPE, for heads of 8 elements.
SECTIONS = {"rope_parameters": {**DEFAULT_ROPE, "partial_rotary_factor": 1.0, "mrope_section": [2, 1, 1]}}
WITH_SECTIONS = (
    "qwen2_5_omni_text",
    "qwen2_vl_text",
    "qwen2_5_vl_text",
    "glm4v_text",
    "glm4v_moe_text",
    "glm_ocr_text",
)
# Encoder-decoders whose decoder alone is a causal language model.
DECODERS = (
    "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus", "plbart",
    "whisper",
)  # fmt: skip
SETTINGS |= dict.fromkeys(WITH_SECTIONS, SECTIONS)
SETTINGS |= {kind: {"encoder_layers": LAYERS, "num_hidden_layers": LAYERS} for kind in DECODERS}
HYBRID = [FULL] * LAYERS
# A kind with other settings, by a name of its own.
VARIANTS: dict[str, dict[str, Any]] = {
    "granitemoehybrid:attention": {"layer_types": HYBRID, "position_embedding_type": "rope", "num_local_experts": 0},
    "qwen3_next:attention": {"layer_types": HYBRID},
    "nemotron_h:attention and mlp": {"layers_block_type": [FULL, "mlp", FULL, "moe"]},
    "minimax_m3_vl_text:sparse": {
        "layer_types": [FULL, "minimax_m3_sparse"] * 2, "index_block_size": 8, "index_topk_blocks": 2,
    },
    "qwen2:window": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2, "layer_types": None},
    "mixtral:window": {"sliding_window": WINDOW},
    "llama:linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "llama:yarn": {
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
        }
    },
    "gemma4_text:shared KV": {"num_kv_shared_layers": 2},
    "gemma3n_text:shared KV": {"num_kv_shared_layers": 2, "layer_types": MIXED},
    "falcon:alibi": {
        "alibi": True, "multi_query": False, "parallel_attn": False, "num_kv_heads": 8,
        "new_decoder_architecture": False,
    },
    "deepseek_v3:no q_lora": {"q_lora_rank": None},
}  # fmt: skip
_QK = re.compile(r"\.(q_proj|k_proj|query_key_value|qkv_proj|c_attn|Wqkv|q_b_proj|kv_b_proj|query|key)\.weight$")
_TRANSPOSED = ("c_attn", "c_proj", "c_fc", "experts.")
_KEPT = ("A_log", "dt_bias")  # whose scale is a rate of decay


def all_kinds() -> list[str]:
    """Return the kinds of causal language models and image-text models of the installed transformers, and variants."""
    from transformers.models.auto import modeling_auto as auto

    kinds = dict.fromkeys((*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES))
    return [*kinds, *VARIANTS]


def build(name: str, seed: int = 0) -> Any:
    """Return a model in fp32. Raises any error of transformers, and RuntimeError for one that is not tiny."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    kind = name.partition(":")[0]
    auto: Any = AutoModelForCausalLM
    if kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        auto = AutoModelForImageTextToText
    default = AutoConfig.for_model(kind)
    options = {**shrunk(default, kind), **VARIANTS.get(name, {})}
    options = {k: v for k, v in options.items() if k != "model_type" and not (v is None and k in LAYER_LISTS)}
    config = type(default)(**options)
    with torch.device("meta"), without_timm():
        size = sum(p.numel() for p in auto.from_config(config).parameters())
    if size > LARGEST:
        raise RuntimeError(f"not shrunk: {size} weights")
    torch.manual_seed(seed)
    with without_timm():
        model = auto.from_config(config).float()
    enlarge(model, seed)
    if kind == "xmod":
        model.set_default_language("en_XX")
    return model.eval().requires_grad_(False)


@contextlib.contextmanager
def without_timm() -> Iterator[None]:
    """Put a module without weights in the place of a part for images that the package timm would make."""
    from transformers import AutoModel

    auto: Any = AutoModel
    own, make = vars(auto)["from_config"], auto.from_config
    auto.from_config = lambda config, **options: (
        nn.Identity() if config.model_type in ("gemma3n_vision", "timm_wrapper") else make(config, **options)
    )
    try:
        yield
    finally:
        auto.from_config = own


def shrunk(config: Any, kind: str) -> dict[str, Any]:
    """Return settings that make a configuration tiny, those of its parts too."""
    options = _sizes(config)
    for name in config.sub_configs:
        if (part := getattr(config, name, None)) is None:
            continue
        if any(word in name for word in ("vision", "audio", "vq", "tokenizer")) or "Vision" in type(part).__name__:
            options[name] = _other_part(part) | {"model_type": part.model_type}
        else:
            options[name] = {**shrunk(part, part.model_type), "model_type": part.model_type}
    return options | SETTINGS.get(kind, {})


def _other_part(config: Any) -> dict[str, Any]:
    """Return settings of a part for images or sound, and of the parts inside it."""
    own = config.to_dict()
    options = {k: v for k, v in VISION.items() if k in own and not isinstance(own[k], list | tuple)}
    for name in config.sub_configs:
        if (part := getattr(config, name, None)) is not None:
            options[name] = _other_part(part) | {"model_type": part.model_type}
    return options | SETTINGS.get(config.model_type, {})


def _sizes(config: Any) -> dict[str, Any]:
    own, aliases = config.to_dict(), config.attribute_map
    sizes = {k: v for k, v in SIZES.items() if k in own or k in aliases}
    sizes = {k: v for k, v in sizes.items() if aliases.get(k) not in sizes}
    for name in FOLLOWING:
        if name in own and own[name] is None:
            sizes.pop(name, None)
    if own.get("num_key_value_heads") is not None and own["num_key_value_heads"] == own.get("num_attention_heads"):
        sizes["num_key_value_heads"] = SIZES["num_attention_heads"]
    layers = sizes.get("num_hidden_layers")
    for key in LAYER_LISTS:
        types = own.get(key)
        if isinstance(types, list | tuple) and layers and len(types) > layers:
            kinds = list(dict.fromkeys(types))
            first = list(types[:layers])
            sizes[key] = first if len(set(first)) == len(kinds) else (kinds * layers)[:layers]  # every kind of layer
    return sizes


@torch.no_grad()
def enlarge(model: nn.Module, seed: int, sharp: float = 2.0, embedding: float = 0.3) -> None:
    """Draw all weights again. ``sharp``: scale of queries and keys. ``embedding``: scale of the input."""
    draw = torch.Generator().manual_seed(seed)
    for name, w in model.named_parameters():
        if not w.is_floating_point() or any(part in name for part in _KEPT):
            continue
        if w.dim() >= 2:
            inputs = w.shape[-2] if any(part in name for part in _TRANSPOSED) else w.shape[-1]
            w.copy_(torch.randn(w.shape, generator=draw) * 1.2 * max(1, inputs) ** -0.5)
        elif name.endswith("bias") or "sinks" in name:
            w.copy_(torch.randn(w.shape, generator=draw) * (0.05 if "bias" in name else 0.5))
        else:
            w.add_(torch.randn(w.shape, generator=draw) * 0.05)
        if _QK.search(name):
            w.mul_(sharp)
    for name, b in model.named_buffers():
        if "correction_bias" in name and b.is_floating_point():
            b.copy_(torch.randn(b.shape, generator=draw) * 0.1)
    inputs_of: Any = model
    if (embed := inputs_of.get_input_embeddings()) is not None and hasattr(embed, "weight"):
        embed.weight.mul_(embedding)
