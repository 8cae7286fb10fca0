"""How many batches take turns, by the laws of both pools: a pure function of the load.

Two batches read the weights twice as often as one, and keep both pools busy. Which is the faster depends on the
devices, the model and the load; so the laws are measured at the start, and asked again when the load has changed.
"""

from __future__ import annotations

import logging
import math

from lamina.engine.rounds.steps import Round

from .laws import RoundLaws

log = logging.getLogger(__name__)
TIE = 0.02  # a gain too small for more batches, which wait longer for each token
SAME_TOKENS = 1.1  # within this factor of those that were looked at last, nobody looks again


class Tuner:
    """``n``: the batches that are wanted now. ``reason``: what was chosen last and why, in one line."""

    def __init__(self, most: int, laws: RoundLaws) -> None:
        """``most``: batches."""
        self._most, self._laws = most, laws
        self._rows, self._tokens = 0, 0  # that were looked at last
        self.n = 1
        self.reason = f"1 batch until requests come; measured at the start: {laws.told()}"
        log.info("--plan auto: %s", self.reason)

    def observe(self, done: Round) -> bool:
        """A round was done; whether another choice has been made by that."""
        if not done.steady or not self._differs(done):
            return False
        first, self._rows, self._tokens = not self._rows, done.rows, done.tokens
        seconds = times_of(self._laws, self._most, done.rows, done.tokens)
        wanted = self.n if seconds.get(self.n, math.inf) <= min(seconds.values()) * (1 + TIE) else chosen(seconds)
        if wanted == self.n and not first:
            return False
        self.n = wanted
        told = ", ".join(f"{s * 1e3:.1f} ms with {n}" for n, s in seconds.items())
        sequences = f"{done.rows} sequence" + "s" * (done.rows != 1)
        self.reason = (
            f"{self.n} batch{'es' * (self.n > 1)}: a token of {sequences}, {done.tokens} tokens long together, takes "
            f"{told}; measured at the start: {self._laws.told()}"
        )
        log.info("--plan auto: %s", self.reason)
        return True

    def _differs(self, done: Round) -> bool:
        same = self._tokens / SAME_TOKENS <= done.tokens <= self._tokens * SAME_TOKENS
        return done.rows != self._rows or not same


def times_of(laws: RoundLaws, most: int, rows: int, tokens: float) -> dict[int, float]:
    """Seconds of a round, by the number of batches; no batch is empty."""
    return {n: laws.seconds(n, rows, tokens) for n in range(1, min(most, rows) + 1)}


def chosen(seconds: dict[int, float]) -> int:
    """The fewest batches of those that are as good as the best."""
    best = min(seconds.values())
    return next(n for n, s in sorted(seconds.items()) if s <= best * (1 + TIE))
