"""Draws how near the Conductor's forecasts came, as an SVG. One plot has first tokens of a served run (the newest row
with them of bench_conductor.jsonl), the other steps at the ends of prompts under two rules of --overload
(model_rejection.jsonl).

    python perf/draw_calibration.py docs/calibration.svg
"""

from __future__ import annotations

import argparse
import json
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from common import RESULTS

SIZE, GAP, TOP = 240, 62, 56  # of a square, between two, above them
TICKS = 4


class Square(NamedTuple):
    """Pairs of (foreseen, real), of one unit."""

    title: str
    under: str
    unit: str
    pairs: list[list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("path", help="the file to write")
    args = parser.parse_args()
    Path(args.path).write_text(draw(squares()))


def squares() -> list[Square]:
    """Draws squares of all that is recorded."""
    first = [row for row in _rows("bench_conductor") if row.get("first_tokens")]
    drawn = []
    if first:
        row = first[-1]
        said = f"served, {row['date'][:10]}, off by {row['expected_off']:.3f} in the median"
        drawn.append(Square("Time to first token", said, "s", row["first_tokens"]))
    for overload in ("early", "predictive"):
        rows = [row for row in _rows("model_rejection") if row["settings"]["overload"] == overload]
        for row in rows[-1:]:
            said = f"modelled, off by {row['off']:.2f} in the median"
            drawn.append(Square(f"Step at a prompt's end, {overload}", said, "limits", row["steps"]))
    return drawn


def _rows(name: str) -> list[dict[str, Any]]:
    path = RESULTS / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def draw(each: list[Square]) -> str:
    """The SVG's text."""
    width, height = GAP + len(each) * (SIZE + GAP), TOP + SIZE + 44
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">'
    parts = [head, f'<rect width="{width}" height="{height}" fill="white"/>']
    for at, square in enumerate(each):
        parts += _square(square, GAP + at * (SIZE + GAP))
    return "\n".join([*parts, "</svg>", ""])


def _square(square: Square, left: float) -> list[str]:
    most, side, middle = max(max(pair) for pair in square.pairs) * 1.05, left - 38, TOP + SIZE / 2

    def place(expected: float, real: float) -> tuple[float, float]:
        return left + expected / most * SIZE, TOP + SIZE - real / most * SIZE

    parts = [
        _text(left + SIZE / 2, TOP - 28, square.title, size=14),
        _text(left + SIZE / 2, TOP - 11, square.under),
        f'<rect x="{left}" y="{TOP}" width="{SIZE}" height="{SIZE}" fill="none" stroke="#999"/>',
        f'<path d="M{left} {TOP + SIZE}L{left + SIZE} {TOP}" stroke="#999" stroke-dasharray="4 3"/>',
        _text(left + SIZE / 2, TOP + SIZE + 34, f"foreseen, {square.unit}"),
        f'<g transform="rotate(-90 {side} {middle})">{_text(side, middle, f"real, {square.unit}")}</g>',
    ]
    for tick in range(TICKS + 1):
        value = most * tick / TICKS
        x, y = place(value, value)
        parts += [_text(x, TOP + SIZE + 16, f"{value:.2g}"), _text(left - 6, y + 4, f"{value:.2g}", anchor="end")]
    dots = "".join(f"M{x:.0f} {y:.0f}h0" for x, y in (place(expected, real) for expected, real in square.pairs))
    style = 'stroke="#1f5fa8" stroke-width="4" stroke-linecap="round" stroke-opacity="0.5"'
    return [*parts, f'<path d="{dots}" {style}/>']


def _text(x: float, y: float, text: str, *, anchor: str = "middle", size: int = 11) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{escape(text)}</text>'


if __name__ == "__main__":
    main()
