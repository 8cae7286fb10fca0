"""Slices whose operators are compiled: the results of those that are not, for any number of rows, and compiled once."""

from __future__ import annotations

import ctypes
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from lamina import gemm
from lamina.compute.compiled import compiled
from lamina.converter import Slice, SlicedProgram
from lamina.gemm import LinearBackend
from lamina.models.convert import convert_model

compiler = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")


def program() -> SlicedProgram:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=96, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    return convert_model(model, max_model_len=64)


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
        tell, cache = (lambda done, total: told.append((done, total))), tmp_path / "cache"
        return compiled(some, gemm.get("native", 1), tell, cache).slices[0]

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


class Part(torch.nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        wide = torch.randn(96, 128, generator=torch.Generator().manual_seed(1)).to(dtype)
        self.one = torch.nn.Linear(64, 48).to(dtype)
        self.two = torch.nn.Parameter(wide[:, :48], requires_grad=False)  # rows apart from each other
        self.three = torch.nn.Parameter(wide[:7, 48:54].contiguous(), requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        linear, hidden = torch.nn.functional.linear, torch.relu(self.one(x))
        return linear(hidden, self.two), linear(hidden.view(-1, 6, 8).mT, self.three)


def of_part(part: Part, linear: LinearBackend, cache: Path) -> Slice:
    """The only slice of ``part``, compiled."""
    x = torch.zeros(3, 1, 64, dtype=part.two.dtype)
    with torch.no_grad():
        module = torch.export.export(part, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)).module()
    program = SlicedProgram((Slice(0, module, "", {}),), (), (), hoist=False, rows="unchecked")
    return compiled(program, linear, lambda done, total: None, cache).slices[0]


@compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_linear_layers_of_compiled_code_give_the_bits_of_their_backend(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    native, part = gemm.get("native", 2), Part(dtype)
    found = of_part(part, native, tmp_path)
    for rows in (1, 2, 3, 300):  # the last one is more than it takes of bf16, where torch has instructions for that
        x = torch.randn(rows, 1, 64).to(dtype)
        hidden = torch.relu(native.linear(x, part.one.weight, part.one.bias))
        wanted = native.linear(hidden, part.two), native.linear(hidden.view(-1, 6, 8).mT, part.three)
        for y, due in zip(found(x), wanted, strict=True):
            torch.testing.assert_close(y, due)
            assert torch.equal(y, due) or rows == 300 or dtype == torch.float64  # which are torch's


@compiler
def test_compiled_code_calls_the_backend_that_it_is_given(tmp_path: Path) -> None:
    calls: list[tuple[int, ...]] = []
    kinds = [ctypes.c_void_p] * 5 + [ctypes.c_int] + [ctypes.c_int64] * 4
    answers = [0, 0, 0, 1]

    @ctypes.CFUNCTYPE(ctypes.c_int, *kinds)
    def run(engine: int, x: int, w: int, b: int | None, y: int, kind: int, *sizes: int) -> int:
        calls.append((engine, b is not None, kind, *sizes))
        return answers[len(calls) - 1]

    class Counting(type(gemm.get("torch", 1))):  # type: ignore[misc]
        source = Path(gemm.__file__).parents[1] / "csrc" / "gemm" / "linear_on.h"
        address = ctypes.cast(run, ctypes.c_void_p).value
        inline = gemm.Inline(source.read_text(), torch.tensor([7, address, 100]))

    found = of_part(Part(torch.bfloat16), Counting(), tmp_path)
    found(torch.zeros(5, 1, 64, dtype=torch.bfloat16))
    assert calls == [(7, True, 1, 5, 48, 64, 64), (7, False, 1, 5, 96, 48, 128), (7, False, 1, 40, 7, 6, 6)]
    found(torch.zeros(101, 1, 64, dtype=torch.bfloat16))
    assert len(calls) == 3  # torch's
    with pytest.raises(RuntimeError):
        found(torch.zeros(5, 1, 64, dtype=torch.bfloat16))


@compiler
def test_a_compiler_that_does_not_work_is_told_in_one_line(tmp_path: Path) -> None:
    import torch._inductor.config as inductor

    nowhere = inductor.patch({"cpp.cxx": ("/nonexistent/g++",)})
    with nowhere, pytest.raises(ValueError, match="--compile cannot be used here: .*; leave it out") as told:
        compiled(program(), gemm.get("native", 1), lambda done, total: None, tmp_path)
    assert "\n" not in str(told.value)
    assert list(tmp_path.iterdir()) == []
