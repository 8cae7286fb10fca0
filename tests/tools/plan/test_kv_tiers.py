"""The KV that sequences with dropped blocks save, by tier of layers: the numbers of Llama-3-8B, and what an
engine has.
"""

from __future__ import annotations

import math

import pytest
import torch

from lamina.config.sparsity import SparsityOptions
from lamina.ops.attention.spec import AttentionSpec
from lamina.protocol.step_plan import LayerShape
from lamina.tools.plan.kv_tiers import MemorySplit, split_of, tiers_of

LLAMA_3_8B = [LayerShape(32, 8, 128, 128, AttentionSpec(scale=1.0).encode())] * 32
LENGTH = 4500  # 4,000 of a prompt, 500 generated


def evict(budget: int, full_layers: int = 3) -> SparsityOptions:
    return SparsityOptions(kv_sparsity="evict", kv_budget=budget, kv_full_layers=full_layers)


def split(options: SparsityOptions, kv_bytes: int) -> MemorySplit:
    return split_of(LLAMA_3_8B, torch.bfloat16, options, LENGTH, kv_bytes, block_size=32, max_rows=512 + 64)


@pytest.mark.parametrize(("budget", "gain"), [(1536, 2.48), (1024, 3.33)])
def test_three_full_layers_and_a_budget_in_the_others(budget: int, gain: float) -> None:
    found = tiers_of(LLAMA_3_8B, torch.bfloat16, evict(budget), LENGTH)
    assert [(t.name, t.layers, t.kept, t.most) for t in found.tiers] == [
        ("full", 3, LENGTH, LENGTH), ("sparse", 29, budget, budget + 128)
    ]  # fmt: skip
    assert [t.token_bytes for t in found.tiers] == [3 * 4096, 29 * 4096]
    assert round(found.gain, 2) == gain
    assert found.least_gain == pytest.approx(32 * LENGTH / (3 * LENGTH + 29 * (budget + 128)))


def test_what_the_memory_holds_is_short_of_the_gain_by_the_prompt_in_flight() -> None:
    """The card has 24 GB, of which 5.5 are left for KV.

    Blocks are whole, and each tier has room for all of one prompt.
    """
    found = split(evict(1536), 5_500_000_000)
    assert 8 <= found.full <= 10
    assert found.blocks["full"][1] == found.blocks["sparse"][1] == math.ceil(LENGTH / 32)
    taken = sum(n * layers * 32 * 4096 for (n, _), layers in zip(found.blocks.values(), (3, 29), strict=True))
    assert 0.99 * 5_500_000_000 < taken <= 5_500_000_000
    most = tiers_of(LLAMA_3_8B, torch.bfloat16, evict(1536), LENGTH).least_gain
    assert 0.85 * most * found.full < found.sparse < most * found.full


def test_short_sequences_gain_nothing_and_windows_keep_what_they_kept() -> None:
    windowed = [LayerShape(4, 2, 16, 16, AttentionSpec(scale=1.0, window=window).encode()) for window in (0, 64, 0)]
    found = tiers_of(windowed, torch.float32, evict(256, 1), 200)
    assert [(t.name, t.kept, t.most) for t in found.tiers] == [
        ("full", 200, 200), ("window of 64", 64, 64), ("sparse", 200, 200)
    ]  # fmt: skip
    assert found.gain == found.least_gain == 1.0
