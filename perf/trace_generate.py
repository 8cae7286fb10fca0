"""Counts the Python files and functions of Lamina that one warm ``LLM.generate`` of 8 tokens crosses.

One memory worker over loopback: all workers are threads of this process, and each has a profile hook from its start. A
function counts once, in whichever thread it runs, if each of three equal calls crosses it. So a health check, which
only a long wait makes, does not count. A comprehension is part of its function. Prints JSON lines.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("lamina", "converter", "netstack")
MODEL = ROOT / "examples" / "tiny_lm" / "model"
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
PROMPT, TOKENS, CALLS = [1, 2, 3, 4, 5], 8, 3


class Crossed:
    """The functions that are called in each of several calls, by file."""

    def __init__(self) -> None:
        self._calls = list[set[Any]]()

    def begin_call(self) -> None:
        """Count functions as those of a new call from now on."""
        self._calls.append(set())

    def hook(self, frame: FrameType, event: str, argument: object) -> None:
        """A profile function, see sys.setprofile."""
        if self._calls and event == "call" and frame.f_code.co_name not in COMPREHENSIONS:
            self._calls[-1].add(frame.f_code)

    def by_file(self) -> dict[str, set[str]]:
        """The names of the functions, with their first lines, by path below the root."""
        found = defaultdict[str, set[str]](set)
        for code in set.intersection(*self._calls):
            path = Path(code.co_filename).resolve()
            if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in ROOMS:
                found[str(path.relative_to(ROOT))].add(f"{code.co_qualname}:{code.co_firstlineno}")
        return dict(sorted(found.items()))


def crossed(model: str) -> dict[str, set[str]]:
    """Trace equal calls after a first one."""
    seen = Crossed()
    threading.setprofile(seen.hook)  # threads that start from now on
    sys.setprofile(seen.hook)

    from lamina import LLM, SamplingParams

    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    with LLM(model, transport="loopback", memory_workers=1) as llm:
        llm.generate([PROMPT], params, use_tqdm=False)
        for _ in range(CALLS):
            seen.begin_call()
            llm.generate([PROMPT], params, use_tqdm=False)
        found = seen.by_file()
    sys.setprofile(None)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--list", action="store_true", help="print the functions of each file, too")
    args = parser.parse_args()
    found = crossed(args.model)
    for path, functions in found.items() if args.list else ():
        sys.stdout.write(json.dumps({"file": path, "functions": sorted(functions)}) + "\n")
    total = sum(map(len, found.values()))
    sys.stdout.write(json.dumps({"what": "one warm generate", "files": len(found), "functions": total}) + "\n")


if __name__ == "__main__":
    main()
