"""An instance that decodes on a virtual clock: all its completions take a token in each step."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

from lamina.engine.conductor.overload import TokenTime
from lamina.sim.clock import VirtualClock


class SimulatedInstance:
    """Steps between two changes of who decodes are taken at once: each is longer by what the rows have added."""

    def __init__(self, clock: VirtualClock, law: TokenTime, ended: Callable[[int, float], None]) -> None:
        """``ended`` is told of a completion at its last token, and the longest of its steps in seconds."""
        self._clock, self._law, self._ended = clock, law, ended
        self._last_step: list[tuple[int, int]] = []  # a heap: (number of a completion's last step, completion)
        self._stored = dict[int, int]()  # completion -> its tokens less the number of the step
        self._longest = dict[int, float]()
        self._total = 0  # of _stored
        self._step = 0  # that are done at _since_s
        self._since_s = 0.0
        self._change = 0

    def join(self, request: int, stored: int, answer: int) -> None:
        """``request`` decodes ``answer`` tokens behind ``stored``, from the next step on."""
        self._catch_up()
        heapq.heappush(self._last_step, (self._step + answer, request))
        self._stored[request] = stored - self._step
        self._total += stored - self._step
        self._longest[request] = 0.0
        self._await_end()

    def _first_s(self) -> float:
        """Of the step that comes next."""
        rows = len(self._stored)
        return self._law.seconds(rows, self._total + rows * self._step)

    def _seconds(self, steps: int) -> float:
        rows = len(self._stored)
        return steps * self._first_s() + self._law.c * rows * steps * (steps - 1) / 2

    def _catch_up(self) -> None:
        """Up to the end of the step that runs now."""
        now = self._clock.now
        if not self._stored:
            self._since_s = now
        if self._since_s >= now:
            return
        growth, first = self._law.c * len(self._stored) / 2, self._first_s()
        passed = now - self._since_s
        about = (
            passed / first
            if not growth
            else (math.sqrt((first - growth) ** 2 + 4 * growth * passed) - (first - growth)) / (2 * growth)
        )
        steps = max(0, math.ceil(about - 1e-9))
        self._take(min(steps, self._last_step[0][0] - self._step))

    def _take(self, steps: int) -> None:
        if steps <= 0:
            return
        longest = self._first_s() + self._law.c * len(self._stored) * (steps - 1)
        self._since_s += self._seconds(steps)
        self._step += steps
        for request, before in self._longest.items():
            if longest > before:
                self._longest[request] = longest

    def _await_end(self) -> None:
        self._change += 1
        if not self._stored:
            return
        change, steps = self._change, self._last_step[0][0] - self._step
        due = self._since_s + self._seconds(steps)

        def end() -> None:
            if change == self._change:
                self._take(steps)
                self._end()

        self._clock.later(max(0.0, due - self._clock.now), end)

    def _end(self) -> None:
        while self._last_step and self._last_step[0][0] <= self._step:
            _, request = heapq.heappop(self._last_step)
            self._total -= self._stored.pop(request)
            self._ended(request, self._longest.pop(request))
        self._await_end()
