"""Predicted times of prompts on prefill workers, of transfers and of decoding steps. Each is a law of a few
coefficients, which follow what is measured.

    seconds(tokens, prefix) = a + b (tokens - prefix) + c (tokens^2 - prefix^2)
    seconds(tokens moved)   = a + b tokens

The rows of a prompt cost b each; row i attends i tokens, which is the quadratic term (Mooncake, section 5.1: "the
computation pattern of a Transformer is regular"). All tokens of a model have as many bytes. Pure policy: no torch, no
I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from .overload import StepLatency

_UNIT = 1024.0  # tokens: features of one order of magnitude, so that sums of their products lose no digits
_KEPT = 0.96  # of the weight of what was measured before, with each new measurement
_PRIOR = 1.0  # measurements that the first law weighs as much as
_PRIOR_PROMPTS = ((1, 0), (512, 0), (4096, 0), (32768, 0), (32768, 16384))
_PRIOR_MOVED = (512, 4096, 32768)  # tokens
_GUESS = 0.01  # the same of the first law of transfers
_PATIENCE, _MOST_PATIENCE = 16, 1024  # prompts in a row, until a transfer is thought to take half
_AS_GOOD = 1 - 1e-9  # of rounding
_FEW = 8  # measurements, from which on
_KEPT_STEPS = 0.998  # the same of steps
_OFTEN = 8
_DEPENDENT = 1e-12  # the least eigenvalue of features of unit length that do not depend on each other
_MOST_OUTLIER = 4.0  # times the prediction is the most that a measurement counts: one stall spoils no law


class PrefillLatency(NamedTuple):
    """Seconds: ``a`` of a prompt, ``b`` of a token, ``c`` of a pair of tokens. None is negative."""

    a: float
    b: float
    c: float

    def seconds(self, tokens: int, prefix: int = 0) -> float:
        """The seconds of computing a prompt whose first ``prefix`` tokens have K and V already."""
        return self.a + self.b * (tokens - prefix) + self.c * (tokens * tokens - prefix * prefix)


class TransferLatency(NamedTuple):
    """Seconds: ``a`` of a transfer, ``b`` of a token. Neither is negative."""

    a: float
    b: float

    @staticmethod
    def at_rate(tokens_per_s: float) -> TransferLatency:
        """One that costs its tokens alone."""
        return TransferLatency(0.0, 1.0 / tokens_per_s)

    def seconds(self, tokens: int) -> float:
        """The seconds of sending K and V of so many tokens."""
        return self.a + self.b * tokens


class PrefillPipelineShape(NamedTuple):
    """``stages`` workers compute a prompt together, in chunks of so many tokens. A law then is of the time that each of
    them needs, for which other prompts wait.
    """

    stages: int = 1
    chunk: int = 1

    def fill_s(self, tokens: int, prefix: int, seconds: float) -> float:
        """Return the seconds until the last stage begins with a prompt, if all stages are idle. It takes each of them
        ``seconds``, and N chunks end after N + X - 1 of a stage's times.
        """
        return (self.stages - 1) * seconds / self._chunks(tokens, prefix)

    def stage_share(self, tokens: int, prefix: int) -> float:
        """Return the share of a prompt's time that one stage needs, if all stages were idle at its beginning."""
        chunks = self._chunks(tokens, prefix)
        return chunks / (chunks + self.stages - 1)

    def _chunks(self, tokens: int, prefix: int) -> int:
        return max(1, -(-(tokens - prefix) // self.chunk))


SINGLE_STAGE = PrefillPipelineShape()


class LatencyFit:
    """Coefficients, none below 0, by weighted least squares of relative errors; old measurements may fade."""

    def __init__(self, features: int, fading: float = 1.0) -> None:
        """``fading``: the weight that earlier measurements keep with each new one."""
        self._fading, self._count = fading, 0
        self._products = np.zeros((features + 1, features + 1))  # sums of products; the last feature is the seconds

    def add(self, features: Sequence[float], seconds: float, size: float, weight: float = 1.0) -> None:
        """Add a measurement. Its error counts in parts of ``size``, so that short and long times weigh alike."""
        row = np.array([*features, seconds]) / size
        self._products += weight * np.outer(row, row)

    def observe(self, features: Sequence[float], seconds: float, expected: float = 0.0) -> None:
        """Add a measurement while others fade. ``expected``: the predicted seconds; 0 if nothing predicted them."""
        size = seconds
        if self._count >= _FEW and expected > 0:
            seconds, size = min(seconds, expected * _MOST_OUTLIER), expected
        self._count += 1
        self._products *= self._fading
        self.add(features, seconds, size)

    def coefficients(self) -> list[float]:
        """Return the best coefficients of each subset of the features, from the subset with the least error."""
        products, targets = self._products[:-1, :-1], self._products[:-1, -1]
        scale = np.sqrt(products.diagonal())
        scale[scale == 0] = 1.0
        # A system for each subset, smaller ones first. A feature that is not in it is 0 by an equation of its own.
        used = np.array(sorted(product((1.0, 0.0), repeat=len(targets)), key=sum))
        scaled = products / np.outer(scale, scale) * used[:, :, None] * used[:, None, :]
        scaled += np.eye(len(targets)) * (1.0 - used)[:, :, None]
        solvable = np.linalg.eigvalsh(scaled)[:, 0] > _DEPENDENT
        scaled, right = scaled[solvable], (targets / scale * used)[solvable]
        solutions = np.linalg.solve(scaled, right[:, :, None])[:, :, 0]
        gains = np.where((solutions >= 0).all(1), (solutions * right).sum(1), -1.0)
        best = (gains >= gains.max() * _AS_GOOD).argmax()  # the first of those that differ by rounding
        return [float(x) for x in solutions[best] / scale]


class PrefillLatencyEstimator:
    """A law that follows what is measured."""

    def __init__(self, model: PrefillLatency, *, trusted: bool = True) -> None:
        """``model``: until something is measured. ``trusted``: it is worth one measurement then, else nothing."""
        self.model, self._fit = model, LatencyFit(3, _KEPT)
        for tokens, prefix in _PRIOR_PROMPTS if trusted else ():
            if (expected := model.seconds(tokens, prefix)) > 0:
                self._fit.add(_features(tokens, prefix), expected, expected, _PRIOR / len(_PRIOR_PROMPTS))

    def observe(self, tokens: int, prefix: int, seconds: float) -> None:
        """A prompt took so long on a worker that did nothing else."""
        if seconds > 0 and tokens > prefix:
            self._fit.observe(_features(tokens, prefix), seconds, self.model.seconds(tokens, prefix))
            a, b, c = self._fit.coefficients()
            self.model = PrefillLatency(a, b / _UNIT, c / _UNIT**2)


class TransferLatencyEstimator:
    """A law of transfers that follows what is measured. The first one is a guess, worth next to nothing.

    Without transfers, a law that is too high would stay. So the more prompts in a row are computed in place of a
    transfer, the cheaper a transfer seems, until one is tried. If that confirms the law, the next try comes later.
    """

    def __init__(self, model: TransferLatency) -> None:
        """``model``: until something is measured."""
        self.model, self._fit = model, LatencyFit(2, _KEPT)
        self._passed, self._patience = 0, _PATIENCE
        for tokens in _PRIOR_MOVED:
            if (expected := model.seconds(tokens)) > 0:
                self._fit.add((tokens / _UNIT, 1.0), expected, expected, _GUESS / len(_PRIOR_MOVED))

    def seconds(self, tokens: int) -> float:
        """The seconds that a transfer of so many tokens is thought to take."""
        return self.model.seconds(tokens) * self._patience / (self._patience + self._passed)

    def on_not_taken(self) -> None:
        """A prompt is computed that would come sooner by a transfer, were that for nothing."""
        self._passed += 1

    def observe(self, tokens: int, seconds: float, ahead_s: float = 0.0) -> None:
        """Follow a transfer, for which a worker waited ``seconds``. It had run for ``ahead_s`` before,
        while other prompts were computed, so it took ``seconds`` at least and both together at most.
        """
        expected, most_s = self.model.seconds(tokens), seconds + ahead_s
        if tokens <= 0 or most_s <= 0:
            return
        if seconds * _AS_GOOD <= expected <= most_s / _AS_GOOD:  # nothing shows that it took another time
            self._tried(confirmed=not ahead_s)
            return
        took_s = seconds if expected < seconds else most_s
        self._tried(confirmed=2 * took_s > expected)
        self._fit.observe((tokens / _UNIT, 1.0), took_s, expected)
        b, a = self._fit.coefficients()
        self.model = TransferLatency(a, b / _UNIT)

    def _tried(self, *, confirmed: bool) -> None:
        if self._passed:
            self._patience = min(2 * self._patience, _MOST_PATIENCE) if confirmed else _PATIENCE
        self._passed = 0


class StepLatencyEstimator:
    """The law of a decoding step, that follows what steps take. It is solved anew once in _OFTEN steps."""

    def __init__(self) -> None:
        self.model = StepLatency(0.0, 0.0, 0.0)
        self._fit, self._count = LatencyFit(3, _KEPT_STEPS), 0

    def observe(self, rows: int, stored: float, seconds: float) -> None:
        """A step of so many rows, whose attention read so many tokens, took so long."""
        if seconds <= 0 or rows < 1:
            return
        self._count += 1
        self._fit.observe((1.0, float(rows), stored / _UNIT), seconds, self.model.seconds(rows, stored))
        if self._count % _OFTEN == 0:
            a, b, c = self._fit.coefficients()
            self.model = StepLatency(a, b, c / _UNIT)


def _features(tokens: int, prefix: int) -> tuple[float, float, float]:
    t, p = tokens / _UNIT, prefix / _UNIT
    return 1.0, t - p, t * t - p * p
