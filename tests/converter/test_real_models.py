"""Real model code: slices against the whole forward pass, in fp64, and what leaves when."""

from __future__ import annotations

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


def build(
    config: PreTrainedConfig, dtype: torch.dtype = torch.float32, overlap: bool = False
) -> tuple[nn.Module, SlicedProgram]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:  # larger than the default, so that attention is sharp and errors show
            nn.init.normal_(parameter, std=0.2)
    return model, convert_model(model, max_model_len=64, overlap=overlap)


@pytest.mark.parametrize("config", [_LLAMA, _GPT2, _PHI3], ids=lambda c: c.model_type)
def test_slices_continue_three_texts_as_the_model_would(config: PreTrainedConfig) -> None:
    model, program = build(config, torch.float64)
    texts = torch.randint(0, 96, (3, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(texts).logits
    history = History()
    starts = [0, 2, 5]  # text i joins at step starts[i], so its position lags behind
    for now in range(12 + max(starts)):
        rows = [i for i, s in enumerate(starts) if 0 <= now - s < 12]
        positions = torch.tensor([[now - starts[i]] for i in rows])
        history.rows = rows
        logits = step(program, history, texts[rows].gather(1, positions), positions)
        truth = torch.stack([expected[i, now - starts[i]] for i in rows])[:, None]
        torch.testing.assert_close(logits, truth, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("config", [_LLAMA, _PHI3, _MPT, _GPT2], ids=lambda c: c.model_type)
def test_q_leaves_before_the_gemm_of_k_and_v(config: PreTrainedConfig) -> None:
    before, between, after = blocks(build(config)[1].slices[1])
    assert len(before) == (5 if config.model_type == "llama" else 4)
    assert len(between) == (2 if config.model_type == "llama" else 1)
    assert after == []


def test_positions_cross_in_place_of_the_tables_that_are_alive() -> None:
    _, program = build(_LLAMA)
    assert [c.bytes_per_token for c in program.cuts] == [260, 260, 256]
    assert [c.live_bytes_per_token for c in program.cuts] == [256 + 2 * 16 * 4] * 2 + [256]


def test_gptj_overlaps_its_mlp_on_demand() -> None:
    _, plain = build(_GPTJ)
    _, program = build(_GPTJ, overlap=True)
    before, between, after = blocks(program.slices[1])
    assert [w.split(".")[-2] for w in (before[-1], *between, *after)] == [
        "q_proj",
        "k_proj",
        "v_proj",
        "fc_in",
        "fc_out",
    ]
    assert [blocks(p.slices[1])[2] != [] for p in (plain, program)] == [False, True]
    assert program.cuts[1].bytes_per_token - plain.cuts[1].bytes_per_token == 64 * 4


def test_dead_masks_and_position_tables_vanish() -> None:
    _, program = build(_GPT2)
    assert program.cuts[1].bytes_per_token == 64 * 4
    operators = {str(n.target) for n in program.slices[1].module.graph.nodes if n.op == "call_function"}
    assert not any(word in o for o in operators for word in ("arange", "where", "dropout", "assert", "masked"))
