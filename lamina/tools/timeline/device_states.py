"""The state of every device at any moment of a run: busy, or waiting, and for what. Pure functions over spans.

A device is in one state at a time, so its states add up to the whole run. The cause of a wait is the state of the
device that it waited for: a memory worker that waits for Q while the compute worker samples waits for sampling.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from lamina.observe.trace import ENGINE, Event, Span

from .intervals import Intervals, intersect, subtract, union

# state -> in words. HOST is the rest: Python between the recorded spans, and time that the system gave to other
# processes.
BUSY, WAIT_Q, WAIT_KV, WAIT_O, NETWORK = "busy", "wait_q", "wait_kv", "wait_o", "network"
IMBALANCE, SCHEDULER, SAMPLING, HOST, IDLE = "imbalance", "scheduler", "sampling", "host", "idle"
GRANT, GAP, LOADING = "grant", "gap", "loading"
STATES = {
    BUSY: "busy",
    WAIT_Q: "waiting for Q",
    WAIT_KV: "waiting for K, V",
    WAIT_O: "waiting for O",
    NETWORK: "network: copies, flight, wake-up",
    IMBALANCE: "imbalance of memory workers",
    SCHEDULER: "scheduler",
    SAMPLING: "sampling",
    GRANT: "storing K, V of prefill workers",
    GAP: "waiting for a gap in decoding",
    LOADING: "waiting for KV to be loaded",
    HOST: "between spans",
    IDLE: "no request",
}
_SENT_AS = {Event.WAIT_PLAN: Event.SEND_PLAN, Event.WAIT_Q: Event.SEND_Q, Event.WAIT_KV: Event.SEND_KV}
_SENDS = (Event.SEND_PLAN, Event.SEND_Q, Event.SEND_KV, Event.RECEIVE_O, Event.RESERVE)
_ATTENTION = (Event.STORED, Event.WRITE, Event.NEW)

States = dict[str, Intervals]


class SpanIndex:
    """Spans by device and event, and by the message that they belong to."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self.of: dict[str, dict[Event, list[Span]]] = defaultdict(lambda: defaultdict(list))
        self.at: dict[tuple[str, Event, int, int, int], list[Span]] = defaultdict(list)
        for s in spans:
            self.of[s.device][s.event].append(s)
            self.at[s.device, s.event, s.batch, s.step, s.layer].append(s)

    def role(self, role: str) -> list[str]:
        """Return devices such as "memory-0", by number."""
        devices = [d for d in self.of if d.partition("-")[0] == role]
        return sorted(devices, key=lambda d: (len(d), d))

    def time(self, device: str, *events: Event) -> Intervals:
        """Return when ``device`` was in any of ``events``."""
        return union((s.start, s.end) for e in events for s in self.of[device].get(e, ()))

    def layer(self, device: str, like: Span, *events: Event) -> list[Span]:
        """Return spans of ``device`` in the same (batch, step, layer) as ``like``."""
        return [s for e in events for s in self.at.get((device, e, like.batch, like.step, like.layer), ())]


def window(spans: Sequence[Span], dropped: Mapping[str, int]) -> tuple[float, float]:
    """Return the time from the first work of any worker to the last. Time before a device's lost spans does not count.
    Raises ValueError if no worker has done anything.
    """
    waits = (Event.WAIT_PLAN, Event.WAIT_STEP)
    work = [s for s in spans if s.device != ENGINE and s.event not in waits]
    if not work:
        raise ValueError("the trace has no work in it: no step was run")
    start = min(s.start for s in work)
    for device, count in dropped.items():
        if count:
            start = max(start, min((s.start for s in spans if s.device == device), default=start))
    return start, max(s.end for s in work)


def states(spans: Sequence[Span], start: float, end: float) -> dict[str, States]:
    """Return device -> state -> when. The states of one device are disjoint and cover ``start`` to ``end``."""
    index = SpanIndex(spans)
    compute = {d: _compute(index, d, start, end) for d in index.role("compute")}
    memory = {d: _memory(index, d, compute, start, end) for d in index.role("memory")}
    prefill = {d: _prefill(index, d, start, end) for d in index.role("prefill")}
    return compute | memory | prefill


def _compute(index: SpanIndex, device: str, start: float, end: float) -> States:
    network, imbalance, plans = _behind_o(index, device)
    waits, steps = index.time(device, Event.WAIT_O), index.time(device, Event.WAIT_STEP)
    return _share_out(
        [(start, end)],
        (NETWORK, index.time(device, *_SENDS)),
        (BUSY, index.time(device, Event.SLICE)),
        (SAMPLING, index.time(device, Event.SAMPLE)),
        (NETWORK, intersect(waits, network)),
        (IMBALANCE, intersect(waits, imbalance)),
        (SCHEDULER, intersect(waits, plans)),
        (WAIT_O, waits),
        (IDLE, intersect(steps, _nobody_asked(index))),
        (SCHEDULER, steps),
    )


def _prefill(index: SpanIndex, device: str, start: float, end: float) -> States:
    last = max((s.end for of in index.of[device].values() for s in of), default=start)
    return _share_out(
        [(start, end)],
        (GAP, index.time(device, Event.RESERVE, Event.WAIT_STORED)),
        (NETWORK, index.time(device, Event.SEND_KV, Event.FETCH)),
        (BUSY, index.time(device, Event.SLICE, Event.STORED, Event.NEW)),
        (SAMPLING, index.time(device, Event.SAMPLE)),
        (IDLE, union([*index.time(device, Event.WAIT_STEP), (last, end)])),
    )


