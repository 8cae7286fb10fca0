"""The cut by heads: which channels, columns and numbers of a state are a part's."""

from __future__ import annotations

import pytest
import torch
from recurrent import SPECS, make_layer

from lamina.ops.recurrence.parts import Part, heads, history


def test_channels_of_a_part_within_a_group() -> None:
    """Heads 1 .. 4 of 6 read groups 0 (head 1), 1 (2, 3) and 2 (4): the part has all three of them."""
    spec = SPECS["qwen3_next"]
    part = Part.of(spec, 1, 4)
    assert (part.spec.heads, part.spec.groups, part.spec.first_head, part.spec.heads_per_group) == (4, 3, 1, 2)
    assert part.channels == ((0, 96), (96, 96), (192 + 48, 4 * 48))
    assert part.columns("g") == part.columns("beta") == ((1, 4),)
    assert part.columns("out") == ((48, 192),)


def test_a_part_of_a_part() -> None:
    spec = SPECS["qwen3_next"]
    inner, direct = Part.of(Part.of(spec, 1, 5).spec, 2, 2), Part.of(spec, 3, 2)
    assert inner.spec == direct.spec
    x = torch.arange(spec.channels)[None]
    outer = Part.of(spec, 1, 5).take_columns("x", x)
    assert torch.equal(inner.take_columns("x", outer), direct.take_columns("x", x))


def test_groups_of_mamba2_go_to_each_worker() -> None:
    spec = SPECS["bamba"]  # one group of six heads
    parts = [Part.of(spec, 2 * i, 2) for i in range(3)]
    assert [p.spec.first_head for p in parts] == [0, 2, 4]
    assert [p.channels[1:] for p in parts] == [((144, 16), (160, 16))] * 3
    assert [p.channels[0] for p in parts] == [(0, 48), (48, 48), (96, 48)]


def test_channels_of_a_convolution() -> None:
    part = Part.of(SPECS["lfm2"], 8, 24)
    assert part.spec.heads == 24
    assert part.channels == part.columns("x") == part.columns("out") == ((8, 24),)


def test_columns_of_kimi_have_a_number_for_each_key() -> None:
    assert Part.of(SPECS["kimi_linear"], 1, 2).columns("g") == ((32, 64),)


@pytest.mark.parametrize("name", ["lfm3", "qwen3_next", "kimi_linear", "nemotron_h"])
def test_states_are_cut_and_put_together(name: str) -> None:
    spec = SPECS[name]
    states = torch.randn(3, spec.state_size)
    together = torch.zeros_like(states)
    for first, end in ((0, 1), (1, spec.heads)):
        part = Part.of(spec, first, end - first)
        own = part.take_state(states)
        assert torch.equal(heads(part.spec, own), heads(spec, states)[:, first:end])
        part.put_state(own, together)
    assert torch.equal(history(spec, together), history(spec, states))
    assert torch.equal(heads(spec, together), heads(spec, states))


def test_static_operands_are_cut() -> None:
    layer = make_layer(SPECS["nemotron_h"], 1)
    part = Part.of(layer.spec, 4, 4)
    own = part.take_static(layer.static)
    assert {name: tuple(t.shape) for name, t in own.items()} == part.spec.static_shapes
    assert torch.equal(own["A"], layer.static["A"][4:])
    assert torch.equal(own["weight"][:64], layer.static["weight"][64:128])


@pytest.mark.parametrize(("first", "count"), [(-1, 2), (0, 0), (5, 2)])
def test_heads_that_are_not_there(first: int, count: int) -> None:
    with pytest.raises(ValueError, match="of 6 are no part of a recurrence"):
        Part.of(SPECS["bamba"], first, count)
