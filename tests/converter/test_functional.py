"""In-place operators become functional where no other operator sees what they write to; the result is the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from lamina.converter import functional
from lamina.converter.functional import is_mutable, make_functional


def plain(x: Tensor) -> Tensor:
    return (x @ x).add_(x, alpha=2)


def one_of_several(x: Tensor) -> Tensor:
    values, _ = x.topk(2)
    total = values.sum(-1, keepdim=True)
    values.div_(total)
    return values * 3


def read_before_and_after(x: Tensor) -> Tensor:
    y = x * 2
    before = y + 1
    y.mul_(3)
    return before + y


def by_places(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    y.index_put_((torch.arange(len(x)).flip(0),), x)
    return y


def twice(x: Tensor) -> Tensor:
    return (x * 2).add_(1).mul_(x)


@pytest.mark.parametrize("function", [plain, one_of_several, read_before_and_after, by_places, twice])
def test_what_nobody_else_sees_is_made_functional(function: Callable[[Tensor], Tensor]) -> None:
    before, after = captured(function), captured(function)
    make_functional(after.graph)
    assert any(map(is_mutable, before.graph.nodes))
    assert not any(map(is_mutable, after.graph.nodes))
    assert torch.equal(run(after), function(INPUT.clone()))


def of_a_view(x: Tensor) -> Tensor:
    y = x * 2
    y[1:].add_(1)
    return y


def a_view_looks_on(x: Tensor) -> Tensor:
    y = x * 2
    view = y.reshape(-1)
    y.mul_(3)
    return view


def itself_without_saying_so(x: Tensor) -> Tensor:
    y = x * 2
    same = torch.dropout(y, 0.5, False)
    y.mul_(3)
    return same


def rounded_in_place(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).mul(2).mul_(x)


def of_an_input(x: Tensor) -> Tensor:
    return x.mul_(3)


OTHERS = [of_a_view, a_view_looks_on, itself_without_saying_so, rounded_in_place, of_an_input]


@pytest.mark.parametrize("function", OTHERS)
def test_what_others_see_is_left(function: Callable[[Tensor], Tensor]) -> None:
    program = captured(function)
    make_functional(program.graph)
    assert any(map(is_mutable, program.graph.nodes))
    assert torch.equal(run(program), function(INPUT.clone()))


@pytest.mark.parametrize("function", OTHERS[1:4])
def test_each_of_them_would_go_wrong(function: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without the checks the results are others."""
    monkeypatch.setattr(functional, "is_fresh", lambda node: True)
    monkeypatch.setattr(functional, "gives_the_same", lambda plain, node: True)
    program = captured(function)
    *_, output = program.graph.nodes
    if any(node.target is torch.ops.aten.dropout.default for n in output.all_input_nodes for node in n.all_input_nodes):
        pytest.skip("this release of torch captures that dropout returns its own input")
    make_functional(program.graph)
    assert not torch.equal(run(program), function(INPUT.clone()))


INPUT = torch.rand(5, 5, generator=torch.Generator().manual_seed(1)) + 0.5


class Module(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        return self._function(x)


def captured(function: Callable[[Tensor], Tensor]) -> ExportedProgram:
    with torch.no_grad():
        return torch.export.export(Module(function), (INPUT.clone(),), strict=False)


def run(program: ExportedProgram) -> Tensor:
    """The operators of the graph, one by one."""
    lifted = {**program.state_dict, **program.constants}
    inputs = [
        lifted[spec.target] if spec.target in lifted else INPUT.clone() for spec in program.graph_signature.input_specs
    ]
    return torch.fx.Interpreter(program.graph_module).run(*inputs)[-1]
