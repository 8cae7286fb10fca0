"""The memory that prompts occupy on a prefill worker, in bytes of K and V times seconds.

It counts from a prompt's first chunk until the last one is computed (Mooncake, arXiv 2407.00079 section 5.2: the cost
of an occupation is S x T).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from lamina.protocol.step_plan import StepPlan


class KvOccupancy:
    """The occupancy of one store."""

    def __init__(self, token_bytes: int, clock: Callable[[], float] = time.perf_counter) -> None:
        """``token_bytes``: bytes of a token in all layers of the store."""
        self.byte_s = 0.0
        self._token_bytes, self._clock = token_bytes, clock
        self._sequence: int | None = None
        self._held, self._since_s = 0, 0.0

    def begin(self, plan: StepPlan) -> None:
        """Note that the chunk of ``plan`` is computed from now on. Between two chunks of a prompt, its tokens stay."""
        if self._sequence != (row := plan.rows[0]).sequence:
            self._sequence, self._held = row.sequence, 0
        self.end()
        self._held = (row.first + row.count) * self._token_bytes

    def end(self) -> None:
        """Note that all layers of the chunk are computed."""
        now = self._clock()
        self.byte_s += self._held * (now - self._since_s)
        self._since_s = now
