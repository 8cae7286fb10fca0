"""A model in slices that computes in integers. A row's result depends on each token that the row has seen, so a wrong
block of any layer shows in all later tokens.

Attention is the shipped one. Of two query heads of a KV head the first has a query of zeros. Its output is the mean of
V, and times their number the sum, once rounded. The second one's query is the code of a position, as K is: it gets the
V of that one position, since all others have e^-40 of its weight. Which position that is depends on all before.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding

from lamina.converter.graph import RowTensor
from lamina.ops.attention.spec import AttentionSpec
from lamina.ops.collective import RankCollectives
from lamina.protocol.mixers import NO_RECURRENT_LAYERS
from lamina.protocol.step_plan import LayerShape
from simulation.model import EOS, VOCAB

PRIME = 2_147_483_647
LAYERS = 3
KV_HEADS, BITS, V_DIM = 2, 8, 4
LARGEST = 1009  # below which numbers in V are
LOUD = 20.0  # of a query that asks for one position
NUMBERS = torch.int64


def token_bytes(kv_heads: int) -> int:
    """Returns the bytes of K and V of one token in a layer."""
    return kv_heads * (BITS + V_DIM) * torch.float32.itemsize


class _Factors(NamedTuple):
    """The factors of one layer, by KV head."""

    v: Tensor  # [KV_HEADS, V_DIM]: what makes the numbers in V
    at: Tensor  # [KV_HEADS]: which position is asked for
    o: Tensor  # [KV_HEADS, 2, V_DIM]: what O adds

    def of_rank(self, rank: int, size: int) -> _Factors:
        """A rank's own heads."""
        count = KV_HEADS // size
        first = rank * count
        return _Factors(*(x[first : first + count] for x in self))


@cache
def _factors(layer: int) -> _Factors:
    rng = random.Random(layer)

    def some(count: int, most: int) -> Tensor:
        return torch.tensor([rng.randrange(1, most) for _ in range(count)])

    v, at, o = some(KV_HEADS * V_DIM, PRIME), some(KV_HEADS, PRIME), some(2 * KV_HEADS * V_DIM, 1 << 20)
    return _Factors(v.view(KV_HEADS, V_DIM), at, o.view(2, KV_HEADS, V_DIM).transpose(0, 1).contiguous())


@cache
def _codes() -> Tensor:
    """[1 << BITS, BITS]: of each position, in 1 and -1."""
    bit = 2 ** torch.arange(BITS)
    return ((torch.arange(1 << BITS).unsqueeze(1) & bit) > 0).to(torch.float32) * 2 - 1


@cache
def _asking() -> Tensor:
    """[1 << BITS, 2 * BITS]: the queries of a KV head that ask for the mean, and for that position."""
    return torch.cat([torch.zeros(1 << BITS, BITS), _codes() * LOUD], 1)


@cache
def _seen(window: int) -> Tensor:
    """[1 << BITS]: how many positions a row at each sees."""
    seen = torch.arange(1, (1 << BITS) + 1)
    return seen.clamp(max=window) if window else seen


@cache
def _counts(window: int) -> Tensor:
    """[1 << BITS, 2], float64: of a row at each position, how many of what O has make the sums."""
    seen = _seen(window).to(torch.float64)
    return torch.stack([seen, torch.ones_like(seen)], 1)


