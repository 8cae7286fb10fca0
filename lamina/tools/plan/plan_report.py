"""A plan as text for a terminal, as JSON, and as the command that serves it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lamina.config.flag_groups import flag_name
from lamina.facts.report import size_text, table
from lamina.tools.plan.cost_model import PhaseTime, split_load
from lamina.tools.plan.deployment import GIB
from lamina.tools.plan.ranking import MeanStoredTokens, OperatingPoint, Planner, Ranking, nearest
from lamina.tools.plan.tables import NetworkLink
from lamina.tools.plan.verdict import PlanVerdict, TurningPoint, tie_width

if TYPE_CHECKING:
    from lamina.tools.plan.simulated import SimulatedRow

_HEAD = ["devices", "sequences", "tokens/s", "TBT", "$/h", "$/Mtoken", "compute", "memory", "between pools", "limit"]


class Plan(NamedTuple):
    """All data of a plan's report. ``rate``: requests a second of the played runs, as in simulate_rows."""

    planner: Planner
    ranking: Ranking
    verdict: PlanVerdict
    simulated: Sequence[SimulatedRow]
    rows: int
    rate: float | None


def plan_text(plan: Plan) -> str:
    """Return the trace, the best deployments with the best homogeneous one, the verdict, and the origins of all
    numbers.
    """
    planner, ranking, verdict, rows = plan.planner, plan.ranking, plan.verdict, plan.rows
    model, trace = planner.costs.model, ranking.trace
    surrogate = ", a SURROGATE: made up in the likeness of a trace" if trace.is_surrogate else ""
    dropped = f"{trace.dropped or 'none'} too long for the model or for all deployments, and left out"
    shown, lengths = shortlist(ranking, rows), f"{trace.mean_prompt:.1f} tokens in, {trace.mean_answer:.1f} out"
    kv_bytes = model.kv_bytes_per_token
    lines = [
        f"modelled, not measured: {_scope(planner)}",
        f"model  {model.name}: {size_text(model.weight_bytes)} of weights, {kv_bytes:,} bytes of KV per token",
        f"       ({model.source})",
        f"trace  {trace.name}: {len(trace.requests)} requests, {lengths}; {dropped}{surrogate}",
        "",
        *table(_with_refused(shown, [_HEAD, *(_row(p, tied=is_tied(planner, ranking, p)) for p in shown)])),
        *_charges(shown),
        f"  {len(ranking.points)} deployments ranked, {len(ranking.refused)} refused{_reasons(ranking)}",
        *_not_ranked(ranking),
        f"  {_tied(planner, ranking)}",
        "",
        f"{verdict.headline}: {verdict.words}",
        *(f"  {_turns(t)}" for t in verdict.turning_points),
        f"  {_prompts(planner, shown[0], ranking)}",
        "",
        *_serve(planner, ranking, verdict),
        "where the numbers are from",
        *_origins(planner, shown[0], ranking),
    ]
    return "\n".join(lines) + "\n"


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return the same as plain data; times in seconds, sizes in bytes."""
    planner, ranking, verdict, rows = plan.planner, plan.ranking, plan.verdict, plan.rows
    trace, model, used = ranking.trace, planner.costs.model, planner.costs.constants
    sizes = {"weight_bytes": model.weight_bytes, "kv_bytes_per_token": model.kv_bytes_per_token}
    named = {"requests": len(trace.requests), "dropped": trace.dropped, "surrogate": trace.is_surrogate}
    return {
        "modelled": True,
        "model": {"name": model.name, "source": model.source, **sizes},
        "trace": {"name": trace.name, **named, "mean_prompt": trace.mean_prompt, "mean_answer": trace.mean_answer},
        "prompts": "here" if planner.chunk else "elsewhere",
        "rows": [_entry(planner, p, ranking) for p in shortlist(ranking, rows)],
        "simulated": [p.to_json() for p in plan.simulated],
        "rate": plan.rate,
        "ranked": len(ranking.points),
        "refused": [{"devices": r.deployment.label, "why": r.why} for r in ranking.refused],
        "tie": verdict.width,
        "verdict": {
            "split": verdict.should_split, "tie": verdict.is_tie, "gain": verdict.gain, "headline": verdict.headline,
            "why": verdict.words, "turns": [t._asdict() for t in verdict.turning_points],
        },
        "serve": serve_command(planner, ranking, verdict),
        "constants": {n: {"value": v, "origin": used.origins[n]} for n, v in used.values.items()},
        "prices": {"book": planner.prices.name, "date": planner.prices.date, "hours": dict(planner.prices.hours)},
        "link": planner.costs.link.source,
        "baseline": {"name": planner.costs.baseline.name, "origin": planner.costs.baseline.origin},
    }  # fmt: skip


def shortlist(ranking: Ranking, rows: int) -> list[OperatingPoint]:
    """Return the cheapest deployments, and those of the verdict: the cheapest split and the cheapest homogeneous one.
    Also the cheapest with each kind of device that none of these has.
    """
    shown = list(ranking.points[:rows])
    of_verdict = (ranking.best(split=kind) for kind in (True, False))
    shown += [point for point in of_verdict if point is not None and point not in shown]
    for point in ranking.points:
        if set(point.deployment.devices).difference(*(p.deployment.devices for p in shown)):
            shown.append(point)
    return shown


def serve_command(planner: Planner, ranking: Ranking, verdict: PlanVerdict) -> str | None:
    """Return the command for the split deployment of the verdict; None if it is against splitting."""
    best = next((p for p in ranking.points if p.deployment == verdict.chosen), None)
    if best is None or not verdict.should_split:
        return None
    deployment = best.deployment
    each = planner.memory.kv_bytes(planner.costs.model, deployment) / deployment.memory_workers
    flags = {
        "--compute-device": "cuda",
        "--memory-device": "cuda",
        "--tensor-parallel-size": deployment.ranks,
        "--memory-workers": deployment.memory_workers,
        "--pipeline": deployment.batches,
        "--max-num-seqs": math.ceil(best.batch),
        flag_name("kv_memory"): f"{int(each // GIB)}GiB",
        "--max-model-len": ranking.trace_of(best).longest,
    }
    name = planner.costs.model.name
    model = name if "/" in name or Path(name).exists() else "MODEL"  # the paper's models have only sizes, no checkpoint
    return " ".join(["lamina-launch serve", model, *(f"{k} {v}" for k, v in flags.items())])


def _row(p: OperatingPoint, *, tied: bool) -> list[str]:
    return [
        p.deployment.label, f"{p.batch:.0f}", f"{p.tokens_s:.0f}", f"{p.tbt_s * 1e3:.1f} ms", f"{p.hour:.2f}",
        f"{'~' if tied else ''}{dollars_text(p.dollars)}", f"{p.compute_busy:.0%}", f"{p.memory_busy:.0%}",
        f"{p.bandwidth * 8 / 1e9:.0f} Gbps" if p.bandwidth else "-", p.limit,
    ]  # fmt: skip


def _with_refused(shown: Sequence[OperatingPoint], rows: list[list[str]]) -> list[list[str]]:
    """Return the rows of the table, with the refused share if some row has one."""
    if not any(p.refused for p in shown):
        return rows
    cells = ["refused", *(f"{p.refused:.1%}" for p in shown)]
    return [[*row[:-1], cell, row[-1]] for row, cell in zip(rows, cells, strict=True)]


def _charges(shown: Sequence[OperatingPoint]) -> list[str]:
    """Return a line that says how refused requests are charged; none without such."""
    others = dict.fromkeys(p.elsewhere.label for p in shown if p.elsewhere is not None)
    if not others:
        return []
    return [f"  refused: tokens of requests that do not fit; $/Mtoken has them at the price of {', '.join(others)}"]


def _entry(planner: Planner, p: OperatingPoint, ranking: Ranking) -> dict[str, Any]:
    deployment = p.deployment
    counts = {"compute": deployment.compute.name, "num_compute": deployment.num_compute, "ranks": deployment.ranks}
    memory = {
        "memory": deployment.memory.name if deployment.memory else None,
        "memory_workers": deployment.memory_workers,
    }
    return {
        "devices": deployment.label, **counts, **memory, "batches": deployment.batches, "split": deployment.is_split,
        **{k: v for k, v in p._asdict().items() if k not in ("deployment", "elsewhere", "room")},
        "elsewhere": p.elsewhere.label if p.elsewhere is not None else None,
        "parts": {n: {"seconds": x.seconds, "origin": x.origin} for n, x in step_phases(planner, p, ranking).items()},
    }  # fmt: skip


def step_phases(planner: Planner, p: OperatingPoint, ranking: Ranking) -> dict[str, PhaseTime]:
    """Return the parts of a step of one of a deployment's batches, by name."""
    stored = MeanStoredTokens(ranking.trace_of(p), planner.costs.model, planner.chunk)
    load = split_load(stored.load(p.batch), p.deployment.batches)[0]
    return dict(planner.costs.step(p.deployment, load).phases)


