"""The contract of lamina.ops.recurrence.RecurrenceBackend, run over every entry of the table.

The oracles are the functions of transformers' modeling files, which models compute with, and the definition in float64.
Covers: lamina/ops/recurrence/native.py, lamina/ops/recurrence/reference.py.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recurrent import LARGE, SPECS, Layer, cut, in_float64, make_layer, new_states, whole
from torch import Tensor

from lamina.ops.recurrence import BACKENDS, RecurrenceBackend, get
from lamina.ops.recurrence.parts import Part, heads, history
from lamina.ops.recurrence.segments import ZEROS, Segment, Segments
from lamina.ops.recurrence.spec import RecurrenceSpec

pytestmark = pytest.mark.no_retry

native = pytest.importorskip("lamina.ops.recurrence._recurrence", reason="the native module was not built")

ENTRIES = [*(name for name in BACKENDS if name != "cuda"), *(f"native/{variant}" for variant in native.usable())]
ALL = {**SPECS, **LARGE}
BOUND = 1e-5  # of fp32, relative to the largest number
# Modeling files that have functions of a kind, of their own.
FILES = {
    "convolution": ("lfm2", "lfm3"),
    "gated_delta": ("qwen3_next", "qwen3_5", "olmo_hybrid"),
    "kimi_delta": ("kimi_linear",),
    "mamba2": ("bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2"),
}


@cache
def open_entry(name: str) -> RecurrenceBackend:
    """Opens an entry of the table, or ``native/variant``."""
    if "/" in name:
        from lamina.ops.recurrence.native import NativeRecurrence

        return NativeRecurrence(2, name.partition("/")[2])
    return get(name, torch.device("cpu"))


def run(backend: RecurrenceBackend, layer: Layer, segments: Segments, states: Tensor) -> Tensor:
    return backend.update(layer.spec, layer.static, layer.inputs, segments, states)


def alone(backend: RecurrenceBackend, layer: Layer, prompt: int | None = None) -> tuple[Tensor, Tensor]:
    """Returns the output and the state after all rows of ``layer``, as one sequence."""
    states = new_states(layer.spec, 1)
    out = run(backend, layer, Segments.of([whole(len(layer.inputs["x"]), prompt=prompt)]), states)
    return out, numbers(layer.spec, states[0])


def numbers(spec: RecurrenceSpec, state: Tensor) -> Tensor:
    """All that a state holds, without the room between."""
    return torch.cat([history(spec, state).flatten(), heads(spec, state).flatten()])


def rows_of(layer: Layer, first: int, count: int) -> Layer:
    return layer._replace(inputs={name: t[first : first + count] for name, t in layer.inputs.items()})


def error(found: Tensor, right: Tensor) -> float:
    """The largest error, relative to the largest number."""
    assert found.shape == right.shape
    return float((found.double() - right.double()).abs().max() / right.abs().max())


def by_transformers(file: str, layer: Layer, prompt: int) -> tuple[Tensor, Tensor]:
    """Computes one sequence as a model's cached ``generate`` does: the prompt at once, then token by token."""
    module: Any = import_module(f"transformers.models.{file}.modeling_{file}")
    spec, static = layer.spec, layer.static
    x, act = layer.inputs["x"].T[None], "silu" if spec.silu else None
    past = torch.zeros(1, spec.channels, spec.width)
    weights = static["weight"], static.get("bias")
    parts = [module.causal_conv1d_fn(x[..., :prompt], *weights, activation=act)]
    past[..., max(spec.width - prompt, 0) :] = x[..., max(prompt - spec.width, 0) : prompt]
    tokens = x[..., prompt:].split(1, -1)
    parts += [module.causal_conv1d_update(token, past, *weights, activation=act) for token in tokens]
    y = torch.cat(parts, -1)[0].T
    if spec.kind == "convolution":
        return y, torch.empty(0)
    named = {name: y[:, first : first + size] for name, (first, size) in spec.channel_ranges.items()}
    q, k = (named[name].unflatten(-1, (spec.groups, spec.key_dim))[None] for name in "qk")
    v = named["v"].unflatten(-1, (spec.heads, spec.value_dim))[None]
    scan = scan_of_mamba2 if spec.kind == "mamba2" else scan_of_delta
    out, state = scan(module, layer, prompt, q, k, v)
    return out.flatten(1), state


