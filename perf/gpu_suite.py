"""Everything that needs an NVIDIA GPU, in one run of less than 10 minutes: ``python perf/gpu_suite.py --out FOLDER``.

Each part is a process of its own with a time limit. What teaches most comes first: native modules for this Python and
carried wheels, what the machine has, kernels that compile, and attention against fp64. Then come tokens of the shipped
model against those of transformers, attention in bytes a second, and decoding next to transformers. A CUDA graph,
transports on one GPU, and mlx5's kernels against software NICs follow. With two GPUs, ranks meet over NCCL.

FOLDER/results.jsonl has a line for each part as soon as it ends, FOLDER/report.md what it found and what to mend, and
FOLDER/log.txt all output. Exit status 1: a part failed. ``--plan`` prints the parts and their limits. ``--dry-run``
runs every part on a CPU, with emulated kernels and small sizes: it shows that the suite has no fault.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from common import BrokenError, record, version

ROOT = Path(__file__).resolve().parents[1]
# The software NIC, and what a dry run takes in place of a GPU.
TESTS = [str(ROOT / "tests"), str(ROOT / "tests/support"), str(ROOT / "tests/support/devices")]
DRY_RUN = "GPU_SUITE_DRY_RUN"  # gpu/place.py reads it
# Imports of the parts, in addition to torch; a part that lacks one is recorded as failed, and the others run.
PACKAGES = ("cupy", "hypothesis", "msgspec", "pytest", "pytest_timeout", "safetensors", "transformers", "tqdm")
BUILT = (
    "lamina.ops.attention._attention",
    "lamina.ops.gemm._gemm",
    "lamina.netstack.host._netstack",
    "soft_nic._native",
)
WHOLE_S = 580.0  # no part begins that cannot end by then
DRY_FACTOR = 8.0  # of limits, on a CPU that others use
SHOWN = 1500  # characters of an error in the report

Result = dict[str, Any]


class Part(NamedTuple):
    """``limit_s``: after so many seconds its processes are ended. ``mend``: what to do if it fails."""

    run: Callable[[], Result]
    limit_s: float
    mend: str
    gpu: bool = True


def parts() -> dict[str, Part]:
    """Return all parts in their order. Their limits add up to less than ten minutes."""
    attention = "csrc/attention/cuda; tests/ops/attention runs the same kernels on a CPU"
    netstack = "csrc/netstack; tests/netstack/gpu runs the same kernels on a CPU"
    return {
        "build": Part(build, 80, "log.txt for the compiler's words; carry what is named as missing", False),
        "machine": Part(machine, 20, "lamina-launch doctor names the fix of each line", False),
        "compile": Part(compile_kernels, 55, "the first error in log.txt, with the architecture's number", False),
        "exactness": Part(lambda: module("gpu.attention").exactness(), 60, attention),
        "tokens": Part(tokens, 70, "the first place that differs: messages by hosts, by kernels, in one process"),
        "memory": Part(lambda: module("gpu.attention").memory(), 15, "torch, or another program on the GPU"),
        "attention": Part(lambda: module("gpu.attention").attention(), 40, attention),
        "decode": Part(decode, 75, "the contender whose line has no tokens_s; try it alone with --parts decode"),
        "graph": Part(lambda: module("gpu.attention").graph(1000), 15, attention),
        "transports": Part(transports, 50, netstack),
        "network": Part(network, 35, netstack),
        "launches": Part(lambda: module("gpu.attention").launches(), 10, attention),
        "eight bits": Part(lambda: module("gpu.attention").eight_bits(), 15, attention),
        "contract": Part(contract, 30, attention),
        "collective": Part(collective, 10, "lamina/ops/collective/nccl.py"),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """0 if every part that ran kept its promises; else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="append to perf/results, too")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu_suite", help="folder of results and report")
    parser.add_argument("--parts", default="", help="some of them, with commas")
    parser.add_argument("--carried", type=Path, default=None, help="folder of wheels to install first")
    parser.add_argument("--plan", action="store_true", help="print the parts and their limits, and end")
    parser.add_argument("--dry-run", action="store_true", help="run every part on a CPU, with emulated kernels")
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)  # the suite's own: run this one, in this process
    parser.add_argument("--result", type=Path, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    every = parts()
    unknown = [name for name in filter(None, args.parts.split(",")) if name not in every]
    if unknown:
        parser.error(f"--parts {unknown[0]!r} is unknown; choose from {', '.join(every)}")
    if args.part:
        args.result.write_text(json.dumps(run_part(args.part, every[args.part].run), default=str))
        return 0
    chosen = [name for name in every if not args.parts or name in args.parts.split(",")]
    if args.plan:
        sys.stdout.write(plan(every))
        return 0
    return run_all({name: every[name] for name in chosen}, args)


def plan(every: Mapping[str, Part]) -> str:
    """Return the parts, each with its limit in seconds and the sum so far."""
    lines, total = [f"{'part':12}{'limit':>8}{'sum':>8}  without a GPU"], 0.0
    for name, part in every.items():
        total += part.limit_s
        lines.append(f"{name:12}{part.limit_s:8g}{total:8g}  {'skipped' if part.gpu else 'runs'}")
    return "\n".join(lines) + "\n"


def run_all(chosen: Mapping[str, Part], args: argparse.Namespace) -> int:
    """Run each part in a process of its own, and write what it found before the next one begins."""
    folder: Path = args.out
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("results.jsonl", "report.md", "log.txt"):
        (folder / name).unlink(missing_ok=True)
    environment = environment_of(args, folder)
    has_gpu = args.dry_run or sees_gpu(environment)
    begun, results = time.monotonic(), dict[str, Result]()
    for name, part in chosen.items():
        limit_s = part.limit_s * (DRY_FACTOR if args.dry_run else 1.0)
        left_s = (WHOLE_S * (DRY_FACTOR if args.dry_run else 1.0)) - (time.monotonic() - begun)
        if part.gpu and not has_gpu:
            results[name] = {"skipped": "no NVIDIA GPU that torch can use", "seconds": 0.0}
        elif left_s < min(limit_s, 10.0):
            results[name] = {"skipped": "no time was left", "seconds": 0.0}
        else:
            results[name] = in_process(name, min(limit_s, left_s), environment, folder / "log.txt")
        with open(folder / "results.jsonl", "a") as file:
            file.write(json.dumps({"part": name, **results[name]}) + "\n")
        (folder / "report.md").write_text(report(results, chosen, dry=args.dry_run))
        end = results[name].get("error") or results[name].get("skipped") or "done"
        print(f"{name}: {end.splitlines()[-1]} ({results[name]['seconds']} s)", file=sys.stderr, flush=True)
    if args.write and not args.dry_run:
        settings = {name: version(*names) for name, names in (("cupy", ("cupy-cuda13x", "cupy-cuda12x", "cupy")),)}
        record("gpu_suite", settings, {"parts": results}, write=True)
    sys.stdout.write((folder / "report.md").read_text())
    return 1 if any("error" in result for result in results.values()) else 0


def environment_of(args: argparse.Namespace, folder: Path) -> dict[str, str]:
    """Return the environment of the parts. The part ``build`` installs wheels of --carried into a folder of theirs."""
    paths = [str(ROOT / "perf"), str(ROOT), *TESTS, os.environ.get("PYTHONPATH", "")]
    more = dict[str, str]()
    if args.carried is not None:
        more["GPU_SUITE_CARRIED"] = str(args.carried.resolve())
        paths.insert(0, str(folder.resolve() / "site"))
        more["GPU_SUITE_SITE"] = paths[0]
    if args.dry_run:
        sys.path[:0] = TESTS
        more |= import_module("cuda_stand_in").environment() | {DRY_RUN: "1"}
    return {**os.environ, **more, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}


def sees_gpu(environment: Mapping[str, str]) -> bool:
    """Return whether torch, in a process of its own, can use a GPU."""
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], env=environment, check=False, timeout=60).returncode == 0


