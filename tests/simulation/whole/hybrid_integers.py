"""The model of integers with recurrent layers. Of a layer all tokens so far make the state, so a wrong version shows in
all later tokens.

The recurrence is the shipped one, with decay 1 and a convolution of two tokens. All numbers stay below 2^24, up to
which fp32 is exact.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lamina.ops.recurrence.spec import RecurrenceSpec
from lamina.protocol.mixers import Exchange, MixerShape, RecurrentLayers

from .integers import KV_HEADS, LAYERS, PRIME, IntegerModel, PlainAttention

KEYS, VALUES, LARGEST_VALUE = 4, 4, 199
SPEC = RecurrenceSpec(
    kind="mamba2", heads=KV_HEADS, width=2, groups=1, heads_per_group=KV_HEADS, key_dim=KEYS, value_dim=VALUES,
    silu=False, softplus=False, dt_bias=False, skip=False,
)  # fmt: skip
MIXERS = {0: 0, LAYERS - 1: 1}  # exchange -> recurrent layer; the other exchanges have attention alone
VERSION_BYTES = len(MIXERS) * SPEC.state_bytes
FACTORS = 2_654_435_761, 40_503  # of numbers in messages


class HybridIntegers(IntegerModel):
    """The model, of one rank."""

    recurrent = RecurrentLayers(
        [Exchange(layer, MIXERS.get(layer, -1)) for layer in range(LAYERS)],
        [MixerShape(SPEC.encode(), ["float32"] * 2, ["float32"] * 2)] * len(MIXERS),
        [[torch.ones(SPEC.channels, SPEC.width), torch.zeros(KV_HEADS)]] * len(MIXERS),
    )

    def plain_operators(self) -> PlainAttention:
        return _PlainOperators(self.windows)

    def _send(self, layer: int, x: Tensor, positions: Tensor, send: Any) -> tuple[Tensor, ...]:
        carried = super()._send(layer, x, positions, send)
        if layer in MIXERS:
            send.mix(layer, *_inputs(x, layer))
        return carried

    def _absorb(self, layer: int, x: Tensor, positions: Tensor, *received: Tensor) -> Tensor:
        o, *mixed = received
        added = super()._absorb(layer, x, positions, o)
        for out in mixed:
            places = torch.arange(1, KV_HEADS * VALUES + 1)
            added += (out.reshape(len(x), -1).round().to(torch.int64) * places * 65_537).sum(1, keepdim=True)
        return added % PRIME


def _inputs(x: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """Returns what a recurrent layer gets of rows [R, 1]: numbers in v, and small ones in k, q and dt."""
    each = x * FACTORS[0] + (torch.arange(SPEC.channels + KV_HEADS) + 31 * layer) * FACTORS[1]
    mixed, few = each % PRIME, SPEC.channel_ranges["v"].size
    v, rest = mixed[:, :few] % LARGEST_VALUE, mixed[:, few : SPEC.channels] // 7 % 3
    return torch.cat([v, rest], 1).to(torch.float32), (mixed[:, SPEC.channels :] // 11 % 3 + 1).to(torch.float32)


class _PlainOperators(PlainAttention):
    """Attention and recurrent layers of one sequence, all of whose rows are there."""

    def __init__(self, windows: Any) -> None:
        super().__init__(windows)
        self._mixed: list[Tensor] = []

    def mix(self, layer: int, x: Tensor, dt: Tensor) -> None:
        """The inputs of all rows."""
        before = torch.cat([torch.zeros(1, x.shape[1]), x[:-1]])
        y, at = (x + before).to(torch.float64), SPEC.channel_ranges
        v, k, q = (y[:, at[name].first : at[name].first + at[name].size] for name in "vkq")
        u = v.view(len(x), KV_HEADS, VALUES) * dt.unsqueeze(2)
        state = torch.einsum("rk,rhv->rhkv", k, u).cumsum(0)
        self._mixed = [torch.einsum("rk,rhkv->rhv", q, state)]

    def outputs(self) -> tuple[Tensor, ...]:
        """All that an exchange returns."""
        mixed, self._mixed = self._mixed, []
        return (self.o(), *mixed)
