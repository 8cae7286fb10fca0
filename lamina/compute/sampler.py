"""Logits to tokens: a pure function, row by row, so that any replica may sample and results do not depend on batch
mates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from lamina.protocol.control import ALL_BANNED, NO_TOKEN, Adjust, Draw, Drawn

_NOTHING: Mapping[int, int] = MappingProxyType({})


def sample(
    logits: Tensor, draws: list[Draw], pending: Mapping[int, int] = _NOTHING, lse: Tensor | None = None
) -> list[Drawn]:
    """One token for each row; NO_TOKEN where the largest logit is NaN or infinite, ALL_BANNED where it is finite and
    bans leave none that is. logits [len(draws), V], any float dtype; ``pending``: sequence -> token that the step
    before drew. ``lse``: of each row, the logarithm of the sum of all, where ``logits`` do not show them all.

    Penalties, bias and bans first. Greedy takes the lowest token id among equals. Otherwise: temperature, then top_k,
    then min_p, then top_p (the smallest set whose probability reaches top_p, at least one token), then the inverse of
    the cumulative distribution at a uniform number that depends on (seed, index) alone.
    """
    raw = logits.float()
    reports = [_logprobs(raw[i], d.logprobs, None if lse is None else lse[i]) for i, d in enumerate(draws)]
    scores = _adjust(raw, draws, pending)
    drawn = scores.argmax(-1)
    best = scores.gather(-1, drawn[:, None])[:, 0]  # of a row with NaN, that is the largest
    for i, draw in enumerate(draws):
        if draw.temperature > 0.0 and draw.known < 0:
            drawn[i] = _draw(scores[i], draw)
    found = torch.where(best.isfinite(), drawn, NO_TOKEN)
    if scores is not raw:
        found = found.where(~(best.isneginf() & raw.amax(-1).isfinite()), ALL_BANNED)
    tokens = [d.known if d.known >= 0 else t for d, t in zip(draws, found.tolist(), strict=True)]
    return [Drawn(d.sequence, t, [] if t < 0 else r(t)) for d, t, r in zip(draws, tokens, reports, strict=True)]


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) from a counter-based generator (Philox 4x64): key = seed, counter = index."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=index)).random())


def _draw(scores: Tensor, draw: Draw) -> Tensor:
    keep = min(draw.top_k, scores.numel()) if draw.top_k > 0 else scores.numel()
    scores = scores.double()
    # Less the largest, so that the smallest temperature divides to 0 and minus infinity, not to infinity.
    top, ids = torch.sort((scores - scores.max()) / draw.temperature, descending=True, stable=True)
    if draw.min_p > 0.0:
        keep = max(1, min(keep, int((top - top[0] >= math.log(draw.min_p)).sum())))  # 0 where all is NaN
    mass = torch.softmax(top[:keep], -1).cumsum(-1)
    most = mass.numel() - 1
    # Numbers stay on the device, where they cost no wait for it.
    last = torch.searchsorted(mass, draw.top_p).clamp_max(most) if draw.top_p < 1.0 else torch.full_like(ids[0], most)
    at = torch.searchsorted(mass, uniform(draw.seed, draw.index) * mass.take(last), right=True)
    return ids.take(torch.minimum(at, last))


def _adjust(scores: Tensor, draws: list[Draw], pending: Mapping[int, int]) -> Tensor:
    if not any(d.banned or d.adjust for d in draws):
        return scores
    scores = scores.clone()
    for row, draw in zip(scores, draws, strict=True):
        if draw.adjust:
            _penalise(row, draw.adjust, pending[draw.sequence] if draw.pending else None)
        row[draw.banned] = float("-inf")
    return scores


def _penalise(row: Tensor, adjust: Adjust, pending: int | None) -> None:
    counts = dict(adjust.counts)
    if pending is not None:
        counts[pending] = counts.get(pending, 0) + 1
    if adjust.repetition != 1.0:
        seen = sorted({*counts, *adjust.prompt})
        row[seen] = torch.where(row[seen] > 0, row[seen] / adjust.repetition, row[seen] * adjust.repetition)
    if counts:
        row[list(counts)] -= adjust.presence + adjust.frequency * row.new_tensor(list(counts.values()))
    if adjust.bias:
        row[list(adjust.bias)] += row.new_tensor(list(adjust.bias.values()))


class _logprobs:  # noqa: N801 - used like a function
    """Reports the log-probabilities of a row once its token is known; free where none were asked for."""

    def __init__(self, scores: Tensor, count: int, lse: Tensor | None) -> None:
        self._count = count
        self._values = None if count < 0 else torch.log_softmax(scores, -1) if lse is None else scores - lse

    def __call__(self, token: int) -> list[tuple[int, float]]:
        if self._values is None:
            return []
        best, ids = self._values.topk(min(self._count, self._values.numel()))
        return [(token, float(self._values[token])), *zip(ids.tolist(), best.tolist(), strict=True)]
