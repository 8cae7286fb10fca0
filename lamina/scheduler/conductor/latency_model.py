"""Latency models of prompts on prefill workers, of transfers and of decoding steps, fitted to measurements.

    seconds(tokens, prefix) = a + b (tokens - prefix) + c (tokens^2 - prefix^2)
    seconds(tokens moved)   = a + b tokens

The rows of a prompt cost b each. Row i attends i tokens, which gives the quadratic term (Mooncake, section 5.1: "the
computation pattern of a Transformer is regular"). All tokens of a model have the same bytes. Pure policy: no torch, no
I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from .overload import StepLatency

_UNIT = 1024.0  # tokens; keeps features in one order of magnitude, so sums of their products lose no digits
_KEPT = 0.96  # the weight that earlier measurements keep with each new one
_PRIOR = 1.0  # the weight of the initial prefill model, in measurements
_PRIOR_PROMPTS = ((1, 0), (512, 0), (4096, 0), (32768, 0), (32768, 16384))
_PRIOR_MOVED = (512, 4096, 32768)  # tokens
_GUESS = 0.01  # the weight of the initial transfer model, in measurements
_PATIENCE, _MOST_PATIENCE = 16, 1024  # prompts without a transfer, until its predicted time is halved
_AS_GOOD = 1 - 1e-9  # tolerance for rounding
_FEW = 8  # measurements, after which outliers are clipped
_KEPT_STEPS = 0.998  # as _KEPT, for decoding steps
_OFTEN = 8  # steps between two fits
_DEPENDENT = 1e-12  # features of unit length with a smaller eigenvalue depend on each other
_MOST_OUTLIER = 4.0  # a measurement counts as at most this many times the prediction, so one stall spoils no fit


class PrefillLatency(NamedTuple):
    """The seconds of a prompt: ``a``, plus ``b`` for each token and ``c`` for each pair of tokens. None is negative."""

    a: float
    b: float
    c: float

    def seconds(self, tokens: int, prefix: int = 0) -> float:
        """The seconds of computing a prompt whose first ``prefix`` tokens are cached."""
        return self.a + self.b * (tokens - prefix) + self.c * (tokens * tokens - prefix * prefix)


class TransferLatency(NamedTuple):
    """The seconds of a transfer: ``a``, plus ``b`` for each token. Neither is negative."""

    a: float
    b: float

    @staticmethod
    def at_rate(tokens_per_s: float) -> TransferLatency:
        """The model of a link with this rate, and no time for a transfer as such."""
        return TransferLatency(0.0, 1.0 / tokens_per_s)

    def seconds(self, tokens: int) -> float:
        """The seconds of sending K and V of ``tokens`` tokens."""
        return self.a + self.b * tokens


class PrefillPipelineShape(NamedTuple):
    """The shape of a pipeline of prefill workers: ``stages`` workers compute a prompt in chunks of ``chunk`` tokens.

    A latency model then predicts the time of one stage, for which other prompts wait.
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
    """A prefill latency model that is fitted anew with each measurement."""

    def __init__(self, model: PrefillLatency, *, trusted: bool = True) -> None:
        """``model``: the initial model. ``trusted``: it weighs as one measurement, else as none."""
        self.model, self._fit = model, LatencyFit(3, _KEPT)
        for tokens, prefix in _PRIOR_PROMPTS if trusted else ():
            if (expected := model.seconds(tokens, prefix)) > 0:
                self._fit.add(_features(tokens, prefix), expected, expected, _PRIOR / len(_PRIOR_PROMPTS))

    def observe(self, tokens: int, prefix: int, seconds: float) -> None:
        """Learn from a prompt that took ``seconds`` on a worker that did nothing else."""
        if seconds > 0 and tokens > prefix:
            self._fit.observe(_features(tokens, prefix), seconds, self.model.seconds(tokens, prefix))
            a, b, c = self._fit.coefficients()
            self.model = PrefillLatency(a, b / _UNIT, c / _UNIT**2)


class TransferLatencyEstimator:
    """A transfer latency model that is fitted anew with each measurement. The initial one is a guess of little weight.

    Without transfers, a prediction that is too high would stay. So with each prompt that is computed instead, the
    predicted time falls, until a transfer is tried. If that confirms the model, the next try comes later.
    """

    def __init__(self, model: TransferLatency) -> None:
        """``model``: the initial model."""
        self.model, self._fit = model, LatencyFit(2, _KEPT)
        self._passed, self._patience = 0, _PATIENCE
        for tokens in _PRIOR_MOVED:
            if (expected := model.seconds(tokens)) > 0:
                self._fit.add((tokens / _UNIT, 1.0), expected, expected, _GUESS / len(_PRIOR_MOVED))

    def seconds(self, tokens: int) -> float:
        """The predicted seconds of a transfer of ``tokens`` tokens."""
        return self.model.seconds(tokens) * self._patience / (self._patience + self._passed)

    def on_not_taken(self) -> None:
        """Record that a prompt is computed which a transfer that takes no time would have made faster."""
        self._passed += 1

    def observe(self, tokens: int, seconds: float, ahead_s: float = 0.0) -> None:
        """Learn from a transfer, for which a worker waited ``seconds``.

        It had run for ``ahead_s`` before, while other prompts were computed. So it took at least ``seconds``, and at
        most the sum of both.
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
    """A latency model of decoding steps, fitted anew every _OFTEN steps."""

    def __init__(self) -> None:
        self.model = StepLatency(0.0, 0.0, 0.0)
        self._fit, self._count = LatencyFit(3, _KEPT_STEPS), 0

    def observe(self, rows: int, stored: float, seconds: float) -> None:
        """Learn from a step of ``rows`` rows, whose attention read ``stored`` tokens."""
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
