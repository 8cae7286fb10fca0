"""The suites of others, on Lamina: vLLM's own tests of its server, ``LLM`` and tool parsers, transformers' examples.

python tests/suites/run.py [SUITE ...] [--only TEXT]        exit 1: a test fails that no list knows, or fewer pass
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import sources
from known import Known, Ran, Verdict, judge, read

# name -> what is run, and the folder that has it.
SUITES: dict[str, tuple[str, Callable[[], Path]]] = {
    "vllm-server": (f"vLLM {sources.VLLM}", sources.vllm),
    "vllm-offline": (f"vLLM {sources.VLLM}", sources.vllm),
    "vllm-tool-parsers": (f"vLLM {sources.VLLM}", sources.vllm),
    "transformers": (f"transformers {metadata.version('transformers')}", lambda: sources.SHIM),
}
HERE = Path(__file__).resolve().parent
SUITE_S, TEST_S = 5000, 240
# Of a suite's own knobs, those that make it fit a machine of two cores.
SMALLER = {
    "VLLM_NEEDLE_TRIALS": "2",
    "VLLM_NEEDLE_BATCH_SIZE": "24",
    "VLLM_MIN_PROMPT": "128",
    "VLLM_MAX_PROMPT": "512",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suites", nargs="*", default=[*SUITES], metavar="SUITE", help=", ".join(SUITES))
    parser.add_argument("--only", default="", help="only files whose names have this text")
    parser.add_argument("--judge", action="store_true", help="run nothing: say what the last run says")
    asked = parser.parse_args()
    red = False
    if unknown := next((name for name in asked.suites if name not in SUITES), None):
        raise ValueError(f"there is no suite {unknown!r}: name some of {', '.join(SUITES)}")
    for name in asked.suites:
        known = read(HERE / f"{name}.txt")
        title, folder = SUITES[name]
        files = [f for f in known.files if asked.only in f]
        report = sources.FOLDER / f"{name}.jsonl"
        if not asked.judge:
            _run(files, known, report, folder())
        ran = [Ran(e["test"], e["outcome"], e["cause"]) for e in map(json.loads, report.read_text().splitlines())]
        verdict = judge(known, [r for r in ran if not known.left_out(r.test)], whole=files == known.files)
        print(_told(f"{name}, {title}", verdict))
        red = red or verdict.red
    return int(red)


def _run(files: list[str], known: Known, report: Path, at: Path) -> None:
    python = sources.environment()
    report.unlink(missing_ok=True)
    options = ["-q", "-p", "suite_report", "--suite-report", str(report), "-p", "no:cacheprovider", "-p", "no:warnings",
               "--tb=native", f"--timeout={TEST_S}", "-c", os.devnull, "--rootdir", str(at), "--confcutdir", str(at),
               "--continue-on-collection-errors"]  # fmt: skip
    left_out = sources.FOLDER / "left_out.txt"
    left_out.write_text("\n".join(known.silent))
    paths = [str(sources.SHIM), str(HERE), str(at), str(sources.ROOT)]
    settings = {
        "PYTHONPATH": os.pathsep.join(paths), "LAMINA_SUITES": str(sources.FOLDER), "HF_HUB_OFFLINE": "1",
        "SUITE_LEFT_OUT": str(left_out),
    }  # fmt: skip
    with (sources.FOLDER / f"{report.stem}.log").open("w") as log:
        subprocess.run(
            [str(python), "-m", "pytest", *options, *files], cwd=at, env={**os.environ, **SMALLER, **settings},
            stdout=log, stderr=subprocess.STDOUT, timeout=SUITE_S, check=False,
        )  # fmt: skip


def _told(name: str, verdict: Verdict) -> str:
    known, new = sum(verdict.differs.values()), len(verdict.new)
    lines = [
        f"{name}: {verdict.passed + known + new} apply; {verdict.passed} passed, {known} differ as known, {new} anew"
    ]
    lines += [f"{count:5}  {reason}" for reason, count in verdict.differs.most_common()]
    lines += [f"{count:5}  not of Lamina: {cause}" for cause, count in verdict.skipped.most_common()]
    lines += [f"  NEW  {ran.test}: {ran.cause}" for ran in verdict.new]
    lines += [f"  passes now, take it off the list: {pattern}" for pattern in verdict.mended]
    if verdict.missing:
        lines.append(f"  {verdict.missing} fewer passed than the list says")
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ValueError as e:
        sys.exit(f"test-suites: {e}")
