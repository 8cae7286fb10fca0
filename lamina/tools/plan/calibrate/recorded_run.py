"""The steps of a recorded run: what each of them had to do, and where its time went."""

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
_IDLE_S = (
    0.2  # from tokens to the next round: a driver with something to do does not wait so long, on a busy host either
)


class RecordedStep(NamedTuple):
    """Rows of its slices, rows that were drawn behind, pairs of a row and a token that it sees. ``total_s``: seconds
    until the next step began, 0 where none was under way by then; ``model_s``: those in which the compute worker did
    not wait, so slices, and turns, messages and draws between them, which keep it from another batch as well; of a step
    without ``total_s`` slices and sampling alone. Of attention, on the memory worker that took the longest: its plan,
    its layers, its messages; ``stored_s``: of these, to read stored K and V. Of the driver.
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
        """Whether the step has no rows of prompts."""
        return self.rows == self.draws

    @property
    def between_s(self) -> float:
        """Seconds in which both pools wait, less those in which both work: below 0 where these are more."""
        return self.total_s - self.model_s - self.attention_s


class RecordedRun(NamedTuple):
    """The recorded steps of one compute worker and ``memory_workers`` memory workers."""

    steps: list[RecordedStep]
    memory_workers: int
    layers: int

    @property
    def chunk(self) -> int:
        """Rows of prompts in a step, at most; 0: there were none."""
        return max(step.rows - step.draws for step in self.steps)


def steps_of(recording: Recording, where: str) -> RecordedRun:
    """Raises ValueError, behind ``where``, for a run that says nothing about its operators."""
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
    """From a step's first slice to that of the step ``following``; 0 where the driver had nothing to do before it asked
    for that one. ``ends``: when it had taken in the tokens of each step; one may be under way while it asks for more.
    """
    asked = min((s.start for s in following if s.event == Event.SCHEDULE), default=math.inf)
    before = ends[bisect(ends, asked) - 1] if ends and ends[0] <= asked else asked
    first, last = _begin(spans), _begin(following)
    return last - first if asked - before < _IDLE_S and -math.inf < first < last else 0.0


def _begin(spans: list[Span]) -> float:
    begins = (s.start for s in spans if s.device == COMPUTE and s.event == Event.SLICE and s.layer == 0)
    return min(begins, default=-math.inf)


def _step(spans: list[Span], following: list[Span], layers: int, ends: list[float]) -> RecordedStep | None:
    """The step that ``spans`` are of; None where some of its spans were lost. The last slice, behind all ``layers``,
    runs for rows that are drawn, and not where there are none. ``following``, ``ends``: as of ``_whole``.
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
    """Seconds in which the compute worker had nothing to do before it began the step ``following``."""
    return _total(_on_compute(spans, (Event.WAIT_O,))) + _total(_on_compute(following, (Event.WAIT_STEP,)))


def _on_compute(spans: Iterable[Span], events: Container[Event]) -> Iterator[Span]:
    return (s for s in spans if s.device == COMPUTE and s.event in events)


def _total(spans: Iterable[Span]) -> float:
    return sum(s.end - s.start for s in spans)
