"""Slices whose operators are compiled: the results of those that are not, for any number of rows, and compiled once."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from lamina import gemm
from lamina.converter import Slice, SlicedProgram
from lamina.models.convert import convert_model
from lamina.workers.compiled import compiled

compiler = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")


def program() -> SlicedProgram:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=96, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    return gemm.bind(convert_model(model, max_model_len=64), gemm.get("torch", 1))


class Sent:
    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def q(self, call: int, q: Tensor) -> None:
        self.tensors.append(q)

    def kv(self, call: int, k: Tensor, v: Tensor) -> None:
        self.tensors.extend((k, v))


@torch.inference_mode()
def run(part: Slice, rows: int) -> list[Tensor]:
    """Results and messages of a slice in the middle."""
    generator = torch.Generator().manual_seed(rows)
    sent = Sent()
    hidden, o = torch.randn(rows, 1, 64, generator=generator), torch.randn(rows, 1, 4, 16, generator=generator)
    if rows % 2:  # as they may come from elsewhere
        hidden, o = torch.stack([hidden, hidden], -1)[..., 0], o.mT.contiguous().mT
    return [*part(hidden, torch.arange(rows)[:, None, None].float(), o, sent), *sent.tensors]


@compiler
def test_any_number_of_rows_gives_what_the_operators_give(tmp_path: Path) -> None:
    plain = program()
    told: list[tuple[int, int]] = []

    def middle() -> Slice:
        some = replace(program(), slices=(program().slices[1],))
        return compiled(some, lambda done, total: told.append((done, total)), tmp_path / "cache").slices[0]

    fused = middle()
    assert told == [(i, told[-1][1]) for i in range(told[-1][1] + 1)]
    for rows in (1, 2, 3, 33):
        for a, b in zip(run(fused, rows), run(plain.slices[1], rows), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    left = [n for n in fused.module.graph.nodes if getattr(n.target, "namespace", "") == "aten"]
    assert len(left) < 10

    made = {p: p.stat().st_mtime_ns for p in (tmp_path / "cache").iterdir()}
    assert len(made) == told[-1][1]
    again = middle()  # what was built is found
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "cache").iterdir()} == made
    assert all(torch.equal(a, b) for a, b in zip(run(again, 5), run(fused, 5), strict=True))


@compiler
def test_a_compiler_that_does_not_work_is_told_in_one_line(tmp_path: Path) -> None:
    import torch._inductor.config as inductor

    nowhere = inductor.patch({"cpp.cxx": ("/nonexistent/g++",)})
    with nowhere, pytest.raises(ValueError, match="--compile cannot be used here: .*; leave it out") as told:
        compiled(program(), lambda done, total: None, tmp_path)
    assert "\n" not in str(told.value)
    assert list(tmp_path.iterdir()) == []
