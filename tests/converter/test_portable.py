"""A capture that was written and read again is the same program, of weights that are the module's own.

Covers: converter/capture.py.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import CUT, Decoder

from lamina.converter import SlicedProgram, convert, portable
from lamina.converter.capture import capture
from lamina.converter.portable import NotPortableError, read, write


class Place:
    """The place of a capture: here."""

    def __init__(self, text: str | None = None) -> None:
        self.text = text
        self.written = 0

    def read(self) -> str | None:
        return self.text

    def write(self, text: str) -> None:
        self.text, self.written = text, self.written + 1


def told(program: SlicedProgram) -> object:
    """All of a program but the weights' numbers; R by one name."""
    codes = [re.sub(r"\bs\d+\b", "R", piece.code) for piece in program]
    return codes, [(c.index, c.name, c.q, c.k, c.v, c.out, c.rest[:2]) for c in program.calls], program.cuts


def spread(x: Tensor) -> Tensor:
    """Rows become more of them, as with experts, and a constant is made while it is traced."""
    flat = x.expand(-1, 2, -1).flatten(0, 1) * torch.tensor([0.5, 2.0], dtype=x.dtype).repeat(x.shape[-1] // 2)
    return flat.unflatten(0, (-1, 2)).sum(1, keepdim=True)


class Spreading(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return spread(self.up(x))


OPTIONS: list[dict[str, Any]] = [{"fused": "split"}, {"parallel": True, "tied": True, "mlp": Spreading}]


@pytest.fixture(scope="module")
def text() -> str:
    model = Decoder(1)
    return write(capture(model, (CUT,)), model)


@pytest.mark.long
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_it_is_the_same_program(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, place = Decoder(**options), Place()
    first = convert(model, CUT, expect=3, cache=place)
    assert place.written == 1
    monkeypatch.setattr(sys.modules["lamina.converter.convert"], "capture", None)  # nothing is traced again
    again = convert(model, CUT, expect=3, cache=place)
    assert place.written == 1
    assert told(again) == told(first)
    assert again.rows == first.rows == "numeric"
    for one, other in zip(first, again, strict=True):
        assert list(one.weights) == list(other.weights)
        pairs = zip(one.weights.values(), other.weights.values(), strict=True)
        assert all(a.data_ptr() == b.data_ptr() or a.equal(b) for a, b in pairs)
    ids, where = torch.tensor([[3], [5]]), torch.tensor([[0], [7]])
    assert all(a.equal(b) for a, b in zip(run(first, ids, where), run(again, ids, where), strict=True))


def run(program: SlicedProgram, ids: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
    class Nobody:
        def q(self, *_: object) -> None: ...

        def kv(self, *_: object) -> None: ...

    return program.slices[0](ids, positions, Nobody())


def test_weights_are_those_of_the_module_that_is_at_hand(text: str) -> None:
    """The weights have other values, as those of another checkpoint of the same configuration."""
    model = Decoder(1)
    with torch.no_grad():
        model.embed.weight.mul_(2)
    program = convert(model, CUT, cache=Place(text))
    assert program.slices[0].weights["embed.weight"] is model.embed.weight


def changed(text: str, change: Callable[[Any], None]) -> str:
    said = json.loads(text)
    change(said)
    return json.dumps(said)


def first_call(said: Any) -> list[Any]:
    found: list[Any] = next(node for node in said["nodes"] if node[0] == "call_function")
    return found


DAMAGE: dict[str, Callable[[Any], None]] = {
    "an operator of nobody": lambda said: first_call(said).__setitem__(2, "aten.no_such.default"),
    "no operator of torch": lambda said: first_call(said).__setitem__(2, "os.system.default"),
    "a function": lambda said: first_call(said).__setitem__(2, "aten.mul.__class__"),
    "of Python": lambda said: first_call(said).__setitem__(2, "methodcaller"),
    "another kind of node": lambda said: first_call(said).__setitem__(0, "call_module"),
    "a weight that is not there": lambda said: said["weights"].update(
        {next(iter(said["weights"])): ["layers.9.weight"]}
    ),
    "a node that is not there": lambda said: said.update(logits=10_000),
    "a dtype that is none": lambda said: first_call(said).__setitem__(3, {"tuple": [{"dtype": "load"}]}),
    "no nodes": lambda said: said.pop("nodes"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_names_anything_unexpected_is_not_read(damage: str, text: str) -> None:
    read(text, Decoder(1))
    with pytest.raises(NotPortableError):
        read(changed(text, DAMAGE[damage]), Decoder(1))


@pytest.mark.parametrize("bad", ["", "{", "[]", "null", '{"nodes":[]}'])
def test_a_text_that_is_none_is_not_read(bad: str) -> None:
    with pytest.raises(NotPortableError):
        read(bad, Decoder(1))


def test_what_cannot_be_read_is_captured_anew_and_kept(text: str) -> None:
    place = Place(text[:-1])
    assert told(convert(Decoder(1), CUT, cache=place)) == told(convert(Decoder(1), CUT, cache=Place(text)))
    assert place.text == text


@pytest.mark.long(but=["{'layers': 1, 'hidden': 16}"])
@pytest.mark.parametrize("options", [{"layers": 1, "hidden": 16}, {"layers": 2}], ids=str)
def test_a_capture_of_another_shape_or_depth_is_not_taken(options: dict[str, int], text: str) -> None:
    place = Place(text)
    program = convert(Decoder(**options), CUT, expect=options["layers"], cache=place)
    assert len(program.calls) == options["layers"]
    assert place.written == 1, "and its own is kept from now on"


def test_a_capture_of_another_dtype_is_not_read(text: str) -> None:
    with pytest.raises(NotPortableError, match=r"torch.float64"):
        read(text, Decoder(1).double())


def test_a_capture_is_written_with_its_own_module() -> None:
    with pytest.raises(NotPortableError, match="not that of the module"):
        write(capture(Decoder(1), (CUT,)), Decoder(1))


class Body(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.up(x).float()


class Large(nn.Module):
    def __init__(self, _: int) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return x * LARGE.sum()


LARGE = torch.ones(portable.LARGEST_CONSTANT)


@pytest.mark.long(but=["Large"])
@pytest.mark.parametrize("mlp", [Body, Large])
def test_what_cannot_be_written_is_not_kept(mlp: Callable[[int], nn.Module]) -> None:
    """A body of an operator of higher order, which is a module, and a large constant."""
    model, place = Decoder(1, mlp=mlp), Place()
    convert(model, CUT, cache=place)
    assert place.text is None
