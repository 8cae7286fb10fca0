"""Operators as units: the same results, called in the same places, equal ones made once."""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

import pytest
import torch
from test_real_models import build
from torch import Tensor, fx, nn

from lamina.converter import Slice, SlicedProgram, fuse, redirect
from lamina.converter.fuse import Bind, has_rows


class Linear:
    """The linear layers of a program are given to these functions, as in a worker."""

    def linear(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return torch.nn.functional.linear(x, w, b)


def private(family: str) -> SlicedProgram:
    """The program that ``build`` shares once more, to be used up."""
    program = build.__wrapped__(family)[1]
    return redirect(program, "gemm", Linear(), {torch.ops.aten.linear.default: "linear"})


def is_aten(node: fx.Node) -> bool:
    return getattr(node.target, "namespace", "") == "aten" or node.target is operator.getitem


def as_it_is(unit: fx.Graph, weights: int) -> Bind:
    return lambda given: partial(module_of(unit), *given)


def module_of(unit: fx.Graph) -> fx.GraphModule:
    return fx.GraphModule(nn.Module(), unit)


def arguments(part: Any, rows: int) -> list[Any]:
    generator = torch.Generator().manual_seed(rows)

    def like(node: fx.Node) -> Tensor:
        value = node.meta["val"]
        shape = (rows, *value.shape[1:])
        if value.dtype == torch.int64:
            return torch.randint(0, 60, shape, generator=generator)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(value.dtype)

    return [like(n) for n in part.module.graph.nodes if n.op == "placeholder" and n.name != "send"]


def run(part: Any, rows: int) -> tuple[tuple[Tensor, ...], list[str], list[Tensor]]:
    """Results, and what was sent."""
    events, sent = list[str](), list[Tensor]()

    class Seen:
        def q(self, call: int, q: Tensor) -> None:
            sent.append(q.clone())
            events.append(f"q{call}")

        def kv(self, call: int, k: Tensor, v: Tensor) -> None:
            sent.extend((k.clone(), v.clone()))
            events.append(f"kv{call}")

    last = "send" not in [n.name for n in part.module.graph.nodes]
    return part(*arguments(part, rows), *(() if last else (Seen(),))), events, sent


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3", "mpt", "gptj"])
@pytest.mark.parametrize("rows", [1, 3])
def test_units_compute_and_send_what_the_operators_did(family: str, rows: int) -> None:
    plain = build(family)[1]
    fused = fuse(private(family), is_aten, as_it_is)
    for before, after in zip(plain.slices, fused.slices, strict=True):
        wanted, events, sent = run(before, rows)
        found, same_events, same_sent = run(after, rows)
        assert events == same_events
        assert len(wanted) == len(found)
        assert all(torch.equal(a, b) for a, b in zip((*wanted, *sent), (*found, *same_sent), strict=True))


def test_layers_share_their_units_and_little_else_is_left() -> None:
    units: list[fx.GraphModule] = []

    def keep(unit: fx.Graph, weights: int) -> Bind:
        units.append(module_of(unit))
        inputs = [n for n in unit.nodes if n.op == "placeholder"]
        assert not any(map(has_rows, inputs[:weights]))
        return as_it_is(unit, weights)

    plain = build("llama")[1]
    fused = fuse(private("llama"), is_aten, keep)
    calls = [sum(n.target == "run" for n in s.module.graph.nodes) for s in fused.slices]
    assert calls[1] == calls[2] >= 4  # slices of one layer each
    assert len(units) < sum(calls)
    left = [n for n in fused.slices[1].module.graph.nodes if getattr(n.target, "namespace", "") == "aten"]
    assert len(left) < len([n for n in plain.slices[1].module.graph.nodes if n.op == "call_function"]) // 3
    for unit in units:
        inputs = [n for n in unit.graph.nodes if n.op == "placeholder"]
        assert any(has_rows(n) for n in inputs)
        assert not list(unit.parameters())  # weights are given


def test_a_unit_that_computes_something_else_shows() -> None:
    plain = build("llama")[1]

    def wrong(unit: fx.Graph, weights: int) -> Bind:
        return lambda given: lambda *x: tuple(y * 2 for y in module_of(unit)(*given, *x))

    fused = fuse(private("llama"), is_aten, wrong)
    assert not torch.equal(run(fused.slices[1], 2)[0][0], run(plain.slices[1], 2)[0][0])


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_what_nobody_builds_stays(family: str) -> None:
    plain, fused = build(family)[1], fuse(private(family), is_aten, lambda unit, weights: None)
    for before, after in zip(plain.slices, fused.slices, strict=True):
        assert [str(n.target) for n in after.module.graph.nodes if is_aten(n)]
        assert all(torch.equal(a, b) for a, b in zip(run(before, 2)[0], run(after, 2)[0], strict=True))


@pytest.mark.parametrize("family", ["llama", "phi3", "mpt"])
def test_operators_that_are_not_taken_run_between_units(family: str) -> None:
    def takes(node: fx.Node) -> bool:
        return is_aten(node) and "mul" not in str(node.target)

    plain, fused = build(family)[1], fuse(private(family), takes, as_it_is)
    for before, after in zip(plain.slices, fused.slices, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(run(before, 3)[0], run(after, 3)[0], strict=True))


class Shared(torch.nn.Module):
    """A value that comes of a weight alone is used in two units."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(4.0), requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        scale = self.weight + 1.0
        best, _ = (x * scale).sort(-1)
        return (best * scale,)


def test_what_comes_of_weights_is_there_for_others_too() -> None:
    x = torch.randn(3, 4)
    with torch.no_grad():
        module = torch.export.export(Shared(), (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)).module()
    program = SlicedProgram((Slice(0, module, "", {}),), (), (), rows="static")
    fused = fuse(program, lambda n: "aten" in str(n.target) and "sort" not in str(n.target), as_it_is).slices[0]
    calls = [n for n in fused.module.graph.nodes if n.target == "run"]
    assert len(calls) == 2
    assert torch.equal(fused(x)[0], Shared()(x)[0])
