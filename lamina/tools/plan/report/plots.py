"""Plots as SVG for an HTML page: bars and lines over one axis. Pure functions of numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

COLOURS = ("#2563eb", "#ea580c", "#16a34a", "#9333ea", "#64748b", "#ca8a04", "#0891b2", "#be123c")
_WIDTH, _LEFT, _TOP, _BOTTOM, _HEIGHT = 860, 64, 30, 44, 316
_BAR, _NAMES = 22, 300  # pixels: of a bar, of the names next to bars


class Series(NamedTuple):
    """One colour of a plot: ``points`` are (x, y), or numbers of bars, None for a missing one."""

    name: str
    points: Sequence[tuple[float, float]]


def bars(rows: Sequence[tuple[str, Sequence[float | None]]], names: Sequence[str], unit: str, mark: float = 0.0) -> str:
    """Return horizontal bars, for each row one of every name. ``mark``: a line across all of them, none at 0."""
    most = max([mark, *(v for _, values in rows for v in values if v)], default=0.0) or 1.0
    step, height = _BAR * len(names) + 8, 0
    scale, parts = (_WIDTH - _NAMES - 90) / most, list[str]()
    for label, values in rows:
        y = height + _BAR * len(names) / 2 + 5
        parts.append(f'<text x="{_NAMES - 8}" y="{y:.0f}" text-anchor="end">{escape(label)}</text>')
        for i, value in enumerate(values):
            if value is None:
                continue
            top, wide = height + i * _BAR + 2, max(1.0, max(0.0, value) * scale)
            parts.append(
                f'<rect x="{_NAMES}" y="{top}" width="{wide:.1f}" height="{_BAR - 4}" fill="{COLOURS[i]}"/>'
                f'<text x="{_NAMES + wide + 5:.1f}" y="{top + 14}">{_number(value)}{escape(unit)}</text>'
            )
        height += step
    if mark:
        at = _NAMES + mark * scale
        parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{height}" class="mark"/>')
    return _legend(names) + _svg(height, parts)


def stacks(rows: Sequence[tuple[str, Sequence[float]]], names: Sequence[str], unit: str) -> str:
    """Return horizontal bars, each made of consecutive parts; parts below 0 are left out."""
    most = max((sum(max(0.0, v) for v in values) for _, values in rows), default=0.0) or 1.0
    scale, parts = (_WIDTH - _NAMES - 90) / most, list[str]()
    for number, (label, values) in enumerate(rows):
        top, at = number * (_BAR + 8) + 2, float(_NAMES)
        parts.append(f'<text x="{_NAMES - 8}" y="{top + 14}" text-anchor="end">{escape(label)}</text>')
        for i, value in enumerate(values):
            if value > 0:
                wide = value * scale
                box = f'x="{at:.1f}" y="{top}" width="{wide:.2f}" height="{_BAR - 4}"'
                parts.append(f'<rect {box} fill="{COLOURS[i]}"/>')
                at += wide
        total = sum(max(0.0, v) for v in values)
        parts.append(f'<text x="{at + 5:.1f}" y="{top + 14}">{_number(total)}{escape(unit)}</text>')
    return _legend(names) + _svg(len(rows) * (_BAR + 8), parts)


def lines(series: Sequence[Series], x: str, y: str, *, logarithmic: bool = False, mark: float | None = None) -> str:
    """Return curves with a dot at each point; x may be in logarithms. ``mark``: a level of y."""
    xs = [_at(p[0], logarithmic) for s in series for p in s.points]
    ys = [p[1] for s in series for p in s.points] + ([mark] if mark is not None else []) + [0.0]
    ticks = _ticks(min(ys), max(ys))
    x0, x1, y0, y1 = min(xs), max(xs), min(ticks[0], *ys), max(ticks[-1], *ys)
    wide, high = (_WIDTH - _LEFT - 20) / ((x1 - x0) or 1.0), (_HEIGHT - _TOP - _BOTTOM) / ((y1 - y0) or 1.0)

    def place(a: float, b: float) -> tuple[float, float]:
        return _LEFT + (_at(a, logarithmic) - x0) * wide, _HEIGHT - _BOTTOM - (b - y0) * high

    parts = _axes(sorted({p[0] for s in series for p in s.points}), ticks, place, x, y)
    for level in [0.0] + ([mark] if mark is not None else []):
        at = place(series[0].points[0][0], level)[1]
        kind = "mark" if level else "axis"
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - 20}" y1="{at:.1f}" y2="{at:.1f}" class="{kind}"/>')
    for colour, each in zip(COLOURS, series, strict=False):
        dots = [place(*p) for p in each.points]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in dots)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in dots]
    return _legend([s.name for s in series]) + _svg(_HEIGHT, parts)


def _axes(
    xs: Sequence[float], ticks: Sequence[float], at: Callable[[float, float], tuple[float, float]], x: str, y: str
) -> list[str]:
    """``at``: returns the pixels of a point."""
    parts, last = list[str](), -math.inf
    for value in xs:
        pixel = at(value, ticks[0])[0]
        if pixel - last > 55:
            last = pixel
            parts.append(f'<text x="{pixel:.1f}" y="{_HEIGHT - 26}" text-anchor="middle">{_number(value)}</text>')
    for level in ticks:
        pixel = at(xs[0], level)[1]
        parts.append(f'<text x="{_LEFT - 8}" y="{pixel + 4:.1f}" text-anchor="end">{_number(level)}</text>')
    parts.append(f'<text x="{_WIDTH / 2:.0f}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(x)}</text>')
    parts.append(f'<text x="4" y="11">{escape(y)}</text>')
    return parts


def _ticks(low: float, high: float) -> list[float]:
    """Return round numbers from ``low`` to ``high``, about five."""
    rough = (high - low) / 4 or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(f * power for f in (1, 2, 5, 10) if f * power >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [i * step for i in range(first, last + 1)]


def _at(value: float, logarithmic: bool) -> float:
    return math.log(value) if logarithmic else value


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _legend(names: Sequence[str]) -> str:
    if len(names) < 2:
        return ""
    each = zip(COLOURS, names, strict=False)
    return "<p class=legend>" + " ".join(f'<i style="background:{c}"></i>{escape(n)}' for c, n in each) + "</p>"


def _svg(height: float, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img">{"".join(parts)}</svg>'
