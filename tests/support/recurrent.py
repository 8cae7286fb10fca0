"""Recurrent layers for tests: specs of every kind, random operands, and what they compute in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lamina.ops.recurrence.segments import ZEROS, Segment, Segments
from lamina.ops.recurrence.spec import RecurrenceSpec

SPECS = {
    "lfm2": RecurrenceSpec(kind="convolution", heads=40, width=3, silu=False),
    "lfm3": RecurrenceSpec(kind="convolution", heads=21, width=7, silu=False, bias=True),
    "qwen3_next": RecurrenceSpec(
        kind="gated_delta", heads=6, groups=3, heads_per_group=2, key_dim=32, value_dim=48, width=4, scale=32**-0.5
    ),
    "odd_sizes": RecurrenceSpec(
        kind="gated_delta", heads=3, groups=3, key_dim=7, value_dim=5, width=2, scale=7**-0.5, normalised=False,
        bias=True,
    ),
    "kimi_linear": RecurrenceSpec(
        kind="kimi_delta", heads=3, groups=3, key_dim=32, value_dim=32, width=4, scale=32**-0.5
    ),
    "bamba": RecurrenceSpec(
        kind="mamba2", heads=6, groups=1, heads_per_group=6, key_dim=16, value_dim=24, width=4, bias=True
    ),
    "nemotron_h": RecurrenceSpec(
        kind="mamba2", heads=8, groups=2, heads_per_group=4, key_dim=32, value_dim=16, width=4, bias=True,
        prompt_dt_least=0.3, prompt_dt_most=0.9,
    ),
    "plain_scan": RecurrenceSpec(
        kind="mamba2", heads=2, groups=2, key_dim=9, value_dim=19, width=5, softplus=False, dt_bias=False, skip=False
    ),
}  # fmt: skip
# Heads of sizes as published.
LARGE = {
    "qwen3_next_head": RecurrenceSpec(
        kind="gated_delta", heads=4, groups=2, heads_per_group=2, key_dim=128, value_dim=128, width=4, scale=128**-0.5
    ),
    "kimi_head": RecurrenceSpec(
        kind="kimi_delta", heads=2, groups=2, key_dim=128, value_dim=128, width=4, scale=128**-0.5
    ),
    "nemotron_head": RecurrenceSpec(
        kind="mamba2", heads=4, groups=1, heads_per_group=4, key_dim=128, value_dim=64, width=4, bias=True
    ),
}


class Layer(NamedTuple):
    """A layer with the rows of some sequences, one after the other."""

    spec: RecurrenceSpec
    static: dict[str, Tensor]
    inputs: dict[str, Tensor]


def make_layer(spec: RecurrenceSpec, rows: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Layer:
    """Draws operands as models have them: decays from nearly 0 to nearly 1."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    static = {name: normal(*shape) * 0.5 for name, shape in spec.static_shapes.items()}
    if "A" in static:
        static["A"] = -torch.exp(normal(spec.heads))
    inputs = {name: normal(rows, columns) for name, columns in spec.input_columns.items()}
    if "beta" in inputs:
        inputs["beta"] = inputs["beta"].sigmoid()
        inputs["g"] = -torch.exp(normal(*inputs["g"].shape) * 2 - 1)
    if "dt" in inputs and not spec.softplus:
        inputs["dt"] = inputs["dt"].abs()
    of_messages = {"x", "dt", "beta"}
    return Layer(spec, static, {n: t.to(dtype) if n in of_messages else t for n, t in inputs.items()})


def whole(count: int, first: int = 0, prompt: int | None = None, read: int = ZEROS, write: int = 0) -> Segment:
    """The segment of one sequence."""
    return Segment(first, count, count if prompt is None else prompt, read, write)


def new_states(spec: RecurrenceSpec, slots: int) -> Tensor:
    """Slots full of NaN: whatever is read without having been written shows."""
    return torch.full((slots, spec.state_size), float("nan"))


def cut(counts: Sequence[int], prompt: int, slots: int = 2) -> list[Segments]:
    """Returns one step for each chunk of one sequence's rows, with versions in turns in slots 0, 1, ..."""
    steps, at = [], 0
    for i, count in enumerate(counts):
        of_prompt = min(max(prompt - at, 0), count)
        read = ZEROS if i == 0 else (i - 1) % slots
        steps.append(Segments.of([Segment(at, count, of_prompt, read, i % slots)]))
        at += count
    return steps


class Exact(NamedTuple):
    out: NDArray[np.float64]  # [rows, columns]
    history: NDArray[np.float64]  # [width - 1, channels]
    state: NDArray[np.float64]  # [heads, K, V]


def in_float64(layer: Layer, prompt: int) -> Exact:
    """Computes one sequence by the definition, number by number of a head, in float64."""
    spec = layer.spec
    inputs = {name: t.double().numpy() for name, t in layer.inputs.items()}
    static = {name: t.double().numpy() for name, t in layer.static.items()}
    rows = len(inputs["x"])
    padded = np.concatenate([np.zeros((spec.width - 1, spec.channels)), inputs["x"]])
    y = np.zeros((rows, spec.channels))
    for t in range(rows):
        y[t] = (padded[t : t + spec.width] * static["weight"].T).sum(0) + static.get("bias", 0.0)
    if spec.silu:
        y = y / (1 + np.exp(-y))
    kept = padded[rows:]
    if spec.kind == "convolution":
        return Exact(y, kept, np.zeros((spec.heads, 0, 1)))
    k_all, v_all = spec.groups * spec.key_dim, spec.heads * spec.value_dim
    if spec.kind == "mamba2":
        v_rows, k_rows, q_rows = np.split(y, [v_all, v_all + k_all], axis=1)
    else:
        q_rows, k_rows, v_rows = np.split(y, [k_all, 2 * k_all], axis=1)
    s = np.zeros((spec.heads, spec.key_dim, spec.value_dim))
    out = np.zeros((rows, spec.heads, spec.value_dim))
    for t in range(rows):
        for h in range(spec.heads):
            group = (spec.first_head + h) // spec.heads_per_group
            q, k = (x[t].reshape(spec.groups, spec.key_dim)[group] for x in (q_rows, k_rows))
            v = v_rows[t].reshape(spec.heads, spec.value_dim)[h]
            if spec.kind == "mamba2":
                dt = inputs["dt"][t, h] + (static["dt_bias"][h] if spec.dt_bias else 0.0)
                dt = np.log1p(np.exp(dt)) if spec.softplus else dt
                if t < prompt:
                    dt = min(max(dt, spec.prompt_dt_least), spec.prompt_dt_most or np.inf)
                s[h] = np.exp(dt * static["A"][h]) * s[h] + np.outer(k, dt * v)
                out[t, h] = q @ s[h] + (static["D"][h] * v if spec.skip else 0.0)
                continue
            if spec.normalised:
                q, k = (x / np.sqrt((x * x).sum() + 1e-6) for x in (q, k))
            decay = np.exp(inputs["g"][t].reshape(spec.heads, -1)[h])
            s[h] = decay[:, None] * s[h]
            s[h] += np.outer(k, inputs["beta"][t, h] * (v - k @ s[h]))
            out[t, h] = spec.scale * (q @ s[h])
    return Exact(out.reshape(rows, -1), kept, s)
