"""A plan, or a figure of the paper, as one HTML page that needs no other file and runs no script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from lamina.tools.plan.figures import PaperFigure
from lamina.tools.plan.ranking import OperatingPoint
from lamina.tools.plan.simulated import simulated_text
from lamina.tools.plan.verdict import gain_by_price

from .plan_report import Plan, plan_text, shortlist, step_phases
from .plots import Series, bars, lines, stacks

_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:940px;margin:2em auto;padding:0 1em;color:#1e293b}
h1{font-size:1.4em}h2{font-size:1.1em;margin-top:2em}svg{width:100%;font:12px system-ui,sans-serif}
pre{overflow-x:auto;background:#f1f5f9;padding:1em;font-size:12px;line-height:1.45}.legend i{display:inline-block;
width:.8em;height:.8em;margin:0 .4em 0 1em}.mark{stroke:#dc2626;stroke-dasharray:5 4}.axis{stroke:#94a3b8}
.verdict{font-size:1.1em;border-left:4px solid #2563eb;padding-left:.8em}figcaption{color:#64748b;font-size:.9em}"""
_PARTS = ("linear", "elementwise", "collective", "attention", "network")
_FACTORS = [2 ** (i / 2) for i in range(-6, 7)]  # of a price, an eighth to eight times


def plan_page(plan: Plan) -> str:
    """Return the page: the verdict first, then its reasons, then all numbers."""
    points = shortlist(plan.ranking, plan.rows)
    sections = [
        f"<p class=verdict><b>{escape(plan.verdict.headline)}</b>: {escape(plan.verdict.words)}</p>",
        _dollars(plan, points),
        _price(plan),
        _times(plan, points),
        _played(plan),
        f"<h2>All of it</h2><pre>{escape(plan_text(plan) + simulated_text(plan.simulated, plan.rate))}</pre>",
    ]
    name, trace = plan.planner.costs.model.name, plan.ranking.trace
    title = f"{name} on {trace.name}{' (SURROGATE)' if trace.is_surrogate else ''}: which devices to buy"
    return _whole(title, "Modelled, not measured.", sections)


def figure_page(name: str, figure: PaperFigure) -> str:
    """Return the page: the paper's numbers next to the modelled ones, a plot for each unit."""
    units = dict.fromkeys(line.unit for line in figure.lines)
    sections = []
    for unit in units:
        values = [line for line in figure.lines if line.unit == unit]
        if any(line.paper is not None for line in values):
            drawn = bars([(x.what, (x.paper, x.modelled)) for x in values], ("paper", "modelled"), f" {unit}")
        else:
            drawn = bars([(x.what, (x.modelled,)) for x in values], ("modelled",), f" {unit}")
        if figure.curves and unit == figure.curves.unit:
            _, x, series, mark = figure.curves
            note = f"<figcaption>dashed: {mark:g} {escape(unit)}, the paper's</figcaption>" if mark else ""
            drawn = lines(series, x, unit, logarithmic=True, mark=mark) + note + drawn
        sections.append(f"<h2>{escape(unit or 'numbers')}</h2>{drawn}")
    cannot = f"Not reproduced: {figure.not_reproduced}." if figure.not_reproduced else ""
    return _whole(f"{name} of arXiv 2405.01814: {figure.title}", f"Modelled, not measured. {cannot}", sections)


def _dollars(plan: Plan, points: Sequence[OperatingPoint]) -> str:
    rows = [(p.deployment.label, (p.dollars,)) for p in points]
    edge = min(p.dollars for p in points) * (1 + plan.verdict.width) if plan.verdict.width else 0.0
    note = "Bars that end left of the line cannot be distinguished from the shortest one: the model is off by as much."
    return _plot("Dollars for a million tokens", bars(rows, ("dollars",), "", edge), note if edge else "")


def _price(plan: Plan) -> str:
    best = plan.ranking.best(split=True)
    if best is None or best.deployment.memory is None or plan.verdict.gain is None:
        return ""
    name = best.deployment.memory.name
    hour = plan.planner.prices.hour(best.deployment.memory)
    gains = [(hour * f, 100 * gain_by_price(plan.planner, plan.ranking, name, f)) for f in _FACTORS]
    points = [p for p in gains if not math.isnan(p[1])]
    if best.deployment.memory == best.deployment.compute or not points:
        return ""
    plot = lines(
        [Series("gain", points)], f"$ for an hour of {name}", "more tokens for a dollar when split, %",
        logarithmic=True, mark=100 * plan.verdict.width,
    )  # fmt: skip
    return _plot(f"If {name} had another price", plot, "Above the line it pays to split.")


def _times(plan: Plan, points: Sequence[OperatingPoint]) -> str:
    rows = []
    for p in points:
        parts = step_phases(plan.planner, p, plan.ranking)
        rows.append((p.deployment.label, [parts[name].seconds * 1e3 for name in _PARTS]))
    note = "Of one batch, one part after the other; with n batches the pools work in parallel."
    return _plot("Where a step's time goes, ms", stacks(rows, _PARTS, " ms"), note)


def _played(plan: Plan) -> str:
    runs = [(p.point.deployment.label, p.run) for p in plan.simulated if p.run is not None]
    if not runs:
        return ""
    rows = [(name, (run.tbt_p50_s * 1e3, run.tbt_p99_s * 1e3)) for name, run in runs]
    text = _plot("Time between two tokens, played", bars(rows, ("median", "99th percentile"), " ms"), "")
    if plan.rate is not None:
        rows = [(name, (run.first_p50_s * 1e3, run.first_p99_s * 1e3)) for name, run in runs]
        text += _plot("Time to the first token, played", bars(rows, ("median", "99th percentile"), " ms"), "")
    return text


def _plot(title: str, plot: str, note: str) -> str:
    caption = f"<figcaption>{escape(note)}</figcaption>" if note else ""
    return f"<h2>{escape(title)}</h2><figure>{plot}{caption}</figure>"


def _whole(title: str, note: str, sections: Sequence[str]) -> str:
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title><style>{_STYLE}</style>"
    return f"{head}<h1>{escape(title)}</h1><p>{escape(note)}</p>{''.join(sections)}</html>\n"
