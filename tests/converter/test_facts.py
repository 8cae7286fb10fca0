"""The facts that explain prints of a program, against numbers worked out by hand.

Covers: converter/explain.py.
"""

from __future__ import annotations

import json

import torch
from test_convert import converted, cut
from test_rows import Experts
from toys import Decoder

from lamina.converter.explain import BLOCKS, facts_of, to_json

_HIDDEN, _ITEM = 32, 2


def test_gemms_by_block_in_bytes() -> None:
    _, program = converted(dtype=torch.bfloat16)
    middle = facts_of(program)[1]
    square = _HIDDEN * _HIDDEN * _ITEM
    mlp, q, kv = 4 * square, square, square
    assert [middle.gemm_bytes(b) for b in BLOCKS] == [square + mlp + q, kv, 0]
    assert middle.q_first is True
    assert "k_proj" in middle.why
    assert all(g.flops_per_token == g.weight_bytes for f in facts_of(program) for g in f.gemms)  # 2 FLOPs, 2 bytes


def test_why_q_is_late() -> None:
    facts = facts_of(cut(Decoder(fused="interleaved")))
    assert (facts[1].q_first, facts[3].q_first) == (False, None)
    assert "one GEMM (layers.1.attention.qkv_proj.weight)" in facts[1].why


def test_experts_cost_what_a_token_uses() -> None:
    gemms = facts_of(cut(Decoder(layers=1, mlp=Experts).bfloat16()))[1].gemms
    experts = next(g for g in gemms if "mlp.weight" in g.weight)
    assert experts.weight_bytes == 4 * _HIDDEN * _HIDDEN * _ITEM
    assert experts.flops_per_token == 2 * 2 * _HIDDEN * _HIDDEN  # two of four


def test_json_has_what_tools_read() -> None:
    facts = json.loads(json.dumps(to_json(converted(dtype=torch.bfloat16)[1])))
    assert facts["num_slices"] == len(facts["slices"]) == 4
    assert facts["stamped"] is False
    assert {k: facts["messages"][k] for k in ("q", "kv", "o")} == {"q": 64, "kv": 64, "o": 64}
    assert facts["messages"]["layers"][2] == {"layer": 2, "exchange": 2, "q": 64, "kv": 64, "o": 64}
    assert [c["bytes_per_token"] for c in facts["cuts"]] == [68, 68, 64]
    assert facts["cuts"][0]["tensors"][0] == {
        "name": "hidden", "shape": [1, 32], "dtype": "torch.bfloat16", "bytes_per_token": 64
    }  # fmt: skip
    assert [c["live_bytes_per_token"] for c in facts["cuts"]] == [68, 68, 64]  # its layers make their own RoPE tables
