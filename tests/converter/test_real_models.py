"""Real model code: slices against the whole forward pass, in fp64, and what leaves when."""

from __future__ import annotations

import functools

import pytest
import torch
from test_convert import blocks, step
from torch import nn
from toys import History
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTJConfig,
    LlamaConfig,
    MptConfig,
    Phi3Config,
    PreTrainedConfig,
)

from lamina.converter import SlicedProgram
from lamina.models.convert import convert_model

_SIZES = {"num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 96, "max_position_embeddings": 64}
_LLAMA = LlamaConfig(hidden_size=64, intermediate_size=96, num_key_value_heads=2, pad_token_id=0, **_SIZES)
_PHI3 = Phi3Config(hidden_size=64, intermediate_size=96, num_key_value_heads=2, pad_token_id=0, **_SIZES)
_GPT2 = GPT2Config(n_embd=64, n_layer=3, n_head=4, n_positions=64, vocab_size=96, bos_token_id=0, eos_token_id=0)
_GPTJ = GPTJConfig(n_embd=64, n_layer=3, n_head=4, n_positions=64, rotary_dim=8, vocab_size=96)
_MPT = MptConfig(d_model=64, n_layers=3, n_heads=4, vocab_size=96, max_seq_len=64)
_CONFIGS: dict[str, PreTrainedConfig] = {c.model_type: c for c in (_LLAMA, _PHI3, _GPT2, _GPTJ, _MPT)}


@functools.cache
def build(family: str) -> tuple[nn.Module, SlicedProgram]:
    """A small fp64 model and its slices; shared, as nothing changes them."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(_CONFIGS[family], dtype=torch.float64).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:  # larger than the default, so that attention is sharp and errors show
            nn.init.normal_(parameter, std=0.2)
    return model, convert_model(model, max_model_len=64, keep=True)


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3"])
def test_slices_continue_three_texts_as_the_model_would(family: str) -> None:
    model, program = build(family)
    texts = torch.randint(0, 96, (3, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(texts).logits
    history = History()
    starts = [0, 2, 5]  # text i joins at step starts[i], so its position is that much lower
    for now in range(12 + max(starts)):
        rows = [i for i, s in enumerate(starts) if 0 <= now - s < 12]
        positions = torch.tensor([[now - starts[i]] for i in rows])
        history.rows = rows
        logits = step(program, history, texts[rows].gather(1, positions), positions)
        truth = torch.stack([expected[i, now - starts[i]] for i in rows])[:, None]
        torch.testing.assert_close(logits, truth, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", ["llama", "phi3", "mpt", "gpt2"])
def test_q_leaves_before_the_gemm_of_k_and_v(family: str) -> None:
    before, between, after = blocks(build(family)[1].slices[1])
    assert len(before) == (5 if family == "llama" else 4)
    assert len(between) == (2 if family == "llama" else 1)
    assert after == []


def test_positions_cross_in_place_of_the_tables_that_are_alive() -> None:
    _, program = build("llama")
    assert [c.bytes_per_token for c in program.cuts] == [516, 516, 512]
    assert [c.live_bytes_per_token for c in program.cuts] == [512 + 2 * 16 * 8] * 2 + [512]


def test_dead_masks_and_position_tables_vanish() -> None:
    _, program = build("gpt2")
    assert program.cuts[1].bytes_per_token == 64 * 8
    operators = {str(n.target) for n in program.slices[1].module.graph.nodes if n.op == "call_function"}
    assert not any(word in o for o in operators for word in ("arange", "where", "dropout", "assert", "masked"))
