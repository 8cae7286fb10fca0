"""A small Llama, the same on every call."""

from __future__ import annotations

from typing import Any

import torch


def sharpen(model: Any) -> Any:
    """Make attention matter: with default weights a random model hardly looks back, and a broken store would pass."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if any(k in name for k in ("q_proj", "k_proj", "c_attn", "query_key_value")):
                weight.mul_(4.0)
            elif "embed" in name or "wte" in name or "lm_head" in name:
                weight.mul_(5.0)
    return model.eval()


def llama(**options: Any) -> Any:
    """A Llama of two layers with 4 KV heads, in fp32, the same on every call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {
        "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
        "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 512,
        "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(11)
    return sharpen(LlamaForCausalLM(LlamaConfig(**{**shape, **options})))
