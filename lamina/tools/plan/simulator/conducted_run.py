"""A trace of requests, dispatched on a virtual clock by the conductor of the running engine.

Nothing is computed. A prefill worker takes a law's time for a prompt, one after the other. A sender sends one transfer
after the other, while other workers compute. Instances decode by a law of their own. The conductor's predictions and
the events are separate: its laws may differ from the workers', and follow the reported times.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lamina.scheduler.conductor import Conductor, PromptInfo
from lamina.scheduler.conductor.latency_model import PrefillLatency, TransferLatency
from lamina.scheduler.conductor.overload import StepLatency
from lamina.scheduler.conductor.routing import NO_WORKER, RoutingDecision

from .clock import VirtualClock
from .decode_instance import ROOM, SimulatedInstance
from .lossless import SimulatedPool


class TracedPrompt(NamedTuple):
    """A request: when it comes, tokens of prompt and reply, the keys of the prompt's pages."""

    at_s: float
    prompt: PromptInfo
    answer: int


class SimulatedPoolSpec(NamedTuple):
    """The workers' real times and capacity. ``instances``: number that decode; 0: nothing is decoded."""

    prefill: PrefillLatency
    transfer: TransferLatency
    instances: int = 0
    decode: StepLatency = StepLatency(0.0, 0.0, 0.0)
    room: SimulatedPool = ROOM  # of an instance


@dataclass
class RequestOutcome:
    """The result of a request. Infinite or zero where it did not come so far."""

    arrival: TracedPrompt
    choice: RoutingDecision
    refused: str = ""  # the limit, and when: "ttft", "tbt", "tbt after prefill"
    ttft_s: float = math.inf
    longest_step_s: float = math.inf
    prefix: int = 0  # tokens that were not computed
    computed: int = 0  # tokens that were
    expected_tbt_s: float = math.nan  # of a step at the end of its prompt, predicted at its arrival
    tbt_s: float = math.nan  # the same as measured: the mean of the instances
    ended_s: float = math.inf

    @property
    def ended(self) -> bool:
        """True if it has all its tokens."""
        return self.ended_s < math.inf


class LoadSample(NamedTuple):
    """The loads of both pools, relative to their limits."""

    at_s: float
    prefill: float
    decode: float


@dataclass
class _SimulatedWorker:
    """A prefill worker. ``line``: its requests in order. ``begun``: those that its stages compute, until ``done_s``;
    ``busy``: whether its first stage computes.
    """

    line: deque[int] = field(default_factory=deque)
    begun: deque[int] = field(default_factory=deque)
    done_s: float = 0.0
    busy: bool = False
    busy_s: float = 0.0
    free_s: float = 0.0  # since when its first stage has nothing to do
    sends_until_s: float = 0.0


