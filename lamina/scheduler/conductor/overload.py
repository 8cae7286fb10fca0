"""Overload policies: predict the decoding load, and decide if one more prompt exceeds it.

The load of a pool is a predicted time as a share of its limit: TTFT for prefill workers, TBT for decoding (Mooncake,
section 6.1). ``--slo overload=`` says when the decoding load is checked:

- ``baseline``: once the prompt is computed. A rejected prompt has then wasted its prefill.
- ``early``: when the prompt arrives, by the load at that time (section 6.2).
- ``predictive``: when the prompt arrives, by the load predicted for the end of its prefill (section 6.4).

All of them check again once the prompt is computed (section 3). Pure policy: no torch, no I/O, no clock.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

OVERLOAD_POLICIES = ("baseline", "early", "predictive")
PRIOR_COMPLETIONS = 49  # the weight of the initial decoding time, in completions


class SloLimits(NamedTuple):
    """``--slo ttft=`` and ``--slo tbt=``, in seconds; infinite without a limit."""

    ttft_s: float = math.inf
    tbt_s: float = math.inf


NO_LIMITS = SloLimits()


class StepLatency(NamedTuple):
    """The seconds of a decoding step: ``a``, plus ``b`` for each row and ``c`` for each token that attention reads."""

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
    """Completions that decode, by decoding instance.

    ``decode_s``: the time for which a completion decodes, the same for all (section 6.4). ``mean_answer_tokens``: its
    tokens. Both follow completions that end; the initial values weigh as ``weight`` completions. A completion counts
    with its final number of tokens, so a step within the limit stays within it.
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
        """The number of completions that decode."""
        return len(self._running)

    @property
    def mean_tokens(self) -> float:
        """The final tokens of a completion with its prompt, as a mean; 0 if none decodes."""
        return sum(i.stored for i in self._instances) / max(1, len(self._running))

    def select(self, stored: int) -> tuple[int, float]:
        """The instance with the shortest step after one more completion of ``stored`` tokens joins, and its seconds."""
        seconds = [
            self.latency.seconds(i.rows + 1, i.stored + stored + self.mean_answer_tokens) for i in self._instances
        ]
        at = min(range(len(seconds)), key=seconds.__getitem__)
        return at, seconds[at]

    def tbt_s(self) -> float:
        """The current seconds of a step, as a mean over instances."""
        return sum(self.latency.seconds(i.rows, i.stored) for i in self._instances) / self.num_instances

    def tbt_at(self, when_s: float, now_s: float, joining: Iterable[tuple[float, int]]) -> float:
        """The predicted seconds of a step at ``when_s``, as a mean over instances.

        ``joining``: (time when computed, tokens) of prompts; those computed by then are spread over all instances.
        Completions that will have decoded for ``decode_s`` are gone. The predicted change is added to the current
        time, since completions that decode longer than ``decode_s`` still count there.
        """
        rows = stored = 0.0
        for at_s, tokens in joining:
            if at_s <= when_s < at_s + self.decode_s:
                rows += 1 / self.num_instances
                stored += (tokens + self.mean_answer_tokens) / self.num_instances
        then, now = self._uniform_s(when_s, rows, stored), self._uniform_s(now_s, 0.0, 0.0)
        return max(0.0, self.tbt_s() + then - now)

    def _uniform_s(self, at_s: float, rows: float, stored: float) -> float:
        """The seconds of a step at ``at_s``, if each completion decodes for exactly ``decode_s``.

        ``rows``, ``stored``: rows and tokens added to each instance.
        """
        left = [_Instance() for _ in self._instances]
        for one in self._running.values():
            if one.since_s + self.decode_s > at_s:
                left[one.instance].rows += 1
                left[one.instance].stored += one.stored
        return sum(self.latency.seconds(i.rows + rows, i.stored + stored) for i in left) / self.num_instances

    def time_until_slot_s(self, places: float, ahead: int) -> float:
        """Seconds until one of ``places`` slots is free for a completion with ``ahead`` completions before it.

        Completions are taken to end one after the other, at equal intervals.
        """
        missing = ahead + 1 - places
        return missing * self.decode_s / max(1.0, places) if missing > 0 else 0.0

    def join(self, request: Hashable, instance: int, tokens: int, now_s: float) -> None:
        """Add ``request``, which decodes after ``tokens`` tokens."""
        stored = tokens + round(self.mean_answer_tokens)
        self._running[request] = _Decoding(instance, now_s, stored)
        self._instances[instance].rows += 1
        self._instances[instance].stored += stored

    def leave(self, request: Hashable, now_s: float, answer: int = 0) -> None:
        """Remove ``request``. ``answer``: its tokens if it ended by itself, else 0."""
        one = self._running.pop(request)
        self._instances[one.instance].rows -= 1
        self._instances[one.instance].stored -= one.stored
        if answer:
            new, self.weight = 1 / (self.weight + 1), min(PRIOR_COMPLETIONS, self.weight + 1)
            self.decode_s += new * (now_s - one.since_s - self.decode_s)
            self.mean_answer_tokens += new * (answer - self.mean_answer_tokens)


def check_overload_policy(name: str) -> str:
    """Returns the name of a policy. Raises ValueError for another name."""
    if name not in OVERLOAD_POLICIES:
        raise ValueError(f"--slo overload= must be one of {', '.join(OVERLOAD_POLICIES)}, not {name!r}")
    return name
