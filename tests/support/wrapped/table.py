"""The table of docs/wrap.md: every feature, tried on a model and on its wrap. Run this file to write it anew."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path

import torch
from desk import ACCEPTED, ALONE, BOTH, DIFFERENT, SAME, Desk, Tried, classify, tried
from features import FEATURES
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import logging as their_logging

import lamina

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "wrap.md"
MODEL = ROOT / "examples" / "tiny_lm" / "model"
BEGIN = "<!-- tried by tests/support/wrapped/table.py -->\n"
Found = dict[str, dict[str, tuple[str, Tried]]]


def all_tried() -> Found:
    """Every feature's class, and what the wrapped model gave."""
    torch.set_num_threads(1)
    their_logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    desk, found = Desk(tokenizer), Found()
    with (
        lamina.wrap(model, memory_workers=2, transport="loopback", max_num_seqs=160) as split,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        for group, calls in FEATURES.items():
            for name, call in calls.items():
                own, here = tried(call, model, desk), tried(call, split, desk)
                found.setdefault(group, {})[name] = (classify(own, here), here)
    return found


def written(found: Found) -> str:
    """As it stands in the page."""
    classes = [outcome for calls in found.values() for outcome, _ in calls.values()]
    lines = [
        BEGIN,
        f"Of {len(classes)} features:\n",
        *(f"- {classes.count(c)} {c}" for c in (SAME, BOTH, ALONE, ACCEPTED, DIFFERENT)),
        "",
        "| | the same | refused by both |",
        "|---|---|---|",
    ]
    for group, calls in found.items():
        cells = (_list(name for name, (outcome, _) in calls.items() if outcome == c) for c in (SAME, BOTH))
        lines.append(f"| {group} | {' | '.join(cells)} |")
    for c in (ALONE, ACCEPTED, DIFFERENT):
        rows = [(n, here) for calls in found.values() for n, (outcome, here) in calls.items() if outcome == c]
        if rows:
            lines += ["", f"| {c} | it says |", "|---|---|"]
            lines += [f"| {_cell(name)} | {_cell(str(here.error or ''))} |" for name, here in rows]
    return "\n".join(lines) + "\n"


def _list(names: Iterable[str]) -> str:
    return "; ".join(map(_cell, names))  # they have commas of their own


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> None:
    text = PAGE.read_text()
    PAGE.write_text(text[: text.index(BEGIN)] + written(all_tried()))


if __name__ == "__main__":
    main()
