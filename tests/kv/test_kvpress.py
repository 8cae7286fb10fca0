"""Scores of blocks compared with those of SnapKV in kvpress, before pooling: an oracle that is no part of
this project.
"""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding, apply_rotary_pos_emb

from lamina.kv.paged_cache import SlotMapping, allocate_layer
from lamina.kv.stored_format import StoredRows
from lamina.ops.attention import Operator
from lamina.ops.attention.block_scores import block_scores
from lamina.ops.attention.native import NativeAttention
from lamina.ops.attention.spec import AttentionSpec
from lamina.protocol.step_plan import SCORE_BITS

snapkv = pytest.importorskip("kvpress.presses.snapkv_press", reason="kvpress is not installed here")
SIZE, ROWS, BLOCKS, HEADS, GROUPS, DIM = 16, 16, 20, 8, 2, 32


def test_scores_are_those_of_snapkv() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HEADS * DIM, num_attention_heads=HEADS, num_key_value_heads=GROUPS, head_dim=DIM,
        attn_implementation="eager",
    )  # fmt: skip
    module, length = LlamaAttention(config, 0), BLOCKS * SIZE + ROWS
    hidden = torch.randn(1, length, config.hidden_size) * 20
    around = LlamaRotaryEmbedding(config)(hidden, torch.arange(length)[None])
    q, k = (p(hidden).view(1, length, -1, DIM).transpose(1, 2) for p in (module.q_proj, module.k_proj))
    q, k = apply_rotary_pos_emb(q, k, *around)
    weights = snapkv.SnapKVPress.compute_window_attention(module, hidden, k, ROWS, around)
    wanted = weights[0].double().sum((0, 1)).view(BLOCKS, SIZE).sum(1)

    store = allocate_layer(BLOCKS + 1, GROUPS, SIZE, DIM, DIM, torch.float32, torch.device("cpu"))
    keys, at = k[0].transpose(0, 1).contiguous(), torch.arange(length)
    store.write(SlotMapping(at // SIZE, at % SIZE), StoredRows(keys, keys))
    op = Operator(spec=AttentionSpec(scale=DIM**-0.5), q_heads=HEADS, kv_heads=GROUPS, qk_dim=DIM, v_dim=DIM)
    given = op, store, torch.arange(BLOCKS + 1), q[0, :, -ROWS:].transpose(0, 1).contiguous(), at[-ROWS:] + 1
    for scores in (block_scores(*given), NativeAttention(torch.float32).block_scores(*given)):
        got = scores[:BLOCKS].double() / (1 << SCORE_BITS)
        assert (got - wanted).abs().max() < 1e-5 * wanted.max()
        assert (got.roll(1) - wanted).abs().max() > 0.1 * wanted.max(), "blocks are not alike"
