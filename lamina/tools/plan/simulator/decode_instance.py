"""An instance that decodes on a shared virtual clock: an engine of its own, whose rounds take the time of a law. The
engine's own scheduler schedules its requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

from lamina.request import RequestOutput, SamplingParams
from lamina.scheduler.conductor.overload import StepLatency

from .clock import VirtualClock
from .lossless import RoundLoad, SimulatedPool

# More capacity than requests fill: only times limit here.
ROOM = SimulatedPool(layers=1, blocks=1 << 18, block=128, longest=1 << 20, most=1 << 14, prefill=8)


class SimulatedInstance:
    """An instance that decodes; prompts come with their KV and first token."""

    def __init__(
        self, clock: VirtualClock, model: StepLatency, ended: Callable[[int, float], None], room: SimulatedPool = ROOM
    ) -> None:
        """``ended``: called with a completion at its last token, and the longest of its steps in seconds."""

        def seconds(load: RoundLoad) -> float:
            return model.seconds(load.rows, sum(step.stored for step in load.steps) - load.rows)

        self._clock, self._ended = clock, ended
        self._engine, self._wire = room.engine(clock, seconds)
        self._names = dict[int, int]()  # request of the engine -> completion
        self._longest = dict[int, float]()  # request -> seconds
        self._since_s = 0.0  # when the round in flight began
        self._change = 0  # number of changes of the requests that decode

    def add_request(self, request: int, stored: int, answer: int) -> None:
        """Let ``request`` decode ``answer`` tokens after ``stored`` ones, as soon as the engine admits it."""
        number = self._engine.add([0] * stored, _params_of(answer + 1))
        self._names[number], self._longest[number] = request, 0.0
        self._go_on()

    def _go_on(self) -> None:
        """Step up to where the round in flight takes time."""
        while self._engine.has_work and not self._clock.now < self._wire.next_event_s < math.inf:
            self._note(self._engine.step())
            self._since_s = self._clock.now
        if self._engine.has_work:
            self._await()

    def _await(self) -> None:
        """Wait for the end of the round in flight, unless another request comes before."""
        self._change += 1
        change = self._change

        def done() -> None:
            if change == self._change:
                self._go_on()

        self._clock.later(self._wire.next_event_s - self._clock.now, done)

    def _note(self, outputs: list[RequestOutput]) -> None:
        took = self._clock.now - self._since_s
        for output in outputs:
            number = output.request_id
            if len(output.outputs[0].token_ids) > 1:
                self._longest[number] = max(self._longest[number], took)
            if output.finished:
                self._ended(self._names.pop(number), self._longest.pop(number))


@lru_cache(maxsize=4096)
def _params_of(tokens: int) -> SamplingParams:
    """Return the parameters for a reply of so many tokens."""
    return SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0)
