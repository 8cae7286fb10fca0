"""A plan stamped from a few layers must be the plan of all layers, or not be made."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from toys import CUT, Decoder, Mlp

from lamina.converter import ConversionError, SlicedProgram, convert
from lamina.converter.stamp import Period, layer_kinds, layer_stack, period_of, stamp


class Wide(Mlp):
    """Another kind of layer."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)
        self.gate = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gate(x)


class Alternating(Mlp):
    """Does something else in odd layers, which no attribute but the index tells."""

    index = -1

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2 if self.index % 2 else super().forward(x)


def build(pattern: Sequence[Callable[[int], nn.Module]]) -> Decoder:
    """A model on the meta device, one layer for each entry of ``pattern``."""
    with torch.device("meta"):
        model = Decoder(layers=0)
        for i, mlp in enumerate(pattern):
            model.layers.append(Decoder(layers=i + 1, mlp=mlp).layers[i])
            if mlp is Alternating:
                model.layers[i].mlp.index = i
    return model.eval()


def stamped(model: Decoder, shallow: Decoder | None = None) -> SlicedProgram | None:
    def first(few: int) -> tuple[SlicedProgram, Sequence[nn.Module], None]:
        small = build([type(layer.mlp) for layer in (shallow or model).layers][:few])
        return convert(small, CUT), list(small.layers), None

    return stamp(first, list(model.layers), None, "layers")


@pytest.mark.long
@pytest.mark.parametrize(
    ("pattern", "captured"),
    [([Mlp] * 8, 4), ([Wide, Mlp, Mlp] * 4, 9), ([Wide] * 2 + [Mlp] * 6, 6)],
    ids=["same", "period-3", "other-first"],
)
def test_stamped_plan_is_the_plan_of_all_layers(pattern: list[type[Mlp]], captured: int) -> None:
    model = build(pattern)
    plan, whole = stamped(model), convert(model, CUT)
    assert plan is not None
    assert plan.stamped == len(pattern) - captured
    assert [s.signature for s in plan] == [s.signature for s in whole]
    assert [s.index for s in plan] == [*range(len(pattern) + 1)]
    assert plan.cuts == whole.cuts
    assert [c.name for c in plan.calls] == [c.name for c in whole.calls]
    assert [c.rest[:2] for c in plan.calls] == [c.rest[:2] for c in whole.calls]
    assert [(c.q, c.k, c.v, c.out) for c in plan.calls] == [(c.q, c.k, c.v, c.out) for c in whole.calls]
    assert [set(s.weights) for s in plan] == [set(s.weights) for s in whole]
    assert plan.weight_bytes == whole.weight_bytes


def test_no_stamping_without_three_periods() -> None:
    assert stamped(build([Mlp, Mlp, Wide, Mlp])) is None
    assert stamped(build([Mlp] * 4)) is None  # all four would be captured anyway


def test_one_odd_layer_in_the_middle_is_not_stamped_over() -> None:
    model = build([Mlp] * 5 + [Wide] + [Mlp] * 2)
    assert layer_kinds(list(model.layers)) == [0, 0, 0, 0, 0, 1, 0, 0]
    assert stamped(model) is None


def test_layers_that_differ_by_an_attribute_are_not_alike() -> None:
    model = build([Mlp] * 9)
    model.layers[4].attention.scale = 2.0
    assert layer_kinds(list(model.layers)) == [0, 0, 0, 0, 1, 0, 0, 0, 0]
    assert stamped(model) is None


@pytest.mark.long
def test_a_shallow_model_of_other_layers_proves_nothing() -> None:
    assert stamped(build([Mlp] * 9), shallow=build([Wide] * 9)) is None


@pytest.mark.long
def test_slices_must_repeat_even_if_the_layers_look_alike() -> None:
    model = build([Alternating] * 6)
    assert set(layer_kinds(list(model.layers))) == {0}
    assert stamped(model) is None


def test_facts_about_layers_tell_them_apart() -> None:
    layers = list(build([Mlp] * 3).layers)
    assert layer_kinds(layers, ["full", "window", "full"]) == [0, 1, 0]


@pytest.mark.parametrize(
    ("kinds", "period"),
    [
        ("aaaa", Period(0, 1)),
        ("baaa", Period(1, 1)),
        ("abababab", Period(0, 2)),
        ("xaabaabaab", Period(1, 3)),
        ("aab", None),
        ("abab", None),
        ("aaab", None),
    ],
)
def test_period(kinds: str, period: Period | None) -> None:
    assert period_of(kinds) == period


def test_a_model_without_a_list_of_layers_is_named() -> None:
    with pytest.raises(ConversionError, match="no list of 5 layers in Decoder"):
        layer_stack(Decoder(), 5)
