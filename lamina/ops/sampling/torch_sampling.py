"""The arithmetic of lamina.ops.sampling in torch: on any device, and if the native module was not built."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from . import SampleSpec
from .sampling_settings import LEVEL_BITS, LOWEST, MASS_BITS, SHARE_BITS, SamplerSettings
from .token_mask import forbid

# 2^r for -1/2 <= r < 1/2; coefficients of r^5, r^4 ... r^0. As in csrc/sampling/sampling.h.
POWER = [
    float.fromhex(c)
    for c in ("0x1.5bb9e6p-10", "0x1.3cea8cp-7", "0x1.c6b754p-5", "0x1.ebf9bcp-3", "0x1.62e42ap-1", "1")
]
WHOLE = 1 << SHARE_BITS


class TorchSampling:
    """The sampling Backend in plain torch, on any device."""

    def sample(self, logits: Tensor, asks: list[SampleSpec]) -> list[int]:
        """Draw a token for each of ``asks`` from logits [rows, V]; -1 if a row's largest logit is NaN or infinite. Rows
        of equal settings are drawn together.
        """
        groups: dict[SamplerSettings, list[int]] = {}
        for at, ask in enumerate(asks):
            groups.setdefault(ask.settings, []).append(at)
        tokens = [0] * len(asks)
        for settings, members in groups.items():
            group = [asks[at] for at in members]
            rows = logits[torch.tensor([a.row for a in group], device=logits.device)].float()
            for row, ask in zip(rows, group, strict=True):
                if ask.allowed is not None:
                    forbid(row, ask.allowed)
            drawn = _greedy(rows) if settings.greedy else _draw(rows, settings, group)
            for at, token in zip(members, drawn.tolist(), strict=True):
                tokens[at] = token
        return tokens

    def top_tokens(self, logits: Tensor, count: int) -> Tensor:
        """Return, for logits [rows, V], the tokens of the first ``count`` ranks, int64 [rows, count]; NaN ranks
        first.
        """
        return top_tokens(logits.float(), count)


def top_tokens(scores: Tensor, count: int) -> Tensor:
    """Return, for scores [rows, V] fp32, the tokens of the first ``count`` ranks, int64 [rows, count]; NaN ranks
    first.
    """
    bits = (scores + 0.0).view(torch.int32)  # -0 becomes 0
    keys = torch.where(scores.isnan(), 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))  # in the order of the floats
    if count == scores.shape[-1]:
        return keys.sort(dim=-1, descending=True, stable=True).indices
    ids = torch.arange(scores.shape[-1], device=scores.device)
    return ((keys.long() << 32) + (0xFFFFFFFF - ids)).topk(count, dim=-1).indices


def levels(scores: Tensor, factor: float) -> Tensor:
    """Return levels, int32, of scores [rows, V] fp32 with a finite maximum."""
    steps = (scores - scores.amax(-1, keepdim=True)) * factor
    return steps.clamp_min(float(LOWEST)).round().to(torch.int32)


def masses(level: Tensor) -> Tensor:
    """Return the masses of levels, int64."""
    whole = (level + (1 << (LEVEL_BITS - 1))) >> LEVEL_BITS
    r = (level - (whole << LEVEL_BITS)).float() * 2.0**-LEVEL_BITS
    power = torch.full_like(r, POWER[0])
    for coefficient in POWER[1:]:
        power = power * r
        power = power + coefficient
    two = ((whole + (127 + MASS_BITS)) << 23).view(torch.float32)
    return (power * two).round().long()


def random_bits(seed: int, index: int) -> int:
    """Return 53 bits that depend on (seed, index) alone: the first that numpy's Philox 4x64 gives."""
    return int(np.random.Philox(key=seed, counter=index).random_raw()) >> (64 - SHARE_BITS)


def _greedy(scores: Tensor) -> Tensor:
    top, at = scores.max(-1)  # NaN, if there is one
    return torch.where(top.isfinite(), at, -1)


def _draw(scores: Tensor, settings: SamplerSettings, asks: list[SampleSpec]) -> Tensor:
    fine = scores.amax(-1).isfinite()
    scores = torch.where(fine[:, None], scores, 0.0)
    level = levels(scores, settings.factor)
    mass = masses(level)
    above = mass.where(level >= settings.cut, 0)
    kept = above if (ranks := _ranks(scores, mass, above, settings)) is None else above.where(ranks, 0)
    ends = kept.cumsum(-1)
    places = [random_bits(a.seed, a.counter) * t // WHOLE for a, t in zip(asks, ends[:, -1].tolist(), strict=True)]
    at = torch.searchsorted(ends, torch.tensor(places, device=ends.device)[:, None], right=True)[:, 0]
    return torch.where(fine, at, -1)


def _ranks(scores: Tensor, mass: Tensor, above: Tensor, settings: SamplerSettings) -> Tensor | None:
    """Return the tokens that top_k and top_p keep, bool [rows, V]; None for all. ``above``: masses of what min_p
    keeps.
    """
    count = min(settings.top_k, scores.shape[-1])
    if count == scores.shape[-1] and settings.share == WHOLE:
        return None
    ids = top_tokens(scores, count)
    inside = torch.ones_like(ids, dtype=torch.bool)
    if settings.share < WHOLE:
        base = above if settings.min_p_first else mass
        ends = base.gather(-1, ids).cumsum(-1)
        totals = ends[:, -1] if settings.top_k_first else base.sum(-1)
        wanted = [-(-settings.share * t // WHOLE) for t in totals.tolist()]
        last = torch.searchsorted(ends, torch.tensor(wanted, device=ends.device)[:, None])
        inside = torch.arange(count, device=ids.device) <= last
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, ids, inside)
