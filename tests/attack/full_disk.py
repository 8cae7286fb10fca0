"""A disk that is full: no request is accepted that cannot be kept, the server says so, and goes on with room."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path

from target import KEYS, Target, serving
from verdict import Verdict, first_failure

SMALL = 2048  # bytes that a file of the server may have: its journal's, that is
REQUEST = {"prompt": "import os\n" * 100, "max_tokens": 64, "ignore_eos": True}


def attack(folder: Path, *, keeps: bool = True) -> Verdict:
    """``keeps``: with a journal; without one there is nothing to keep, so requests are accepted."""
    flags = [f"--journal={folder / 'journal'}"] if keeps else []
    with serving(folder, *flags) as target:
        had = resource.prlimit(target.pid or 0, resource.RLIMIT_FSIZE)
        resource.prlimit(target.pid or 0, resource.RLIMIT_FSIZE, (SMALL, had[1]))
        statuses = [_complete(target) for _ in range(20)]
        health = json.loads(target.ask("GET", "/health")[1] or b"{}")
        checks = {
            f"requests get 503 once the disk is full, not {sorted(set(statuses))}": statuses[-1] == 503,
            "health names the journal": "journal" in health,
        }
        resource.prlimit(target.pid or 0, resource.RLIMIT_FSIZE, had)
        end = time.monotonic() + 60
        while not (works := _complete(target) == 200) and time.monotonic() < end:
            time.sleep(0.5)  # the server tries its disk once in a while
        checks["it goes on once there is room"] = works
    return first_failure(checks, f"{statuses.count(503)} of {len(statuses)} requests got 503, and then it went on")


def _complete(target: Target) -> int:
    return target.ask("POST", "/v1/completions", REQUEST, key=KEYS[0])[0]
