"""The cut of a recurrence by heads: each worker computes some heads, with the groups that these read.

A group whose heads lie on several workers is on each of them, with its channels and their history.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import msgspec
import torch
from torch import Tensor

from .spec import Range, RecurrenceSpec


@dataclass(frozen=True)
class Part:
    """Heads ``first .. first + spec.heads`` of a ``whole`` recurrence; ``spec`` says what they compute."""

    whole: RecurrenceSpec
    first: int
    spec: RecurrenceSpec

    @staticmethod
    def of(whole: RecurrenceSpec, first: int, count: int) -> Part:
        """Cut ``count`` heads (``convolution``: channels) out of ``whole``. Raises ValueError if it has no such
        heads.
        """
        if not 0 <= first < first + count <= whole.heads:
            raise ValueError(f"heads {first} to {first + count} of {whole.heads} are no part of a recurrence")
        if whole.kind == "convolution":
            spec = msgspec.structs.replace(whole, heads=count, cut_of=whole.cut_of or whole.heads)
            return Part(whole, first, spec)
        per_group, at = whole.heads_per_group, whole.first_head + first
        groups = -(-(at % per_group + count) // per_group)
        spec = msgspec.structs.replace(whole, heads=count, groups=groups, first_head=at % per_group)
        return Part(whole, first, spec)

    @cached_property
    def channels(self) -> tuple[Range, ...]:
        """The part's channels, as ranges of the whole's: those of the part one after the other."""
        whole, spec = self.whole, self.spec
        group = (whole.first_head + self.first) // whole.heads_per_group
        ranges = []
        for name, (start, _) in whole.channel_ranges.items():
            each, first, count = whole.key_dim, group, spec.groups
            if name == "v":
                each, first, count = whole.value_dim, self.first, spec.heads
            ranges.append(Range(start + first * each, count * each))
        return tuple(ranges)

    def columns(self, name: str) -> tuple[Range, ...]:
        """Return the columns of input ``name``, or of the output ("out"), as ranges of the whole's."""
        if name == "x":
            return self.channels
        each = self.whole.output_columns if name == "out" else self.whole.input_columns[name]
        each //= self.whole.heads
        return (Range(self.first * each, self.spec.heads * each),)

    def take_static(self, static: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the part's own operands, copied."""
        heads = (Range(self.first, self.spec.heads),)
        by_channel = ("weight", "bias")
        return {name: _take(t, 0, self.channels if name in by_channel else heads) for name, t in static.items()}

    def take_columns(self, name: str, whole: Tensor) -> Tensor:
        """Return the part's columns of input ``name``, or of the output ("out")."""
        return _take(whole, 1, self.columns(name))

    def take_state(self, whole: Tensor) -> Tensor:
        """Return the part of states [..., whole.state_size]: [..., spec.state_size]."""
        part = whole.new_zeros(*whole.shape[:-1], self.spec.state_size)
        for into, out_of in self._places(part, whole):
            into.copy_(out_of)
        return part

    def put_state(self, part: Tensor, whole: Tensor) -> None:
        """Write states [..., spec.state_size] to their places in [..., whole.state_size]."""
        for out_of, into in self._places(part, whole):
            into.copy_(out_of)

    def _places(self, part: Tensor, whole: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return views of both that have the same numbers."""
        own, all_ = history(self.spec, part), history(self.whole, whole)
        pairs, at = [], 0
        for first, size in self.channels:
            pairs.append((own[..., at : at + size], all_[..., first : first + size]))
            at += size
        of = slice(self.first, self.first + self.spec.heads)
        return [*pairs, (heads(self.spec, part), heads(self.whole, whole)[..., of, :, :])]


def history(spec: RecurrenceSpec, states: Tensor) -> Tensor:
    """Return the last rows of x, a view [..., width - 1, channels] of states [..., state_size]."""
    kept = spec.width - 1
    return states[..., : kept * spec.channels].view(*states.shape[:-1], kept, spec.channels)


def heads(spec: RecurrenceSpec, states: Tensor) -> Tensor:
    """Return S of each head, a view [..., heads, K, V] of states [..., state_size]."""
    sizes = spec.heads, spec.key_dim, spec.value_dim
    at = spec.history_size
    return states[..., at : at + prod(sizes)].view(*states.shape[:-1], *sizes)


def _take(t: Tensor, dim: int, ranges: Sequence[Range]) -> Tensor:
    return torch.cat([t.narrow(dim, first, size) for first, size in ranges], dim)
