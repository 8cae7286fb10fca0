"""Draw what bench_kv_sparsity.py has recorded of recall, as an SVG: one cell for each share, number of pairs, distance,
form and order of question; the last row of each counts.

    python perf/draw_recall.py docs/recall.svg
"""

from __future__ import annotations

import argparse
import json
from html import escape
from itertools import product
from pathlib import Path

from common import RESULTS

ROWS = [("evict", "seen"), ("select", "seen"), ("select", "later"), ("evict", "later")]
DISTANCES, SHARES, PAIRS = (256, 1024, 1800), (0.25, 0.1), (4, 24)
WIDTH, HEIGHT, LEFT, TOP = 62, 21, 190, 64
Cell = tuple[str, str, int, float, int]  # form, order, distance, share, pairs


def recorded(lines: list[str]) -> dict[Cell, float]:
    """Recall by cell, with the options as they are."""
    cells = dict[Cell, float]()
    for row in map(json.loads, lines):
        settings = row["settings"]
        usual = settings.get("window", 4) == 4 or row.get("form") == "select"
        alike = settings["full_layers"] == 1 and settings["block_size"] == 16
        if row.get("measure", "recall") == "recall" and row.get("order") and usual and alike:
            cells[row["form"], row["order"], row["distance"], row["share"], row["pairs"]] = row["recall"]
    return cells


def draw(cells: dict[Cell, float]) -> str:
    """The SVG's text."""
    parts = list[str]()
    columns = list(product(SHARES, PAIRS))
    for at, (share, pairs) in enumerate(columns):
        parts.append(_text(LEFT + (at + 0.5) * WIDTH, TOP - 8, f"{pairs} pairs"))
        if not at % len(PAIRS):
            parts.append(_text(LEFT + (at + 1) * WIDTH, TOP - 28, f"{share:.0%} of the KV", weight="bold"))
    for down, ((form, order), distance) in enumerate(product(ROWS, DISTANCES)):
        y = TOP + down * HEIGHT + down // len(DISTANCES) * 8
        if not down % len(DISTANCES):
            parts.append(_text(8, y + 15, f"{form}, question {order}", anchor="start", weight="bold"))
        parts.append(_text(LEFT - 8, y + 15, f"{distance:,}", anchor="end"))
        for at, (share, pairs) in enumerate(columns):
            value = cells.get((form, order, distance, share, pairs))
            fill = "#eee" if value is None else f"hsl({120 * value**2:.0f},55%,70%)"
            place = f'x="{LEFT + at * WIDTH}" y="{y}" width="{WIDTH - 2}" height="{HEIGHT - 2}"'
            parts.append(f'<rect {place} fill="{fill}"/>')
            parts.append(_text(LEFT + (at + 0.5) * WIDTH, y + 14, "" if value is None else f"{value:.2f}"))
    size = LEFT + len(columns) * WIDTH + 8, TOP + len(ROWS) * len(DISTANCES) * HEIGHT + 8 * len(ROWS)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{size[0]}" height="{size[1]}" font-family="sans-serif">'
    title = _text(8, 18, "Share of questions answered, by tokens of text in between", anchor="start")
    return "\n".join([head, f'<rect width="{size[0]}" height="{size[1]}" fill="white"/>', title, *parts, "</svg>", ""])


def _text(x: float, y: float, text: str, *, anchor: str = "middle", weight: str = "normal") -> str:
    style = f'text-anchor="{anchor}" font-size="12" font-weight="{weight}"'
    return f'<text x="{x:.0f}" y="{y:.0f}" {style}>{escape(text)}</text>'


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    lines = (RESULTS / "bench_kv_sparsity.jsonl").read_text().splitlines()
    args.file.write_text(draw(recorded(lines)))


if __name__ == "__main__":
    main()
