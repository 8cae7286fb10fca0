"""Fits the planner's tables to a recorded run: of the compute worker by its rows, of attention by its bytes, and of the
rest.

Each number is a median over similar steps, so that a stall of the host has no effect. Attention follows a law fitted by
the conductor's least fitted with relative errors. Tables are of one model on one host, and are marked so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from lamina.facts.hardware import Device
from lamina.scheduler.conductor.latency_model import LatencyFit, PrefillLatency
from lamina.scheduler.conductor.overload import StepLatency
from lamina.tools.plan.cost_model import BatchLoad, CostModel
from lamina.tools.plan.deployment import Deployment
from lamina.tools.plan.model_facts import ModelFacts
from lamina.tools.plan.operators import OperatorTables
from lamina.tools.plan.tables import Constants, NetworkLink, baseline

from .delays import Delays, StepDelay
from .recorded_run import RecordedRun, RecordedStep

COMPUTE, MEMORY = "recorded-compute", "recorded-memory"
_NOMINAL = 1000.0  # unknown peaks: they cancel out, since tables are of this model
_LEAST = 3  # steps without prompts
_INSTANT = 1e-12  # seconds: of parts that the slices include
_TOKENS = 1024.0  # features of one order of magnitude
_LEAST_BYTES, _SIZES = 1024.0, 96  # of the table of attention, each the fourth root of 2 times the one before


class Calibration(NamedTuple):
    """The result of a fit. ``by_rows``: rows -> seconds of slices, number of steps. Attention of a layer on one worker
    takes ``floor_s``, and ``byte_s`` seconds a byte. ``between_s``: of a step; ``driver_s``: of a round. ``delays``: of
    steps that decoded. ``decode``, ``prefill``: the same run by the conductor's laws; the latter None without prompts.
    """

    costs: CostModel
    deployment: Deployment
    by_rows: dict[int, tuple[float, int]]
    floor_s: float
    byte_s: float
    between_s: float
    driver_s: float
    chunk: int
    delays: Delays
    decode: StepLatency
    prefill: PrefillLatency | None


def calibrate(run: RecordedRun, model: ModelFacts, constants: Constants, source: str) -> Calibration:
    """Fit a run. Raises ValueError, beginning with ``source``, for a run of another model, or with too few steps that
    only decode.
    """
    if run.layers != model.num_layers:
        raise ValueError(f"{source} is a run of {run.layers} layers, and {model.name} has {model.num_layers}")
    decoding = [s for s in run.steps if s.is_decode_only and s.total_s]
    if len(decoding) < _LEAST:
        raise ValueError(f"{source} has {len(decoding)} steps without prompts: record longer answers")
    deployment = Deployment(_device(COMPUTE, source), 1, _device(MEMORY, source), run.memory_workers)
    tables, by_rows = OperatorTables(), _by_rows([s for s in run.steps if s.total_s])
    weights = sum(p.work(1)[0] for p in model.products)
    tables.put("linear", COMPUTE, 1, [(rows, took, weights) for rows, (took, _) in by_rows.items()])
    tables.put("elementwise", COMPUTE, 1, [(1, _INSTANT / model.num_layers, model.hidden_bytes)])
    floor, byte = _attention(decoding, model, run.memory_workers)
    group = model.attentions[0].heads // model.attentions[0].kv_heads
    sizes = [_LEAST_BYTES * 2.0 ** (i / 4) for i in range(_SIZES)]
    tables.put("attention", MEMORY, group, [(size, floor + byte * size, 0.0) for size in sizes])
    used = _moved(constants, _chunked(run, model), median(s.driver_s for s in decoding))
    link = NetworkLink("recorded", _NOMINAL * 1e9, 1.0, 0.0, source)
    costs = CostModel(model, used, link, baseline("ideal"), tables)
    between = median(s.between_s for s in decoding)
    hidden = median(costs.step(deployment, _load(s, model)).network_s for s in decoding)
    each = (between - hidden) / model.num_layers  # below 0 if both work at once
    costs = replace(costs, link=replace(link, round_trip_s=each))
    took = ((s.total_s, costs.round(deployment, [_load(s, model)]).seconds) for s in decoding)
    delays = Delays(tuple(StepDelay(expected, whole - expected) for whole, expected in took))
    return Calibration(
        costs, deployment, by_rows, floor, byte, between, used["driver_round"], run.chunk, delays,
        _decode_law(decoding), _prefill_law(run.steps),
    )  # fmt: skip


def _decode_law(steps: Sequence[RecordedStep]) -> StepLatency:
    """Return the law of whole decoding steps: by rows and by tokens that attention reads."""
    fitted = LatencyFit(3)
    for s in steps:
        fitted.add((1.0, s.rows, s.pairs / _TOKENS), s.total_s, s.total_s)
    a, b, c = fitted.coefficients()
    return StepLatency(a, b, c / _TOKENS)


def _prefill_law(steps: Sequence[RecordedStep]) -> PrefillLatency | None:
    """Return the law of steps with a chunk of one prompt. Their fixed time counts as part of the rows' time."""
    alone = [s for s in steps if s.total_s and s.draws <= 1 < s.rows]
    fitted = LatencyFit(2)
    for s in alone:
        fitted.add((s.rows, 2 * s.pairs / _TOKENS), s.total_s, s.total_s)
    b, c = fitted.coefficients()
    return PrefillLatency(0.0, b, c / _TOKENS) if alone else None


