"""Moving stored K to other positions: R(d) K(p) = K(p + d) for a rotary embedding (arXiv 2104.09864).

It rotates pairs of K's elements by angles that are proportional to the position, so stored K can be rotated further. Up
to rounding this is exact. Angles and their cosines are computed in fp64, products in fp32. K is rounded once when it is
stored again; K of 8 bits gets a new scale.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lamina.protocol.step_plan import Rotary

from .paged_cache import LayerCache
from .stored_format import dequantise, is_scaled, quantise


def rotate_keys(k: Tensor, rotary: Rotary, delta: int) -> Tensor:
    """Return R(delta) k, in fp32, for k [..., D] of any float dtype: K at a position that is ``delta`` higher."""
    out = k.to(torch.float32, copy=True)
    frequencies = np.frombuffer(rotary.frequencies, "<f8")
    if not len(frequencies):
        return out
    angles = torch.from_numpy(frequencies.astype(np.float64)) * delta
    cos, sin = (f(angles).to(torch.float32).to(out.device) for f in (torch.cos, torch.sin))
    low, pairs = rotary.start, len(frequencies)
    part = out[..., low : low + 2 * pairs]
    a, b = (part[..., ::2], part[..., 1::2]) if rotary.interleaved else (part[..., :pairs], part[..., pairs:])
    first, second = a * cos - b * sin, b * cos + a * sin
    a.copy_(first)
    b.copy_(second)
    return out


@torch.inference_mode()  # called on any thread
def rotate_blocks(kv: LayerCache, blocks: list[int], rotary: Rotary, delta: int) -> None:
    """Rotate stored K of whole ``blocks`` to positions that are ``delta`` higher. V does not depend on positions."""
    if not blocks or not rotary.frequencies:
        return
    ids = torch.tensor(blocks, device=kv.k.device)
    old = kv.k[ids]
    if not is_scaled(kv.k.dtype) or kv.scales is None:
        kv.k[ids] = rotate_keys(old, rotary, delta).to(kv.k.dtype)
        return
    numbers, scale = quantise(rotate_keys(dequantise(old, kv.scales.k[ids]), rotary, delta), kv.k.dtype)
    if kv.k.dtype.itemsize == 1 and kv.k.dtype.is_floating_point:  # float8 has no index_put
        kv.k.view(torch.int8)[ids] = numbers.view(torch.int8)
    else:
        kv.k[ids] = numbers
    kv.scales.k[ids] = scale
