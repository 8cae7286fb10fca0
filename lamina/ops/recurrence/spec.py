"""The meaning of a recurrent layer as data. It imports no torch, so planners and tools can read it."""

from __future__ import annotations

from math import isfinite
from typing import Literal, NamedTuple

import msgspec

Kind = Literal["convolution", "gated_delta", "kimi_delta", "mamba2"]
ALIGNED = 16  # fp32 numbers in 64 bytes: where the parts of a state begin
WIDTHS = range(2, 9)  # of convolutions
RUNS, MAX_RUN = 32, 256  # runs of a convolution, of so many channels at most; else there are more


class Range(NamedTuple):
    """Consecutive numbers."""

    first: int
    size: int


class RecurrenceSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole meaning of one layer's causal convolution and recurrence, except for its tensors.

    First, each channel c of x is summed over the last ``width`` tokens of the sequence, zeros before its beginning:

        y[t, c] = activation(sum_j weight[c, j] * x[t - width + 1 + j, c] + bias[c])

    With kind ``convolution`` that is the output, and ``heads`` are channels. Else y has a query q and a key k for each
    group, and a value v for each head; head h reads group (first_head + h) // heads_per_group. Its state S [K, V] is

        S = decay * S + k (x) u         output = q . S  (+ skip)

        gated_delta  decay = exp(g[h]), u = beta[h] * (v - k . (decay * S)); q, k normalised, q scaled by ``scale``
        kimi_delta   the same, but g has a number for each h and each of K, and row i of S decays by exp(g[h, i])
        mamba2       s = softplus(dt[h] + dt_bias[h]), decay = exp(s * A[h]), u = s * v, k = B, q = C, skip = D[h] * v

    Normalised is x / sqrt(sum(x^2) + 1e-6). Mamba-2 bounds s by ``prompt_dt_least`` and ``prompt_dt_most`` for tokens
    of the prompt, and never for others. Channels are in the order q, k, v; with mamba2 it is v, k, q.
    """

    kind: Kind
    heads: int
    width: int
    groups: int = 0
    heads_per_group: int = 1
    first_head: int = 0  # heads of the first group that are before this part's first one
    key_dim: int = 0  # K
    value_dim: int = 1  # V
    silu: bool = True  # the activation; else none
    bias: bool = False
    normalised: bool = True
    scale: float = 1.0
    softplus: bool = True
    dt_bias: bool = True
    skip: bool = True
    prompt_dt_least: float = 0.0
    prompt_dt_most: float = 0.0  # 0 = no bound
    cut_of: int = 0  # channels of the model's layer of which this ``convolution`` is a part; 0 = it is no part

    def __post_init__(self) -> None:
        sizes = self.heads, self.heads_per_group, self.value_dim
        whole = min(sizes) > 0 and 0 <= self.first_head < self.heads_per_group and self.width in WIDTHS
        if self.kind == "convolution":
            whole = whole and (self.groups, self.key_dim, self.value_dim, self.heads_per_group) == (0, 0, 1, 1)
        else:
            groups = -(-(self.first_head + self.heads) // self.heads_per_group)
            whole = whole and self.key_dim > 0 and self.groups == groups
        if not whole:
            raise ValueError(f"a recurrence has sizes that do not fit together: {self}")
        if not (isfinite(self.scale) and 0 <= self.prompt_dt_least < float("inf") and self.prompt_dt_most >= 0):
            raise ValueError(f"a recurrence has factors that are no numbers to compute with: {self}")

    def encode(self) -> str:
        """Return the spec as canonical text: equal specs have equal text. It is an argument of the captured
        operator.
        """
        return msgspec.json.encode(self).decode()

    @staticmethod
    def decode(text: str) -> RecurrenceSpec:
        """Return the spec of a text by ``encode``. Raises msgspec.ValidationError for anything else."""
        return msgspec.json.decode(text, type=RecurrenceSpec)

    @property
    def clamps_prompts(self) -> bool:
        """True if tokens of a prompt are computed in another way than the same tokens of an answer."""
        return self.prompt_dt_least > 0.0 or self.prompt_dt_most > 0.0

    @property
    def run(self) -> int:
        """The heads that one worker has, and one fragment in storage; of ``convolution`` a run of channels. All parts
        of a layer have the same.
        """
        return min(MAX_RUN, -(-(self.cut_of or self.heads) // RUNS)) if self.kind == "convolution" else 1

    @property
    def channels(self) -> int:
        """The channels of the convolution."""
        return self.heads * self.value_dim + 2 * self.groups * self.key_dim

    @property
    def channel_ranges(self) -> dict[str, Range]:
        """The channels of q, k and v; of ``convolution`` they are all v."""
        sizes = {"v": self.heads * self.value_dim}
        if self.kind != "convolution":
            ends = dict.fromkeys("kq" if self.kind == "mamba2" else "qk", self.groups * self.key_dim)
            sizes = {**sizes, **ends} if self.kind == "mamba2" else {**ends, **sizes}
        ranges, first = {}, 0
        for name, size in sizes.items():
            ranges[name] = Range(first, size)
            first += size
        return ranges

    @property
    def input_columns(self) -> dict[str, int]:
        """The inputs [rows, columns] by name. ``x`` has the dtype of messages, as has ``dt``; others may be fp32."""
        columns = {"x": self.channels}
        if self.kind in ("gated_delta", "kimi_delta"):
            columns["g"] = self.heads * (self.key_dim if self.kind == "kimi_delta" else 1)
            columns["beta"] = self.heads
        elif self.kind == "mamba2":
            columns["dt"] = self.heads
        return columns

    @property
    def output_columns(self) -> int:
        """The columns of the output [rows, columns]: head by head."""
        return self.heads * self.value_dim

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The shape of a row of the output, as the model reads it."""
        return (self.heads,) if self.kind == "convolution" else (self.heads, self.value_dim)

    @property
    def static_shapes(self) -> dict[str, tuple[int, ...]]:
        """The operands that all tokens share, by name."""
        shapes: dict[str, tuple[int, ...]] = {"weight": (self.channels, self.width)}
        if self.bias:
            shapes["bias"] = (self.channels,)
        if self.kind == "mamba2":
            shapes["A"] = (self.heads,)
            shapes |= {name: (self.heads,) for name, there in (("D", self.skip), ("dt_bias", self.dt_bias)) if there}
        return shapes

    @property
    def history_size(self) -> int:
        """The numbers of a state before S: the last width - 1 rows of x, [width - 1, channels], and room to align."""
        return -(-(self.width - 1) * self.channels // ALIGNED) * ALIGNED

    @property
    def state_size(self) -> int:
        """The fp32 numbers of a state: the history, then S [heads, K, V], then room to align."""
        return self.history_size + -(-self.heads * self.key_dim * self.value_dim // ALIGNED) * ALIGNED

    @property
    def state_bytes(self) -> int:
        """The bytes of one version of a sequence's state."""
        return 4 * self.state_size