def _turns(turn: TurningPoint) -> str:
    if turn.factor:
        return f"turns at {turn.what}: {turn.value}"
    if turn.low == turn.high:
        return f"{turn.what}: nothing to compare where it is another one"
    return f"no {turn.what} from {turn.low:.2g} to {turn.high:.2g} times this one would turn it"


def _not_ranked(ranking: Ranking) -> list[str]:
    """Return a line for each kind of device that no ranked deployment has."""
    ranked = {d for p in ranking.points for d in p.deployment.devices}
    missing = {r.deployment.compute: None for r in ranking.refused if r.deployment.compute not in ranked}
    close = {d: nearest([r for r in ranking.refused if r.deployment.compute == d]) for d in missing}
    return [f"  none with {d.name} is ranked: {r.deployment.label}: {r.why}" for d, r in close.items() if r]


def _reasons(ranking: Ranking) -> str:
    counts: dict[str, int] = {}
    for refused in ranking.refused:
        counts[refused.why] = counts.get(refused.why, 0) + 1
    return "".join(f"; {n}: {why}" for why, n in sorted(counts.items(), key=lambda x: -x[1])[:3])


def dollars_text(dollars: float) -> str:
    """Return three decimals, or as many as two digits need."""
    return f"{dollars:.3f}" if dollars >= 0.01 else f"{dollars:.2g}"