def in_process(name: str, limit_s: float, environment: Mapping[str, str], log: Path) -> Result:
    """Run a part in a process of its own, and end all of its processes after ``limit_s`` seconds."""
    start = time.monotonic()
    with TemporaryDirectory() as folder, open(log, "a") as output:
        found = Path(folder) / "result.json"
        output.write(f"\n=== {name}\n")
        output.flush()
        command = [sys.executable, str(Path(__file__).resolve()), "--part", name, "--result", str(found)]
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait(limit_s)
            result = json.loads(found.read_text()) if found.exists() else {"error": f"it ended with status {status}"}
        except subprocess.TimeoutExpired:
            result = {"error": f"it took more than {limit_s:g} s"}
        finally:
            end_group(process)
    result["seconds"] = round(time.monotonic() - start, 1)
    return result


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a part's process and those that it has left."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)


def report(results: Mapping[str, Result], chosen: Mapping[str, Part], *, dry: bool) -> str:
    """Return what was found: first what to mend, then the figures."""
    failed = {name: result for name, result in results.items() if "error" in result}
    waiting = [name for name in chosen if name not in results]
    lines = [
        f"# GPU suite{', dry run' * dry}: {len(results) - len(failed)} of {len(chosen)} parts without an error",
        "",
    ]
    if waiting:
        lines += [f"Not run yet: {', '.join(waiting)}.", ""]
    for name, result in failed.items():
        lines += [f"## To mend: {name}", "", str(result["error"])[-SHOWN:], "", f"See {chosen[name].mend}.", ""]
    lines += ["## Found", "", "| part | s | what | value |", "|---|---|---|---|"]
    for name, result in results.items():
        for key, value in result.items():
            if key in ("seconds", "error"):
                continue
            for label, x in value.items() if isinstance(value, dict) else [("", value)]:
                text = f"{x:.4g}" if isinstance(x, float) else str(x).replace("\n", " ")[:200]
                lines.append(f"| {name} | {result['seconds']} | {key} {label} | {text} |")
    return "\n".join(lines) + "\n"


