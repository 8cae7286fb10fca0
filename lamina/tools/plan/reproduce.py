"""``lamina-launch reproduce fig4``: a figure of the paper next to the same numbers by the planner's cost model."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lamina.facts.report import table

if TYPE_CHECKING:
    from lamina.tools.request_traces import RequestTrace

    from .figures import FigureValue, PaperFigure

_RUNS = ("table4", "fig10", "fig11")
_NAMES = ("fig2", "fig3", "fig4", "fig10", "fig11", "fig12", "fig13", "fig14", "table3", "table4", "table5")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this sub-command."""
    parser.add_argument("figure", help=", ".join(_NAMES))
    parser.add_argument("--traces", metavar="FOLDER", help=f"of the published traces, for {', '.join(_RUNS)}")
    parser.add_argument(
        "--baseline",
        default="ideal",
        metavar="NAME",
        help="vLLM: ideal, or calibrated, as slow as the paper's seems (ideal)",
    )
    parser.add_argument(
        "--requests", type=int, default=1000, metavar="N", help="of each trace that fig10 replays (1000)"
    )
    parser.add_argument(
        "--model", default="", metavar="NAME", help="of fig10 one model alone: llama-33b, llama-65b, llama3-70b"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print what would be computed")


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns exit status 0; raises ValueError for bad input."""
    from .figures import SPLITS
    from .tables import baseline

    if args.figure not in _NAMES:
        raise ValueError(f"{args.figure} is not one of {', '.join(_NAMES)}: the others have no numbers to model")
    if args.requests < 1:
        raise ValueError(f"--requests must be at least 1, not {args.requests}")
    if args.model and args.model not in SPLITS:
        raise ValueError(f"--model {args.model} is not one of {', '.join(SPLITS)}")
    baseline(args.baseline)
    traces = _traces(args.figure, args.traces) if args.figure in _RUNS else {}
    if args.dry_run:
        print(f"would compute {args.figure}" + (f" on {', '.join(traces)}" if traces else ""))
        return 0
    figure = _figure(args, traces)
    if args.json:
        lines = [{**line._asdict(), "gap": line.gap} for line in figure.lines]
        result = {"figure": args.figure, "title": figure.title, "lines": lines, "cannot": figure.not_reproduced}
        result["measured"] = figure.measured
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
    else:
        sys.stdout.write(_text(args.figure, figure))
    return 0


def _figure(args: argparse.Namespace, traces: dict[str, RequestTrace]) -> PaperFigure:
    from .figures import FIGURES, SPLITS

    if args.figure not in _RUNS:
        return FIGURES[args.figure]()
    from .figures import runs

    if args.figure == "table4":
        return runs.table4(traces)
    if args.figure == "fig11":
        return runs.figure11(traces, args.baseline)
    return runs.figure10(traces, args.baseline, args.requests, [args.model] if args.model else list(SPLITS))


def _traces(figure: str, folder: str | None) -> dict[str, RequestTrace]:
    from lamina.tools.request_traces import read_trace

    from .figures.runs import TRACES

    if folder is None:
        raise ValueError(
            f"{figure} needs --traces FOLDER, with Azure's and Mooncake's published files; see docs/planner.md"
        )
    traces = {}
    for name, files in TRACES.items():
        paths = (Path(folder) / f"{file}{end}" for file in files for end in ("", ".gz"))
        path = next((p for p in paths if p.is_file()), None)
        if path is not None:
            traces[name] = read_trace(str(path))
    if "Azure-Conv" not in traces:
        raise ValueError(f"--traces {folder} has no {' or '.join(TRACES['Azure-Conv'])}, nor one of these as .gz")
    return traces


def _text(name: str, figure: PaperFigure) -> str:
    rows = [["", "paper", "modelled", "gap", "", ""], *(_row(line) for line in figure.lines)]
    notes = [f"  not reproduced: {figure.not_reproduced}"] if figure.not_reproduced else []
    notes += [f"  measured: {figure.measured}"]
    return "\n".join([f"{name} of arXiv 2405.01814: {figure.title}", *table(rows, left=(0, 4)), *notes]) + "\n"


def _row(line: FigureValue) -> list[str]:
    paper = "-" if line.paper is None else f"{line.paper:,.10g}"
    gap = "-" if line.gap is None else f"{line.gap:+.1%}"
    modelled = f"{line.modelled:,.0f}" if line.modelled >= 1000 else f"{line.modelled:.4g}"
    return [line.what, paper, modelled, gap, line.unit, line.note]