def is_tied(planner: Planner, ranking: Ranking, point: OperatingPoint) -> bool:
    """Return True if a deployment after the first cannot be distinguished from it by its dollars."""
    best = ranking.points[0]
    width = tie_width(planner.costs, best.deployment, point.deployment)
    return point is not best and point.dollars < best.dollars * (1 + width)


def _tied(planner: Planner, ranking: Ranking) -> str:
    count = sum(is_tied(planner, ranking, p) for p in ranking.points)
    if not count:
        return "no other is as cheap within the model's error"
    return f"~ {count} deployments cannot be distinguished from the first, by the model's error for each pair of them"


def _scope(planner: Planner) -> str:
    if planner.chunk:
        return f"decoding, together with prompts in chunks of {planner.chunk} tokens"
    return "decoding alone; prompts are computed elsewhere"


def _prompts(planner: Planner, best: OperatingPoint, ranking: Ranking) -> str:
    """Return a note on what the price leaves out."""
    if planner.chunk:
        return "the price has the prompts in it; each of them waits for its turn, see --rate"
    costs, trace = planner.costs, ranking.trace
    flops = sum(products.work(1)[1] for products in costs.model.products)
    device, rate = best.deployment.compute, best.tokens_s / trace.mean_answer * trace.mean_prompt
    count = flops * rate / (device.tflops * 1e12 * costs.constants["linear_flops_share"])
    note = f"not in the price: the prompts, {rate:,.0f} tokens/s at the first row's rate"
    return f"{note}, whose products alone take about {count:.1f} {device.name}"


def _serve(planner: Planner, ranking: Ranking, verdict: PlanVerdict) -> Sequence[str]:
    command = serve_command(planner, ranking, verdict)
    if not command:
        return []
    name = planner.costs.model.name
    model = f"MODEL: a checkpoint of {name}; " if " MODEL " in command else ""
    return [f"serve it:  {command}", f"           ({model}devices on several hosts: docs/hosts.md)", ""]


def _cut(link: NetworkLink, best: OperatingPoint) -> str:
    memory = best.deployment.memory
    cut = link.cut_by(best.deployment.compute, memory) if memory else ""
    return f", {cut}" if cut else ""


def _origins(planner: Planner, best: OperatingPoint, ranking: Ranking) -> list[str]:
    parts = [["a step of", best.deployment.label, "one batch"]]
    parts += [[name, f"{x.seconds * 1e3:.2f} ms", x.origin] for name, x in step_phases(planner, best, ranking).items()]
    devices = {d.name: d for p in ranking.points for d in p.deployment.devices}
    prices, base, link = planner.prices, planner.costs.baseline, planner.costs.link
    unit, us = planner.memory.unit, link.round_trip_s * 1e6
    return [
        *table(parts),
        *(
            f"  {d.title}: {d.tflops:g} TFLOP/s, {d.bandwidth_gbs:g} GB/s, {d.memory} ({d.source})"
            for d in devices.values()
        ),
        *(f"  {d.name}: ${prices.hour(d):.2f}/h ({prices.sources[d.name]}; {prices.date})" for d in devices.values()),
        f"  memory: a sheet's GB is read as {unit}; {planner.costs.constants['memory_in_use']:.0%} of it in use",
        f"  link {link.name}{_cut(link, best)}: {link.share:.1%} of its rate, {us:.1f} us and back ({link.source})",
        f"  homogeneous engines, --baseline {base.name}: {base.origin}",
        "  constants: lamina/tools/plan/data/constants.toml, each with its origin; --json prints all",
    ]
