"""The reference backend: plain torch on any device, one token of all sequences at a time.

It uses only operations on single elements, since how torch sums or computes exp may depend on the place of a number in
a tensor. Sums are made of halves, exp and log of products and sums.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from . import RecurrenceBackend, check_operands
from .parts import heads, history
from .segments import Ints, Segments
from .spec import RecurrenceSpec

EPSILON = 1e-6  # of normalised q and k
SAME_BEYOND = 20.0  # softplus(x) = x, as in torch


def open_backend(device: torch.device) -> ReferenceRecurrence:
    """Open the backend on ``device``."""
    return ReferenceRecurrence()


class ReferenceRecurrence(RecurrenceBackend):
    """The ``RecurrenceBackend`` in plain torch, with which others are compared."""

    def update(
        self,
        spec: RecurrenceSpec,
        static: dict[str, Tensor],
        inputs: dict[str, Tensor],
        segments: Segments,
        states: Tensor,
    ) -> Tensor:
        rows = check_operands(spec, static, inputs, segments, states)
        static = {name: t.float() for name, t in static.items()}
        x = inputs["x"].float()
        out = x.new_zeros(rows, spec.output_columns)
        for wave in segments.waves:
            self._update_wave(spec, static, {**inputs, "x": x}, _chosen(segments, wave), states, out)
        return out.to(inputs["x"].dtype)

    def _update_wave(
        self,
        spec: RecurrenceSpec,
        static: dict[str, Tensor],
        inputs: dict[str, Tensor],
        segments: Segments,
        states: Tensor,
        out: Tensor,
    ) -> None:
        before = states[torch.from_numpy(segments.read).to(states.device)]  # a copy; -1 is replaced
        before[torch.from_numpy(segments.read < 0).to(states.device)] = 0.0
        rows = np.concatenate([np.arange(f, f + n) for f, n in zip(segments.first, segments.rows, strict=True)])
        y, kept = convolve(spec, static, inputs["x"], segments, history(spec, before))
        if spec.kind == "convolution":
            out[rows] = y
        else:
            after = heads(spec, before)
            step = STEPS[spec.kind](spec, static, {name: t[rows].float() for name, t in inputs.items()}, y)
            place = np.cumsum(segments.rows) - segments.rows  # of each segment's first row in y
            for t in range(int(segments.rows.max())):
                still = np.flatnonzero(segments.rows > t)
                of = torch.from_numpy(place[still] + t)
                s, o = step(after[still], of, torch.from_numpy(t < segments.prompt[still])[:, None])
                after[still] = s
                out[rows[of.numpy()]] = o.flatten(1)
        history(spec, before).copy_(kept)
        states[torch.from_numpy(segments.write).to(states.device)] = before


def convolve(
    spec: RecurrenceSpec, static: dict[str, Tensor], x: Tensor, segments: Segments, before: Tensor
) -> tuple[Tensor, Tensor]:
    """Return y of all segments' rows [rows, channels], one segment after the other, and the last rows of x after each
    segment. ``before``: those that the segments continue, [segments, width - 1, channels].
    """
    kept = spec.width - 1
    known = torch.cat([x, before.flatten(0, 1)])
    lines: list[Ints] = []  # of each segment, its rows of ``known``
    for i, (first, count) in enumerate(zip(segments.first, segments.rows, strict=True)):
        lines.append(np.r_[len(x) + i * kept : len(x) + (i + 1) * kept, first : first + count])
    y: Tensor | None = None
    for j in range(spec.width):
        tap = known[np.concatenate([line[j : len(line) - kept + j] for line in lines])] * static["weight"][:, j]
        y = tap if y is None else y + tap
    assert y is not None
    if spec.bias:
        y = y + static["bias"]
    return y * sigmoid(y) if spec.silu else y, known[np.stack([line[len(line) - kept :] for line in lines])]


# Of S [sequences, heads, K, V], one row of each sequence, and whether it belongs to the prompt [sequences, 1]: the next
# S, and the output [sequences, heads, V].
Step = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def delta_step(spec: RecurrenceSpec, static: dict[str, Tensor], inputs: dict[str, Tensor], y: Tensor) -> Step:
    """Return the step of ``gated_delta`` and ``kimi_delta`` by rows of ``inputs`` and ``y``."""
    q, k, v = _by_head(spec, y)
    if spec.normalised:
        q, k = normalise(q), normalise(k)
    q = q * spec.scale
    g, beta = exp(inputs["g"]).reshape(len(y), spec.heads, -1, 1), inputs["beta"]

    def step(s: Tensor, of: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        s = s * g[of]
        seen = halves(s * k[of].unsqueeze(-1))
        s = s + k[of].unsqueeze(-1) * ((v[of] - seen) * beta[of].unsqueeze(-1)).unsqueeze(-2)
        return s, halves(s * q[of].unsqueeze(-1))

    return step


def mamba2_step(spec: RecurrenceSpec, static: dict[str, Tensor], inputs: dict[str, Tensor], y: Tensor) -> Step:
    """Return the step of ``mamba2`` by rows of ``inputs`` and ``y``."""
    q, k, v = _by_head(spec, y)
    size = inputs["dt"] + static["dt_bias"] if spec.dt_bias else inputs["dt"]
    size = softplus(size) if spec.softplus else size
    bounded = size.clamp(spec.prompt_dt_least, spec.prompt_dt_most or None)

    def step(s: Tensor, of: Tensor, of_prompt: Tensor) -> tuple[Tensor, Tensor]:
        dt = torch.where(of_prompt.to(s.device), bounded[of], size[of])
        u = dt.unsqueeze(-1) * v[of]
        s = s * exp(dt * static["A"])[..., None, None] + k[of].unsqueeze(-1) * u.unsqueeze(-2)
        o = halves(s * q[of].unsqueeze(-1))
        return s, o + static["D"][:, None] * v[of] if spec.skip else o

    return step


STEPS: dict[str, Callable[[RecurrenceSpec, dict[str, Tensor], dict[str, Tensor], Tensor], Step]] = {
    "gated_delta": delta_step,
    "kimi_delta": delta_step,
    "mamba2": mamba2_step,
}


def halves(x: Tensor) -> Tensor:
    """Return the sum of x [..., K, V] over K: halves are added up until one number is left."""
    while (n := x.shape[-2]) > 1:
        half = n // 2
        low = x[..., :half, :] + x[..., half : 2 * half, :]
        x = torch.cat([low, x[..., 2 * half :, :]], -2) if n % 2 else low
    return x.squeeze(-2)


def normalise(x: Tensor) -> Tensor:
    """Return x [..., K] / sqrt(sum of its squares + EPSILON)."""
    total = halves((x * x).unsqueeze(-1)) + EPSILON
    return x / total.double().sqrt().float()  # the root of a double is rounded right in any place


def exp(x: Tensor) -> Tensor:
    """Return exp(x) in fp32: 2^n e^r with x = n ln 2 + r; the power in two halves, as it may be below 2^-126."""
    x = x.clamp(-104.0, 89.0)
    n = torch.round(x * 1.44269504)
    r = (x - n * 0.693145751953125) - n * 1.42860677e-6
    p = torch.full_like(r, 0.000198412698)
    for c in (0.00138888889, 0.00833333333, 0.0416666667, 0.166666667, 0.5, 1.0, 1.0):
        p = p * r + c
    whole = n.nan_to_num().int()
    half = whole >> 1
    return p * _power(half) * _power(whole - half)


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + exp(-x))


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + exp(x)); x itself beyond SAME_BEYOND."""
    e = exp(x.clamp(max=SAME_BEYOND))
    u = 1.0 + e
    # What 1 + e has lost by rounding, the quotient gives back (Kahan).
    return torch.where(x > SAME_BEYOND, x, torch.where(u == 1.0, e, log(u) * (e / (u - 1.0))))


