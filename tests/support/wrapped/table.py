"""Writes docs/wrap-features.md: every feature, tried on a model and on its wrap."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from desk import ACCEPTED, ALONE, BOTH, DIFFERENT, SAME, Desk, Tried, classify, tried
from features import FEATURES
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import logging as their_logging

import lamina

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "wrap-features.md"
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
    """Returns it as it stands in the page."""
    classes = [outcome for calls in found.values() for outcome, _ in calls.values()]
    lines = [
        BEGIN,
        f"Of {len(classes)} features:\n",
        *(f"- {classes.count(c)} {c}" for c in (SAME, BOTH, ALONE, ACCEPTED, DIFFERENT)),
    ]
    for group, calls in found.items():
        lines += ["", f"## {group}", "", "| feature | result |", "|---|---|"]
        for name, (outcome, here) in calls.items():
            result = outcome if outcome in (SAME, BOTH) else f"{outcome}: `{here.error or ''}`"
            lines.append(f"| {_cell(name)} | {_cell(result)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> None:
    text = PAGE.read_text()
    PAGE.write_text(text[: text.index(BEGIN)] + written(all_tried()))


if __name__ == "__main__":
    main()
