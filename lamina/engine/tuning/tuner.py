"""How many batches take turns, by the laws of both pools: a pure function of the load.

Two batches read the weights twice as often as one, and keep both pools busy. Which is the faster depends on the
devices, the model and the load; so the laws are measured at the start, and asked again when the load has changed.
"""

from __future__ import annotations

import logging
import math

from lamina.scheduler.scheduler_output import Round

from .round_time_model import RoundTimeModel

log = logging.getLogger(__name__)
MIN_GAIN = 0.02  # a gain too small for more batches, which wait longer for each token
RETUNE_FACTOR = 1.1  # within this factor of those that were looked at last, nobody looks again


class Tuner:
    """``num_batches``: the batches that are wanted now. ``reason``: what was chosen last and why, in one line."""

    def __init__(self, most: int, model: RoundTimeModel) -> None:
        """``most``: batches."""
        self._most, self._laws = most, model
        self._rows, self._tokens = 0, 0  # that were looked at last
        self.num_batches = 1
        self.reason = f"1 batch until requests come; measured at the start: {model.describe()}"
        log.info("--pipeline auto: %s", self.reason)

    def observe(self, done: Round) -> bool:
        """A round was done; whether another choice has been made by that."""
        if not done.is_decode_only or not self._load_changed(done):
            return False
        first, self._rows, self._tokens = not self._rows, done.rows, done.tokens
        seconds = round_seconds(self._laws, self._most, done.rows, done.tokens)
        wanted = (
            self.num_batches
            if seconds.get(self.num_batches, math.inf) <= min(seconds.values()) * (1 + MIN_GAIN)
            else choose_num_batches(seconds)
        )
        if wanted == self.num_batches and not first:
            return False
        self.num_batches = wanted
        text = ", ".join(f"{s * 1e3:.1f} ms with {n}" for n, s in seconds.items())
        sequences = f"{done.rows} sequence" + "s" * (done.rows != 1)
        self.reason = (
            f"{self.num_batches} batch{'es' * (self.num_batches > 1)}: a token of {sequences}, {done.tokens} tokens "
            f"long together, takes "
            f"{text}; measured at the start: {self._laws.describe()}"
        )
        log.info("--pipeline auto: %s", self.reason)
        return True

    def _load_changed(self, done: Round) -> bool:
        same = self._tokens / RETUNE_FACTOR <= done.tokens <= self._tokens * RETUNE_FACTOR
        return done.rows != self._rows or not same


def round_seconds(model: RoundTimeModel, most: int, rows: int, tokens: float) -> dict[int, float]:
    """Seconds of a round, by the number of batches; no batch is empty."""
    return {n: model.seconds(n, rows, tokens) for n in range(1, min(most, rows) + 1)}


def choose_num_batches(seconds: dict[int, float]) -> int:
    """The fewest batches of those that are as good as the best."""
    best = min(seconds.values())
    return next(n for n, s in sorted(seconds.items()) if s <= best * (1 + MIN_GAIN))
