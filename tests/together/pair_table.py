"""Makes docs/together.md: which features work together. Each pair is started on the shipped model.

python tests/together/pair_table.py NAME ...       # the pairs among some features: prints their lines
python tests/together/pair_table.py --write        # all that build/together.jsonl lacks, then the page

The tokens of a pair are compared with those of a run without its lossless features. Both features must have acted, by
their counters. Pairs run one after another in a process that is replaced if a pair takes more than ``LIMIT_S``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from together.paired_features import BY_NAME, CHANGED, LONG, PRIORITY, ROWS, SESSIONS, Row, merged  # noqa: E402

RESULTS, PAGE = ROOT / "build" / "together.jsonl", ROOT / "docs" / "together.md"
LIMIT_S = 120.0
SEED = 9
BAR = "\\|"  # inside of a table
VERDICTS = SAME, REFUSED, DIFFERS, IDLE, MISLEADING, FAILED = (
    "same", "refused", "differs", "idle", "misleading", "failed",
)  # fmt: skip


class Result(NamedTuple):
    """The outcome of a pair. ``why``: the refusal, what differs, or the feature that did not act."""

    first: str
    second: str
    verdict: str
    why: str = ""


def run_pairs(pairs: Iterable[tuple[str, str]]) -> Iterator[Result]:
    """Run pairs in this process."""
    from together.run_pair import Run, run

    from lamina.protocol.executor import WorkerError

    known: dict[tuple[tuple[str, ...], frozenset[str], int], Run] = {}

    def reference(rows: Sequence[Row], uses: frozenset[str], seed: int) -> Run:
        key = tuple(row.name for row in rows), uses, seed
        if key not in known:
            known[key] = run(rows, uses, seed)
        return known[key]

    def compared(rows: Sequence[Row], seed: int) -> tuple[str, str]:
        uses = rows[0].uses | rows[1].uses
        found = run(rows, uses, seed)
        lossy, asked = [row for row in rows if row.lossy], uses - {PRIORITY}
        found.facts[CHANGED] = len(unlike(found.tokens, reference([], asked - {LONG}, seed).tokens))
        if idle := [row.name for row in rows if not row.acted(found.facts)]:
            return IDLE, f"{' and '.join(idle)} did not act"
        other = [] if len(lossy) == 2 else unlike(found.tokens, reference(lossy, asked, seed).tokens)
        return (DIFFERS, f"completions {other} of {len(found.tokens)}") if other else (SAME, "")

    for names in pairs:
        rows = [BY_NAME[name] for name in names]
        try:
            verdict, why = compared(rows, SEED)
            if verdict == DIFFERS:  # a random number may have been on the edge between two tokens
                verdict, why = compared(rows, SEED + 1)
        except ValueError as error:
            verdict, why = judged(rows, " ".join(str(error).split()))
        except (WorkerError, RuntimeError) as error:
            verdict, why = FAILED, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        yield Result(*names, verdict, why)


def unlike(found: Sequence[list[int]], wanted: Sequence[list[int]]) -> list[int]:
    """Return the numbers of the completions that differ; all, if there are not equally many."""
    if len(found) != len(wanted):
        return [*range(len(found))]
    return [n for n, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b]


def judged(rows: Sequence[Row], error: str) -> tuple[str, str]:
    """Return the verdict on a refusal: it must name both features."""
    from lamina.config.flag_groups import flag_name

    for row in rows:
        flags = [flag_name(name).split()[0].rstrip("=") for name in row.options]
        if not any(flag in error for flag in [*flags, row.name, *(["session_id"] * (SESSIONS in row.uses))]):
            return MISLEADING, f"{error} (it does not name {row.name})"
    return REFUSED, error


def pairs_of(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return all pairs of different features; two values of one option are none."""
    return [(a, b) for a, b in itertools.combinations(names, 2) if merged([BY_NAME[a], BY_NAME[b]]) is not None]


def in_other_processes(pairs: Sequence[tuple[str, str]]) -> Iterator[Result]:
    """Run pairs in a child, which is replaced after a pair without a result in time."""
    todo = list(pairs)
    while todo:
        words = ["|".join(pair) for pair in todo]
        with subprocess.Popen(
            [sys.executable, __file__, "--child", "--", *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, start_new_session=True,
        ) as child:  # fmt: skip
            assert child.stdout is not None
            selector = selectors.DefaultSelector()
            selector.register(child.stdout, selectors.EVENT_READ)
            while todo and selector.select(LIMIT_S) and (line := child.stdout.readline()):
                if line.startswith("{"):
                    todo.pop(0)
                    yield Result(**json.loads(line))
            if todo:
                yield Result(*todo.pop(0), FAILED, f"a crash, or no result in {LIMIT_S:.0f} s")
            os.killpg(child.pid, signal.SIGKILL)


def page(results: Sequence[Result]) -> str:
    """Return docs/together.md."""
    counts = {verdict: sum(r.verdict == verdict for r in results) for verdict in VERDICTS}
    text = [
        "# Features that work together\n",
        "Look up whether two features go together. `tests/together/pair_table.py --write` makes this page.",
        "It runs the shipped model with each pair of features, with so little memory that sequences are preempted, and",
        "cancels a stream.\n",
        "- **Same**: both features acted, by their counters, and the tokens are those of a run without the pair. If a",
        "  feature itself changes tokens, the tokens are those of a run with that feature alone.",
        "- **Refused**: the engine does not start with the pair, or refuses the request.",
        "- **Idle**: one of the features had nothing to do.\n",
        f"Pairs: {', '.join(f'{count} {verdict}' for verdict, count in counts.items() if count)}.\n",
    ]
    for verdict in VERDICTS:
        if verdict != SAME and counts[verdict]:
            text += [f"## {verdict.capitalize()}\n", "| one | another | why |", "|---|---|---|"]
            text += [
                f"| `{r.first}` | `{r.second}` | {r.why.replace('|', chr(92) + '|')} |"
                for r in results
                if r.verdict == verdict
            ]
            text += [""]
    text += ["## Same\n", "All other pairs of these features:", ""]
    text += [f"- `{row.name}`" for row in ROWS]
    return "\n".join(text) + "\n"


def read_results(file: Path) -> dict[tuple[str, str], Result]:
    """Return the results of a file, by their pair."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {(r.first, r.second): r for r in (Result(**json.loads(line)) for line in lines)}


def main() -> int:
    """Return exit status 1 if a pair gives other tokens, fails, or is refused by a line that misleads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="features, by the names of the page; default: all")
    parser.add_argument("--write", action="store_true", help="write docs/together.md")
    parser.add_argument("--results", type=Path, default=RESULTS, help="a file of results; those in it are not run")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        for result in run_pairs([tuple(word.split("|")) for word in args.names]):
            print(json.dumps(result._asdict()), flush=True)
        return 0
    known = {} if args.names else read_results(args.results)
    for result in in_other_processes([pair for pair in pairs_of(args.names or [*BY_NAME]) if pair not in known]):
        known[result.first, result.second] = result
        print(f"{result.first} + {result.second}: {result.verdict} {result.why}", flush=True)
        if not args.names:
            args.results.parent.mkdir(exist_ok=True)
            with args.results.open("a") as out:
                out.write(json.dumps(result._asdict()) + "\n")
    if args.write:
        PAGE.write_text(page([known[pair] for pair in pairs_of([*BY_NAME])]))
    return any(result.verdict in (DIFFERS, MISLEADING, FAILED) for result in known.values())


if __name__ == "__main__":
    sys.exit(main())
