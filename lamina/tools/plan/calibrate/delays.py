"""Delays of a host: the time of recorded steps beyond the tables' time, dealt to predicted rounds."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple


class StepDelay(NamedTuple):
    """Seconds of a recorded step: by the tables, and beyond them; below 0 where it was quicker."""

    expected_s: float
    beyond_s: float


class Delays(NamedTuple):
    """The delays of a recorded run. A stall takes the same time in each round, and hits a long round more often: a
    round meets the delays of as many recorded steps as last as long as the round.
    """

    recorded: tuple[StepDelay, ...]

    def sampler(self, seed: int) -> Callable[[float], float]:
        """Seconds that a round takes, of those that it is expected to take; another delay in each call."""
        rng = random.Random(seed)

        def took(expected_s: float) -> float:
            left, total = expected_s, expected_s
            while left > 0:
                step = rng.choice(self.recorded)
                if rng.random() * step.expected_s < left:  # the last one is met in part
                    total += step.beyond_s
                left -= step.expected_s
            return max(0.0, total)

        return took
