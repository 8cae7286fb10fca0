"""The rotation of a model's keys with their position, read from its own rotary modules, and proved.

Nothing here depends on a family. A row that attends to itself alone has the same O in every layer at any position: its
own V. So rows of the same token at several positions give all layers equal inputs. Then K of a layer must be R(d) K(p),
and V must be the same. The model's rotary modules give the frequencies. The rotated elements, and their pairs, are
found by trying. An error names a layer in which nothing fits, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lamina.kv.rope_shift import rotate_keys
from lamina.protocol.step_plan import LayerShape, Rotary

from .errors import UnsupportedModelError

TOKENS = (1, 7)  # any tokens will do that the slices have embeddings of
SLACK = 16.0  # times the rounding error
ANGLE_ERROR = 2.0**-22  # radians a position, since models compute angles in fp32


class _LayerKV(NamedTuple):
    k: Tensor  # [positions, Hkv, D] fp32
    v: Tensor  # V in the same layout


def find_rotary(
    program: Any,
    model: nn.Module,
    layers: Sequence[LayerShape],
    dtype: torch.dtype,
    max_len: int,
    device: torch.device,
    tokens: Sequence[int] = TOKENS,
) -> list[LayerShape]:
    """Return ``layers`` with the rotation of their keys. ``program``: slices that can run, without other ranks;
    ``tokens``: some that they have embeddings of. Raises UnsupportedModelError if stored keys cannot be rotated.
    """
    import msgspec

    positions = sorted({0, 1, 2, 5, max_len // 3, max_len // 2, max_len - 1})
    runs = [_run(program, layers, token, positions, dtype, device) for token in tokens]
    known = list(_frequencies(model))
    proved = list[LayerShape]()
    for number, layer in enumerate(layers):
        seen = [run[number] for run in runs]
        proved.append(msgspec.structs.replace(layer, rotary=_rotary(number, layer, seen, positions, known, dtype)))
    return proved


@torch.inference_mode()
def _run(
    program: Any,
    layers: Sequence[LayerShape],
    token: int,
    positions: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> list[_LayerKV]:
    rows, sends = len(positions), _CapturedKv()
    ids = torch.full((rows, 1), token, device=device)
    inputs: tuple[Tensor, ...] = (ids, torch.tensor([[p] for p in positions], device=device))
    for number, layer in enumerate(layers):
        carry = program.slices[number](*inputs, sends)
        v = sends.v.view(rows, layer.kv_heads, layer.v_dim)
        o = v.repeat_interleave(layer.q_heads // layer.kv_heads, dim=1).unsqueeze(1)
        inputs = (*carry, o.to(dtype).contiguous())
    return sends.seen


class _CapturedKv:
    """Records what slices send."""

    def __init__(self) -> None:
        self.seen: list[_LayerKV] = []
        self.v = torch.empty(0)

    def q(self, layer: int, q: Tensor) -> None:
        """Ignore Q, which does not matter for the rotation of keys."""

    def kv(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Record k [R, Hkv, 1, D] and v [R, Hkv, 1, Dv]."""
        self.v = v.clone()
        self.seen.append(_LayerKV(*(x[:, :, 0].to("cpu", torch.float32, copy=True) for x in (k, v))))


def _frequencies(model: nn.Module) -> Iterator[bytes]:
    """Yield the frequencies of all rotary modules, equal ones once, as bytes: fp64, little-endian."""
    buffers = dict[bytes, None]()
    for name, buffer in model.named_buffers():
        if name.rpartition(".")[2].endswith("inv_freq") and "original" not in name and not buffer.is_meta:
            buffers[buffer.detach().to("cpu", torch.float64).numpy().astype("<f8").tobytes()] = None
    yield from buffers


def _rotary(
    number: int,
    layer: LayerShape,
    seen: Sequence[_LayerKV],
    positions: Sequence[int],
    known: Sequence[bytes],
    dtype: torch.dtype,
) -> Rotary:
    eps = torch.finfo(dtype).eps
    if not any(s.k.any() for s in seen):
        raise _refused(number, "its K is zero, which proves nothing")
    if any(_differs(s.v, s.v[:1].expand_as(s.v), eps, 0.0) for s in seen):
        raise _refused(number, "its V depends on the position")
    for rotary in [Rotary(b""), *_candidates(layer.qk_dim, known)]:
        if all(_holds(s.k, rotary, positions, eps) for s in seen):
            return rotary
    raise _refused(number, "no rotation by the model's own frequencies takes its K from one position to another")


def _candidates(width: int, known: Sequence[bytes]) -> Iterator[Rotary]:
    for frequencies, interleaved in product(known, (False, True)):
        turned = 2 * len(np.frombuffer(frequencies, "<f8"))
        for start in dict.fromkeys((0, width - turned)):
            if 0 <= start <= width - turned:
                yield Rotary(frequencies, start, interleaved)


def _holds(k: Tensor, rotary: Rotary, positions: Sequence[int], eps: float) -> bool:
    """Return whether R(q - p) K(p) is K(q), for all neighbouring positions and for the two ends."""
    pairs = [*zip(range(len(positions) - 1), range(1, len(positions)), strict=True), (len(positions) - 1, 0)]
    return not any(
        _differs(rotate_keys(k[a], rotary, positions[b] - positions[a]), k[b], eps, max(positions[a], positions[b]))
        for a, b in pairs
    )


def _differs(a: Tensor, b: Tensor, eps: float, position: float) -> bool:
    """Return whether rows [..., D] differ more than the rounding of elements and angles explains."""
    size = torch.maximum(a.abs().amax(-1), b.abs().amax(-1))
    limit = (SLACK * eps + SLACK * ANGLE_ERROR * position) * size
    return bool(((a - b).abs().amax(-1) > limit).any())


def _refused(number: int, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"--context-overflow truncate moves stored keys to other positions, and layer {number} does not allow that: "
        f"{reason}; use --context-overflow refuse"
    )
