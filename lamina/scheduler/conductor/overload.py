"""What decodes, how long its next tokens will take, and whether one prompt more is too much. Pure policy: no torch, no
I/O, no clock.

The load of a pool is a predicted time over its limit: of the first token for prefill workers, of the gap between tokens
for what decodes (Mooncake, section 6.1). When decoding is looked at, says ``--slo overload=``:

baseline    once the prompt is computed: if there is no room then, the prefill was for nothing
early       at the arrival, as decoding is then (section 6.2)
predictive  at the arrival, as decoding will be when the prompt is computed (section 6.4)

Each of them looks at the end of the prompt again (section 3).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

OVERLOAD_POLICIES = ("baseline", "early", "predictive")
PRIOR_COMPLETIONS = 49  # completions that a first decoding time is worth


class SloLimits(NamedTuple):
    """``--slo ttft=`` and ``--slo tbt=``, seconds: infinite where nothing is promised."""

    ttft_s: float = math.inf
    tbt_s: float = math.inf


NO_LIMITS = SloLimits()


class StepLatency(NamedTuple):
    """Seconds of a step: ``a``, ``b`` of a row, ``c`` of a token that its attention reads."""

    a: float
    b: float
    c: float

    def seconds(self, rows: float, stored: float) -> float:
        """The seconds of a step; 0 without rows."""
        return self.a + self.b * rows + self.c * stored if rows > 0 else 0.0


class _Decoding(NamedTuple):
    instance: int
    since_s: float
    stored: int


@dataclass
class _Instance:
    rows: int = 0
    stored: int = 0


@dataclass
class DecodeLoadModel:
    """Completions that decode, by instance: who takes steps together. ``decode_s``: how long one decodes, all alike
    (section 6.4), and ``mean_answer_tokens``: its tokens. Both follow those that end; ``weight``: completions that the
    first ones count as. A completion counts with all the tokens that it will have, so that a step which is within the
    limit stays there.
    """

    num_instances: int
    latency: StepLatency
    decode_s: float
    mean_answer_tokens: float = 0.0
    weight: int = PRIOR_COMPLETIONS
    _running: dict[Hashable, _Decoding] = field(default_factory=dict)
    _instances: list[_Instance] = field(init=False)

    def __post_init__(self) -> None:
        self._instances = [_Instance() for _ in range(self.num_instances)]

    @property
    def num_running(self) -> int:
        """Completions."""
        return len(self._running)

    @property
    def mean_tokens(self) -> float:
        """Tokens that a completion will have, prompt included; 0 where none decodes."""
        return sum(i.stored for i in self._instances) / max(1, len(self._running))

    def select(self, stored: int) -> tuple[int, float]:
        """The instance whose step stays the shortest with one more completion behind ``stored`` tokens, and that step's
        seconds.
        """
        seconds = [
            self.latency.seconds(i.rows + 1, i.stored + stored + self.mean_answer_tokens) for i in self._instances
        ]
        at = min(range(len(seconds)), key=seconds.__getitem__)
        return at, seconds[at]

    def tbt_s(self) -> float:
        """Seconds of a step now: the mean of the instances."""
        return sum(self.latency.seconds(i.rows, i.stored) for i in self._instances) / self.num_instances

    def tbt_at(self, when_s: float, now_s: float, joining: Iterable[tuple[float, int]]) -> float:
        """The same at ``when_s``: sequences that will have decoded for ``decode_s`` are gone; prompts of ``joining``,
        (time when computed, tokens), that are computed by then are spread over all instances. The expected change is
        added to the time of a step now, as a sequence that decodes longer than ``decode_s`` still counts in it.
        """
        rows = stored = 0.0
        for at_s, tokens in joining:
            if at_s <= when_s < at_s + self.decode_s:
                rows += 1 / self.num_instances
                stored += (tokens + self.mean_answer_tokens) / self.num_instances
        then, now = self._uniform_s(when_s, rows, stored), self._uniform_s(now_s, 0.0, 0.0)
        return max(0.0, self.tbt_s() + then - now)

    def _uniform_s(self, at_s: float, rows: float, stored: float) -> float:
        """Seconds of a step at ``at_s`` of those that decode now, were ``decode_s`` true of each, with so many rows and
        tokens more on each instance: the mean.
        """
        left = [_Instance() for _ in self._instances]
        for one in self._running.values():
            if one.since_s + self.decode_s > at_s:
                left[one.instance].rows += 1
                left[one.instance].stored += one.stored
        return sum(self.latency.seconds(i.rows + rows, i.stored + stored) for i in left) / self.num_instances

    def time_until_slot_s(self, places: float, ahead: int) -> float:
        """Seconds until one of ``places`` places is free for one more completion, if the completions ``ahead`` of it
        take places first and all end evenly, one after the other.
        """
        missing = ahead + 1 - places
        return missing * self.decode_s / max(1.0, places) if missing > 0 else 0.0

    def join(self, request: Hashable, instance: int, tokens: int, now_s: float) -> None:
        """``request`` begins to decode behind so many tokens."""
        stored = tokens + round(self.mean_answer_tokens)
        self._running[request] = _Decoding(instance, now_s, stored)
        self._instances[instance].rows += 1
        self._instances[instance].stored += stored

    def leave(self, request: Hashable, now_s: float, answer: int = 0) -> None:
        """``request`` decodes no more. ``mean_answer_tokens``: the tokens with which it came to its own end; 0: it did
        not."""
        one = self._running.pop(request)
        self._instances[one.instance].rows -= 1
        self._instances[one.instance].stored -= one.stored
        if answer:
            new, self.weight = 1 / (self.weight + 1), min(PRIOR_COMPLETIONS, self.weight + 1)
            self.decode_s += new * (now_s - one.since_s - self.decode_s)
            self.mean_answer_tokens += new * (answer - self.mean_answer_tokens)


def check_overload_policy(name: str) -> str:
    """Raises ValueError for a name that is none."""
    if name not in OVERLOAD_POLICIES:
        raise ValueError(f"--slo overload= must be one of {', '.join(OVERLOAD_POLICIES)}, not {name!r}")
    return name
