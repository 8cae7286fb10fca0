"""The steps of a recorded run: the work of each, and where its time went."""

from __future__ import annotations

import math
from bisect import bisect
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator
from typing import NamedTuple

from lamina.observe.trace import ENGINE, Event, Recording, Span

COMPUTE = "compute-0"
_MODEL = (Event.SLICE, Event.SAMPLE)
_ATTENTION = (Event.PLAN, Event.STORED, Event.NEW, Event.SEND_O, Event.WRITE)
_DRIVER = (Event.SCHEDULE, Event.POSTPROCESS)
_IDLE_S = 0.2  # from tokens to the next round: a driver with work does not wait so long, even on a busy host


class RecordedStep(NamedTuple):
    """One recorded step: rows of its slices, rows that were drawn after them, pairs of a row and a token that it
    attends.

    ``total_s``: seconds until the next step began, 0 if none was in flight by then. ``model_s``: seconds in which the
    compute worker did not wait: slices, and turns, messages and draws between them, which also keep it from another
    batch. For a step without ``total_s`` it counts slices and sampling only. ``attention_s``: on the memory worker that
    took the longest: its plan, its layers, its messages. ``stored_s``: the part of it that reads stored K and V.
    ``driver_s``: of the driver.
    """

    rows: int
    draws: int
    pairs: int
    model_s: float
    attention_s: float
    stored_s: float
    driver_s: float
    total_s: float

    @property
    def is_decode_only(self) -> bool:
        """True if the step has no rows of prompts."""
        return self.rows == self.draws

    @property
    def between_s(self) -> float:
        """Seconds in which both pools wait, minus those in which both work: below 0 if these are more."""
        return self.total_s - self.model_s - self.attention_s


class RecordedRun(NamedTuple):
    """The recorded steps of one compute worker and ``memory_workers`` memory workers."""

    steps: list[RecordedStep]
    memory_workers: int
    layers: int

    @property
    def chunk(self) -> int:
        """The most rows of prompts in a step; 0: there were none."""
        return max(step.rows - step.draws for step in self.steps)


def steps_of(recording: Recording, where: str) -> RecordedRun:
    """Return the steps of a recording. Raises ValueError, beginning with ``where``, for a run without data on its
    operators.
    """
    devices = {s.device for s in recording.spans}
    computes = sorted(d for d in devices if d.startswith("compute-"))
    if computes != [COMPUTE] or any(s.batch for s in recording.spans):
        raise ValueError(f"{where}: record a run of one compute worker and one batch, without --pipeline and ranks")
    of = defaultdict[int, list[Span]](list)
    for span in recording.spans:
        of[span.step].append(span)
    ends = sorted(s.end for s in recording.spans if s.event == Event.POSTPROCESS)
    layers = 1 + max((s.layer for s in recording.spans if s.event in _ATTENTION), default=0)
    steps = [_step(spans, of.get(n + 1, []), layers, ends) for n, spans in sorted(of.items())]
    whole = [s for s in steps if s is not None]
    if not whole:
        raise ValueError(f"{where} has no step whose spans are all there: let it run longer, or less long")
    return RecordedRun(whole, sum(d.startswith("memory-") for d in devices), layers)


def _whole(spans: list[Span], following: list[Span], ends: list[float]) -> float:
    """Return the seconds from a step's first slice to that of the step ``following``; 0 if the driver had nothing to do
    before it requested that one. ``ends``: when it had handled the tokens of each step; one may be in flight while it
    requests more.
    """
    asked = min((s.start for s in following if s.event == Event.SCHEDULE), default=math.inf)
    before = ends[bisect(ends, asked) - 1] if ends and ends[0] <= asked else asked
    first, last = _begin(spans), _begin(following)
    return last - first if asked - before < _IDLE_S and -math.inf < first < last else 0.0


def _begin(spans: list[Span]) -> float:
    begins = (s.start for s in spans if s.device == COMPUTE and s.event == Event.SLICE and s.layer == 0)
    return min(begins, default=-math.inf)


def _step(spans: list[Span], following: list[Span], layers: int, ends: list[float]) -> RecordedStep | None:
    """Return the step of ``spans``; None if some of its spans were lost. The last slice, after all ``layers``, runs
    only for rows that are drawn. ``following``, ``ends``: as in ``_whole``.
    """
    whole_s = _whole(spans, following, ends)
    rows_of = {s.layer: s.value for s in spans if s.device == COMPUTE and s.event == Event.SLICE}
    pairs = next((s.value for s in spans if s.event == Event.SCHEDULE), 0)
    by_worker = defaultdict[str, list[Span]](list)
    for span in spans:
        if span.event in _ATTENTION and span.device.startswith("memory-"):
            by_worker[span.device].append(span)
    if not pairs or not by_worker or not rows_of.get(0):
        return None
    longest = max(by_worker.values(), key=_total)
    return RecordedStep(
        rows=rows_of[0],
        draws=rows_of.get(layers, 0),
        pairs=pairs,
        model_s=whole_s - _waited(spans, following) if whole_s else _total(_on_compute(spans, _MODEL)),
        attention_s=_total(longest),
        stored_s=_total(s for s in longest if s.event == Event.STORED),
        driver_s=_total(s for s in spans if s.device == ENGINE and s.event in _DRIVER),
        total_s=whole_s,
    )


def _waited(spans: list[Span], following: list[Span]) -> float:
    """Return the seconds in which the compute worker had nothing to do before it began the step ``following``."""
    return _total(_on_compute(spans, (Event.WAIT_O,))) + _total(_on_compute(following, (Event.WAIT_STEP,)))


def _on_compute(spans: Iterable[Span], events: Container[Event]) -> Iterator[Span]:
    return (s for s in spans if s.device == COMPUTE and s.event in events)


def _total(spans: Iterable[Span]) -> float:
    return sum(s.end - s.start for s in spans)
