"""Logits to tokens: a pure function, row by row, so that any replica may sample and results do not depend on batch
mates.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lamina.workers.control import Draw, Drawn


def sample(logits: Tensor, draws: list[Draw]) -> list[Drawn]:
    """One token for each row. logits [len(draws), V], any float dtype.

    Greedy takes the lowest token id among equals. Otherwise: temperature, then top_k, then top_p (the smallest set
    whose probability reaches top_p, at least one token), then the inverse of the cumulative distribution at a
    uniform number that depends on (seed, index) alone.
    """
    scores = logits.float()
    reports = [_logprobs(scores[i], d.logprobs) for i, d in enumerate(draws)]
    scores = _ban(scores, draws)
    tokens = scores.argmax(-1).tolist() if draws else []
    for i, draw in enumerate(draws):
        if draw.temperature > 0.0:
            tokens[i] = _draw(scores[i], draw)
    return [Drawn(d.sequence, t, r(t)) for d, t, r in zip(draws, tokens, reports, strict=True)]


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) from a counter-based generator (Philox 4x64): key = seed, counter = index."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=index)).random())


def _draw(scores: Tensor, draw: Draw) -> int:
    keep = min(draw.top_k, scores.numel()) if draw.top_k > 0 else scores.numel()
    top, ids = torch.sort(scores.double() / draw.temperature, descending=True, stable=True)
    mass = torch.softmax(top[:keep], -1).cumsum(-1)
    if draw.top_p < 1.0:
        mass = mass[: int(torch.searchsorted(mass, draw.top_p)) + 1]
    at = int(torch.searchsorted(mass, uniform(draw.seed, draw.index) * float(mass[-1]), right=True))
    return int(ids[min(at, mass.numel() - 1)])


def _ban(scores: Tensor, draws: list[Draw]) -> Tensor:
    if not any(d.banned for d in draws):
        return scores
    scores = scores.clone()
    for row, draw in zip(scores, draws, strict=True):
        row[draw.banned] = float("-inf")
    return scores


class _logprobs:  # noqa: N801 - used like a function
    """Reports the log-probabilities of a row once its token is known; free where none were asked for."""

    def __init__(self, scores: Tensor, count: int) -> None:
        self._count = count
        self._values = torch.log_softmax(scores, -1) if count >= 0 else None

    def __call__(self, token: int) -> list[tuple[int, float]]:
        if self._values is None:
            return []
        best, ids = self._values.topk(min(self._count, self._values.numel()))
        return [(token, float(self._values[token])), *zip(ids.tolist(), best.tolist(), strict=True)]
