"""The fields that every benchmark records: commit, host, versions, settings, and the spread of what it measured."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import select
import statistics
import subprocess
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from time import monotonic
from typing import Any


class BrokenError(Exception):
    """The claim to be shown does not hold."""


def line_of(process: subprocess.Popen[str], timeout_s: float) -> str:
    """The next line of ``process``'s output, of which nothing else has been read. Raises RuntimeError where it ends
    first, or does not say one in time.
    """
    assert process.stdout is not None
    fd, line, deadline = process.stdout.fileno(), bytearray(), monotonic() + timeout_s
    while not line.endswith(b"\n"):
        if not select.select([fd], [], [], max(0.0, deadline - monotonic()))[0]:
            raise RuntimeError(f"a process printed no line within {timeout_s:g} s: {process.args!r}")
        byte = os.read(fd, 1)  # no more: others read on where this one ends
        if not byte:
            raise RuntimeError(f"a process ended before it printed a line: {process.args!r}")
        line += byte
    return line.decode().strip()


RESULTS = Path(__file__).parent / "results"


def parser_of(docstring: str | None) -> argparse.ArgumentParser:
    """Return the parser of a script with this docstring. Its flag --write is the one that ``record`` takes."""
    parser = argparse.ArgumentParser(description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="append to perf/results")
    return parser


def peak_products(folder: Path, *, bf16: bool) -> Callable[[float], float]:
    """Compile peak_products.cpp in ``folder``, unless it is there. Returns a function of seconds: for so long it does
    products on the thread that calls, and it returns floating point operations a second.
    """
    source, library = Path(__file__).with_name("peak_products.cpp"), folder / "peak.so"
    if not library.exists():
        subprocess.run(["g++", "-O3", "-march=native", "-shared", "-fPIC", source, "-o", library], check=True)
    peak = getattr(ctypes.CDLL(str(library)), "peak_bf16" if bf16 else "peak_float")
    peak.restype, peak.argtypes = ctypes.c_double, [ctypes.c_double]
    return lambda seconds: float(peak(seconds))


def host() -> dict[str, Any]:
    """The machine, in words that identify the hardware and no user's installation."""
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
    """Returns the version of the package that is here under the first of its ``names``, if any."""
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return f"not installed (python {platform.python_version()})"


def commit() -> str:
    """The commit measured; "-dirty" when the tree differs from it, but for rows of results."""
    here = Path(__file__).parent

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=False)

    differs = git("diff", "--quiet", "HEAD", "--", ":/", ":(top,exclude)perf/results").returncode == 1
    return git("rev-parse", "--short", "HEAD").stdout.strip() + "-dirty" * differs or "unknown"


def commit_of(checkout: Path) -> str:
    """Return the commit of another checkout; "-dirty" when its tree differs from it."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True).stdout.strip()


def cpu_seconds(process: int) -> float:
    """Return the CPU seconds of a process, of its children that have ended, and of its descendants that run."""
    folder = Path(f"/proc/{process}")
    fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
    children = " ".join((task / "children").read_text() for task in (folder / "task").iterdir()).split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") + sum(cpu_seconds(int(child)) for child in children)


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
    facts = {
        "benchmark": name,
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ"),
        "commit": commit(),
        "host": host(),
        "settings": settings,
    }
    assert not facts.keys() & results.keys(), "a result would hide a fact of the run"
    line = json.dumps(facts | results)
    if write:
        RESULTS.mkdir(exist_ok=True)
        with open(RESULTS / f"{name}.jsonl", "a") as f:
            f.write(line + "\n")
    return line


GREEDY: dict[str, Any] = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """The flags that ``sampling_of`` reads."""
    parser.add_argument("--temperature", type=float, default=0.0, help="0 = greedy")
    parser.add_argument("--top-k", type=int, default=0, help="0 = all")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--min-p", type=float, default=0.0)


def sampling_of(args: argparse.Namespace) -> dict[str, Any]:
    """Parameters of every request by their names in SamplingParams. Raises SystemExit where a filter has nothing to
    filter.
    """
    if not args.temperature and (args.top_k or args.min_p or args.top_p != 1.0):
        raise SystemExit("--top-k, --top-p and --min-p filter what is sampled: give --temperature too")
    return {name: getattr(args, name) for name in GREEDY}
