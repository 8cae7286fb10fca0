"""What every benchmark records: commit, host, versions, settings, and the spread of what it measured."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any


class BrokenError(Exception):
    """What was to be shown does not hold."""


RESULTS = Path(__file__).parent / "results"


def host() -> dict[str, Any]:
    """The machine, in words that identify the hardware and nobody's installation."""
    import torch

    with open("/proc/cpuinfo") as f:
        fields = dict(line.split(":", 1) for line in f.read().split("\n\n")[0].splitlines() if ":" in line)
    info = {k.strip(): v.strip() for k, v in fields.items()}
    flags = [f for f in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f in info.get("flags", "").split()]
    return {
        "cpu": info.get("model name", platform.processor()),
        "cores": len(os.sched_getaffinity(0)),
        "cpu_flags": flags,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }


def version(*names: str) -> str:
    """Of the package that is here under the first of its ``names``, if any."""
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return f"not installed (python {platform.python_version()})"


def commit() -> str:
    """The commit measured; "-dirty" when the tree differs from it."""
    here = Path(__file__).parent
    run = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"], cwd=here, capture_output=True, text=True, check=False
    )
    return run.stdout.strip() or "unknown"


def cpu_pressure() -> float:
    """Share of the last 10 s in which some task waited for a core, in percent; -1 where the kernel does not say."""
    try:
        text = Path("/proc/pressure/cpu").read_text()
    except OSError:
        return -1.0
    return float(text.split("avg10=")[1].split()[0])


def spread(values: list[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile and count."""
    cuts = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else [values[0]] * 9
    return {"median": statistics.median(values), "p10": cuts[0], "p90": cuts[8], "count": float(len(values))}


def record(name: str, settings: dict[str, Any], results: dict[str, Any], *, write: bool) -> str:
    """One JSON line; with ``write`` it is appended to perf/results/<name>.jsonl too."""
    line = json.dumps(
        {
            "benchmark": name,
            "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ"),
            "commit": commit(),
            "host": host(),
            "settings": settings,
            **results,
        }
    )
    if write:
        RESULTS.mkdir(exist_ok=True)
        with open(RESULTS / f"{name}.jsonl", "a") as f:
            f.write(line + "\n")
    return line