@dataclass(eq=False)
class IntegerModel:
    """A SlicedProgram, as far as a compute worker uses one, and what is known of a loaded model. ``windows``: of the
    layers. With several ranks each has its KV heads, and its part of the logits. ``slices``: of a stage; empty = all.
    """

    windows: Sequence[int]
    rank: int = 0
    size: int = 1
    slices: Sequence[Any] = ()
    group: RankCollectives | None = None  # the other ranks

    vocab_size, eos_token_ids, weight_bytes = VOCAB, (EOS,), 0
    recurrent = NO_RECURRENT_LAYERS

    def __post_init__(self) -> None:
        rank, size, windows = self.rank, self.size, self.windows
        self.windows = [windows[layer % len(windows)] for layer in range(LAYERS)]
        self._rank, self._size, self._heads = rank, size, KV_HEADS // size
        self.layers = [
            LayerShape(2 * self._heads, self._heads, BITS, V_DIM, AttentionSpec(scale=1.0, window=w).encode())
            for w in self.windows
        ]
        self.slices = self.slices or [self._first, *(self._middle(layer) for layer in range(LAYERS - 1)), self._last]
        carried = tuple(RowTensor(name, (1,), NUMBERS) for name in ("state", "position"))
        self.cuts = [_IntegerCut(carried)] * LAYERS
        self.calls = [_IntegerCall(RowTensor("o", (1, 2 * self._heads, V_DIM), torch.float32))] * LAYERS
        self._of = [_factors(layer).of_rank(rank, size) for layer in range(LAYERS)]

    def of_rank(self, rank: int, size: int) -> IntegerModel:
        """A rank's part of it; its slices meet those of others in ``group``."""
        return type(self)(self.windows, rank, size)

    @property
    def config(self) -> IntegerModel:
        """Returns the config that a Hugging Face model would have."""
        return self

    def get_text_config(self) -> IntegerModel:
        """Returns itself, as a config of Hugging Face does."""
        return self

    def right(self, prompt: Sequence[int], tokens: Sequence[int]) -> bool:
        """Returns whether greedy ``tokens`` are what follows ``prompt``: by one pass over all, with
        attention in fp64.
        """
        ids = torch.tensor([*prompt, *tokens]).unsqueeze(1)
        plain, positions = self.plain_operators(), torch.arange(len(ids)).unsqueeze(1)
        carry = self._first(ids, positions, plain)
        for layer in range(1, LAYERS):
            carry = self.slices[layer](*carry, *plain.outputs(), plain)
        (logits,) = self.slices[-1](*carry, *plain.outputs())
        drawn: list[int] = logits[len(prompt) - 1 : -1, 0].argmax(-1).tolist()
        return drawn == list(tokens)

    def plain_operators(self) -> PlainAttention:
        """Returns what computes its operators over a whole sequence."""
        return PlainAttention(self.windows)

    def _first(self, ids: Tensor, positions: Tensor, send: Any) -> tuple[Tensor, ...]:
        return self._send(0, (ids * 7_919 + positions * 104_729 + 1) % PRIME, positions, send)

    def _middle(self, layer: int) -> Any:
        def run(x: Tensor, positions: Tensor, *outputs: Any) -> tuple[Tensor, ...]:
            *received, send = outputs
            return self._send(layer + 1, self._absorb(layer, x, positions, *received), positions, send)

        return run

    def _last(self, x: Tensor, positions: Tensor, *received: Tensor) -> tuple[Tensor]:
        token, width = self._absorb(LAYERS - 1, x, positions, *received) % VOCAB, -(-VOCAB // self._size)
        logits = torch.zeros(len(x), 1, width * self._size).scatter_(2, token.unsqueeze(2), 10.0)
        return (logits[..., self._rank * width :][..., :width],)

    def _send(self, layer: int, x: Tensor, positions: Tensor, send: Any) -> tuple[Tensor, ...]:
        of, rows, heads = self._of[layer], len(x), self._heads
        asked = positions - (x * of.at % PRIME) % _seen(self.windows[layer])[positions]  # [R, heads]
        send.q(layer, embedding(asked, _asking()).view(rows, 2 * heads, 1, BITS))
        k = embedding(positions.expand(rows, heads), _codes()).view(rows, heads, 1, BITS)
        v = (x.unsqueeze(2) * of.v % PRIME % LARGEST).to(torch.float32)
        send.kv(layer, k, v.view(rows, heads, 1, V_DIM))
        return x, positions

    def _absorb(self, layer: int, x: Tensor, positions: Tensor, *received: Tensor) -> Tensor:
        (o,) = received
        counts = embedding(positions, _counts(self.windows[layer])).unsqueeze(3)  # [R, 1, 2, 1]
        whole = (o.view(len(x), self._heads, 2, V_DIM) * counts).round().to(NUMBERS)
        added = (whole * self._of[layer].o).sum((1, 2, 3)).unsqueeze(1)
        if self.group is not None:
            added = self.group.all_reduce(added)
        return ((x * 48_271) % PRIME + added) % PRIME


class _IntegerCut(NamedTuple):
    """The tensors that go from one slice to the next."""

    tensors: tuple[RowTensor, ...]

    @property
    def bytes_per_token(self) -> int:
        return sum(t.bytes_per_token for t in self.tensors)


class _IntegerCall(NamedTuple):
    """The output of an attention operator."""

    out: RowTensor


class PlainAttention:
    """Attention of one sequence, all of whose rows are there, as its name says."""

    def __init__(self, windows: Sequence[int]) -> None:
        self._windows = windows
        self._sent: dict[str, Tensor] = {}
        self._layer = 0

    def outputs(self) -> tuple[Tensor, ...]:
        """All that an exchange returns."""
        return (self.o(),)

    def q(self, layer: int, q: Tensor) -> None:
        """Q of all rows."""
        self._layer, self._sent["q"] = layer, q[:, :, 0].to(torch.float64)

    def kv(self, layer: int, k: Tensor, v: Tensor) -> None:
        """K and V of all rows."""
        self._sent["k"], self._sent["v"] = (
            x[:, :, 0].repeat_interleave(2, 1).to(torch.float64) for x in (k, v)
        )  # fmt: skip

    def o(self) -> Tensor:
        """[R, 1, Hq, Dv]"""
        q, k, v = (self._sent[name] for name in "qkv")
        at, window = torch.arange(len(q)), self._windows[self._layer]
        behind = at.unsqueeze(1) - at
        hidden = (behind < 0) | ((behind >= window) if window else (behind < 0))
        scores = torch.einsum("rhd,shd->hrs", q, k).masked_fill(hidden, -torch.inf)
        return torch.einsum("hrs,shd->rhd", scores.softmax(-1), v).unsqueeze(1)
