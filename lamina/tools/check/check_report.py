"""The verdicts of ``lamina-launch check``, as a table for people and as JSON."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from lamina.config.engine_config import EngineConfig
from lamina.config.flat_options import flat_options

from .verdict import Verdict

WIDTH = 140  # characters, if the table goes to a file or a pipe
COLUMNS = {
    "axis": "left", "setting": "left", "promised": "left", "exactness": "left", "": "left", "same tokens": "right",
    "prompts": "right", "as": "left", "difference": "right", "error": "right", "ties": "right",
}  # fmt: skip
LEGEND = (
    "difference: the largest of a log-probability to the run named under 'as'. error: the largest to transformers. "
    "ties: tokens that differ from those of transformers where its margin is within ten times the error"
)


def report_json(model: str, config: EngineConfig, verdicts: Sequence[Verdict], left: int = 0) -> dict[str, Any]:
    """Return all results as plain data. ``config``: that of the base run. ``left``: settings that were not run."""
    return {
        "model": model,
        "held": not any(v.held is False for v in verdicts),
        "left": left,
        "broken": list(dict.fromkeys(v.axis for v in verdicts if v.held is False)),
        "base": flat_options(config),
        "runs": [dataclasses.asdict(v) for v in verdicts],
    }


def show(
    model: str, config: EngineConfig, verdicts: Sequence[Verdict], axes: Collection[str] = (), left: int = 0
) -> None:
    """Print the table, notes on single runs, and a summary. ``axes``: those whose rows are shown; empty: all. A run
    that others are compared with has a row if it is broken. ``left``: settings that were not run.
    """
    shown = [v for v in verdicts if v.axis in axes or not axes or v.held is False]
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False, markup=False)
    table = Table(box=None, pad_edge=False)
    for name, side in COLUMNS.items():
        table.add_column(name, justify="right" if side == "right" else "left")
    for v in shown:
        table.add_row(*_cells(v), style="red" if v.held is False else "dim" if v.held is None else None)
    console.print(table)
    console.print()
    for v in shown:
        if v.note:
            word = "" if v.word == "-" else f"{v.word}: "
            console.print(f"{v.axis} {v.setting}: {word}{v.note}".replace(" :", ":"), soft_wrap=True)
    console.print(LEGEND, style="dim", soft_wrap=True)
    early = f"ended early, {left} settings were not run; " if left else ""
    console.print(early + _summary(model, config, verdicts), soft_wrap=True)


def _cells(v: Verdict) -> list[str]:
    """Return a row of the table, in the order of COLUMNS."""
    first = [v.axis, v.setting or "-", v.promised, v.exactness, v.word]
    if not v.tokens:
        return [*first, *["-"] * 6]
    same = [f"{v.tokens - v.ties - v.wrong}/{v.tokens}", f"{v.same_as_generate}/{v.prompts}", "transformers", "-"]
    if v.compared_with:
        same = [f"{v.equal_tokens}/{v.tokens}", f"{v.equal_prompts}/{v.prompts}", v.compared_with]
        same.append(f"{v.worst_difference:.1e}" if v.worst_difference else "0")
    wrong = f"{v.wrong} wrong, " if v.wrong else ""
    return [*first, *same, f"{v.logit_error:.1e}", f"{wrong}{v.ties}"]


def _summary(model: str, config: EngineConfig, verdicts: Sequence[Verdict]) -> str:
    count = Counter(v.word for v in verdicts)
    promises = len(verdicts) - count["-"]
    refused = f", {count['refused']} settings refused" if count["refused"] else ""
    base = f"base: {config.topology.memory_workers} memory worker over {config.launch.scheme}, {config.model.dtype}"
    broken = ", ".join(dict.fromkeys(v.axis for v in verdicts if v.held is False))
    if broken:
        return f"{model}: {count['BROKEN']} of {promises} promises BROKEN ({broken}){refused}; {base}"
    return f"{model}: all {count['held']} promises held{refused}; {base}"