def _behind_o(index: SpanIndex, device: str) -> tuple[Intervals, Intervals, Intervals]:
    """Return three sets of times. First: when O of some layer was on the way (or Q, KV for it were). Second: when the
    first memory worker had sent its O and the last had not. Third: when the last one still had to apply the plan. The
    last one decides how long a layer takes.
    """
    network: list[tuple[float, float]] = []
    imbalance: list[tuple[float, float]] = []
    plans: list[tuple[float, float]] = []
    memory = index.role("memory")
    for waits in _by_layer(index.of[device].get(Event.WAIT_O, [])):
        sent = [s for m in memory for s in index.layer(m, waits[0], Event.SEND_O)]
        if not sent:
            continue
        last = max(sent, key=lambda s: s.end)
        stuck = index.layer(last.device, last, Event.WAIT_Q, Event.WAIT_KV, Event.RESERVE, Event.SEND_O)
        network += [(s.start, s.end) for s in stuck]
        network.append((last.end, max(s.end for s in waits)))
        imbalance.append((min(s.end for s in sent), last.end))
        plans += [(s.start, s.end) for s in index.layer(last.device, last._replace(layer=-1), Event.PLAN)]
    return union(network), union(imbalance), union(plans)


def _memory(index: SpanIndex, device: str, compute: Mapping[str, States], start: float, end: float) -> States:
    claims = [
        (BUSY, index.time(device, *_ATTENTION)),
        (GRANT, index.time(device, Event.GRANT)),
        (LOADING, index.time(device, Event.WAIT_LAYER)),
        (SCHEDULER, index.time(device, Event.PLAN)),
        (NETWORK, index.time(device, Event.SEND_O, Event.RESERVE)),
    ]
    replicas = _senders(index, device)
    for event in _SENT_AS:
        by_source: dict[str, list[Span]] = defaultdict(list)
        for s in index.of[device].get(event, []):
            replica = max(s.peer, 0)
            by_source[replicas[replica] if replica < len(replicas) else f"compute-{replica}"].append(s)
        for source, waits in by_source.items():
            claims.append((NETWORK, _on_the_way(index, source, device, waits)))
            claims += _blame(union((s.start, s.end) for s in waits), compute.get(source, {}), event)
    return _share_out([(start, end)], *claims)


def _senders(index: SpanIndex, device: str) -> list[str]:
    """Return the compute workers from which ``device`` gets Q and KV, by replica: one of several ranks each."""
    number = int(device.partition("-")[2])

    def sends(compute: str) -> bool:
        return any(s.peer == number for event in _SENT_AS.values() for s in index.of[compute].get(event, []))

    return [c for c in index.role("compute") if sends(c)] or index.role("compute")


def _on_the_way(index: SpanIndex, source: str, device: str, waits: Sequence[Span]) -> Intervals:
    """Return the part of ``waits`` after the sender's signal."""
    number, pairs = int(device.partition("-")[2]), []
    for w in waits:
        sent = [s.end for s in index.layer(source, w, _SENT_AS[w.event]) if s.peer == number]
        if sent:
            pairs.append((max(w.start, *sent), w.end))
    return union(pairs)


def _blame(waits: Intervals, source: States, event: Event) -> list[tuple[str, Intervals]]:
    """Return the sender's states meanwhile; if it waits for O, it waits for other memory workers."""
    seen = {SAMPLING: SAMPLING, NETWORK: NETWORK, IMBALANCE: IMBALANCE, WAIT_O: IMBALANCE}
    seen |= {SCHEDULER: SCHEDULER, IDLE: IDLE}
    blamed = [(state, intersect(waits, source.get(theirs, []))) for theirs, state in seen.items()]
    return [*blamed, (WAIT_KV if event == Event.WAIT_KV else WAIT_Q, waits)]


def _nobody_asked(index: SpanIndex) -> Intervals:
    """Return the times from the end of a step of the engine until its next one is requested."""
    pairs: list[tuple[float, float]] = []
    left: float | None = None
    for s in sorted((s for spans in index.of[ENGINE].values() for s in spans), key=lambda s: s.start):
        if s.event == Event.SCHEDULE and left is not None:
            pairs.append((left, s.start))
        left = s.end if s.event == Event.POSTPROCESS else None
    return union(pairs)


def _share_out(whole: Intervals, *claims: tuple[str, Intervals]) -> States:
    """Return the parts of ``whole`` by state: a moment goes to the first of ``claims`` that has it; an unclaimed one is
    HOST.
    """
    out: States = {state: [] for state in STATES}
    for state, wanted in claims:
        out[state] = union([*out[state], *intersect(whole, wanted)])
        whole = subtract(whole, wanted)
    out[HOST] = whole
    return out


def _by_layer(spans: Iterable[Span]) -> Iterable[list[Span]]:
    groups: dict[tuple[int, int, int], list[Span]] = defaultdict(list)
    for s in spans:
        groups[s.batch, s.step, s.layer].append(s)
    return groups.values()
