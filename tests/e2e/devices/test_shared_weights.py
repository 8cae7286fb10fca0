"""Packed weights that the replicas of a host share, as the kernel shows what their processes have mapped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lamina import LLM, SamplingParams
from lamina.ops.gemm.native import open_backend

PACKS = open_backend(1).packed_bytes(torch.bfloat16, 64, 64) > 0


@pytest.mark.skipif(not PACKS, reason="on this CPU linear layers have no order of their own for weights of bf16")
def test_replicas_have_one_sealed_copy(tiny_lm: Path) -> None:
    with LLM(str(tiny_lm), transport="shm", pipeline=3, memory_workers=1) as llm:
        (output,) = llm.generate(["def f"], SamplingParams(temperature=0.0, max_tokens=4))
        assert len(output.outputs[0].token_ids) == 4
        pids = [pid for name, pid in llm.pools.pids.items() if name.startswith("compute")]
        assert len(pids) == 2
        windows = [packed(pid) for pid in pids]
    assert [len(each) for each in windows] == [1, 1]
    (one, two) = (each[0].split() for each in windows)
    assert one[1] == two[1] == "r--s", "nobody can write"
    assert one[4] == two[4], "one file"


def packed(pid: int) -> list[str]:
    return [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "memfd:lamina-packed" in line]
