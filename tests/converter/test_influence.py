"""The numbers that a row's numbers depend on are found from the operators alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from lamina.converter.influence import influence, run_row


def traced(step: Callable[[Tensor], Tensor]) -> tuple[fx.Graph, fx.Node]:
    """The graph of a step of one row of 8 numbers, and its input."""

    class Step(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return step(x)

    graph = torch.export.export(Step(), (torch.ones(1, 8),)).graph
    return graph, next(node for node in graph.nodes if node.op == "placeholder")


def read_by(step: Callable[[Tensor], Tensor], output: int) -> list[int]:
    """The numbers of the row on which one number of the step's output may depend."""
    graph, x = traced(step)
    given = torch.zeros(1, 8, requires_grad=True)
    (last,) = graph.output_node().all_input_nodes
    result = influence(graph.nodes, {x: given})[last].reshape(-1)
    (found,) = torch.autograd.grad(result[output], given)
    return found.flatten().nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("step", "output", "expected"),
    [
        (lambda x: torch.exp(x) * 2.0, 3, [3]),
        (lambda x: x.view(1, 2, 4).transpose(1, 2), 1, [4]),
        (lambda x: x.view(1, 4, 2).mean(-1), 1, [2, 3]),
        (lambda x: torch.cat([x[:, 4:], x[:, :4]], -1) * x, 0, [0, 4]),
        (lambda x: x.softmax(-1), 5, [*range(8)]),
        (lambda x: x.view(1, 2, 4) * torch.rsqrt(x.view(1, 2, 4).pow(2).mean(-1, keepdim=True)), 6, [4, 5, 6, 7]),
        (lambda x: torch.zeros(1, 8) + x.split([3, 5], -1)[1].sum(-1, keepdim=True), 0, [3, 4, 5, 6, 7]),
        (lambda x: x @ torch.ones(8, 2), 1, [*range(8)]),
        (lambda x: x[:, :2].double().type_as(x), 1, [1]),
    ],
)
def test_a_number_may_depend_on(step: Callable[[Tensor], Tensor], output: int, expected: list[int]) -> None:
    assert read_by(step, output) == expected


def test_what_depends_on_nothing_given_is_left_out() -> None:
    graph, _ = traced(lambda x: x + 1.0)
    assert influence(graph.nodes, {}) == {}


def test_a_row_is_computed_with_random_numbers_where_none_are_given() -> None:
    graph, x = traced(lambda x: (x * torch.ones(8)).relu())
    (last,) = graph.output_node().all_input_nodes
    assert not run_row(graph.nodes, {x: torch.zeros(1, 8)})[last].any()
    values = run_row(graph.nodes, {x: torch.full((1, 8), 2.0)})[last]
    assert values.min() >= 1.0
    assert len(values.unique()) > 1
