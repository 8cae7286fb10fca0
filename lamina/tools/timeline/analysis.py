"""Facts from a trace: how busy each pool was, its bubbles, stragglers, slow steps, hidden attention."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lamina.observe.trace import Event, Recording, Span

from .device_states import STATES, SpanIndex, States, states, window
from .intervals import intersect, total

SLOW = 2.0  # times the median makes a step slow
SHOWN = 5  # slow steps in a report
ROLES = ("compute", "memory", "prefill")


@dataclass(frozen=True)
class Straggler:
    """A memory worker: of ``layers`` layers it was the ``last`` one to send O, ``late_s`` after the first (mean)."""

    device: str
    layers: int
    last: int
    late_s: float


@dataclass(frozen=True)
class StepSpan:
    """One step of one batch on the compute side: from its first slice to its tokens. ``cause``: the state of the
    compute worker that took most of it.
    """

    batch: int
    step: int
    rows: int
    start: float
    duration_s: float
    cause: str = ""


@dataclass(frozen=True)
class Hidden:
    """Attention over the stored tokens in one layer, mean of a step and a memory worker. ``stored_s``: all of it;
    ``hidden_s``: the part of it that ran before K and V began to be sent.
    """

    layer: int
    stored_s: float
    hidden_s: float

    @property
    def share(self) -> float:
        """The hidden share of the attention over stored tokens."""
        return self.hidden_s / self.stored_s if self.stored_s else 0.0


@dataclass(frozen=True)
class Report:
    """``devices`` and ``pools``: name -> state -> share of the run; the shares of a name add up to 1.
    ``recording_share``: an upper bound of the run's time that went into recording it.
    """

    window_s: float
    steps: int
    step_median_s: float
    step_p99_s: float
    pools: dict[str, dict[str, float]]
    devices: dict[str, dict[str, float]]
    stragglers: list[Straggler]
    slow_steps: list[StepSpan]
    hidden: list[Hidden]
    dropped: dict[str, int]
    clock_uncertainty_s: float
    recording_share: float


def analyse(recording: Recording) -> Report:
    """Return the report on a recording. Raises ValueError if no step was run."""
    start, end = window(recording.spans, recording.dropped)
    spans = [s for s in recording.spans if s.end > start]
    by_device, index = states(spans, start, end), SpanIndex(spans)
    devices = {d: {k: total(v) / (end - start) for k, v in of.items()} for d, of in by_device.items()}
    steps = steps_of(spans)
    times = sorted(s.duration_s for s in steps) or [0.0]
    return Report(
        window_s=end - start,
        steps=len(steps),
        step_median_s=statistics.median(times),
        step_p99_s=times[min(len(times) - 1, int(0.99 * len(times)))],
        pools={r: _mean([devices[d] for d in index.role(r)]) for r in ROLES if index.role(r)},
        devices=devices,
        stragglers=stragglers(index),
        slow_steps=_slow(steps, by_device),
        hidden=hidden(index),
        dropped=recording.dropped,
        clock_uncertainty_s=max((c.uncertainty_s for c in recording.clocks.values()), default=0.0),
        recording_share=recording_share(spans, recording.span_cost_s, end - start),
    )


def steps_of(spans: Sequence[Span]) -> list[StepSpan]:
    """Return all steps that the spans hold from their first slice on, by their start."""
    groups: dict[tuple[int, int], list[Span]] = defaultdict(list)
    for s in spans:
        if s.device.startswith("compute") and s.event in (Event.SLICE, Event.SAMPLE):
            groups[s.batch, s.step].append(s)
    steps = []
    for (batch, step), of in groups.items():
        first = next((s for s in of if s.event == Event.SLICE and s.layer == 0), None)
        if first is not None:
            steps.append(StepSpan(batch, step, first.value, first.start, max(s.end for s in of) - first.start))
    return sorted(steps, key=lambda s: s.start)


def stragglers(index: SpanIndex) -> list[Straggler]:
    """Return the lateness of each memory worker, if there are several."""
    memory, late, layers = index.role("memory"), defaultdict[str, list[float]](list), 0
    for sent in index.of[memory[0]].get(Event.SEND_O, []) if len(memory) > 1 else []:
        ends = {s.device: s.end for m in memory for s in index.layer(m, sent, Event.SEND_O)}
        if len(ends) > 1:
            layers += 1
            last = max(ends, key=lambda d: ends[d])
            late[last].append(ends[last] - min(ends.values()))
    return [Straggler(m, layers, len(late[m]), statistics.mean(late[m] or [0.0])) for m in memory if layers]


def hidden(index: SpanIndex) -> list[Hidden]:
    """Return hidden attention by layer; spans whose send KV is not in the trace do not count."""
    sums: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for device in index.role("memory"):
        number = int(device.partition("-")[2])
        for s in index.of[device].get(Event.STORED, []):
            senders = [x for c in index.role("compute") for x in index.layer(c, s, Event.SEND_KV)]
            begun = [x.start for x in senders if x.peer == number]
            if begun:
                sums[s.layer].append((s.end - s.start, max(0.0, min(s.end, *begun) - s.start)))
    means = {layer: [statistics.mean(x) for x in zip(*pairs, strict=True)] for layer, pairs in sums.items()}
    return [Hidden(layer, *means[layer]) for layer in sorted(means)]


def recording_share(spans: Sequence[Span], span_cost_s: float, window_s: float) -> float:
    """Return the share of the window that recording took, as if the engine and the busiest worker of each role had
    recorded one after the other.
    """
    counts: dict[str, int] = defaultdict(int)
    for s in spans:
        counts[s.device] += 1
    worst: dict[str, int] = defaultdict(int)
    for device, count in counts.items():
        role = device.partition("-")[0]
        worst[role] = max(worst[role], count)
    return sum(worst.values()) * span_cost_s / window_s


def _mean(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {state: statistics.mean(r[state] for r in rows) for state in STATES}


def _slow(steps: Sequence[StepSpan], by_device: Mapping[str, States]) -> list[StepSpan]:
    """Return the slowest steps, with the compute workers' main state meanwhile."""
    median = statistics.median([s.duration_s for s in steps] or [0.0])
    slow = sorted((s for s in steps if s.duration_s > SLOW * median), key=lambda s: -s.duration_s)[:SHOWN]
    compute = [of for device, of in by_device.items() if device.startswith("compute")]
    out = []
    for s in slow:
        during = [(s.start, s.start + s.duration_s)]
        spent = {state: sum(total(intersect(of[state], during)) for of in compute) for state in STATES}
        cause = max(spent, key=lambda state: spent[state])
        out.append(StepSpan(s.batch, s.step, s.rows, s.start, s.duration_s, cause))
    return out