def log(x: Tensor) -> Tensor:
    """Return log(x) of x >= 1 in fp32, after Cephes (Moshier, Methods and Programs for Mathematical Functions)."""
    bits = x.contiguous().view(torch.int32) - 0x3F3504F3  # of sqrt(1/2): the mantissa becomes sqrt(1/2) .. sqrt(2)
    e = (bits >> 23).float()
    r = ((bits & 0x7FFFFF) + 0x3F3504F3).view(torch.float32) - 1.0
    z = r * r
    p = torch.full_like(r, 7.0376836292e-2)
    for c in (
        -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1, 2.0000714765e-1,
        -2.4999993993e-1, 3.3333331174e-1,
    ):  # fmt: skip
        p = p * r + c
    return e * 0.693359375 + (r + (z * -0.5 + (e * -2.12194440e-4 + p * r * z)))


def _power(n: Tensor) -> Tensor:
    return ((n + 127) << 23).view(torch.float32)


def _by_head(spec: RecurrenceSpec, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k [rows, heads, K] and v [rows, heads, V] of y."""
    group = (torch.arange(spec.heads, device=y.device) + spec.first_head) // spec.heads_per_group
    by_name = {name: y.narrow(-1, *of) for name, of in spec.channel_ranges.items()}
    q, k = (by_name[name].reshape(-1, spec.groups, spec.key_dim)[:, group] for name in "qk")
    return q, k, by_name["v"].reshape(-1, spec.heads, spec.value_dim)


def _chosen(segments: Segments, numbers: Ints) -> Segments:
    return Segments(segments.table[numbers])