def _by_rows(steps: Sequence[RecordedStep]) -> dict[int, tuple[float, int]]:
    took = defaultdict[int, list[float]](list)
    for step in steps:
        took[step.rows].append(step.model_s)
    return growing({rows: (median(each), len(each)) for rows, each in sorted(took.items())})


def growing(by_rows: Mapping[int, tuple[float, int]]) -> dict[int, tuple[float, int]]:
    """Make times grow with rows: neighbours that contradict get their mean, weighted by their steps."""
    pools = list[tuple[list[int], float, int]]()  # rows, their seconds, steps
    for rows, (took, steps) in by_rows.items():
        pools.append(([rows], took, steps))
        while len(pools) > 1 and pools[-2][1] > pools[-1][1]:
            (before, a, n), (after, b, m) = pools[-2:]
            pools[-2:] = [(before + after, (a * n + b * m) / (n + m), n + m)]
    return {rows: (took, by_rows[rows][1]) for each, took, _ in pools for rows in each}


def _attention(steps: Sequence[RecordedStep], model: ModelFacts, workers: int) -> tuple[float, float]:
    """Return the seconds of a layer's attention on one worker: a fixed part, and the seconds of a byte. Only reading
    stored K and V grows with bytes. The rest depends on rows at most, of which long sequences have no more.
    """
    each = model.kv_bytes_per_token / model.num_layers / workers
    unit = max(s.pairs for s in steps) * each
    fitted = LatencyFit(2)
    for step in (s for s in steps if s.stored_s):
        took = step.stored_s / model.num_layers
        fitted.add((1.0, step.pairs * each / unit), took, took)
    floor, of_unit = fitted.coefficients()
    rest = median(step.attention_s - step.stored_s for step in steps) / model.num_layers
    return floor + rest, of_unit / unit


def _chunked(run: RecordedRun, model: ModelFacts) -> float:
    """Return FLOP/s of attention when prompts are computed; 0 if none were. It is the median of such steps."""
    flops = sum(a.count * a.flops for a in model.attentions) / run.memory_workers
    rates = [s.pairs * flops / s.attention_s for s in run.steps if s.rows - s.draws > 1 and s.attention_s]
    return median(rates) if rates else 0.0


def _moved(constants: Constants, flops: float, driver_s: float) -> Constants:
    share = flops / (_NOMINAL * 1e12) if flops else 1.0
    values = {**constants.values, "attention_flops_share": share, "driver_round": driver_s, "driver_row": 0.0}
    return replace(constants, values=values)


def _load(step: RecordedStep, model: ModelFacts) -> BatchLoad:
    return BatchLoad(step.rows, dict.fromkeys(model.windows, float(step.pairs)))


def _device(name: str, source: str) -> Device:
    return Device(
        name=name, title=name, tflops=_NOMINAL, memory="1000 GiB", memory_gb=1000 * 1.073741824,
        bandwidth_gbs=1e-3, network_gbs=None, source=source,
    )  # fmt: skip
