"""Slices of small models: the same numbers as the whole, the order of their work, what they carry, whose weights.

Covers: converter/emit.py, converter/fused.py, converter/graph.py, converter/plan.py, converter/render.py,
converter/reorder.py.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import CUT, Decoder, History, Sender

from lamina.converter import ConversionError, Slice, SlicedProgram, convert
from lamina.converter.explain import send_shares
from lamina.converter.graph import is_expensive


def cut(model: nn.Module, **options: Any) -> SlicedProgram:
    return convert(model, CUT, **options)


@functools.cache
def converted(dtype: torch.dtype = torch.float32, **shape: Any) -> tuple[Decoder, SlicedProgram]:
    """A model and its slices, shared by tests that only look."""
    model = Decoder(**shape).to(dtype).eval()
    return model, cut(model, expect=len(model.layers))


def step(
    program: SlicedProgram, history: History, ids: Tensor, positions: Tensor, keep: Tensor | None = None
) -> Tensor:
    """One pass; the last slice runs for rows ``keep`` alone if given."""
    send = Sender(history)
    carried: tuple[Tensor, ...] = program.slices[0](ids, positions, send)
    for piece in program.slices[1:-1]:
        carried = piece(*carried, history.receive(piece.index - 1), send)
    inputs = (*carried, history.receive(len(program.calls) - 1))
    return program.slices[-1](*(t if keep is None else t[keep] for t in inputs))[0]


# Rows join and leave, positions are ragged: (sequences of the batch, position of each).
_STEPS = [([0, 1, 2], [0, 5, 40]), ([2, 0, 1], [41, 1, 6]), ([0], [2]), ([3, 1, 0, 2], [9, 7, 3, 42])]


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [{"fused": f} for f in ("", "slices", "split", "clamp", "interleaved")]
    + [{"parallel": True}, {"parallel": True, "fused": "split"}],
    ids=str,
)
def test_slices_compute_what_the_model_computes(options: dict[str, Any]) -> None:
    model, program = converted(dtype=torch.float64, **options)
    truth, history = History(), History()
    for rows, at in _STEPS:
        ids, positions = torch.tensor(rows)[:, None] * 3 + 1, torch.tensor(at)[:, None]
        truth.rows = history.rows = rows
        model.run = truth.attend
        with torch.no_grad():
            expected = model(ids, positions)
        model.run = CUT
        torch.testing.assert_close(step(program, history, ids, positions), expected, rtol=1e-12, atol=1e-12)
    assert history.events == ["q0", "kv0", "q1", "kv1", "q2", "kv2"] * len(_STEPS)
    history.kv[1, 0][1][0].mul_(2)  # the comparison sees one stored value
    truth.rows = history.rows = [0]
    model.run = truth.attend
    with torch.no_grad():
        expected = model(torch.tensor([[5]]), torch.tensor([[4]]))
    actual = step(program, history, torch.tensor([[5]]), torch.tensor([[4]]))
    assert (actual - expected).abs().max() > 1e-6


def test_rows_may_be_dropped_between_slices() -> None:
    _, program = converted(dtype=torch.float64, fused="")
    ids, positions, keep = torch.arange(5)[:, None], torch.arange(5)[:, None] * 7, torch.tensor([3, 1])
    every, some = History(), History()
    every.rows = some.rows = [*range(5)]
    expected = step(program, every, ids, positions)[keep]
    torch.testing.assert_close(step(program, some, ids, positions, keep), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows", [1, 2, 512])
def test_one_conversion_serves_any_number_of_rows(rows: int) -> None:
    program, history = converted()[1], History()
    history.rows = [*range(rows)]
    logits = step(program, history, torch.ones(rows, 1, dtype=torch.long), torch.zeros(rows, 1, dtype=torch.long))
    assert logits.shape == (rows, 1, 64)


@pytest.mark.long
def test_residual_and_positions_cross_in_place_of_rope_tables() -> None:
    _, program = converted(dtype=torch.bfloat16)
    hidden = ("hidden", (1, 32), torch.bfloat16)
    middle = [(t.name, t.shape, t.dtype) for t in program.cuts[1].tensors]
    assert middle[0] == hidden
    # As fp32 the positions take 4 bytes, as the model's int64 input 8, its tables of sines and cosines 32.
    assert [c.bytes_per_token for c in program.cuts] == [2 * 32 + 4, 2 * 32 + 4, 2 * 32]
    assert [(t.name, t.shape) for t in program.cuts[2].tensors] == [hidden[:2]]
    assert program.cut_bytes_per_token == 68 + 68 + 64


def test_messages_have_the_captured_shapes() -> None:
    _, program = converted(dtype=torch.bfloat16)
    call = program.calls[1]
    assert (call.q.shape, call.k.shape, call.v.shape, call.out.shape) == ((4, 1, 8), (2, 1, 8), (2, 1, 8), (1, 4, 8))
    assert (call.q_bytes, call.kv_bytes, call.out_bytes) == (64, 64, 64)
    assert program.message_bytes_per_token == 3 * 192
    assert call.name == "layers.1.attention"


def test_other_arguments_of_the_call_are_values() -> None:
    model, program = converted()
    calls = program.calls
    assert [c.rest[:2] for c in calls] == [(0, "full"), (1, "full"), (2, "full")]
    torch.testing.assert_close(calls[2].rest[2], model.slopes.detach() * 2)


def blocks(piece: Slice) -> list[list[str]]:
    """Names of the GEMM weights before send Q, between the sends, and after them."""
    found: list[list[str]] = [[]]
    for node in piece.module.graph.nodes:
        if node.op == "call_method":
            found.append([])
        elif is_expensive(node):
            found[-1] += [
                a.meta["weight"] for a in node.all_input_nodes if a.op == "get_attr" and "bias" not in a.meta["weight"]
            ]
    return found


def test_q_leaves_before_k_and_v_are_computed() -> None:
    before, between, after = blocks(converted()[1].slices[1])
    assert before[-1] == "layers.1.attention.q_proj.weight"
    assert between == ["layers.1.attention.k_proj.weight", "layers.1.attention.v_proj.weight"]
    assert after == []


def test_without_early_q_messages_leave_together_in_the_captured_order_with_the_same_numbers() -> None:
    model, early = converted(dtype=torch.float64)
    captured = cut(model, early_q=False)
    before, between, after = blocks(captured.slices[1])
    assert before[-3:] == [f"layers.1.attention.{x}_proj.weight" for x in "qkv"]
    assert between == after == []
    first, second = send_shares(captured.slices[1])
    assert first == second == 1.0
    assert send_shares(early.slices[1])[0] < send_shares(early.slices[1])[1] == 1.0
    ids, positions, results = torch.arange(5)[:, None], torch.arange(5)[:, None] * 7, []
    for program in (early, captured):
        history = History()
        history.rows = [*range(5)]
        results.append(step(program, history, ids, positions))
        assert history.events == ["q0", "kv0", "q1", "kv1", "q2", "kv2"]
    assert torch.equal(*results)


@pytest.mark.long(but=["slices"])
@pytest.mark.parametrize("fused", ["slices", "split", "clamp"])
def test_contiguous_fused_projection_is_split_into_views(fused: str) -> None:
    model, program = converted(fused=fused)
    before, between, _ = blocks(program.slices[1])
    name = "layers.1.attention.qkv_proj.weight"
    assert before[-1] == f"{name}[0:32]"
    assert between == [f"{name}[32:64]"]
    whole = model.layers[1].attention.qkv_proj.weight
    part = program.slices[1].weights[between[0]]
    assert part.data_ptr() == whole.data_ptr() + 32 * 32 * 4


def test_other_fused_projections_stay_whole() -> None:
    before, between, _ = blocks(cut(Decoder(fused="interleaved")).slices[1])
    assert (before[-1], between) == ("layers.1.attention.qkv_proj.weight", [])


@pytest.mark.long(but=["False-"])
@pytest.mark.parametrize("fused", ["", "split"])
@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_the_models_own(tied: bool, fused: str) -> None:
    model, program = converted(tied=tied, fused=fused)
    own = {n: t for n, t in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()] if n != "slopes"}
    bound = {n: t for s in program for n, t in s.weights.items()}
    assert {n.split("[")[0] for n in bound} <= set(own)
    for name, tensor in bound.items():
        storage = own[name.split("[")[0]].untyped_storage()
        assert tensor.untyped_storage().data_ptr() == storage.data_ptr()
    distinct = {t.data_ptr(): t.numel() * t.element_size() for t in own.values()}
    assert program.weight_bytes == sum(distinct.values())
    if tied:
        assert bound["head.weight"].data_ptr() == model.embed.weight.data_ptr()


@pytest.mark.long
def test_equal_layers_give_equal_signatures() -> None:
    signatures = [s.signature for s in converted(layers=5)[1]]
    assert signatures[1] == signatures[2] == signatures[3]
    assert len(set(signatures)) == 4
    assert signatures[1] not in {s.signature for s in converted(hidden=64)[1]}


def test_code_reads_in_the_order_of_the_work() -> None:
    lines = [line.strip() for line in converted()[1].slices[1].code.splitlines()]
    assert lines[0] == "def slice_1(hidden, positions, o, send):"
    assert "# hidden [R, 1, 32] float32" in lines
    order = [lines.index(next(x for x in lines if x.startswith(s))) for s in ("q_proj", "send.q(1, q)", "k_proj")]
    order += [lines.index("send.kv(1, k, v)"), lines.index("return hidden_1, positions")]
    assert order == sorted(order)


@pytest.mark.long
def test_too_few_operators_are_refused_by_name() -> None:
    with pytest.raises(ConversionError, match=r"expected 4 .* has 3 \(in: layers\.0\.attention, .*recurrent"):
        cut(Decoder(), expect=4)
    model = Decoder()
    model.layers = nn.ModuleList()
    with pytest.raises(ConversionError, match="at least 1"):
        cut(model)


def test_the_model_is_left_as_found() -> None:
    model = Decoder(fused="split")
    model.layers[0].eval()
    training = {n: m.training for n, m in model.named_modules()}
    versions = {n: (p.data_ptr(), p._version, p.requires_grad) for n, p in model.named_parameters()}
    program = cut(model)
    assert not any("dropout" in str(n.target) for s in program for n in s.module.graph.nodes)
    assert training == {n: m.training for n, m in model.named_modules()}
    assert versions == {n: (p.data_ptr(), p._version, p.requires_grad) for n, p in model.named_parameters()}


class Counting(nn.Module):
    """Keeps state outside of the KV cache."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.state.add_(1)
        return x * self.state


@pytest.mark.long
def test_state_outside_the_cache_is_refused() -> None:
    with pytest.raises(ConversionError, match=r"layers\.0\.mlp\.state"):
        cut(Decoder(mlp=Counting))


class InPlace(nn.Module):
    """Mutates an intermediate, which is harmless."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        y[..., :4] = 0.0
        return y.mul_(2.0)


@pytest.mark.long
def test_in_place_operators_are_made_functional() -> None:
    program = cut(Decoder(mlp=InPlace))
    targets = [n.target for s in program for n in s.module.graph.nodes if n.op == "call_function"]
    assert not any(isinstance(t, torch._ops.OpOverload) and t._schema.is_mutable for t in targets)
    assert torch.ops.aten.linear.default in targets


@pytest.mark.long
def test_meta_weights_give_a_plan() -> None:
    with torch.device("meta"):
        model = Decoder()
    program = cut(model)
    assert program.rows == "static"
    assert program.cuts == converted()[1].cuts
