"""A log-log plot as an SVG, for results that are kept next to the code: small, and the same for the same data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 860, 520
LEFT, RIGHT, TOP, BOTTOM = 70, 240, 40, 55
COLOURS = ("#d62728", "#1f77b4", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f", "#bcbd22", "#e377c2")


@dataclass(frozen=True)
class Curve:
    name: str
    points: Sequence[tuple[float, float]]  # both above 0
    strong: bool = False


def draw(title: str, x_title: str, y_title: str, lines: Sequence[Curve]) -> str:
    """The SVG's text. Raises ValueError if there is nothing to draw."""
    points = [p for line in lines for p in line.points]
    if not points:
        raise ValueError("nothing to draw")
    x_axis = Axis([x for x, _ in points], 2, LEFT, WIDTH - RIGHT)
    y_axis = Axis([y for _, y in points], 10, HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 22, title, size=14),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 14, x_title, anchor="middle"),
        f'<g transform="rotate(-90 16 {HEIGHT / 2})">{_text(16, HEIGHT / 2, y_title, anchor="middle")}</g>',
    ]
    for value in x_axis.ticks(4):
        x = x_axis.place(value)
        parts.append(f'<path d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#ddd"/>')
        parts.append(_text(x, HEIGHT - BOTTOM + 16, _bytes(value), anchor="middle"))
    for value in y_axis.ticks(1):
        y = y_axis.place(value)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 6, y + 4, f"{value:g}", anchor="end"))
    for i, line in enumerate(lines):
        colour, width = COLOURS[i % len(COLOURS)], 3 if line.strong else 1.3
        dash = "" if i < len(COLOURS) else ' stroke-dasharray="5 3"'
        path = "L".join(f"{x_axis.place(x):.1f} {y_axis.place(y):.1f}" for x, y in line.points)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dash}/>')
        y = TOP + 12 + 18 * i
        parts.append(f'<path d="M{WIDTH - RIGHT + 14} {y - 4}h24" stroke="{colour}" stroke-width="{width}"{dash}/>')
        parts.append(_text(WIDTH - RIGHT + 44, y, line.name))
    return "\n".join([*parts, "</svg>", ""])


class Axis:
    """Maps values on a logarithmic scale, widened to whole powers of ``base``, to pixels."""

    def __init__(self, values: Sequence[float], base: int, start: float, end: float) -> None:
        self._base, self._start = base, start
        self.low = math.floor(math.log(min(values), base) + 1e-9)
        self.high = max(self.low + 1, math.ceil(math.log(max(values), base) - 1e-9))
        self._step = (end - start) / (self.high - self.low)

    def place(self, value: float) -> float:
        return self._start + (math.log(value, self._base) - self.low) * self._step

    def ticks(self, every: int) -> list[float]:
        first = self.low if every == 1 else self.low + (-self.low) % every
        return [float(self._base) ** k for k in range(first, self.high + 1, every)]


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 11) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'


def _bytes(value: float) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if value >= unit:
            return f"{value / unit:g} {name}"
    return f"{value:g}"