def scan_of_delta(module: Any, layer: Layer, prompt: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    g = layer.inputs["g"][None]
    if layer.spec.kind == "kimi_delta":
        g = g.unflatten(-1, (layer.spec.heads, layer.spec.key_dim))
        chunked, stepped = module.chunk_kimi_delta_attention, module.recurrent_kimi_delta_attention
    else:
        chunked, stepped = module.torch_chunk_gated_delta_rule, module.torch_recurrent_gated_delta_rule
    operands = q, k, v, g, layer.inputs["beta"][None]
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": layer.spec.normalised}
    out, state = chunked(*(t[:, :prompt] for t in operands), initial_state=None, **options)
    outs = [out]
    for t in range(prompt, q.shape[1]):
        out, state = stepped(*(x[:, t : t + 1] for x in operands), initial_state=state, **options)
        outs.append(out)
    return torch.cat(outs, 1)[0], state[0]


def scan_of_mamba2(module: Any, layer: Layer, prompt: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    spec, static, dt = layer.spec, layer.static, layer.inputs["dt"][None]
    bounds = spec.prompt_dt_least, spec.prompt_dt_most or float("inf")
    out, state = module.mamba2_chunk_scan(
        v[:, :prompt], dt[:, :prompt], static["A"], k[:, :prompt], q[:, :prompt], chunk_size=8, D=static.get("D"),
        dt_bias=static.get("dt_bias"), dt_softplus=spec.softplus, dt_limit=bounds, return_final_states=True,
    )  # fmt: skip
    outs, wide = [out], (-1, spec.value_dim)
    heads = {name: static[name][:, None].expand(*wide) if name in static else None for name in ("D", "dt_bias")}
    for t in range(prompt, v.shape[1]):
        out = module.mamba2_selective_state_update(
            state, v[:, t], dt[:, t, :, None].expand(-1, *wide), static["A"][:, None, None].expand(*wide, spec.key_dim),
            k[:, t], q[:, t], heads["D"], dt_bias=heads["dt_bias"], dt_softplus=spec.softplus,
        )  # fmt: skip
        outs.append(out[None])
    return torch.cat(outs, 1)[0], state[0].mT


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(("name", "file"), [(name, file) for name, spec in ALL.items() for file in FILES[spec.kind]])
def test_tokens_of_transformers(entry: str, name: str, file: str) -> None:
    layer, prompt = make_layer(ALL[name], rows=14), 11
    out, state = alone(open_entry(entry), layer, prompt)
    right, right_state = by_transformers(file, layer, prompt)
    assert error(out, right) < BOUND
    if right_state.numel():
        assert error(state[-right_state.numel() :], right_state.flatten()) < BOUND


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("rows", [1, 2, 9])
def test_definition_in_float64(entry: str, name: str, rows: int) -> None:
    layer = make_layer(ALL[name], rows)
    out, state = alone(open_entry(entry), layer, rows // 2)
    right = in_float64(layer, rows // 2)
    assert error(out, torch.from_numpy(right.out)) < BOUND
    size = right.history.size
    assert torch.equal(state[:size].double(), torch.from_numpy(right.history).flatten())
    if right.state.size:
        assert error(state[size:], torch.from_numpy(right.state).flatten()) < BOUND


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", ["nemotron_h"])
def test_prompts_end_counts(entry: str, name: str) -> None:
    """Bounds of dt hold for tokens of the prompt alone: another end of it is another result."""
    layer = make_layer(SPECS[name], 6)
    outs = [alone(open_entry(entry), layer, prompt)[0] for prompt in range(7)]
    for prompt, (out, longer) in enumerate(pairwise(outs)):
        assert torch.equal(out[:prompt], longer[:prompt])
        assert not torch.equal(out[prompt], longer[prompt])


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SPECS)
def test_messages_of_16_bits(entry: str, name: str, dtype: torch.dtype) -> None:
    """They are computed in fp32 and rounded once."""
    layer = make_layer(SPECS[name], 7, dtype)
    exact = layer._replace(inputs={n: t.float() for n, t in layer.inputs.items()})
    out, state = alone(open_entry(entry), layer)
    wide, wide_state = alone(open_entry(entry), exact)
    assert out.dtype == dtype
    assert torch.equal(out, wide.to(dtype))
    assert torch.equal(state, wide_state)


@pytest.mark.parametrize("entry", ENTRIES)
@given(st.data())
@settings(max_examples=60)
def test_any_cut_into_chunks(entry: str, data: st.DataObject) -> None:
    spec = SPECS[data.draw(st.sampled_from(sorted(SPECS)))]
    counts = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    prompt = data.draw(st.integers(0, sum(counts)))
    layer, backend = make_layer(spec, sum(counts)), open_entry(entry)
    out, state = alone(backend, layer, prompt)
    states, at = new_states(spec, 2), 0
    for segments in cut(counts, prompt):
        n = segments.rows_end - at
        found = run(backend, layer, segments, states)
        assert torch.equal(found[at : at + n], out[at : at + n])
        at += n
    assert torch.equal(numbers(spec, states[(len(counts) - 1) % 2]), state)
    # The same chunks as segments of one step, each of which continues what the one before it writes.
    chained, at = [], 0
    for i, count in enumerate(counts):
        chained.append(Segment(at, count, min(max(prompt - at, 0), count), i - 1, i))
        at += count
    states = new_states(spec, len(counts))
    assert torch.equal(run(backend, layer, Segments.of(chained), states), out)
    assert torch.equal(numbers(spec, states[len(counts) - 1]), state)


@pytest.mark.parametrize("entry", ENTRIES)
@given(st.data())
@settings(max_examples=60)
def test_rows_among_others(entry: str, data: st.DataObject) -> None:
    """A sequence gets the same bits alone and among others, whatever these are, NaN included."""
    spec = SPECS[data.draw(st.sampled_from(sorted(SPECS)))]
    counts = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    layer, backend = make_layer(spec, sum(counts)), open_entry(entry)
    odd = data.draw(st.integers(0, len(counts)))  # its rows are NaN, if there is such a sequence
    starts = [sum(counts[:i]) for i in range(len(counts))]
    slots = data.draw(st.permutations(range(2 * len(counts))))
    before = torch.randn(len(counts), spec.state_size, generator=torch.Generator().manual_seed(1))
    states = new_states(spec, 2 * len(counts))
    segments = []
    for i, (first, count) in enumerate(zip(starts, counts, strict=True)):
        states[slots[2 * i]] = before[i]
        segments.append(Segment(first, count, count // 2, slots[2 * i], slots[2 * i + 1]))
        if i == odd:
            layer.inputs["x"][first : first + count] = float("nan")
    kept = states.clone()
    order = data.draw(st.permutations(segments))
    out = run(backend, layer, Segments.of(order), states)
    for i, (first, count, prompt, read, write) in enumerate(segments):
        own = new_states(spec, 2)
        own[1] = before[i]
        right = run(backend, rows_of(layer, first, count), Segments.of([Segment(0, count, prompt, 1, 0)]), own)
        found = out[first : first + count]
        assert torch.equal(found.isnan(), right.isnan())
        assert torch.equal(found.nan_to_num(), right.nan_to_num())
        assert torch.equal(numbers(spec, states[write]).nan_to_num(), numbers(spec, own[0]).nan_to_num())
        assert torch.equal(states[read].nan_to_num(), kept[read].nan_to_num())  # the old version is as it was
        assert i == odd or not found.isnan().any()


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", ["lfm3", "qwen3_next", "kimi_linear", "nemotron_h"])
def test_heads_of_workers(entry: str, name: str) -> None:
    """Workers with any heads compute together, bit for bit, what one computes with all of them."""
    spec, backend = SPECS[name], open_entry(entry)
    layer = make_layer(spec, 5)
    states = torch.randn(2, spec.state_size, generator=torch.Generator().manual_seed(1))
    segments = Segments.of([Segment(0, 5, 3, 0, 1)])
    before = states.clone()
    out = run(backend, layer, segments, states)
    together = torch.full_like(states[1], 0.0)
    for edges in ([0, 1, spec.heads], [0, spec.heads // 2, spec.heads - 1, spec.heads]):
        for first, end in pairwise(edges):
            part = Part.of(spec, first, end - first)
            own = part.take_state(before)
            inputs = {n: part.take_columns(n, t) for n, t in layer.inputs.items()}
            found = backend.update(part.spec, part.take_static(layer.static), inputs, segments, own)
            assert torch.equal(found, part.take_columns("out", out))
            part.put_state(own[1], together)
        assert torch.equal(numbers(spec, together), numbers(spec, states[1]))


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", LARGE)
def test_states_larger_than_caches(entry: str, name: str) -> None:
    """Decoding of many sequences, which may go past the caches, has the bits of one alone."""
    spec = LARGE[name]
    count = -(-(2**18) // spec.state_size)
    layer, backend = make_layer(spec, count), open_entry(entry)
    states = new_states(spec, 2 * count)
    states[:count] = torch.randn(count, spec.state_size, generator=torch.Generator().manual_seed(1))
    out = run(backend, layer, Segments.of([Segment(i, 1, 0, i, count + i) for i in range(count)]), states)
    for i in range(count):
        own = torch.cat([states[i : i + 1], new_states(spec, 1)])
        right = run(backend, rows_of(layer, i, 1), Segments.of([Segment(0, 1, 0, 0, 1)]), own)
        assert torch.equal(out[i], right[0])
        assert torch.equal(numbers(spec, states[count + i]), numbers(spec, own[1]))


@pytest.mark.parametrize("entry", ENTRIES)
def test_strided_rows(entry: str) -> None:
    """Inputs may be columns of a message."""
    spec = SPECS["qwen3_next"]
    layer, backend = make_layer(spec, 5), open_entry(entry)
    out, _ = alone(backend, layer)
    message = torch.cat([layer.inputs["x"], layer.inputs["g"], layer.inputs["beta"]], 1)
    x, g, beta = message.split([spec.channels, spec.heads, spec.heads], 1)
    found, _ = alone(backend, layer._replace(inputs={"x": x, "g": g, "beta": beta}))
    assert torch.equal(found, out)


@pytest.mark.parametrize("entry", ENTRIES)
def test_state_counts(entry: str) -> None:
    """A state of zeros in place of the real one changes the output: so do histories alone, and heads alone."""
    spec, backend = SPECS["qwen3_next"], open_entry(entry)
    layer = make_layer(spec, 4)
    first, rest = rows_of(layer, 0, 3), rows_of(layer, 3, 1)
    states = new_states(spec, 2)
    run(backend, first, Segments.of([whole(3)]), states)
    segments, known = Segments.of([Segment(0, 1, 0, 0, 1)]), states[0].clone()
    right = run(backend, rest, segments, states)
    for wipe in (history, heads):
        states[0] = known
        wipe(spec, states)[0] = 0.0
        assert not torch.equal(run(backend, rest, segments, states), right)


@pytest.mark.parametrize("entry", ENTRIES)
def test_decays_of_all_sizes(entry: str) -> None:
    """Decays to 0 and by 1, steps near 0 and large ones, are what float64 says."""
    for name in ("qwen3_next", "kimi_linear"):
        layer = make_layer(SPECS[name], 8)
        layer.inputs["g"].copy_(-torch.logspace(-8, 3, layer.inputs["g"].numel()).view_as(layer.inputs["g"]))
        assert error(alone(open_entry(entry), layer)[0], torch.from_numpy(in_float64(layer, 8).out)) < BOUND
    layer = make_layer(SPECS["bamba"], 8)
    layer.inputs["dt"].copy_(torch.linspace(-30, 30, layer.inputs["dt"].numel()).view_as(layer.inputs["dt"]))
    out, right = alone(open_entry(entry), layer)[0], torch.from_numpy(in_float64(layer, 8).out)
    for found, row in zip(out, right, strict=True):  # each one has its own size
        assert error(found, row) < BOUND


@pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear", "bamba"])
@pytest.mark.parametrize("entry", ENTRIES)
def test_inputs_go_by_name(entry: str, name: str) -> None:
    """In any order: g and beta of a gated delta rule have the same shape, and dt of Mamba-2 is not x."""
    layer = make_layer(SPECS[name], 8)
    turned = layer._replace(inputs=dict(reversed(layer.inputs.items())))
    assert torch.equal(alone(open_entry(entry), turned)[0], alone(open_entry(entry), layer)[0])


@pytest.mark.parametrize("entry", ENTRIES)
def test_operands_that_do_not_fit(entry: str) -> None:
    spec, backend = SPECS["bamba"], open_entry(entry)
    layer, states, one = make_layer(spec, 3), new_states(spec, 2), Segments.of([whole(3)])
    short = {**layer.static, "A": layer.static["A"][:-1]}
    with pytest.raises(ValueError, match=r"operands of a recurrence have shapes .*'A': \(5,\)"):
        backend.update(spec, short, layer.inputs, one, states)
    with pytest.raises(ValueError, match="inputs of a recurrence have shapes"):
        backend.update(spec, layer.static, {"x": layer.inputs["x"]}, one, states)
    with pytest.raises(ValueError, match="segments have 4 rows, and inputs of a recurrence have 3"):
        run(backend, layer, Segments.of([whole(4)]), states)
    with pytest.raises(ValueError, match=r"states \[3, \d+\] are needed, and there are \[2, \d+\]"):
        run(backend, layer, Segments.of([Segment(0, 3, 3, ZEROS, 2)]), states)
    for other in (states.double(), torch.cat([states, states], 1)[:, ::2]):
        with pytest.raises(ValueError, match="states are fp32 without gaps"):
            run(backend, layer, one, other)


@pytest.mark.parametrize("name", ALL)
def test_instruction_sets_with_fused_products_agree(name: str) -> None:
    """A sequence can move between workers of different CPUs."""
    if not {"avx2", "avx512"} <= {*native.usable()}:
        pytest.skip("this CPU has no AVX-512")
    layer = make_layer(ALL[name], 37)
    results = [alone(open_entry(f"native/{variant}"), layer, 20) for variant in ("avx2", "avx512")]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_numbers_of_16_bits(entry: str, dtype: torch.dtype) -> None:
    """All are read and rounded as torch does: subnormal ones, infinities, NaN, and halves that are too large."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)[None]
    spec = RecurrenceSpec(kind="convolution", heads=2**16, width=2, silu=False)
    for factor in (1.0, 1.0009, 0.4995):
        layer = Layer(spec, {"weight": torch.tensor([[0.0, factor]]).repeat(2**16, 1)}, {"x": numbers})
        out, _ = alone(open_entry(entry), layer)
        right = (numbers.float() * factor).to(dtype)
        assert torch.equal(out.isnan(), right.isnan())
        assert torch.equal(out.nan_to_num(), right.nan_to_num())


def test_unknown_entry() -> None:
    with pytest.raises(ValueError, match="unknown recurrence backend 'other'; choose one of auto"):
        get("other", torch.device("cpu"))
