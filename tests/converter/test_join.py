"""Linear layers of one input made at once: K with V, gate with up, and never what a message waits for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from test_fuse import arguments, run
from test_real_models import build
from torch import Tensor

from lamina.converter import Slice, SlicedProgram, join, redirect

LINEAR = torch.ops.aten.linear.default


class Linear:
    """What linear layers are given to, as in a worker; how many it is given at once."""

    def __init__(self) -> None:
        self.calls = list[int]()

    def linear(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return self.linears(x, ((w, b),))[0]

    def linears(self, x: Tensor, weights: Sequence[tuple[Tensor, Tensor | None]]) -> list[Tensor]:
        self.calls.append(len(weights))
        return [torch.nn.functional.linear(x, w, b) for w, b in weights]


def private(family: str) -> SlicedProgram:
    """The program that ``build`` shares once more, to be used up."""
    program: SlicedProgram = build.__wrapped__(family)[1]
    return program


def joined(family: str) -> tuple[SlicedProgram, Linear]:
    own = Linear()
    program = join(private(family), "gemm", own, LINEAR, "linears")
    return redirect(program, "gemm", own, {LINEAR: "linear"}), own


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3", "mpt", "gptj"])
def test_results_and_messages_are_what_they_were(family: str) -> None:
    plain = private(family)
    program, _ = joined(family)
    for part, due in zip(program.slices, plain.slices, strict=True):
        (results, events, sent), (due_results, due_events, due_sent) = run(part, 3), run(due, 3)
        assert events == due_events
        for got, wanted in zip([*results, *sent], [*due_results, *due_sent], strict=True):
            assert torch.equal(got, wanted)


def test_k_meets_v_and_gate_meets_up_but_q_has_left_before() -> None:
    program, own = joined("llama")
    calls: list[Any] = []

    class Seen:
        def q(self, call: int, q: Tensor) -> None:
            calls.append([*own.calls])

        def kv(self, call: int, k: Tensor, v: Tensor) -> None:
            calls.append([*own.calls])

    program.slices[1](*arguments(program.slices[1], 3), Seen())
    at_q, at_kv = calls
    assert at_q == [1, 2, 1, 1], "o, gate with up, down, q"
    assert at_kv == [*at_q, 2], "k with v"


def test_weights_that_are_used_before_stay_where_they_are() -> None:
    """One weight meets two inputs, and another one meets the second input behind it."""

    class Part(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.relu(self.one(x))
            z = self.two(y)
            return self.one(y) * z

    x = torch.randn(3, 4)
    module = torch.export.export(Part(), (x,)).module()
    program = SlicedProgram((Slice(0, module, "", {}),), (), (), hoist=False, rows="unchecked")
    before, own = program.slices[0](x), Linear()
    program = join(program, "gemm", own, LINEAR, "linears")
    assert torch.equal(program.slices[0](x), before)
    assert own.calls == [2]
