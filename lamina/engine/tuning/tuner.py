"""Chooses the number of batches by predicted times and the load. Pure policy.

Two batches read the weights twice as often as one, but keep both pools busy. Which is faster depends on the devices,
the model and the load. So times are measured at the start, and the choice is made again when the load changes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from lamina.scheduler.feature import Feature
from lamina.scheduler.scheduler_output import Round, ScheduledStep

from .round_time_model import RoundTimeModel

log = logging.getLogger(__name__)
MIN_GAIN = 0.02  # more batches must gain more than this, since each token then takes longer
RETUNE_FACTOR = 1.1  # the load must change by more than this factor for a new choice


class Tuner(Feature):
    """Chooses the number of batches after each round. ``reason``: the last choice and why; "" before the first one."""

    def __init__(self, most: int, set_num_batches: Callable[[int], None]) -> None:
        """``most``: the limit of batches. ``set_num_batches``: called with each choice."""
        self._most, self._set_num_batches = most, set_num_batches
        self._laws: RoundTimeModel | None = None
        self._rows, self._tokens = 0, 0  # the load of the last choice
        self._num_batches, self.reason = 1, ""

    def use(self, laws: RoundTimeModel) -> None:
        """Choose by this model from now on, beginning with one batch."""
        self._laws = laws
        self._choose(1, f"1 batch until requests come; measured at the start: {laws.describe()}")

    def on_step_done(self, step: ScheduledStep, done: Round | None = None) -> None:
        """Choose anew if the load has changed."""
        if self._laws is None or done is None or not done.is_decode_only or not self._load_changed(done):
            return
        first, self._rows, self._tokens = not self._rows, done.rows, done.tokens
        seconds = round_seconds(self._laws, self._most, done.rows, done.tokens)
        wanted = (
            self._num_batches
            if seconds.get(self._num_batches, math.inf) <= min(seconds.values()) * (1 + MIN_GAIN)
            else choose_num_batches(seconds)
        )
        if wanted == self._num_batches and not first:
            return
        text = ", ".join(f"{s * 1e3:.1f} ms with {n}" for n, s in seconds.items())
        sequences = f"{done.rows} sequence" + "s" * (done.rows != 1)
        self._choose(
            wanted,
            f"{wanted} batch{'es' * (wanted > 1)}: a token of {sequences}, {done.tokens} tokens long together, takes "
            f"{text}; measured at the start: {self._laws.describe()}",
        )

    def _choose(self, num_batches: int, reason: str) -> None:
        self._num_batches, self.reason = num_batches, reason
        log.info("--pipeline auto: %s", reason)
        self._set_num_batches(num_batches)

    def _load_changed(self, done: Round) -> bool:
        same = self._tokens / RETUNE_FACTOR <= done.tokens <= self._tokens * RETUNE_FACTOR
        return done.rows != self._rows or not same


def round_seconds(model: RoundTimeModel, most: int, rows: int, tokens: float) -> dict[int, float]:
    """The seconds of a round by number of batches, none of which is empty."""
    return {n: model.seconds(n, rows, tokens) for n in range(1, min(most, rows) + 1)}


def choose_num_batches(seconds: dict[int, float]) -> int:
    """The lowest number of batches within MIN_GAIN of the best time."""
    best = min(seconds.values())
    return next(n for n, s in sorted(seconds.items()) if s <= best * (1 + MIN_GAIN))