class SimulatedPools:
    """One simulated run."""

    def __init__(
        self,
        conductor: Conductor,
        truth: SimulatedPoolSpec,
        clock: VirtualClock | None = None,
        sample_s: float = 0.0,
        *,
        steps: bool = False,
    ) -> None:
        """``sample_s``: between two samples of the loads; 0 = none. ``steps``: keep for each request the step predicted
        for the end of its prompt, and the real one.
        """
        self.clock = clock or VirtualClock()
        self._conductor, self._truth, self._sample_s = conductor, truth, sample_s
        self._steps = steps
        self._workers = [_SimulatedWorker() for _ in range(conductor.num_workers)]
        self._instances = [
            SimulatedInstance(self.clock, truth.decode, self._ended, truth.room) for _ in range(truth.instances)
        ]
        self._coming = set[int]()  # requests whose transfer is in flight
        self._came = dict[int, tuple[float, float]]()  # of a prompt: when its transfer began, and ended
        self._left = 0  # requests that have not ended
        self.requests: list[RequestOutcome] = []
        self.samples: list[LoadSample] = []

    @property
    def busy_s(self) -> Sequence[float]:
        """The seconds that each prefill worker computed."""
        return [worker.busy_s for worker in self._workers]

    def run(self, arrivals: Iterable[TracedPrompt]) -> None:
        """Run all arrivals, up to the end of the last."""
        for arrival in arrivals:
            self._left += 1
            self.clock.later(arrival.at_s - self.clock.now, lambda arrival=arrival: self._arrive(arrival))  # type: ignore[misc]
        if self._sample_s:
            self._sample()
        while self.clock.advance():
            pass

    def _arrive(self, arrival: TracedPrompt) -> None:
        conductor, now = self._conductor, self.clock.now
        choice = conductor.choose(arrival.prompt, now)
        number, request = len(self.requests), RequestOutcome(arrival, choice)
        self.requests.append(request)
        if refusal := conductor.check_admission(arrival.prompt, choice, now):
            request.refused = refusal.reason
            self._left -= 1
            return
        if self._steps:
            request.expected_tbt_s = conductor.tbt_s(arrival.prompt, now, now + choice.ttft_s)
        conductor.reserve(number, arrival.prompt, choice, now)
        self._workers[choice.worker].line.append(number)
        if choice.source != NO_WORKER:
            self._send(number, choice)
        self._begin(choice.worker)

    def _send(self, number: int, choice: RoutingDecision) -> None:
        sender = self._workers[choice.source]
        begins_s = max(self.clock.now, sender.sends_until_s)
        sender.sends_until_s = begins_s + self._truth.transfer.seconds(choice.transferred_tokens)
        self._coming.add(number)
        self._came[number] = begins_s, sender.sends_until_s

        def received() -> None:
            self._coming.discard(number)
            self._conductor.on_pages_received(number)
            self._begin(choice.worker)

        self.clock.later(sender.sends_until_s - self.clock.now, received)

    def _begin(self, at: int) -> None:
        worker = self._workers[at]
        if worker.busy or not worker.line or worker.line[0] in self._coming:
            return
        number = worker.line.popleft()
        request = self.requests[number]
        prompt = request.arrival.prompt
        (ready,) = self._conductor.prefix_index.match([self._conductor.places[at]], prompt.keys, ready=True)
        request.prefix = prompt.tokens_of_pages(ready)
        seconds = self._truth.prefill.seconds(prompt.tokens, request.prefix)
        worker.busy, worker.busy_s, now = True, worker.busy_s + seconds, self.clock.now
        if number in self._came:
            self._tell_transfer(*self._came.pop(number), request.choice.transferred_tokens, worker.free_s)
        worker.begun.append(number)
        if len(worker.begun) == 1:
            self._conductor.on_prefill_started(number, now)
        fill_s = self._conductor.staged.fill_s(prompt.tokens, request.prefix, seconds)
        worker.done_s = max(now + fill_s, worker.done_s) + seconds
        self.clock.later(worker.done_s - now, lambda: self._computed(number, at, seconds))
        if self._conductor.staged.stages > 1:
            self.clock.later(seconds, lambda: self._free(at))

    def _tell_transfer(self, asked_s: float, came_s: float, tokens: int, free_s: float) -> None:
        """Report a transfer as a worker does: it had nothing else to do from ``free_s`` on."""
        waits_s = max(asked_s, free_s)
        if waits_s < came_s:
            self._conductor.record_transfer(tokens, came_s - waits_s, waits_s - asked_s)
        else:
            self._conductor.record_transfer(tokens, 0.0, waits_s - asked_s)

    def _free(self, at: int) -> None:
        """Note that its first stage is done with a prompt."""
        self._workers[at].busy, self._workers[at].free_s = False, self.clock.now
        self._begin(at)

    def _computed(self, number: int, at: int, seconds: float) -> None:
        request, now = self.requests[number], self.clock.now
        prompt = request.arrival.prompt
        request.computed, request.ttft_s = prompt.tokens - request.prefix, now - request.arrival.at_s
        worker = self._workers[at]
        worker.begun.popleft()
        self._conductor.on_prefill_done(number, now, seconds, request.prefix)
        if worker.begun:
            self._conductor.on_prefill_started(worker.begun[0], now)
        self._decode(number, request)
        if self._conductor.staged.stages == 1:
            self._free(at)

    def _decode(self, number: int, request: RequestOutcome) -> None:
        tokens, answer = request.arrival.prompt.tokens, request.arrival.answer - 1  # the first one is drawn
        if not self._instances:
            self._left -= 1
            return
        if refusal := self._conductor.check_decode_admission(tokens, request.ttft_s):
            request.refused = f"{refusal.reason} after prefill"
            self._left -= 1
            return
        instance, _ = self._conductor.decode_load_model.select(tokens)
        self._conductor.decode_load_model.join(number, instance, tokens, self.clock.now)
        request.tbt_s = self._conductor.decode_load_model.tbt_s() if self._steps else math.nan
        if answer < 1:
            self._ended(number, 0.0)
        else:
            self._instances[instance].add_request(number, tokens, answer)

    def _ended(self, number: int, longest_step_s: float) -> None:
        request = self.requests[number]
        request.longest_step_s, request.ended_s = longest_step_s, self.clock.now
        self._conductor.decode_load_model.leave(number, self.clock.now, request.arrival.answer)
        self._left -= 1

    def _sample(self) -> None:
        conductor, now = self._conductor, self.clock.now
        self.samples.append(LoadSample(now, conductor.prefill_load(now), conductor.decode_load()))
        if self._left:
            self.clock.later(self._sample_s, self._sample)
