"""Delays of a host: the time of recorded steps beyond the tables' time, applied to predicted rounds."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple


class StepDelay(NamedTuple):
    """Seconds of a recorded step: by the tables, and beyond them; below 0 if it was quicker."""

    expected_s: float
    beyond_s: float


class Delays(NamedTuple):
    """The delays of a recorded run. A stall takes the same time in each round, but hits a long round more often. So a
    round gets the delays of as many recorded steps as last as long as the round.
    """

    recorded: tuple[StepDelay, ...]

    def sampler(self, seed: int) -> Callable[[float], float]:
        """Return a function from a round's expected seconds to its seconds with delays; each call draws
        another delay.
        """
        rng = random.Random(seed)

        def took(expected_s: float) -> float:
            left, total = expected_s, expected_s
            while left > 0:
                step = rng.choice(self.recorded)
                if rng.random() * step.expected_s < left:  # the last one counts in part
                    total += step.beyond_s
                left -= step.expected_s
            return max(0.0, total)

        return took
