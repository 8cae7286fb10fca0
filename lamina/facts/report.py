"""The facts of a sliced model, and an estimate for it, as text for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

_BLOCKS = ("before_q", "between")
MOST_RUNS = 4  # of numbers in one label


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
    of = count_text(layers, "attention layer") + _and_mixers(facts)
    lines = [
        f"{facts['model']}: {facts['architecture']}, {facts['dtype']}, {of}, {weights} of weights",
        f"{facts['num_slices']} slices of {kinds} kinds ({how}); row independence {rows[facts['rows']]}",
        "",
        *_slices(facts["slices"], facts["early_q"]),
        "",
        *_crossings(facts),
    ]
    return "\n".join(lines) + "\n"


def _and_mixers(facts: dict[str, Any]) -> str:
    mixers = facts.get("mixers", [])
    return " and " + count_text(len(mixers), "mixer (recurrent layer)", "mixers (recurrent layers)") if mixers else ""


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
    sizes, layers, mixers = ("q", "kv", "o"), facts["messages"]["layers"], facts.get("mixers", [])
    for label, layer in alike_items(layers, sizes):
        each = ", ".join(f"{k.upper()} {layer[k]:,}" for k in sizes)
        rows.append(["messages", label, f"{sum(layer[k] for k in sizes):,}", each])
    for label, mixer in alike_items(mixers, ("kind", "inputs", "output", "state")):
        each = f"inputs {mixer['inputs']:,}, output {mixer['output']:,}; {mixer['kind']}, state {mixer['state']:,}"
        rows.append(["mixers", label, f"{mixer['inputs'] + mixer['output']:,}", each])
    step, states = facts["message_bytes_per_token"], size_text(sum(mixer["state"] for mixer in mixers))
    kv = size_text(sum(layer["kv"] for layer in layers))
    return [
        *table(rows),
        f"  all messages of one token: {size_text(step)}; all cuts: {size_text(facts['cut_bytes_per_token'])}",
        *([f"  a sequence has {states} of states, and {kv} of K and V for each token"] if mixers else []),
    ]


def alike_items(items: Sequence[dict[str, Any]], keys: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    """Return the items that differ in ``keys``, each with the numbers of the exchanges that are like it."""
    kinds = dict[tuple[Any, ...], list[dict[str, Any]]]()
    for item in items:
        kinds.setdefault(tuple(item[key] for key in keys), []).append(item)
    return [(_numbers([item["exchange"] for item in alike]), alike[0]) for alike in kinds.values()]


def _numbers(numbers: Sequence[int]) -> str:
    """Return ascending numbers as runs; of more than four runs the first two and the last one."""
    runs = list[list[int]]()
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    return ", ".join(texts if len(texts) <= MOST_RUNS else [*texts[:2], "...", texts[-1]])
