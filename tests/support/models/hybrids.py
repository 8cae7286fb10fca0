"""Tiny random models with recurrent layers, with weights so large that tokens depend on the states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from .families import VOCAB, enlarge

_BASE = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
_BASE |= {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16}
_DELTA |= {"linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "head_dim": 16}
_SCAN = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_d_conv": 4}
_LATENT = {"q_lora_rank": None, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
RECURRENT, FULL = "linear_attention", "full_attention"

# name -> class in transformers, options of its configuration.
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": (
        "Qwen3Next",
        {**_DELTA, **_EXPERTS, "num_hidden_layers": 4, "shared_expert_intermediate_size": 32},
    ),
    "qwen3_5": ("Qwen3_5", {**_DELTA, "num_hidden_layers": 4}),
    "granite_4_h": (
        "GraniteMoeHybrid",
        {
            **_SCAN, "num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"], "mamba_expand": 2,
            "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32,
        },
    ),
    "nemotron_h": (
        "NemotronH",
        {
            "layers_block_type": [RECURRENT, "mlp", FULL, RECURRENT], "mamba_num_heads": 8, "mamba_head_dim": 16,
            "ssm_state_size": 16, "n_groups": 2, "conv_kernel": 4, "chunk_size": 16, "head_dim": 16,
        },
    ),
    "bamba": ("Bamba", {**_SCAN, "num_hidden_layers": 3, "attn_layer_indices": [1], "mamba_expand": 2}),
    "lfm2": ("Lfm2", {"num_hidden_layers": 4, "layer_types": ["conv", FULL] * 2, "block_multiple_of": 16}),
    "falcon_h1": ("FalconH1", {**_SCAN, "num_hidden_layers": 2, "head_dim": 16, "mamba_d_ssm": 128}),
    "kimi_linear": (
        "KimiLinear",
        {
            **_LATENT, "num_hidden_layers": 4, "num_key_value_heads": 4, "linear_num_heads": 4, "linear_head_dim": 16,
            "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1,
            "topk_group": 1, "layer_types": [RECURRENT] * 3 + [FULL],
        },
    ),
}  # fmt: skip


def each_hybrid(early: str) -> pytest.MarkDecorator:
    """A test of every model by its ``name``, which is slow for all but ``early``: for that one it is long."""
    marks = {name: pytest.mark.long if name == early else pytest.mark.slow for name in sorted(HYBRIDS)}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=mark) for name, mark in marks.items()])


def build_hybrid(name: str, **changes: Any) -> Any:
    """Return the model in fp32 and evaluation mode, the same on every call. ``changes``: of its configuration."""
    import transformers

    family, options = HYBRIDS[name]
    form = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    config = form(**{**_BASE, **options, **changes})
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    enlarge(model, 2.0, 0.3)
    return model.eval().requires_grad_(False)


def reused(name: str, prompt: int, answer: int) -> int:
    """Return how many tokens of a turn have states for the next one. The last has none; where answers are computed in
    another way than prompts, no token of an answer has.
    """
    return prompt if name == "nemotron_h" else prompt + answer - 1


def prompts(*lengths: int) -> list[list[int]]:
    """Return random prompts of these lengths, the same on every call."""
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB, (n,), generator=draw).tolist() for n in lengths]


@torch.no_grad()
def greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """Return transformers' own tokens, by its cache. Without a mask it would take some tokens for padding."""
    ids = torch.tensor([[*prompt]])
    options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return list(map(int, out[0, len(prompt) :]))


@torch.no_grad()
def greedy_without_states(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """Return transformers' tokens if recurrent states are zeroed before each of them."""
    done = model(torch.tensor([[*prompt]]), use_cache=True)
    tokens = [int(done.logits[0, -1].argmax())]
    while len(tokens) < count:
        for layer in done.past_key_values.layers:
            for states in (getattr(layer, "conv_states", None), getattr(layer, "recurrent_states", None)):
                for state in states.values() if isinstance(states, dict) else states or ():
                    if state is not None:
                        state.zero_()
        done = model(torch.tensor([tokens[-1:]]), past_key_values=done.past_key_values, use_cache=True)
        tokens.append(int(done.logits[0, -1].argmax()))
    return tokens
