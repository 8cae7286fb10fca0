"""Modelled: a figure of the paper (arXiv 2405.01814) next to the same numbers by the planner's cost model.

    python perf/model_figures.py fig4
    python perf/model_figures.py fig10 --traces FOLDER

table4, fig10 and fig11 need the published traces of Azure and Mooncake; see docs/planner.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import paper_runs
from paper_figures import FIGURES, SPLITS, FigureValue, PaperFigure
from paper_runs import TRACES

from lamina.facts.report import table
from lamina.tools.plan.tables import baseline
from lamina.tools.request_traces import RequestTrace, read_trace

_RUNS = ("table4", "fig10", "fig11")


def main(argv: Sequence[str] | None = None) -> None:
    """Print a figure as a table, or as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", choices=sorted([*FIGURES, *_RUNS]))
    parser.add_argument("--traces", metavar="FOLDER", help=f"of the published traces, for {', '.join(_RUNS)}")
    parser.add_argument("--baseline", default="ideal", help="vLLM: ideal, or calibrated, as slow as the paper's seems")
    parser.add_argument("--requests", type=int, default=1000, help="of each trace that fig10 replays (1000)")
    parser.add_argument("--model", choices=[*SPLITS], help="of fig10 one model alone")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    args = parser.parse_args(argv)
    try:
        baseline(args.baseline)
        figure = _figure(args, _traces(args.figure, args.traces) if args.figure in _RUNS else {})
    except ValueError as error:
        parser.error(str(error))
    if args.json:
        lines = [{**line._asdict(), "gap": line.gap} for line in figure.lines]
        result = {"figure": args.figure, "title": figure.title, "lines": lines, "cannot": figure.not_reproduced}
        result["measured"] = figure.measured
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
    else:
        sys.stdout.write(_text(args.figure, figure))


def _figure(args: argparse.Namespace, traces: dict[str, RequestTrace]) -> PaperFigure:
    if args.figure not in _RUNS:
        return FIGURES[args.figure]()
    if args.figure == "table4":
        return paper_runs.table4(traces)
    if args.figure == "fig11":
        return paper_runs.figure11(traces, args.baseline)
    return paper_runs.figure10(traces, args.baseline, args.requests, [args.model] if args.model else list(SPLITS))


def _traces(figure: str, folder: str | None) -> dict[str, RequestTrace]:
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
    rows = [["", "paper", "modelled", "gap", "emulated", "", ""], *(_row(line) for line in figure.lines)]
    if all(line.emulated is None for line in figure.lines):
        rows = [row[:4] + row[5:] for row in rows]
    left = (0, len(rows[0]) - 2)
    notes = [f"  not reproduced: {figure.not_reproduced}"] if figure.not_reproduced else []
    notes += [f"  measured: {figure.measured}"]
    return "\n".join([f"{name} of arXiv 2405.01814: {figure.title}", *table(rows, left=left), *notes]) + "\n"


def _row(line: FigureValue) -> list[str]:
    paper = "-" if line.paper is None else f"{line.paper:,.10g}"
    gap = "-" if line.gap is None else f"{line.gap:+.1%}"
    modelled = f"{line.modelled:,.0f}" if line.modelled >= 1000 else f"{line.modelled:.4g}"
    emulated = "-" if line.emulated is None else f"{line.emulated:.4g}"
    return [line.what, paper, modelled, gap, emulated, line.unit, line.note]


if __name__ == "__main__":
    main()
