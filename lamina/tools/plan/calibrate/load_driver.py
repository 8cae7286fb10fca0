"""Passes requests to an engine, real or simulated, and records the times of their tokens, by the same code for both."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from lamina.engine.engine import Engine
from lamina.request import RequestOutput, SamplingParams
from lamina.tools.request_traces import TracedRequest

_MOST = 4096  # sequences of a shape


class RunShape(NamedTuple):
    """A run of so many prompts of so many tokens at once, in ``batches`` batches."""

    sequences: int
    prompt: int
    batches: int = 1

    @property
    def label(self) -> str:
        """The shape in words: 8 x 512, n = 1."""
        return f"{self.sequences} x {self.prompt}, n = {self.batches}"

    def requests(self, answer: int) -> list[TracedRequest]:
        """Return the requests of the run, which all come at once."""
        return [TracedRequest(0.0, self.prompt, answer)] * self.sequences


class RunSpeed(NamedTuple):
    """Tokens per second, and seconds between two tokens of a sequence."""

    tokens_s: float
    tbt_p50_s: float
    tbt_p99_s: float


def shapes_of(text: str, flag: str) -> list[RunShape]:
    """Parse 8x2048,32x512,8x512:2. Raises ValueError that names ``flag``."""
    shapes = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,4})x(\d{1,7})(?::([1-4]))?", part.strip())
        if match is None or not 1 <= int(match[1]) <= _MOST or int(match[2]) < 1:
            raise ValueError(f"{flag} {part.strip()!r} is no number of sequences, their prompt and n: 8x2048, 8x512:2")
        shapes.append(RunShape(int(match[1]), int(match[2]), int(match[3] or 1)))
    return shapes


def run_requests(
    engine: Engine,
    now: Callable[[], float],
    requests: Sequence[TracedRequest],
    sleep: Callable[[float], None],
    *,
    together: bool,
) -> RunSpeed:
    """Give ``engine`` requests when they come by ``now``; ``sleep``: lets time pass when there is nothing to do.
    ``together``: count tokens while all of them decode, else all. Raises ValueError if no token counts.
    """
    start, left = now(), list(requests)
    times: dict[int, list[float]] = {}
    while left or engine.has_work:
        if left and not engine.has_work and (wait := left[0].at_s - (now() - start)) > 0:
            sleep(wait)
        while left and left[0].at_s <= now() - start:
            request = left.pop(0)
            params = SamplingParams(max_tokens=request.answer, ignore_eos=True, temperature=0)
            times[engine.add([1] * request.prompt, params)] = []
        _note(engine.step(), times, now())
    engine.release_idle_blocks()
    return _tempo(list(times.values()), together=together)


def _note(outputs: Sequence[RequestOutput], times: dict[int, list[float]], at: float) -> None:
    for output in outputs:
        seen = times[output.request_id]
        seen += [at] * (len(output.outputs[0].token_ids) - len(seen))


def _tempo(times: Sequence[Sequence[float]], *, together: bool) -> RunSpeed:
    begin = max(t[0] for t in times) if together else 0.0
    end = min(t[-1] for t in times) if together else math.inf
    gaps = sorted(b - a for t in times for a, b in pairwise(t) if begin <= a and b <= end)
    if not gaps:
        raise ValueError("no two tokens of all sequences lie in one stretch of decoding: let answers be longer")
    first, last = (begin, end) if together else (min(t[0] for t in times), max(t[-1] for t in times))
    count = sum(first < x <= last for t in times for x in t)
    return RunSpeed(count / (last - first), gaps[len(gaps) // 2], gaps[min(len(gaps) - 1, len(gaps) * 99 // 100)])