def module(name: str) -> Any:
    """Returns a module of this folder, imported when its part runs: what it lacks is that part's error."""
    return import_module(name)


def missing() -> str:
    """Returns what the parts need and is not here, and how to get it, in one line; empty: nothing."""
    packages = [name for name in PACKAGES if not _is_here(name)]
    built = [name for name in BUILT if not _is_here(name)]
    python = ".".join(platform.python_version_tuple()[:2])
    said = []
    if packages:
        names = " ".join(packages).replace("_", "-").replace("cupy", "cupy-cuda13x")
        said.append(
            f"not here: {', '.join(packages)}: pip install -e '.[dev]'; without a network, elsewhere: pip download "
            f"--dest wheels --only-binary=:all: --no-deps --python-version {python} {names}, and --carried wheels here"
        )
    if built:
        said.append(f"not built for Python {python}: {', '.join(built)}: make")
    return "; ".join(said)


def _is_here(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ImportError:  # of what it is in
        return False


def run_part(name: str, part: Callable[[], Result]) -> Result:
    """Returns what the part found, or its error, in the end; and its seconds."""
    start, result = time.perf_counter(), Result()
    try:
        result.update(part())
    except Exception as error:  # noqa: BLE001 - the other parts are to run
        result["error"] = f"{type(error).__name__}: {error}"[-2000:]
        if not isinstance(error, BrokenError):
            traceback.print_exc()
    result["seconds"] = round(time.perf_counter() - start, 1)
    return result


def is_dry() -> bool:
    """Return whether this process is a part of a dry run."""
    return bool(os.environ.get(DRY_RUN))


def build() -> Result:
    """Installs carried wheels and builds the native modules for this Python. Raises BrokenError for what is missing."""
    figures, wheels = Result(), os.environ.get("GPU_SUITE_CARRIED")
    if wheels:
        names = [str(path) for path in sorted(Path(wheels).glob("*.whl"))]
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--upgrade"]
        figures["wheels_s"] = timed([*pip, "--target", os.environ["GPU_SUITE_SITE"], *names])
    for name, folder in (("modules_s", "."), ("soft_nic_s", "tests/soft_nic")):
        figures[name] = timed([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], ROOT / folder)
    lacks = missing()
    if lacks and not is_dry():
        raise BrokenError(lacks)
    return {**figures, "missing": lacks or "nothing"}


def timed(command: Sequence[str], folder: Path = ROOT) -> float:
    """Returns the seconds that a command takes. Raises BrokenError with its last words if it fails."""
    start = time.perf_counter()
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    sys.stdout.write(run.stdout + run.stderr)
    if run.returncode:
        raise BrokenError(f"{' '.join(command[:4])}: {run.stderr.strip()[-600:]}")
    return time.perf_counter() - start


def machine() -> Result:
    """The facts that transports find here, in the lines of ``doctor``, and the step of the GPU's clock."""
    from lamina.netstack.doctor import Machine, findings

    found = (x for x in findings(Machine(), ("mlx5", "cuda")) if x.check != "opens")
    said = {x.check: f"{x.detail}; {x.fix}" if x.fix else x.detail for x in found}
    return {**said, "clock": module("gpu.network").clock_step()}


def pytest(*arguments: str, limit_s: float) -> Result:
    """A run of tests in a process of its own. A dry run collects them, as they need the GPU."""
    limit_s *= DRY_FACTOR if is_dry() else 1.0
    options = ["-rs", "-p", "no:cacheprovider", *(["--collect-only", "-q"] if is_dry() else [])]
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    try:
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        raise BrokenError(f"pytest {' '.join(arguments)} took more than {limit_s:g} s") from None
    said = run.stdout.strip().splitlines()
    if run.returncode != 0:
        raise BrokenError("\n".join(said[-30:]) + run.stderr[-500:])
    return {
        "summary": said[-1].strip("= ") if said else "",
        "skipped tests": [line for line in said if line.startswith("SKIPPED")],
    }


def compile_kernels() -> Result:
    """Compiles the kernels of attention and of the network for this GPU, or without one for sm_90."""
    torch = import_module("torch")
    architecture = "90"
    if torch.cuda.is_available():
        architecture = "".join(map(str, torch.cuda.get_device_capability()))
    tests = "tests/ops/attention/test_cuda_compile.py", "tests/netstack/gpu/test_kernels.py"
    return {"architecture": architecture, **pytest(*tests, "-k", architecture, limit_s=50)}


def network() -> Result:
    """Kernels that send and receive, against software NICs."""
    count, rounds = (40, 4) if is_dry() else (1000, 300)
    figures: Result = module("gpu.network").network(count, rounds)
    return figures


def transports() -> Result:
    """The contract of transports between two ends on this GPU: of processes, and of one process."""
    return pytest("-m", "gpu", "tests/contract/test_transports.py", limit_s=48)


def contract() -> Result:
    """The contract of attention backends, on this GPU."""
    return pytest("-m", "gpu", "tests/contract/test_attention.py", "-k", "cuda or flashinfer", limit_s=28)


def collective() -> Result:
    """Measures what ranks do together: the contract over ``nccl``, and its time against that of ``mesh``."""
    figures = Result(module("gpu.collective").nccl_against_mesh())
    if "skipped" in figures:
        return figures
    return {**figures, **pytest("tests/contract/test_collectives.py", "-k", "nccl", limit_s=120)}


def tokens() -> Result:
    """Compares tokens of the shipped model, with compute workers on this GPU and memory workers here and there."""
    decoding = module("gpu.decode")
    shares: Result = decoding.tokens_as_transformers(decoding.settings(is_dry()))
    if bad := {n: part for n, part in shares.items() if not isinstance(part, float) or part < decoding.LEAST_EQUAL}:
        raise BrokenError(f"of the tokens of transformers: {bad}")
    return shares


def decode() -> Result:
    """Decoding, next to transformers on the same GPU."""
    decoding = module("gpu.decode")
    figures: Result = decoding.speed(decoding.settings(is_dry()))
    return figures


if __name__ == "__main__":
    sys.exit(main())
