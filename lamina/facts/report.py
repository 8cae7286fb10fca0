"""The facts of a sliced model, and an estimate for it, as text for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

_BLOCKS = ("before_q", "between")


def size_text(num_bytes: float) -> str:
    """Return a size such as 1.5 GB, in decimal units."""
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def count_text(number: int, one: str, many: str = "") -> str:
    """Return a number of things, as in "1 batch", "2 batches"; ``many``: the plural, by default ``one`` and an s."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def explain_text(facts: dict[str, Any]) -> str:
    """Return the text for ``facts``: lamina.converter.explain.to_json's, with "model", "architecture" and "dtype"."""
    layers = len(facts["messages"]["layers"])
    kinds, stamped = facts["num_distinct_slices"], facts["stamped_layers"]
    how = f"{layers - stamped} layers captured, {stamped} stamped from equal slices" if stamped else "all captured"
    rows = {"numeric": "shown by rule and by running", "static": "shown by rule"}
    weights = size_text(facts["weight_bytes"])
    lines = [
        f"{facts['model']}: {facts['architecture']}, {facts['dtype']}, {layers} attention layers, {weights} of weights",
        f"{facts['num_slices']} slices of {kinds} kinds ({how}); row independence {rows[facts['rows']]}",
        "",
        *_slices(facts["slices"], facts["early_q"]),
        "",
        *_crossings(facts),
    ]
    return "\n".join(lines) + "\n"


def _ranges(items: Sequence[Any], key: Callable[[Any], Any]) -> list[tuple[str, Any, int]]:
    """Return the runs of equal items as (their numbers, the first of them, how many)."""
    runs, at = [], 0
    for _, run in groupby(items, key):
        members = list(run)
        label = f"{at}" if len(members) == 1 else f"{at}-{at + len(members) - 1}"
        runs.append((label, members[0], len(members)))
        at += len(members)
    return runs


def table(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Return lines of padded columns. Columns ``left`` are aligned left, the others right; the last one is free."""
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]) - 1)]
    lines = []
    for row in rows:
        cells = [c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=False))]
        lines.append("  ".join(["", *cells, row[-1]]).rstrip())
    return lines


def _slices(slices: Sequence[dict[str, Any]], early_q: bool) -> list[str]:
    rows = [["slices", "operators", "weights", "GEMM before Q", "Q to KV", "Q first"]]
    notes: dict[str, list[str]] = {}
    for label, piece, _ in _ranges(slices, lambda s: s["signature"]):
        first = piece["q_first"]
        shares = [_percent(piece["gemm_share"][b]) for b in _BLOCKS] if first is not None else ["-"] * len(_BLOCKS)
        verdict = "-" if first is None else "yes" if first else "no"
        rows.append([label, str(piece["operators"]), size_text(piece["weight_bytes"]), *shares, verdict])
        if first is False and early_q:
            notes.setdefault(piece["why"], []).append(label)
    explanations = [f"  Q is not first in {', '.join(where)}: {why}" for why, where in notes.items()]
    return [*table(rows), *explanations, *_orders(slices, early_q)]


def _orders(slices: Sequence[dict[str, Any]], early_q: bool) -> list[str]:
    """Return a line that compares both orders of messages, for the kind of slice that most layers have."""
    kinds = Counter(s["signature"] for s in reversed(slices) if s["q_first"])  # of equal counts the later one
    if not early_q:
        return ["  captured order (--no-early-q): Q, K and V leave together"]
    if not kinds:
        return []
    piece = next(s for s in slices if s["signature"] == kinds.most_common(1)[0][0])
    before_q, between = (piece["gemm_share"][b] for b in _BLOCKS)
    late = _percent(before_q + between)
    order = f"Q leaves after {_percent(before_q)} of a slice's GEMM weights, K and V after {late}"
    return [f"  {order}; in the captured order (--no-early-q) all leave after {late}"]


def _percent(share: float) -> str:
    return "< 1 %" if 0 < share < 0.01 else f"{100 * share:.0f} %"


def _crossings(facts: dict[str, Any]) -> list[str]:
    rows = [["bytes per token", "", "total", ""]]
    for label, cut, _ in _ranges(facts["cuts"], lambda c: [c["tensors"], c["live_bytes_per_token"]]):
        tensors = ", ".join(f"{t['name']} {t['shape']} {t['dtype'].removeprefix('torch.')}" for t in cut["tensors"])
        alive = f"{tensors}  (uncut {cut['live_bytes_per_token']:,})"
        rows.append(["cut", label, f"{cut['bytes_per_token']:,}", alive])
    sizes = ("q", "kv", "o")
    for label, layer, _ in _ranges(facts["messages"]["layers"], lambda m: [m[k] for k in sizes]):
        each = ", ".join(f"{k.upper()} {layer[k]:,}" for k in sizes)
        rows.append(["messages", label, f"{sum(layer[k] for k in sizes):,}", each])
    step = facts["message_bytes_per_token"]
    return [
        *table(rows),
        f"  all messages of one token: {size_text(step)}; all cuts: {size_text(facts['cut_bytes_per_token'])}",
    ]
