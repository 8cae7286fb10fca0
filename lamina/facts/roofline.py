"""The roofline of one decode step on two kinds of devices, and the network that it needs (arXiv 2405.01814, section 3).

Everything here is modelled: peak rates of the devices, no launch cost, perfect overlap within an operator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .hardware import Device

ALPHA = 0.2  # part of the step's time that the paper allows for the network


@dataclass(frozen=True, kw_only=True)
class GemmWork:
    """A product with weights: their bytes, bytes of one weight, and FLOPs for one token."""

    weight_bytes: int
    itemsize: int
    flops_per_token: int


@dataclass(frozen=True, kw_only=True)
class AttentionWork:
    """Attention of one layer. ``kv_bytes``: read for each stored token in its stored form, with scales. ``flops``: for
    each token. ``window``: tokens seen, 0: all. ``message_bytes``: for each token.
    """

    kv_bytes: int
    flops: int
    window: int
    message_bytes: int


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One step of ``batch`` sequences of ``length`` stored tokens on ``num_compute`` and ``num_memory`` devices.

    Times are seconds, sizes bytes, rates bytes per second. With ``min_bandwidth`` all messages of the step take ALPHA
    times the rest of it. ``network_s`` is their time over the network cards, None if a device states none.
    ``compute_bound`` is the share of the model's time spent in GEMMs limited by FLOP/s rather than by memory.
    """

    batch: int
    length: int
    num_compute: int
    num_memory: int
    model_s: float
    compute_bound: float
    attention_s: float
    attention_bound: str
    message_bytes: int
    min_bandwidth: float
    network_s: float | None
    weight_bytes: int
    kv_bytes: int
    compute_needed: int
    memory_needed: int

    @property
    def step_s(self) -> float:
        """The time of model, attention and network one after the other: one batch, nothing overlapped."""
        return self.model_s + self.attention_s + (self.network_s or 0.0)


def min_bandwidth(message_bytes: float, model_s: float, attention_s: float) -> float:
    """Return (2 + 2/G) e d B L / (ALPHA (MTIME + ATIME)) in bytes per second; ``message_bytes`` is the numerator."""
    return message_bytes / (ALPHA * (model_s + attention_s))


def bytes_and_flops(weight_bytes: int, itemsize: int, flops_per_row: int, rows: float) -> tuple[float, float]:
    """Return, for one product, the bytes of the weights that some row needs, all of which are read, and the FLOPs.

    With experts a row needs a share of the weights, and few rows need less than all. If each expert is equally likely,
    a part (1 - share) ** rows of the weights is needed by no row.
    """
    flops, share = flops_per_row * rows, flops_per_row / 2 * itemsize / weight_bytes
    return weight_bytes * (1 - (1 - share) ** rows if share < 1 else min(1.0, rows * share)), flops


def gemm_seconds(work: GemmWork, batch: int, device: Device, count: int) -> tuple[float, bool]:
    """Return the time of one GEMM spread over ``count`` devices, and whether FLOP/s limit it."""
    touched, flops = bytes_and_flops(work.weight_bytes, work.itemsize, work.flops_per_token, batch)
    reading = touched / (device.bandwidth_gbs * 1e9 * count)
    computing = flops / (device.tflops * 1e12 * count)
    return max(reading, computing), computing > reading


def attention_seconds(
    layers: Sequence[AttentionWork], batch: int, length: int, device: Device, count: int
) -> tuple[float, str]:
    """Return the time of attention over all layers, and which of "memory" and "compute" limits it."""
    tokens = [batch * (min(length, w.window) if w.window else length) for w in layers]
    reading = sum(t * w.kv_bytes for t, w in zip(tokens, layers, strict=True)) / (device.bandwidth_gbs * 1e9 * count)
    computing = sum(t * w.flops for t, w in zip(tokens, layers, strict=True)) / (device.tflops * 1e12 * count)
    return max(reading, computing), "memory" if reading >= computing else "compute"


def estimate(
    gemms: Sequence[GemmWork],
    layers: Sequence[AttentionWork],
    weight_bytes: int,
    *,
    compute: Device,
    memory: Device,
    num_compute: int,
    num_memory: int,
    batch: int,
    length: int,
) -> Estimate:
    """Model one step. ``weight_bytes`` counts all weights, for the number of devices that hold them."""
    times = [gemm_seconds(g, batch, compute, num_compute) for g in gemms]
    model_s = sum(t for t, _ in times)
    attention_s, attention_bound = attention_seconds(layers, batch, length, memory, num_memory)
    message_bytes = batch * sum(w.message_bytes for w in layers)
    stored = [min(length, w.window) if w.window else length for w in layers]
    kv_bytes = batch * sum(s * w.kv_bytes for s, w in zip(stored, layers, strict=True))
    network_s = None
    if compute.network_gbs and memory.network_gbs:
        network_s = message_bytes / (min(num_compute * compute.network_gbs, num_memory * memory.network_gbs) * 1e9)
    return Estimate(
        batch=batch,
        length=length,
        num_compute=num_compute,
        num_memory=num_memory,
        model_s=model_s,
        compute_bound=sum(t for t, bound in times if bound) / model_s if model_s else 0.0,
        attention_s=attention_s,
        attention_bound=attention_bound,
        message_bytes=message_bytes,
        min_bandwidth=min_bandwidth(message_bytes, model_s, attention_s),
        network_s=network_s,
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
        compute_needed=math.ceil(weight_bytes / (compute.memory_gb * 1e9)),
        memory_needed=math.ceil(kv_bytes / (memory.memory_gb * 1e9)),
    )
